"""Given equal gradients, each optimizer's update has the bits of one process in every layout."""

from __future__ import annotations

import torch

from tests.optim.given_gradients import updated, updated_alone
from tests.oracle import make_plan
from tests.rows import each_layout, read_layouts

OPTIMIZERS = {name: settings for name, (_, settings) in read_layouts(__file__, "optimizers")[0].items()}


@each_layout(__file__, "updates")
def test_updates_have_the_bits_of_one_process(ranks: int, layout: list[str]) -> None:
    plans = [make_plan(ranks, *settings, *layout) for settings in OPTIMIZERS.values()]
    for (name, settings), (_, final) in zip(OPTIMIZERS.items(), updated(plans), strict=True):
        expected = updated_alone(*settings).final
        assert final.keys() == expected.keys(), name
        assert [key for key, tensor in expected.items() if not torch.equal(final[key], tensor)] == [], name


def test_the_states_of_each_optimizer_are_compared() -> None:
    states = {name: updated_alone(*settings).final for name, settings in OPTIMIZERS.items()}
    assert all(any(tensor.any() for tensor in final.values()) for final in states.values())
    assert any(".scale." in name for name in states["8 bits"])
    momenta = [name for name in states["muon"] if name.startswith("optimizer.momentum_buffer.")]
    assert len(momenta) == 28, "each matrix has a momentum, and no other weight"
    weights = [tensor for name, tensor in states["bf16_sr"].items() if not name.startswith("optimizer.")]
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights)
