"""Promise 1 in 16 bits: layouts are as near to one process as rounding allows, on paths that bf16 alone takes, too."""

from __future__ import annotations

import math

import pytest
import torch

from tests.compiled import skip_without_compiler
from tests.layouts.table import COMPILED, ONE_MICRO_BATCH, TIED, WIDE, WINDOW
from tests.layouts.tampers import (
    compiled_gradients_of_one_token_more,
    last_chunk_of_the_head_lost,
    local_token_count,
    mean_over_data_parallel_ranks,
    no_kv_copy_sum,
    no_tied_sum,
    norms_count_copies,
)
from tests.oracle import RaggedSamples, Result, Tamper, make_plan, oracle, run_layout, worst
from tests.rows import rows

BF16 = "trainer.precision=bf16"
# Of one micro batch gradients stay in 16 bits until the update (Storage.keeps_bf16_grads). Compiled blocks have a
# kernel for attention, with sums in 32 bits. name, ranks, overrides of the layout, overrides of the model.
NARROW: list[tuple[str, int, list[str], list[str]]] = [
    ("one micro batch", 1, [ONE_MICRO_BATCH], []),
    ("one micro batch, full recompute", 1, [ONE_MICRO_BATCH, "trainer.recompute=full"], []),
    ("tp2+sp, tied, one micro batch", 2, ["trainer.tp=2", ONE_MICRO_BATCH], [TIED]),
    ("tp4+sp, kv heads < tp, one micro batch", 4, ["trainer.tp=4", ONE_MICRO_BATCH], []),
    ("pp2, tied, one micro batch", 2, ["trainer.pp=2", ONE_MICRO_BATCH], [TIED]),
    ("tp2+sp, compiled, window, one micro batch", 2, ["trainer.tp=2", *COMPILED, ONE_MICRO_BATCH], [*WIDE, WINDOW]),
    ("pp2, compiled, window", 2, ["trainer.pp=2", *COMPILED], [*WIDE, WINDOW]),
]
QUICK = {
    "one micro batch, full recompute",
    "tp4+sp, kv heads < tp, one micro batch",
    "pp2, tied, one micro batch",
}


def bf16_bounds(expected: Result, exact: Result, *model: str) -> dict[str, float]:
    """How far a layout's bf16 run may be from the one-process bf16 run, of which ``exact`` is the fp32 counterpart.

    The two runs round the same values, but sums of other parts. Their errors are taken as independent and equally
    large, so the runs differ by sqrt(2) times what one of them differs from fp32. A gradient tensor is thousands of
    values, so that its measured distance from fp32 is a reliable scale, r. A loss or a norm is a single number, whose
    own distance from fp32 may be zero by luck and is no scale: on some processors it was a third of another's. They are
    means of errors over the counted tokens, so r / sqrt(tokens) is their standard deviation, and three of them are
    allowed. A token's loss changes by the change of its logits, which have standard deviation
    initializer_range * sqrt(hidden_size); the loss itself is about log(vocab_size).
    """
    plan = make_plan(1, *model)
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
    actual = worst(result, expected)
    return {kind: (actual[kind], bound) for kind, bound in bounds.items() if actual[kind] > bound}


@pytest.mark.parametrize(
    ("layout", "precision"),
    rows(
        (
            (f"{layout}, {precision}", ([layout], precision))
            for layout in ("trainer.tp=2", "trainer.pp=2", "trainer.zero=1", "trainer.zero=3", "trainer.cp=2")
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


@pytest.mark.parametrize(("ranks", "layout", "model"), rows(((case[0], case[1:]) for case in NARROW), QUICK))
@pytest.mark.usefixtures("compiled_here")
def test_paths_of_bf16_alone_within_its_precision(ranks: int, layout: list[str], model: list[str]) -> None:
    skip_without_compiler(layout)
    assert make_plan(ranks, *layout, *model, BF16).storage.keeps_bf16_grads == (ONE_MICRO_BATCH in layout)
    expected = oracle(*model, BF16)
    bounds = bf16_bounds(expected, oracle(*model), *model)
    assert not beyond(bounds, run_layout(ranks, *layout, *model, BF16), expected)


NARROW_BROKEN: list[tuple[Tamper, int, list[str], list[str]]] = [
    (last_chunk_of_the_head_lost, 1, [ONE_MICRO_BATCH], ["data.seq_length=10"]),  # whose last token counts
    (no_kv_copy_sum, 4, ["trainer.tp=4", ONE_MICRO_BATCH], []),
    (no_tied_sum, 2, ["trainer.pp=2", ONE_MICRO_BATCH], [TIED]),
    (compiled_gradients_of_one_token_more, 1, [*COMPILED, ONE_MICRO_BATCH], [*WIDE, WINDOW]),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("tamper", "ranks", "layout", "model"),
    rows(
        ((case[0].__name__, case) for case in NARROW_BROKEN),
        {case[0].__name__ for case in NARROW_BROKEN if COMPILED[0] not in case[2]},
    ),
)
@pytest.mark.usefixtures("compiled_here")
def test_an_error_there_is_larger(tamper: Tamper, ranks: int, layout: list[str], model: list[str]) -> None:
    skip_without_compiler(layout)
    expected = oracle(*model, BF16)
    try:
        result = run_layout(ranks, *layout, *model, BF16, tamper=tamper)
    except AssertionError as failure:  # copies that drifted apart
        assert "differ" in str(failure)
        return
    assert "first_grads" in beyond(bf16_bounds(expected, oracle(*model), *model), result, expected)


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
    expected = oracle(BF16)
    assert kind in beyond(bf16_bounds(expected, oracle()), run_layout(2, layout, BF16, tamper=tamper), expected)


def test_stochastic_rounding_twice_gives_the_same_bits() -> None:
    chosen = ("trainer.precision=bf16_sr", "trainer.zero=2")
    assert set(worst(run_layout(2, *chosen), run_layout(2, *chosen)).values()) == {0.0}


def test_bf16_keeps_fp32_masters() -> None:
    result = run_layout(1, BF16, "optim.lr=1e-6", "trainer.steps=100", steps=1)
    for name, weight in result.weights.items():
        assert weight.dtype == torch.float32
        moved = (weight - result.initial[name]).abs()
        # An update far below bf16's resolution of the weight is not lost.
        assert 0 < moved.max() < 2**-9 * weight.abs().max(), name
