"""LoRA with float8 matmuls of the frozen matrices, in each layout, against one process with float8 matmuls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_llama.devices.kernels import Float8Operand
from megatron_llama.parallel import ParallelModel, float8
from tests.finetuning.runner import Tamper, Tuned, World, tune
from tests.oracle import distance
from tests.rows import rows

TENSORWISE, ROWWISE = "trainer.float8=tensorwise", "trainer.float8=rowwise"
# Sums in another order move about one value in a million to the next float8 number, as in tests/layouts/test_float8.py.
# Distances are shares of the error of float8 itself: the distance of one process from fp32.
SHARE = 0.3
LEAST_ERROR = 0.02
"""Float8 rounds, so its error is not smaller."""
MICRO_1 = "trainer.micro_batch_size=1"
LAYOUTS = {
    "tp2": (2, ["trainer.tp=2", "trainer.sp=false"]),
    "tp2+sp": (2, ["trainer.tp=2"]),
    "dp2, zero 3": (2, ["trainer.zero=3", MICRO_1]),
    "pp2": (2, ["trainer.pp=2"]),
    "tp2·dp2+sp, zero 3, full recompute": (
        4,
        ["trainer.tp=2", "trainer.zero=3", "trainer.recompute=full", MICRO_1],
    ),
}
ROWS = {
    f"{recipe.partition('=')[2]}, {name}": (recipe, *row)
    for recipe in (TENSORWISE, ROWWISE)
    for name, row in LAYOUTS.items()
}
QUICK = {
    "rowwise, dp2, zero 3",
}


def farthest(tuned: Tuned, other: Tuned) -> float:
    """Return the largest distance of a gradient of the first step."""
    assert tuned.first_grads.keys() == other.first_grads.keys()
    return max(distance(tuned.first_grads[name], grad) for name, grad in other.first_grads.items())


def share(
    world: World, folder: Path, recipe: str, ranks: int, layout: list[str], tamper: Tamper | None = None
) -> float:
    """Return a layout's distance from one process, as a share of the error of float8."""
    alone = [setting for setting in layout if "batch" in setting]
    ours = tune(ranks, folder / "ours", *world.lora, recipe, *layout, steps=1, tamper=tamper)
    one = tune(1, folder / "one", *world.lora, recipe, *alone, steps=1)
    exact = tune(1, folder / "exact", *world.lora, *alone, steps=1)
    error = farthest(one, exact)
    distance_of_layout = farthest(ours, one)
    print(f"error of float8: {error:.3g}; distance of the layout: {distance_of_layout:.3g}")
    assert error > LEAST_ERROR
    return distance_of_layout / error


@pytest.mark.parametrize(("recipe", "ranks", "layout"), rows(ROWS.items(), QUICK))
def test_layouts_are_near_one_process(recipe: str, ranks: int, layout: list[str], world: World, tmp_path: Path) -> None:
    assert share(world, tmp_path, recipe, ranks, layout) < SHARE


def scale_of_own_part(model: ParallelModel) -> None:
    cast = float8._cast

    def alone(values: torch.Tensor, dtype: torch.dtype, layer: float8.Layer, dim: int, *_: object) -> Float8Operand:
        return cast(values, dtype, layer, dim)

    float8._cast = alone


def test_scales_of_a_part_are_seen(world: World, tmp_path: Path) -> None:
    assert share(world, tmp_path, TENSORWISE, 2, ["trainer.tp=2"], tamper=scale_of_own_part) > 2 * SHARE
