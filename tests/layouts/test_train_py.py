"""The layout table again, from ``train.py`` itself: its launcher, its ranks, its metrics.jsonl, over 20 steps."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

import megatron_llama.train.run_rank  # noqa: F401  imported once, before the forks
from tests.checkpoint.runner import final_tensors
from tests.layouts import table
from tests.oracle import SMALL, make_plan
from tests.processes import losses, run_train_py

TOLERANCE = 1e-4  # relative, over 20 steps
NAMES = {f"trainer.{name}" for name in ("tp", "sp", "pp", "vpp", "zero", "shard_group", "pipeline_layers")}
NAMES |= {"trainer.micro_batch_size", "model.vocab_size"}
LAYOUTS = {
    name: (ranks, layout, model)
    for name, ranks, layout, model in table.LAYOUTS
    if {override.split("=")[0] for override in (*layout, *model)} <= NAMES
}


def train(folder: Path, *overrides: str) -> list[float]:
    """The losses that a run of ``train.py`` logs."""
    status, output = run_train_py(folder, *SMALL, *overrides, "logging.tensorboard=false", "checkpoint.save_last=false")
    assert status == 0, output
    return losses(folder)


@cache
def one_process(folder: Path, *model: str) -> list[float]:
    """The losses of one process."""
    return train(folder, *model)


# test_layouts.py has these layouts over three steps.
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout", "model"), LAYOUTS.values(), ids=LAYOUTS)
def test_twenty_steps(
    ranks: int, layout: list[str], model: list[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = one_process(tmp_path_factory.getbasetemp() / f"one_process{len(model)}", *model)
    dp = make_plan(ranks, *layout, *model).config.trainer.dp
    actual = train(tmp_path / "run", *layout, *model, f"trainer.dp={dp}")
    assert len(actual) == len(expected) == 20
    assert max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True)) <= TOLERANCE
    assert expected[-1] < expected[0]  # it learns, so there is something to compare


LAYOUTS_IN_TURN = (
    {},
    {"tp": 2},
    {"pp": 2, "vpp": 2},
    {"dp": 2, "zero": 3},
    {"tp": 2, "dp": 2, "zero": 2, "micro_batch_size": 1},
    {"tp": 4, "micro_batch_size": 4},
)
ONE_PROCESS = {"tp": 1, "pp": 1, "vpp": 1, "dp": 1, "zero": 1, "micro_batch_size": 2}  # a run keeps its settings


@pytest.mark.slow
def test_an_exact_run_that_changes_its_layout_five_times(tmp_path: Path) -> None:
    settings = [*SMALL, "trainer.exact=true", "logging.tensorboard=false", "checkpoint.every_minutes=null"]
    settings += ["optim=constant", "optim.lr=0.001", "optim.warmup_steps=5"]
    status, output = run_train_py(tmp_path / "constant", *settings, "trainer.steps=100", "trainer.dp=1")
    assert status == 0, output
    for number, layout in enumerate(LAYOUTS_IN_TURN):
        words = [f"trainer.{name}={value}" for name, value in {**ONE_PROCESS, **layout}.items()]
        last = (17, 34, 51, 68, 84, 100)[number]
        status, output = run_train_py(tmp_path / "changed", *settings, *words, f"trainer.steps={last}")
        assert status == 0, output
    one, other = (
        {name: tensor for name, tensor in final_tensors(tmp_path / run).items() if not name.startswith("random.")}
        for run in ("constant", "changed")
    )
    assert one.keys() == other.keys() and any("exp_avg" in name for name in one)
    assert not [name for name in one if not torch.equal(one[name], other[name])]
    both = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("constant", "changed")]
    columns = [[(row["reduced_train_loss"], row["gradient_norm"]) for row in map(json.loads, rows)] for rows in both]
    assert columns[0] == columns[1] and len(columns[0]) == 100
