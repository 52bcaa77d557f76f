"""Promise 1: the layout never changes the result. docs/parity.md explains the method and shows the table."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_llama.devices import get_device
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan
from megatron_llama.topology import build_topology
from tests.compiled import needs_compiler, skip_without_compiler
from tests.layouts.table import ASYNC_TP, LAYOUTS, QUICK, TIED
from tests.layouts.tampers import (
    chunks_of_12,
    local_token_count,
    mean_over_data_parallel_ranks,
    norms_count_copies,
    passes_of_the_compiled_loss,
)
from tests.oracle import TOLERANCE, RaggedSamples, Result, Tamper, Tensors, make_plan, oracle, run_layout, worst
from tests.ranks import run_ranks
from tests.rows import rows

# Layouts whose sums have the same order as the oracle's: equal to the last bit.
BITWISE: list[tuple[str, int, list[str], list[str]]] = [
    ("selective recompute", 1, ["trainer.recompute=selective"], []),
    ("elementwise recompute", 1, ["trainer.recompute=elementwise"], []),
    ("full recompute", 1, ["trainer.recompute=full"], []),
    ("offloaded", 1, ["trainer.offload=[activations,optimizer]"], []),
]


@pytest.mark.parametrize(("ranks", "layout", "model"), rows(((case[0], case[1:]) for case in LAYOUTS), QUICK))
@pytest.mark.usefixtures("compiled_here")
def test_layout_equals_one_process(ranks: int, layout: list[str], model: list[str]) -> None:
    skip_without_compiler(layout)
    result, expected = run_layout(ranks, *layout, *model), oracle(*model)
    for name, tensor in expected.initial.items():
        assert torch.equal(result.initial[name], tensor), f"initial {name} depends on the layout"
    differences = worst(result, expected)
    assert all(difference <= TOLERANCE for difference in differences.values()), differences
    assert (result.fused > 0) == ("trainer.async_tp=true" in layout)


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("compiled_here")
def test_the_overlapped_row_runs_products_with_collectives_inside() -> None:
    # 8 in a pass through a block, forward and backward; 4 blocks, 4 micro batches.
    assert run_layout(2, *ASYNC_TP, steps=2).fused == 8 * 4 * 4 * 2
    assert run_layout(2, *ASYNC_TP, "trainer.async_tp=false", steps=1).fused == 0


@pytest.mark.parametrize(
    ("ranks", "layout", "model"),
    [
        (1, [], []),
        (2, ["trainer.tp=2"], [TIED, "model.vocab_size=61"]),
        (2, ["trainer.tp=2", "trainer.sp=false"], []),
        (2, ["trainer.pp=2"], [TIED]),
    ],
    ids=["one process", "tp2+sp, tied, odd vocabulary", "tp2", "pp2, tied"],
)
@pytest.mark.parametrize("how", [chunks_of_12, passes_of_the_compiled_loss])
def test_chunks_of_the_loss_change_nothing(ranks: int, layout: list[str], model: list[str], how: Tamper) -> None:
    differences = worst(run_layout(ranks, *layout, *model, tamper=how), oracle(*model))
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


def bf16_bounds(expected: Result, exact: Result) -> dict[str, float]:
    """How far a layout's bf16 run may be from the one-process bf16 run, of which ``exact`` is the fp32 counterpart.

    The two runs round the same values, but sums of other parts. Their errors are taken as independent and equally
    large, so the runs differ by sqrt(2) times what one of them differs from fp32. A gradient tensor is thousands of
    values, so that its measured distance from fp32 is a reliable scale, r. A loss or a norm is a single number, whose
    own distance from fp32 may be zero by luck and is no scale: on some processors it was a third of another's. They are
    means of errors over the counted tokens, so r / sqrt(tokens) is their standard deviation, and three of them are
    allowed. A token's loss changes by the change of its logits, which have standard deviation
    initializer_range * sqrt(hidden_size); the loss itself is about log(vocab_size).
    """
    plan = make_plan(1)
    samples = RaggedSamples(plan.config.data.seq_length, plan.model.vocab_size)
    tokens = sum(samples[index]["loss_mask"].sum().item() for index in range(plan.config.trainer.global_batch_size))
    scale = worst(expected, exact)["first_grads"]
    scalar = 3 * math.sqrt(2) * scale / math.sqrt(tokens)
    logits = plan.model.initializer_range * math.sqrt(plan.model.hidden_size)
    return {
        "first_grads": 1.5 * scale,
        "norms": scalar,
        "losses": scalar * logits / math.log(plan.model.vocab_size),
    }


def beyond(bounds: dict[str, float], result: Result, expected: Result) -> dict[str, tuple[float, float]]:
    """The differences that are above their bounds, with these."""
    found = worst(result, expected)
    return {kind: (found[kind], bound) for kind, bound in bounds.items() if found[kind] > bound}


@pytest.mark.parametrize(
    ("layout", "precision"),
    rows(
        (
            (f"{layout}, {precision}", ([layout], precision))
            for layout in ("trainer.tp=2", "trainer.pp=2", "trainer.zero=1", "trainer.zero=3")
            for precision in ("bf16", "bf16_sr")
        ),
        {"trainer.tp=2, bf16_sr", "trainer.pp=2, bf16", "trainer.zero=3, bf16_sr"},
    ),
)
def test_bf16_within_its_precision(layout: list[str], precision: str) -> None:
    # The noise of stochastic rounding is the same in all layouts, so it gets no allowance.
    chosen = f"trainer.precision={precision}"
    expected, exact = oracle(chosen), oracle()
    bounds = bf16_bounds(expected, exact)
    assert bounds["first_grads"] > 1e-4  # bf16 really is at work
    assert not beyond(bounds, run_layout(2, *layout, chosen), expected)


@pytest.mark.parametrize(
    ("tamper", "kind", "layout"),
    [
        (local_token_count, "losses", "trainer.zero=1"),
        (norms_count_copies, "norms", "trainer.zero=0"),
        (mean_over_data_parallel_ranks, "first_grads", "trainer.zero=1"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_error_is_larger_than_bf16_allows(tamper: Tamper, kind: str, layout: str) -> None:
    chosen = "trainer.precision=bf16"
    expected = oracle(chosen)
    assert kind in beyond(bf16_bounds(expected, oracle()), run_layout(2, layout, chosen, tamper=tamper), expected)


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
