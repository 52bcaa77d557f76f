"""Training benchmarks end to end with this project only: starts, turns, layouts, and a failing program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results as page_parts
from benchmarks.harness import runner
from benchmarks.harness.arguments import RunMatrix, build_tasks, install_peers, parse_layout
from benchmarks.harness.environments import OURS, PEERS, NotInstalled, Peer, interpreter
from benchmarks.harness.runner import RoundSettings, StartupTime, run_rounds
from benchmarks.harness.task import Layout, TrainingTask
from benchmarks.peers.train_ours import overrides
from megatron_llama.config import ConfigError
from tests.paths import ROOT


def test_layouts_are_parsed() -> None:
    assert [parse_layout(name) for name in ("one", "tp2", "tp2pp4")] == [Layout(), Layout(tp=2), Layout(tp=2, pp=4)]
    for name in ("two", "tp", "2tp", "sp2", "pp2tp", ""):
        with pytest.raises(ConfigError, match="a layout is one, or axes"):
            parse_layout(name)


def test_all_argument_errors_are_reported_before_installation() -> None:
    split_words = (
        "--models llama_57m,llama_2m,[a] --precision bf61 --peers our,litgpt --layouts pt2,tp0 --batch 0".split()
    )
    split_words += "--recompute none,nothing --modes eager,eager --zero 1,7 --state-bits 16 --threads 0 --modes".split()
    bench = [sys.executable, "-m", "benchmarks", "train", *split_words, ""]
    done = subprocess.run(bench, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("This benchmark can't work, for 12 reasons:") and "environment" not in done.stderr
    for problem in ("model = llama_57m", "--precision = bf61", "--peers = our\n", "--layouts = pt2", "--batch = 0"):
        assert f"\n  {problem}" in done.stderr
    for problem in ("--recompute = nothing", "--zero = 7", "--state-bits = 16", "--threads = 0", "--layouts = tp0"):
        assert f"\n  {problem}" in done.stderr
    assert "  --modes\n    rule     is empty" in done.stderr


def test_machine_description(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, description in (
        ({"model name": "A 9", "flags": "fpu avx512_bf16 amx_bf16"}, "A 9, bf16 units (amx_bf16, avx512_bf16)"),
        ({"model name": "A 9", "flags": "fpu no_avx512_bf16"}, "A 9, no bf16 units"),
        ({}, "an unknown processor, no bf16 units"),
    ):
        monkeypatch.setattr(page_parts, "processor", lambda cpu=cpu: cpu)
        assert page_parts.describe_machine("cpu") == f"{os.cpu_count()} cores of {description}"


def test_failed_installation_is_reported(tmp_path: Path) -> None:
    missing = Peer("missing", ("no such package",), "nothing")
    with pytest.raises(NotInstalled, match="ended with status"):
        interpreter(missing, tmp_path)
    assert not (tmp_path / "missing" / "installed.txt").exists()


def test_turns_begin_with_an_untimed_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each program trains two warm-up steps, then turns of one untimed and three timed steps. 0 rounds train none."""
    trained: list[tuple[str, int]] = []

    class Recorded:
        facts, first_loss, start = None, 0.0, StartupTime(1.0, {}, 0)

        def __init__(self, peer: Peer, python: Path, task: TrainingTask) -> None:
            self.name, self.task = peer.name, task

        def __enter__(self) -> Recorded:
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def train(self, steps: int) -> dict[str, Any]:
            trained.append((self.name, steps))
            return {"step_seconds": [1.0] * steps, "processor_seconds": 1.0, "loss": 0.0, "peak_bytes": 1}

        def live_bytes(self) -> int:
            return 1

    monkeypatch.setattr(runner, "RunningProgram", Recorded)
    monkeypatch.setattr(runner, "find_mismatches", lambda *_: [])
    matrix = RunMatrix([OURS], ["eager"], ["one"], ["none"], [1], "cpu", 1, 1, 32, None)
    ((_, task),) = build_tasks(matrix, "llama_2m", "fp32")
    entries = [(Peer(name, (), "nothing"), Path(sys.executable), task) for name in ("one", "other")]

    def settings(rounds: int) -> RoundSettings:
        return RoundSettings(rounds, 3, False, lambda: 1e9, lambda _: None, {})

    assert not any(result.turns for result in run_rounds(entries, settings(0))) and not trained
    results = run_rounds(entries, settings(2))
    one_round = [("one", 1), ("one", 3), ("other", 1), ("other", 3)]
    assert trained == [("one", 2), ("other", 2), *one_round, *one_round]
    assert [len(turn.step_seconds) for result in results for turn in result.turns] == [3, 3, 3, 3]


