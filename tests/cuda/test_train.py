"""train.py with device=cuda runs to its end on the runtime, and does the recorded amount of work in a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cuda import fused_attention, rows
from tests.cuda.harness import Runtime
from tests.cuda.in_process import ACCESSES, NO_COPIES
from tests.cuda.streams import conflicts
from tests.layouts.table import LAYOUTS, OFFLOAD

pytestmark = pytest.mark.slow
WAITS_OF_A_STEP = 1  # the read of loss, norm and counts
SHAPE = (
    *("model.vocab_size=64", "model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=4"),
    *("model.num_attention_heads=4", "model.num_key_value_heads=2", "data.seq_length=16"),
    *("trainer.global_batch_size=8", "trainer.micro_batch_size=2"),
)
"""The small model of the layout table."""
EIGHT_BITS, MUON = "optim.state_bits=8", "optim.name=muon"
LOW_PRECISION = ["trainer.precision=bf16_sr", "trainer.precision=bf16_pure"]
TABLE = [row for row in LAYOUTS if "trainer.async_tp=true" not in row[2]]  # it needs symmetric memory


@pytest.mark.parametrize("name", rows.ROWS)
def test_three_steps(runtime: Runtime, tmp_path: Path, name: str) -> None:
    run = rows.start(runtime, name, tmp_path).check()
    actual = rows.measured(run)
    assert len(actual) == rows.ROWS[name][0]
    for counted in actual:
        assert counted["waits"] == WAITS_OF_A_STEP + ("offload" in name)
    goldens = rows.goldens()
    if goldens.get("torch") != torch.__version__:
        pytest.skip(f"counts are known for torch {goldens.get('torch')}: python -m tests.cuda.rows records them again")
    message = ["python -m tests.cuda.rows records intended changes:", *rows.changes(name, actual)]
    assert actual == goldens["rows"][name], "\n".join(message)


def test_ranks_are_spawned(runtime: Runtime, tmp_path: Path) -> None:
    """On a GPU ranks are Python processes that do not inherit the imports of the launcher."""
    run = runtime.spawn(tmp_path, *rows.ROWS["tp 2, sp"][1], devices=2).check()
    assert [list(log.steps) for log in run.logs] == [[1, 2, 3]] * 2


def check(runtime: Runtime, folder: Path, ranks: int, settings: list[str], waits: int = WAITS_OF_A_STEP) -> None:
    """Run three steps. Uses of memory by two streams must have an order, and steps at most ``waits`` waits."""
    variables = {ACCESSES: "1"}
    if not {EIGHT_BITS, MUON, OFFLOAD, *LOW_PRECISION}.isdisjoint(settings):
        variables[NO_COPIES] = "1"
    run = runtime.train(folder, *SHAPE, *settings, devices=ranks, **variables).check()
    assert len(run.logs) == ranks
    for log in run.logs:
        assert list(log.steps) == [1, 2, 3]
        assert not conflicts(log)
        for step in (2, 3):  # the first step also checks that all gradients exist
            calls = [call for call in log.steps[step] if call.name == "SYNC"]
            assert len(calls) <= waits, calls


@pytest.mark.parametrize(("ranks", "layout", "model"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_layout(runtime: Runtime, tmp_path: Path, ranks: int, layout: list[str], model: list[str]) -> None:
    reads_logits = any(setting.startswith("optim.qk_clip") for setting in model)  # its metric is one more read
    check(runtime, tmp_path, ranks, [*layout, *model], WAITS_OF_A_STEP + (OFFLOAD in layout) + reads_logits)


@pytest.mark.parametrize(("ranks", "settings"), rows.SETTINGS.values(), ids=rows.SETTINGS)
def test_setting(runtime: Runtime, tmp_path: Path, ranks: int, settings: list[str]) -> None:
    check(runtime, tmp_path, ranks, settings)


def test_copies_are_compared(runtime: Runtime, tmp_path: Path) -> None:
    """A comparison reads the device outside steps, and finds equal copies."""
    check(runtime, tmp_path, 4, [*rows.COPIES])


EXACT = [(1, []), (2, ["trainer.tp=2"]), (2, ["trainer.zero=3"]), (4, ["trainer.tp=2", "trainer.pp=2"])]


@pytest.mark.parametrize(("ranks", "layout"), EXACT, ids=["one rank", "tp 2, sp", "dp 2, zero 3", "tp 2, pp 2"])
def test_exact_mode(runtime: Runtime, tmp_path: Path, ranks: int, layout: list[str]) -> None:
    """Exact mode waits twice per step: its optimizer reads on the host whether the step is skipped."""
    check(runtime, tmp_path, ranks, ["trainer.exact=true", *layout], WAITS_OF_A_STEP + 1)


@pytest.mark.parametrize("package", fused_attention.PACKAGES)
def test_fused_attention_is_used_where_it_is_installed(runtime: Runtime, tmp_path: Path, package: str) -> None:
    run = runtime.start([["-m", fused_attention.__name__, package]], tmp_path, 1, {}).check()
    assert run.output.endswith("done\n")
