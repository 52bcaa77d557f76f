"""Promise 1 in 16 bits and with float8 matmuls: layouts are as near to one process as rounding allows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megatron_llama.devices.kernels import Float8Operand
from megatron_llama.parallel import ParallelModel, float8
from tests.compiled import skip_without_compiler
from tests.layouts import table, tampers
from tests.oracle import RaggedSamples, Result, Tamper, make_plan, oracle, run_layout, worst
from tests.rows import rows

BF16, NARROW, WINDOW = "trainer.precision=bf16", table.ONE_MICRO_BATCH, [*table.WIDE, table.WINDOW]
# Of one micro batch gradients stay in 16 bits until the update (Storage.keeps_bf16_grads). Compiled blocks have a
# kernel for attention, with sums in 32 bits. Ranks, overrides of the layout, of the model, and the precision.
LAYOUTS: dict[str, tuple[int, list[str], list[str], str]] = {
    f"{layout}, {precision}": (2, [layout], [], f"trainer.precision={precision}")
    for layout in (table.TP2, table.PP2, table.ZERO1, table.ZERO3, table.CP)
    for precision in ("bf16", "bf16_sr")
} | {
    "one micro batch": (1, [NARROW], [], BF16),
    "one micro batch, full recompute": (1, [NARROW, table.FULL], [], BF16),
    "tp2+sp, tied, one micro batch": (2, [table.TP2, NARROW], [table.TIED], BF16),
    "tp4+sp, kv heads < tp, one micro batch": (4, [table.TP4, NARROW], [], BF16),
    "pp2, tied, one micro batch": (2, [table.PP2, NARROW], [table.TIED], BF16),
    "tp2+sp, compiled, window, one micro batch": (2, [table.TP2, *table.COMPILED, NARROW], WINDOW, BF16),
    "pp2, compiled, window": (2, [table.PP2, *table.COMPILED], WINDOW, BF16),
}
QUICK = {
    "trainer.tp=2, bf16_sr",
    "trainer.pp=2, bf16",
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
    return {"first_grads": 1.5 * scale, "norms": scalar, "losses": scalar * logits / math.log(plan.model.vocab_size)}


def beyond(bounds: dict[str, float], result: Result, expected: Result) -> dict[str, tuple[float, float]]:
    """The differences that are above their bounds, with these."""
    actual = worst(result, expected)
    return {kind: (actual[kind], bound) for kind, bound in bounds.items() if actual[kind] > bound}


@pytest.mark.parametrize(("ranks", "layout", "model", "precision"), rows(LAYOUTS.items(), QUICK))
@pytest.mark.usefixtures("compiled_here")
def test_layouts_are_within_the_precision(ranks: int, layout: list[str], model: list[str], precision: str) -> None:
    """The noise of stochastic rounding is the same in all layouts, so it gets no allowance."""
    skip_without_compiler(layout)
    if precision == BF16:
        assert make_plan(ranks, *layout, *model, BF16).storage.keeps_bf16_grads == (NARROW in layout)
    expected = oracle(*model, precision)
    bounds = bf16_bounds(expected, oracle(*model), *model)
    assert bounds["first_grads"] > 1e-4, "bf16 really is at work"
    assert not beyond(bounds, run_layout(ranks, *layout, *model, precision), expected)


# What is broken, the kind of value that shows it, ranks, overrides of the layout and of the model.
BROKEN: list[tuple[Tamper, str, int, list[str], list[str]]] = [
    # The last of 10 tokens counts.
    (tampers.last_chunk_of_the_head_lost, "first_grads", 1, [NARROW], ["data.seq_length=10"]),
    (tampers.no_kv_copy_sum, "first_grads", 4, [table.TP4, NARROW], []),
    (tampers.no_tied_sum, "first_grads", 2, [table.PP2, NARROW], [table.TIED]),
    (tampers.compiled_gradients_of_one_token_more, "first_grads", 1, [*table.COMPILED, NARROW], WINDOW),
    (tampers.local_token_count, "losses", 2, [table.ZERO1], []),
    (tampers.norms_count_copies, "norms", 2, [table.ZERO0], []),
    (tampers.mean_over_data_parallel_ranks, "first_grads", 2, [table.ZERO1], []),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("tamper", "kind", "ranks", "layout", "model"),
    rows(((case[0].__name__, case) for case in BROKEN), {"no_kv_copy_sum"}),
)
@pytest.mark.usefixtures("compiled_here")
def test_an_error_is_larger(tamper: Tamper, kind: str, ranks: int, layout: list[str], model: list[str]) -> None:
    skip_without_compiler(layout)
    expected = oracle(*model, BF16)
    try:
        result = run_layout(ranks, *layout, *model, BF16, tamper=tamper)
    except AssertionError as failure:  # copies that drifted apart
        assert "differ" in str(failure)
        return
    assert kind in beyond(bf16_bounds(expected, oracle(*model), *model), result, expected)


def test_bf16_keeps_fp32_masters() -> None:
    result = run_layout(1, BF16, "optim.lr=1e-6", "trainer.steps=100", steps=1)
    for name, weight in result.weights.items():
        assert weight.dtype == torch.float32
        # An update far below bf16's resolution of the weight is not lost.
        assert 0 < (weight - result.initial[name]).abs().max() < 2**-9 * weight.abs().max(), name


TENSORWISE = "trainer.float8=tensorwise"
# Sums in another order change a value by 1e-7, which moves about one value in a million to the next float8 number. That
# changes gradients by up to an eighth of the error of float8 itself, here measured as a run's distance from fp32.
SHARE = 0.3
# In bf16 the results of matmuls are rounded before their sum over ranks, so more values move. The runs' float8 errors
# are then independent. The runs differ by at most sqrt(2) times one of them.
FLOAT8_BF16, INDEPENDENT = "trainer.precision=bf16", 2**0.5
FLOAT8_LAYOUTS, STARS = table.read_rows("float8.txt")
IN_BF16: dict[str, tuple[int, list[str]]] = {
    "tensorwise, tp2+sp": (2, [TENSORWISE, table.TP2]),
    "rowwise, pp2·dp2, zero 1": (4, ["trainer.float8=rowwise", table.PP2, table.ZERO1]),
}
FLOAT8_QUICK = {row[0] for row, star in zip(FLOAT8_LAYOUTS, STARS, strict=True) if star}


def first_gradients(ranks: int, layout: list[str], model: list[str], **options: object) -> tuple[float, float]:
    """A layout's distance from one process, and the distance of one process from fp32."""
    expected = oracle(layout[0], *model)
    result = run_layout(ranks, *layout, *model, **options)  # type: ignore[arg-type]
    return worst(result, expected)["first_grads"], worst(expected, oracle(*model))["first_grads"]


