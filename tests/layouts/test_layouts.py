"""Promise 1: the layout never changes the result. docs/parity.md explains the method and shows the table."""

from __future__ import annotations

import pytest
import torch

from megatron_llama.devices import get_device
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan
from megatron_llama.topology import build_topology
from tests.layouts.table import LAYOUTS
from tests.oracle import TOLERANCE, Tensors, make_plan, oracle, run_layout, worst
from tests.ranks import run_ranks

# Layouts whose sums have the same order as the oracle's: equal to the last bit.
BITWISE = [
    ("selective recompute", 1, ["trainer.recompute=selective"], []),
    ("full recompute", 1, ["trainer.recompute=full"], []),
]


@pytest.mark.parametrize(
    ("ranks", "layout", "model"), [case[1:] for case in LAYOUTS], ids=[case[0] for case in LAYOUTS]
)
def test_layout_equals_one_process(ranks: int, layout: list[str], model: list[str]) -> None:
    result, expected = run_layout(ranks, *layout, *model), oracle(*model)
    for name, tensor in expected.initial.items():
        assert torch.equal(result.initial[name], tensor), f"initial {name} depends on the layout"
    differences = worst(result, expected)
    assert all(difference <= TOLERANCE for difference in differences.values()), differences


@pytest.mark.parametrize(
    ("ranks", "layout", "model"), [case[1:] for case in BITWISE], ids=[case[0] for case in BITWISE]
)
def test_same_order_of_sums_gives_the_same_bits(ranks: int, layout: list[str], model: list[str]) -> None:
    assert set(worst(run_layout(ranks, *layout, *model), oracle(*model)).values()) == {0.0}


def test_first_loss_under_pp_is_bitwise_equal() -> None:
    for layout in (["trainer.pp=2"], ["trainer.pp=4"], ["trainer.pp=2", "trainer.vpp=2"]):
        assert run_layout(2 if "trainer.pp=2" in layout else 4, *layout, steps=1).losses == oracle().losses[:1]


def test_tensor_parallel_ranks_hold_different_shards() -> None:
    # The best-known small 3D trainer gives all tensor-parallel ranks the same random shard and trains a half-width
    # model.
    one, other = run_ranks(initial_shards, 2, make_plan(2, "trainer.tp=2"))
    split = [name for name, values in one.items() if values.dim() == 2]
    assert len(split) == 4 * 7 + 2
    for name in split:
        assert not torch.equal(one[name], other[name]), f"both ranks begin with the same half of {name}"
    assert len({tensor.sum().item() for tensor in oracle().initial.values() if tensor.dim() == 2}) == len(split)


def initial_shards(rank: int, plan: Plan) -> Tensors:
    """What a rank's model holds before the first step."""
    device, cpu = get_device("cpu"), torch.device("cpu")
    topology = build_topology(plan, rank)
    with process_groups(plan, topology, device, cpu):
        model = build_model(plan, topology, device, cpu)
        pieces = [(piece, shard) for shard in model.shards for piece in shard.pieces]
        return {piece.name: shard.local[piece.local_slices].clone() for piece, shard in pieces}


def test_copies_were_compared() -> None:
    # The table above would prove less if no rank held copies: norms under tp, kv heads, zero=0 replicas, tied tables.
    assert run_layout(2, "trainer.tp=2", steps=1).copies > 0
    assert run_layout(2, "trainer.zero=0", steps=1).copies > run_layout(2, "trainer.zero=1", steps=1).copies == 0


def test_every_weight_moves_in_a_step() -> None:
    for ranks, layout in ((1, ()), (4, ("trainer.tp=2", "trainer.pp=2"))):
        result = run_layout(ranks, *layout, steps=1)
        for name, before in result.initial.items():
            assert not torch.equal(before, result.weights[name]), f"{name} did not move"


@pytest.mark.parametrize("precision", ["bf16", "bf16_sr"])
@pytest.mark.parametrize(
    "layout",
    [["trainer.tp=2"], ["trainer.pp=2"], ["trainer.zero=1"], ["trainer.zero=3"]],
    ids=lambda layout: layout[0],
)
def test_bf16_within_its_precision(layout: list[str], precision: str) -> None:
    # bf16 keeps 8 bits, so sums in another order round differently. How much that may be is measured, not guessed: a
    # layout may be no further from the one-process bf16 run than that run is from fp32, where each value is rounded
    # once or more. The noise of stochastic rounding is the same in all layouts, so it gets no allowance.
    chosen = f"trainer.precision={precision}"
    result, expected, exact = run_layout(2, *layout, chosen), oracle(chosen), oracle()
    differences, roundings = worst(result, expected), worst(expected, exact)
    assert roundings["first_grads"] > 1e-4  # bf16 really is at work
    for kind in ("losses", "norms", "first_grads"):
        assert differences[kind] <= 1.5 * roundings[kind], (kind, differences[kind], roundings[kind])


def test_stochastic_rounding_twice_gives_the_same_bits() -> None:
    chosen = ("trainer.precision=bf16_sr", "trainer.zero=2")
    assert set(worst(run_layout(2, *chosen), run_layout(2, *chosen)).values()) == {0.0}


def test_bf16_keeps_fp32_masters() -> None:
    result = run_layout(1, "trainer.precision=bf16", "optim.lr=1e-6", "trainer.steps=100", steps=1)
    for name, weight in result.weights.items():
        assert weight.dtype == torch.float32
        moved = (weight - result.initial[name]).abs()
        # An update far below bf16's resolution of the weight is not lost.
        assert 0 < moved.max() < 2**-9 * weight.abs().max(), name
