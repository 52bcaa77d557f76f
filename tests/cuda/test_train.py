"""train.py with device=cuda runs to its end on the runtime, and does the recorded amount of work in a step: launches of
a block, and the plan's memory against torch's allocator."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron_llama.config import load_config
from megatron_llama.plan import resolve
from megatron_llama.plan.memory import stage_footprints
from megatron_llama.train.metrics_file import read_metrics
from tests.cuda import fused_attention, rows
from tests.cuda.harness import Runtime, train_words
from tests.cuda.in_process import ACCESSES, NO_COPIES
from tests.cuda.log import kernel_class
from tests.cuda.streams import conflicts
from tests.layouts.table import LAYOUTS, OFFLOAD
from tests.paths import CONF

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
    actual = rows.measured(rows.start(runtime, name, tmp_path).check())
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
    assert runtime.start(["-m", fused_attention.__name__, package], tmp_path, 1, {}).check().output.endswith("done\n")


OPERATORS = {"norms": 2 * 3, "rotations of q and k": 2 * 2, "SwiGLU": 2}
"""Kernels of a block, forward and backward. A norm's backward pass adds and rounds the weight's gradient."""
PLAIN = 60
"""Kernels of a block that the fused operators replace, at least."""


def _block(runtime: Runtime, folder: Path, **settings: str) -> Counter[str]:
    """Return the kernels of one block of a micro batch by class, from runs with one and two blocks."""
    counted = []
    for layers in (1, 2):
        overrides = (f"model.num_hidden_layers={layers}", "trainer.global_batch_size=2", "trainer.compile=false")
        run = runtime.train(folder / str(layers), *overrides, **settings).check()
        calls = (call for call in run.logs[0].steps[rows.MEASURED_STEP] if call.name == "KERNEL")
        counted.append(Counter(kernel_class(call.fields["name"]) for call in calls))
    return counted[1] - counted[0]


def test_launches_of_a_block(runtime: Runtime, tmp_path: Path) -> None:
    """Without a C compiler Triton cannot launch kernels: the plain operators run."""
    fused = _block(runtime, tmp_path / "fused")
    plain = _block(runtime, tmp_path / "plain", CC="no-such-compiler")
    assert 0 < fused["Triton"] <= sum(OPERATORS.values()) + 2  # and the sums of the norms' weight gradients
    assert plain["Triton"] == 0
    assert plain.total() - fused.total() >= PLAIN, (plain, fused)


TOLERANCE = 0.1  # as the plan states
WORKSPACES = 64 << 20  # of cuBLAS on Hopper, which the plan does not count
QLORA = (
    *("finetune=lora", "trainer.precision=bf16", "trainer.micro_batch_size=1", "trainer.global_batch_size=1"),
    *("model.hidden_size=4096", "model.intermediate_size=11008", "model.num_hidden_layers=1", "trainer.steps=2"),
    *("model.num_attention_heads=32", "model.num_key_value_heads=32", "model.vocab_size=1024", "trainer.compile=false"),
)
GROUPED = (
    *("model=llama3_1b", "model.num_hidden_layers=2", "model.vocab_size=1024", "data.seq_length=2048"),
    *("trainer.precision=fp32", "trainer.micro_batch_size=1", "trainer.global_batch_size=1", "trainer.steps=2"),
)
MEMORY = {
    "int8": (*QLORA, "finetune.frozen_dtype=int8"),
    "nf4": (*QLORA, "finetune.frozen_dtype=nf4"),
    "fp32, grouped heads, eager": (*GROUPED, "trainer.compile=false"),
    "fp32, grouped heads, compiled": (*GROUPED, "trainer.compile=true"),
}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", MEMORY)
def test_memory(runtime: Runtime, tmp_path: Path, name: str, recompute: str) -> None:
    settings = (*MEMORY[name], f"trainer.recompute={recompute}")
    runtime.train(tmp_path, *settings).check()
    peak = max(row["peak_memory_bytes"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl"))
    plan = resolve(load_config(train_words(tmp_path, settings)[1:], CONF), 1)
    forecast = stage_footprints(plan)[0].total
    assert (1 - TOLERANCE) * forecast < peak < (1 + TOLERANCE) * forecast + WORKSPACES