@pytest.mark.parametrize(
    ("ranks", "layout", "model"), rows(((case[0], case[1:]) for case in FLOAT8_LAYOUTS), FLOAT8_QUICK)
)
@pytest.mark.usefixtures("compiled_here")
def test_layouts_are_near_one_process(ranks: int, layout: list[str], model: list[str]) -> None:
    skip_without_compiler(layout)
    distance, error = first_gradients(ranks, layout, model)
    assert error > 0.05, "float8 rounds"
    assert distance < SHARE * error


@pytest.mark.parametrize(("ranks", "layout"), rows(IN_BF16.items(), {"tensorwise, tp2+sp"}))
def test_layouts_in_bf16_differ_by_independent_errors(ranks: int, layout: list[str]) -> None:
    distance, error = first_gradients(ranks, layout, [FLOAT8_BF16])
    assert error > 0.05
    assert distance < INDEPENDENT * error


def scale_of_own_part(model: ParallelModel) -> None:
    cast = float8._cast

    def alone(values: torch.Tensor, dtype: torch.dtype, layer: float8.Layer, dim: int, *_: object) -> Float8Operand:
        return cast(values, dtype, layer, dim)

    float8._cast = alone
    assert dist.get_world_size() == 2


def test_scales_of_a_part_are_seen() -> None:
    distance, error = first_gradients(2, [TENSORWISE, table.TP2], [], tamper=scale_of_own_part)
    assert distance > 2 * SHARE * error