@pytest.mark.long
@pytest.mark.slow
def test_layouts_and_recompute_train_equally(tmp_path: Path) -> None:
    matrix = RunMatrix([OURS], ["eager"], ["one", "tp2", "pp2"], ["none", "full"], [1, 3], "cpu", 2, 2, 32, None)
    tasks = [replace(task, cache=str(tmp_path)) for _, task in build_tasks(matrix, "llama_2m", "fp32")]
    tasks = [
        task
        for task in tasks
        if (task.zero == 3) == (task.recompute == "full") and (task.layout.ranks == 1 or task.zero == 1)
    ]
    ours, python = PEERS[OURS], Path(sys.executable)
    tasks.insert(1, replace(tasks[0], state_bits=8))
    entries = [(ours, python, task) for task in tasks]
    entries.append((ours, python, replace(tasks[0], parameters=tasks[0].parameters + 1)))
    entries.append((Peer("broken", (), "no.such.module"), python, tasks[0]))
    excluded: dict[str, str] = {}
    progress: list[str] = []
    settings = RoundSettings(2, 1, False, lambda: 1e9, progress.append, excluded)
    one, eight, recomputed, tp, pp = run_rounds(entries, settings)
    assert "parameters: 1771200, not 1771201" in excluded[OURS]
    assert "No module named 'no'" in excluded["broken"]
    assert [one.name, eight.name, recomputed.name] == ["ours", "ours state_bits=8", "ours zero=3 recompute=full"]
    assert [tp.name, pp.name] == ["ours tp2", "ours pp2"]
    assert "optim.state_bits=8" in overrides(eight.task, "run") and "8-bit" in eight.facts.optimizer
    assert one.live_bytes - eight.live_bytes > 2 * 1_771_200  # 6 bytes per weight, minus temporary fp32 buffers
    assert {"trainer.recompute=full", "trainer.zero=3"} < {*overrides(recomputed.task, "run")}
    assert recomputed.turns[1].loss == one.turns[1].loss
    assert recomputed.live_bytes <= one.live_bytes  # with this small batch the peak is in the update
    for result in (one, recomputed, tp, pp):
        assert len(result.turns) == 2 and result.facts.parameters == 1_771_200
        assert result.live_bytes > 4 * 4 * 1_771_200 * 0.9  # weights, gradients and two moments in fp32
        assert result.turns[0].peak_bytes > result.live_bytes
        assert result.turns[1].loss == pytest.approx(one.turns[1].loss, rel=1e-5)  # layouts do equal work
    assert progress[-1] == "ours pp2, memory"


@pytest.mark.slow
@pytest.mark.long
def test_command_writes_page_and_record(tmp_path: Path) -> None:
    split_words = "train --models llama_2m --precision fp32 --peers ours --modes eager --rounds 1 --steps 1".split()
    split_words += ["--layouts", "one,tp3"]  # four heads do not divide by 3
    command = [sys.executable, "-m", "benchmarks", *split_words, "--seq-length", "32", "--output"]
    done = subprocess.run([*command, str(tmp_path / "out")], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    broken = "llama_2m fp32 ours tp3: ours tp3 ended with status 2"
    assert f"excluded: {broken}" in done.stderr
    record = json.loads((tmp_path / "out.json").read_text())
    page = (tmp_path / "out.md").read_text()
    assert record["cells"][0]["results"][0]["facts"]["parameters"] == 1_771_200
    assert record["machine"] in page and "| ours |" in page and f"* {broken}" in page


def test_peers_get_the_derived_learning_rate() -> None:
    matrix = RunMatrix([OURS], ["eager"], ["one"], ["none"], [1], "cpu", 1, 1, 32, None)
    ((_, task),) = build_tasks(matrix, "llama_2m", "fp32")
    assert task.optimizer["lr"] == 3e-4


def test_installed_peers_need_no_installation() -> None:
    excluded: dict[str, str] = {}
    args = Namespace(peers=[OURS, "transformers", "litgpt"], device="cpu", installed=True)
    pythons = dict(install_peers(args, excluded))
    assert pythons == {OURS: Path(sys.executable), "transformers": Path(sys.executable)}
    assert excluded == {"litgpt": "not installed in this environment"}
