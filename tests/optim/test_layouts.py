"""Given equal gradients, each optimizer's update has the bits of one process in every layout."""

from __future__ import annotations

import pytest
import torch

from tests.optim.given_gradients import updated, updated_alone
from tests.oracle import make_plan
from tests.rows import read_layouts, rows

LAYOUTS, QUICK = read_layouts(__file__)
ROUNDED = ("trainer.precision=bf16_sr", "model.vocab_size=61")
OPTIMIZERS = {
    "bf16_sr": ROUNDED,
    "fp32_OptStates": ("trainer.precision=fp32_OptStates", "model.vocab_size=61"),
    # Two blocks of a row on each of two tensor-parallel ranks; k_proj and v_proj alone would be too small for 8 bits.
    "8 bits": (
        "optim.state_bits=8",
        "model.hidden_size=128",
        "model.intermediate_size=128",
        "model.num_hidden_layers=4",
    ),
    "muon": ("optim.name=muon",),
    "muon, bf16_sr": ("optim.name=muon", "trainer.precision=bf16_sr"),
}


@pytest.mark.parametrize(("ranks", "layout"), rows(LAYOUTS.items(), QUICK))
def test_updates_have_the_bits_of_one_process(ranks: int, layout: list[str]) -> None:
    plans = [make_plan(ranks, *settings, *layout) for settings in OPTIMIZERS.values()]
    for (name, settings), (_, final) in zip(OPTIMIZERS.items(), updated(ranks, plans), strict=True):
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
