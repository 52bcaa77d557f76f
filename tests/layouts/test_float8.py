"""Layouts with float8 matmuls against one process with float8 matmuls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_llama.devices.kernels import Float8Operand
from megatron_llama.parallel import ParallelModel, float8
from tests.compiled import skip_without_compiler
from tests.layouts import table
from tests.oracle import make_plan, oracle, run_layout, worst
from tests.rows import rows

TENSORWISE, ROWWISE = "trainer.float8=tensorwise", "trainer.float8=rowwise"
# Sums in another order change a value by 1e-7, which moves about one value in a million to the next float8 number. That
# changes gradients by up to an eighth of the error of float8 itself, here measured as a run's distance from fp32.
SHARE = 0.3
# In bf16 the results of matmuls are rounded before their sum over ranks, so more values move. The runs' float8 errors
# are then independent. The runs differ by at most sqrt(2) times one of them.
BF16, INDEPENDENT = "trainer.precision=bf16", 2**0.5
ELEMENTWISE = [table.TP2, table.ELEMENTWISE]
LAYOUTS: list[tuple[str, int, list[str], list[str]]] = [
    ("tensorwise, tp2+sp", 2, [TENSORWISE, table.TP2], []),
    ("rowwise, tp2, full recompute", 2, [ROWWISE, table.TP2, table.NO_SP, table.FULL], []),
    ("rowwise, tp2·pp2+sp, tied", 4, [ROWWISE, table.TP2, table.PP2], [table.TIED]),
    ("tensorwise, pp2·dp2, zero 3", 4, [TENSORWISE, table.PP2, table.ZERO3], []),
    ("tensorwise, pp2·vpp2", 2, [TENSORWISE, table.PP2, table.VPP2], []),
    ("rowwise, dp2, zero 1", 2, [ROWWISE, table.ZERO1], []),
    ("rowwise, tp2+sp", 2, [ROWWISE, table.TP2], []),
    ("tensorwise, tp2, full recompute", 2, [TENSORWISE, table.TP2, table.NO_SP, table.FULL], []),
    ("rowwise, pp2·dp2, zero 3", 4, [ROWWISE, table.PP2, table.ZERO3], []),
    ("rowwise, pp2·vpp2", 2, [ROWWISE, table.PP2, table.VPP2], []),
    ("tensorwise, tp2·dp2+sp, zero 2, tied", 4, [TENSORWISE, table.TP2, table.ZERO2], [table.TIED]),
    ("rowwise, cp2", 2, [ROWWISE, table.CP], []),
    ("tensorwise, cp2·tp2+sp", 4, [TENSORWISE, table.CP, table.TP2], []),
    ("tensorwise, cp2, ulysses", 2, [TENSORWISE, table.CP, table.ULYSSES], []),
    ("rowwise, micro batches of 4", 1, [ROWWISE, "trainer.micro_batch_size=4"], []),
    ("tensorwise, compiled", 1, [TENSORWISE, *table.COMPILED], table.WIDE),
    ("rowwise, tp2+sp, compiled", 2, [ROWWISE, table.TP2, *table.COMPILED], table.WIDE),
    ("tensorwise, tp2+sp, elementwise recompute, compiled", 2, [TENSORWISE, *ELEMENTWISE, *table.COMPILED], table.WIDE),
    ("tensorwise, cp2, compiled", 2, [TENSORWISE, table.CP, *table.COMPILED], table.WIDE),
]
IN_BF16: dict[str, tuple[int, list[str]]] = {
    "tensorwise, tp2+sp": (2, [TENSORWISE, table.TP2]),
    "rowwise, pp2·dp2, zero 1": (4, [ROWWISE, table.PP2, table.ZERO1]),
}
QUICK = {
    "rowwise, tp2, full recompute",
    "tensorwise, pp2·dp2, zero 3",
}


def first_gradients(ranks: int, layout: list[str], model: list[str], **options: object) -> tuple[float, float]:
    """A layout's distance from one process, and the distance of one process from fp32."""
    expected = oracle(layout[0], *model)
    result = run_layout(ranks, *layout, *model, **options)  # type: ignore[arg-type]
    return worst(result, expected)["first_grads"], worst(expected, oracle(*model))["first_grads"]


@pytest.mark.parametrize(("ranks", "layout", "model"), rows(((case[0], case[1:]) for case in LAYOUTS), QUICK))
@pytest.mark.usefixtures("compiled_here")
def test_layouts_are_near_one_process(ranks: int, layout: list[str], model: list[str]) -> None:
    skip_without_compiler(layout)
    distance, error = first_gradients(ranks, layout, model)
    assert error > 0.05, "float8 rounds"
    assert distance < SHARE * error


@pytest.mark.parametrize(("ranks", "layout"), rows(IN_BF16.items(), {"tensorwise, tp2+sp"}))
def test_layouts_in_bf16_differ_by_independent_errors(ranks: int, layout: list[str]) -> None:
    distance, error = first_gradients(ranks, layout, [BF16])
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


@pytest.mark.slow
def test_shared_kv_heads_round_parts_of_their_gradient() -> None:
    """tp above the number of kv heads: each rank rounds the gradient from its query heads, before their sum."""
    layout = [ROWWISE, "trainer.tp=4", "trainer.micro_batch_size=4"]
    assert make_plan(4, *layout).model.num_key_value_heads == 2
    distance, error = first_gradients(4, layout, [])
    assert distance < error
