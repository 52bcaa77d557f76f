"""LoRA with float8 matmuls of the frozen matrices, in each layout, against one process with float8 matmuls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.finetuning.runner import Tuned, World, tune
from tests.oracle import distance
from tests.rows import rows

TENSORWISE, ROWWISE = "trainer.float8=tensorwise", "trainer.float8=rowwise"
# Sums in another order move about one value in a million to the next float8 number, as in tests/layouts/test_float8.py.
SHARE = 0.3
LEAST_ERROR = 0.02
"""Float8 rounds, so its error is not smaller."""
MICRO_1 = "trainer.micro_batch_size=1"
LAYOUTS = {
    "tp2": (2, ["trainer.tp=2", "trainer.sp=false"]),
    "tp2+sp": (2, ["trainer.tp=2"]),
    "dp2, zero 3": (2, ["trainer.zero=3", MICRO_1]),
    "pp2": (2, ["trainer.pp=2"]),
    "tp2·dp2+sp, zero 3, full recompute": (4, ["trainer.tp=2", "trainer.zero=3", "trainer.recompute=full", MICRO_1]),
}
ROWS = {
    f"{recipe.partition('=')[2]}, {name}": (recipe, *row)
    for recipe in (TENSORWISE, ROWWISE)
    for name, row in LAYOUTS.items()
}


def farthest(tuned: Tuned, other: Tuned) -> float:
    """Return the largest distance of a gradient of the first step."""
    assert tuned.first_grads.keys() == other.first_grads.keys()
    return max(distance(tuned.first_grads[name], grad) for name, grad in other.first_grads.items())


@pytest.mark.parametrize(("recipe", "ranks", "layout"), rows(ROWS.items(), {"rowwise, dp2, zero 3"}))
def test_layouts_are_near_one_process(recipe: str, ranks: int, layout: list[str], world: World, tmp_path: Path) -> None:
    """Distances are shares of the error of float8 itself: the distance of one process from fp32."""
    alone = [setting for setting in layout if "batch" in setting]
    ours = tune(ranks, tmp_path / "ours", *world.lora, recipe, *layout, steps=1)
    one = tune(1, tmp_path / "one", *world.lora, recipe, *alone, steps=1)
    exact = tune(1, tmp_path / "exact", *world.lora, *alone, steps=1)
    error = farthest(one, exact)
    assert error > LEAST_ERROR
    assert farthest(ours, one) < SHARE * error
