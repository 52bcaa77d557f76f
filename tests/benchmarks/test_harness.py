"""The harness of the training benchmarks, and their studies: tables and statistics of given numbers, and small runs."""

from __future__ import annotations

import json
import os
import pickle
import re
import runpy
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks import __main__, studies
from benchmarks import results as page_parts
from benchmarks.harness import comparison, runner, worker
from benchmarks.harness.arguments import add_program_arguments, build_tasks, install_peers, parse_layout
from benchmarks.harness.comparison import (
    ComparisonCell,
    ProgramResult,
    Spread,
    StartupTime,
    TurnMeasurement,
    find_mismatches,
)
from benchmarks.harness.environments import OURS, PEERS, NotInstalled, Peer, interpreter
from benchmarks.harness.runner import program_name, run_rounds
from benchmarks.harness.task import Facts, Layout, TrainingTask, checksum
from benchmarks.peers import train_ours
from benchmarks.recovery import START, STOP, Run, Timeline, read_phases
from benchmarks.studies import STUDIES, Trained
from benchmarks.train import page
from megatron_llama import cli
from megatron_llama.config import ConfigError
from megatron_llama.system.phase import PhaseFile
from tests.compiled import needs_compiler
from tests.golden import GoldenFiles
from tests.paths import ROOT

TASK = TrainingTask(
    preset="tiny",
    model={"vocab_size": 1000},
    parameters=5000,
    seq_length=10,
    batch_size=4,
    micro_batch_size=4,
    precision="fp32",
    mode="eager",
    layout=Layout(),
    device="cpu",
    threads=2,
    optimizer={"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0},
    seed=1,
    cache="cache",
    started=0.0,
)
FACTS = Facts(
    parameters=5000,
    weight_dtype="float32",
    compute_dtype="float32",
    tokens_per_step=40,
    tokens_checksum=checksum(TASK.text(1)[:, :-1]),
    optimizer="AdamW, fused",
    clip=1.0,
    attention="sdpa",
    versions={"torch": "2.13.0"},
)
FIRST_LOSS = 6.95  # log(1000) is 6.908


def result(peer: str, seconds: list[float], live_bytes: int, **changed: Any) -> ProgramResult:
    """Return turns of one step of ``seconds`` each; the peak is 1000 FLOP/s in the first round and 2000 afterwards."""
    task = replace(TASK, **changed)
    turns = [
        TurnMeasurement([second], 2 * second, 10 * live_bytes + number, 1000.0 if number == 0 else 2000.0, 6.9)
        for number, second in enumerate(seconds)
    ]
    starts = [StartupTime(30.0, graphs=2), StartupTime(8.0, graphs=0)]
    return ProgramResult(program_name(peer, task), task, FACTS, FIRST_LOSS, starts, turns, live_bytes)


def cell() -> ComparisonCell:
    """Return a cell: ours takes 1, 2 and 1 s, peer ``fast`` 2, 2 and 4 s, peer ``lean`` 10 s, two layouts 2 s."""
    return ComparisonCell(
        flops_per_token=10.0,
        results=[
            result("ours", [1.0, 2.0, 1.0], 60 << 20),
            result("fast", [2.0, 2.0, 4.0], 200 << 20, mode="compiled"),
            result("lean", [10.0, 10.0, 10.0], 100 << 20),
            result("ours", [2.0, 2.0, 2.0], 1 << 20, layout=Layout(pp=2), micro_batch_size=1),
            result("ours", [2.0, 2.0, 2.0], 1 << 20, layout=Layout(dp=2), micro_batch_size=2),
        ],
    )


def tasks(words: str) -> list[tuple[Peer, TrainingTask]]:
    """Return the uncompiled programs of this project that train llama_2m in fp32 with these flags."""
    parser = ArgumentParser()
    add_program_arguments(parser)
    words = f"--peers ours --modes eager --seq-length 32 --threads 1 {words}"
    return list(build_tasks(parser.parse_args(words.split()), "llama_2m", "fp32"))


def test_layouts_are_parsed() -> None:
    assert [parse_layout(name) for name in ("one", "tp2", "tp2pp4")] == [Layout(), Layout(tp=2), Layout(tp=2, pp=4)]
    for name in ("two", "tp", "2tp", "sp2", "pp2tp", ""):
        with pytest.raises(ConfigError, match="a layout is one, or axes"):
            parse_layout(name)


def test_all_argument_errors_are_reported_before_installation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--models llama_57m,llama_2m,[a] --precision bf61 --peers our,litgpt --layouts pt2,tp0 --batch 0".split()
    words += "--recompute none,nothing --modes eager,eager --zero 1,7 --state-bits 16 --threads 0".split()
    words += ["--before", "/", "--modes", ""]
    monkeypatch.setattr(sys, "argv", ["benchmarks", "train", *words])
    assert __main__.main() == 2
    printed = capsys.readouterr()
    assert not printed.out and "environment" not in printed.err
    GoldenFiles.check(
        "benchmarks/argument_errors.txt", printed.err, {r"one of from_hf(.|\n)*?(?=\n\n)": "one of MODELS"}
    )


def test_machine_and_commit_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit needs no git."""
    for cpu, description in (
        ({"model name": "A 9", "flags": "fpu avx512_bf16 amx_bf16"}, "A 9, bf16 units (amx_bf16, avx512_bf16)"),
        ({"model name": "A 9", "flags": "fpu no_avx512_bf16"}, "A 9, no bf16 units"),
        ({}, "an unknown processor, no bf16 units"),
    ):
        monkeypatch.setattr(page_parts, "processor", lambda cpu=cpu: cpu)
        assert page_parts.describe_machine("cpu") == f"{os.cpu_count()} cores of {description}"
    monkeypatch.setenv("PATH", "/nonexistent")
    assert page_parts.commit() == "?"


def test_failed_installation_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(NotInstalled, match="ended with status"):
        interpreter(Peer("missing", ("no such package",), "nothing"), tmp_path)
    assert not (tmp_path / "missing" / "installed.txt").exists()


def test_turns_begin_with_an_untimed_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each program trains two warm-up steps, then turns of one untimed and three timed steps."""
    trained: list[tuple[str, int]] = []

    class Recorded:
        facts, first_loss, start = None, 0.0, StartupTime(1.0, 0)

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
    ((_, task),) = tasks("--batch 1")
    assert task.optimizer["lr"] == 3e-4, "peers get the derived learning rate"
    entries = [(Peer(name, (), "nothing"), Path(sys.executable), task) for name in ("one", "other")]

    results = run_rounds(entries, 2, 3, peak=lambda: 1e9, advance=lambda _: None, excluded={})
    one_round = [("one", 1), ("one", 3), ("other", 1), ("other", 3)]
    assert trained == [("one", 2), ("other", 2), *one_round, *one_round]
    assert [len(turn.step_seconds) for result in results for turn in result.turns] == [3, 3, 3, 3]


@pytest.mark.long
@pytest.mark.slow
def test_layouts_and_recompute_train_equally(tmp_path: Path) -> None:
    every = tasks("--batch 2 --threads 2 --layouts one,tp2,pp2 --recompute none,full --zero 1,3")
    every = [(ours, replace(task, cache=str(tmp_path))) for ours, task in every]
    chosen = [task for _, task in every if (task.zero == 3) == (task.recompute == "full")]
    chosen = [task for task in chosen if task.layout.ranks == 1 or task.zero == 1]
    ours, python = PEERS[OURS], Path(sys.executable)
    chosen.insert(1, replace(chosen[0], state_bits=8))
    entries = [(ours, python, task) for task in chosen]
    entries.append((ours, python, replace(chosen[0], parameters=chosen[0].parameters + 1)))
    entries.append((Peer("broken", (), "no.such.module"), python, chosen[0]))
    excluded: dict[str, str] = {}
    progress: list[str] = []
    results = run_rounds(entries, 2, 1, peak=lambda: 1e9, advance=progress.append, excluded=excluded)
    one, eight, recomputed, tp, pp = results
    assert "parameters: 1771200, not 1771201" in excluded[OURS]
    assert "No module named 'no'" in excluded["broken"]
    assert [one.name, eight.name, recomputed.name] == ["ours", "ours state_bits=8", "ours zero=3 recompute=full"]
    assert [tp.name, pp.name] == ["ours tp2", "ours pp2"]
    assert "optim.state_bits=8" in train_ours.overrides(eight.task, "run") and "8-bit" in eight.facts.optimizer
    assert one.live_bytes - eight.live_bytes > 2 * 1_771_200  # 6 bytes per weight, minus temporary fp32 buffers
    assert {"trainer.recompute=full", "trainer.zero=3"} < {*train_ours.overrides(recomputed.task, "run")}
    assert recomputed.turns[1].loss == one.turns[1].loss
    assert recomputed.live_bytes <= one.live_bytes  # with this small batch the peak is in the update
    for each in (one, recomputed, tp, pp):
        assert len(each.turns) == 2 and each.facts.parameters == 1_771_200
        assert each.live_bytes > 4 * 4 * 1_771_200 * 0.9  # weights, gradients and two moments in fp32
        assert each.turns[0].peak_bytes > each.live_bytes
        assert each.turns[1].loss == pytest.approx(one.turns[1].loss, rel=1e-5)  # layouts do equal work
    assert progress[-1] == "ours pp2, memory"


@pytest.mark.slow
@pytest.mark.long
def test_command_writes_page_and_record(tmp_path: Path) -> None:
    split_words = "train --models llama_2m --precision fp32 --peers ours --modes eager --rounds 1 --steps 1".split()
    split_words += ["--before", str(ROOT), "--layouts", "one,tp3"]  # four heads do not divide by 3
    command = [sys.executable, "-m", "benchmarks", *split_words, "--seq-length", "32", "--output"]
    done = subprocess.run([*command, str(tmp_path / "out")], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    broken = "llama_2m fp32 ours tp3: ours tp3 ended with status 2"
    assert f"excluded: {broken}" in done.stderr
    record = json.loads((tmp_path / "out.json").read_text())
    page = (tmp_path / "out.md").read_text()
    assert record["cells"][0]["results"][0]["facts"]["parameters"] == 1_771_200
    assert record["machine"] in page and "| ours |" in page and f"* {broken}" in page
    assert "the fastest peer, before." in page


def test_installed_peers_need_no_installation() -> None:
    excluded: dict[str, str] = {}
    args = Namespace(peers=[OURS, "transformers", "litgpt"], device="cpu", installed=True, before=ROOT)
    assert dict(install_peers(args, excluded)) == dict.fromkeys([OURS, "transformers", "before"], Path(sys.executable))
    assert excluded == {"litgpt": "not installed in this environment"}


@pytest.mark.parametrize(
    ("changed", "first_loss", "messages"),
    [
        ({}, FIRST_LOSS, []),
        ({"parameters": 4999}, FIRST_LOSS, ["parameters: 4999, not 5000"]),
        ({"weight_dtype": "bfloat16"}, FIRST_LOSS, ["weight dtype: bfloat16, not float32"]),
        ({"compute_dtype": "bfloat16"}, FIRST_LOSS, ["matmul dtype: bfloat16, not float32"]),
        ({"tokens_per_step": 20}, FIRST_LOSS, ["tokens per step: 20, not 40"]),
        ({"tokens_checksum": checksum(TASK.text(2)[:, :-1])}, FIRST_LOSS, ["checksum of the first tokens"]),
        ({"clip": None}, FIRST_LOSS, ["gradient clipping: None, not 1.0"]),
        ({"versions": {"torch": "2.12.0"}}, FIRST_LOSS, ["torch: 2.12.0, not 2.13.0"]),
        ({}, FIRST_LOSS * 4, ["first loss: 27.8000, not within 10% of 6.9078"]),  # of another normalization
    ],
)
def test_different_work_is_reported(changed: dict[str, Any], first_loss: float, messages: list[str]) -> None:
    mismatches = find_mismatches(TASK, replace(FACTS, **changed), first_loss, "2.13.0")
    assert len(mismatches) == len(messages)
    assert all(map(str.startswith, mismatches, messages)), mismatches


def test_bf16_requires_bf16_matmuls() -> None:
    mismatches = find_mismatches(replace(TASK, precision="bf16"), FACTS, FIRST_LOSS, "2.13.0")
    assert mismatches == ["matmul dtype: float32, not bfloat16"]


def test_tokens_are_deterministic_and_differ_between_steps() -> None:
    assert checksum(TASK.text(1)) == checksum(TASK.text(1)) != checksum(TASK.text(2))


def test_statistics_of_a_recorded_cell() -> None:
    recorded = cell()
    ours, fast = recorded.results[:2]
    assert recorded.speeds(ours) == [40.0, 20.0, 40.0]  # 40 tokens per step
    # 10 FLOPs per token; the peak is 1000 FLOP/s in the first round and 2000 afterwards
    assert recorded.peak_shares(ours) == pytest.approx([0.4, 0.1, 0.2])
    assert recorded.ratio(ours, fast) == Spread(2.0, 1.0, 4.0), "computed by round"
    # 4 micro batches keep 2 stages busy in 4 of 5 slots.
    assert list(comparison.layout_rows(recorded)) == [
        ["ours pp2", "0.50 (0.50 to 1.00)", "0.80", "62.5%"],
        ["ours dp2", "0.50 (0.50 to 1.00)", "1.00", "50.0%"],
    ]
    rows = list(comparison.speed_rows(recorded))
    assert [row[0] for row in rows] == ["ours", "fast compiled", "ours pp2", "ours dp2", "lean"], "by speed"
    assert rows[0] == ["ours", "40", "0.0", "20.0%", "2.00", "600", "60", "30.0 s", "8.0 s"]
    recorded.results.append(result("ours", [4.0, 4.0, 4.0], 30 << 20, recompute="full"))
    assert list(comparison.summary_lines(recorded)) == [
        "* ours is 2.00 (1.00 to 4.00) times as fast as the fastest peer, fast compiled.",
        "* ours is 10.00 (5.00 to 10.00) times as fast as lean.",
        "* ours: peak resident memory is 60% of lean, the smallest peer.",
        "* ours: peak live memory is 60% of lean, the smallest peer.",
        "* ours recompute=full is 0.50 (0.50 to 1.00) times as fast as the fastest peer, fast compiled.",
        "* ours recompute=full: peak resident memory is 30% of lean, the smallest peer.",
        "* ours recompute=full: peak live memory is 30% of lean, the smallest peer.",
    ]


def test_published_record_reproduces_its_page() -> None:
    published = ROOT / "docs/results/train-amx.json"
    record = json.loads(published.read_text())
    cells = []
    for fields in record["cells"]:
        results = []
        for each in fields["results"]:
            task, facts = TrainingTask.from_json(json.dumps(each["task"])), Facts(**each["facts"])
            starts = [StartupTime(start["seconds"], start["graphs"]) for start in each["starts"]]
            turns = [TurnMeasurement(**turn) for turn in each["turns"]]
            results.append(ProgramResult(**{**each, "task": task, "facts": facts, "starts": starts, "turns": turns}))
        cells.append(ComparisonCell(fields["flops_per_token"], results))
    text = "\n".join(page(record, cells))
    GoldenFiles.check("benchmarks/train-amx.md", text)
    ratios = re.findall(r"is (\S+ \(.*?\)) times as fast as the fastest peer", text)
    summary = published.with_name("speed.md").read_text(encoding="utf-8")
    assert len(ratios) == 2 and all(f"| {ratio} |" in summary for ratio in ratios)


def test_spawned_ranks_can_import_their_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TrainingTask("llama_2m", {}, 1, 8, 1, 1, "fp32", "eager", Layout(), "cuda", 1, {}, 0)
    entries: list[Any] = []
    monkeypatch.setattr(cli, "main", lambda overrides, entry: entries.append(entry) or 0)
    monkeypatch.setattr(sys, "argv", ["train_ours.py", task.to_json()])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(train_ours.__file__), run_name="__main__")
    assert ended.value.code == 0
    # A rank of CUDA is a new process, in which __main__ is another module.
    assert entries[0].func is train_ours.train_rank
    assert pickle.loads(pickle.dumps(entries[0])).args[0] == task


@pytest.mark.parametrize(("device", "expected"), [("cuda", ["empty", "step", "step", "empty"]), ("cpu", ["step"] * 2)])
def test_cached_memory_is_freed_after_a_turn(device: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: calls.append("empty"))
    for name in ("synchronize", "reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.accelerator, name, lambda: 1)

    def step(number: int) -> float:
        calls.append("step")
        return 2.0

    task, trainer = SimpleNamespace(device=device), SimpleNamespace(step=step)
    result = worker._train(cast(Any, task), cast(Any, trainer), worker.Ranks(), 2, 2)
    assert calls == expected
    assert result["loss"] == 2.0 and len(result["step_seconds"]) == 2


BLOCKED = """
import sys
for name in ("hydra", "omegaconf", "yaml", "megatron"):
    sys.modules[name] = None
from benchmarks.harness import worker
"""


def test_a_peer_needs_torch_only() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_programs_import_what_this_process_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/packages")
    assert runner.import_path(Path(sys.executable)) == f"{ROOT}{os.pathsep}/packages"
    assert runner.import_path(Path("/peer/bin/python")) == str(ROOT)


def run(seconds: float, *losses: float | None) -> Trained:
    """Return a run with 0.5 TFLOP and 100 tokens per step."""
    step = {"tflops_per_device": 0.25, "step_time_s": 2.0}
    return Trained(seconds, [{**step, "consumed_tokens": 100 * n, "val_loss": loss} for n, loss in enumerate(losses)])


def test_a_recovery_is_divided_by_the_slowest_rank() -> None:
    record = PhaseFile()
    assert read_phases(os.getpid())[os.fstat(record.file.fileno()).st_ino] == record.read().name
    timeline = Timeline(10.0)
    timeline.reach(STOP, 11.0)
    timeline.reach(START, 13.0)
    phases = ("the start of its process", "importing the program", "meeting the other ranks", "opening the data")
    for now, name in enumerate((*phases, "step 4", "step 5", "step 6"), 14):
        timeline.note_phases({1: name, 2: name if name != "step 5" else "step 4"}, float(now))
    assert timeline.seconds == [1.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.0, 2.0, 10.0]


def test_a_recovery_reports_rejected_settings(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="name=value"), Run(tmp_path / "0", ["nope"]) as run_of_nothing:
        run_of_nothing.poll(lambda: False)


def test_table_compares_with_the_first_variant_of_the_same_seed() -> None:
    """Tokens to a loss are interpolated, and names of folders have no spaces."""
    names = list(STUDIES["random_ltd"].variants)[:2]
    runs = [[run(30, None, 3.0), run(50, None, 3.2)], [run(20, 2.9), run(34, 3.4)]]
    table = list(studies.table(STUDIES["random_ltd"], dict(zip(names, runs, strict=True))))
    assert table[2] == "| plain | 2 | 1.00 (100%) | 3.1000 | | 100% of 2 seeds | 0.00 | 40 | |"
    gap = "+0.0500 (-0.1000 to +0.2000)"
    shares = "67% (67% to 68%)"
    assert table[3] == f"| {names[1]} | 1 | 0.50 (50%) | 3.1500 | {gap} | 0% of 1 seeds | 0.00 | 27 | {shares} |"
    assert studies.gap([3.0], [2.5]) == "+0.5000"
    one = run(1.0, None, 4.0, None, 3.0, 2.5)
    assert one.tokens_to(3.5) == 200 and one.tokens_to(3.0) == 300 and one.tokens_to(4.5) == 100
    assert one.tokens_to(2.0) is None
    assert studies.folder_name("ZeRO++: all three", 64, 1) == "zero_all_three-64-1"


@pytest.mark.parametrize("name", STUDIES)
def test_each_variant_of_a_study_has_a_plan(name: str) -> None:
    study = STUDIES[name]
    assert all(studies.sent(study, variant) >= 0 for variant in study.variants.values())


def test_equal_work_is_counted_in_layer_tokens() -> None:
    study = replace(STUDIES["random_ltd"], steps=30)
    steps = {name: studies.steps_of(study, name) for name in study.variants}
    tokens = {name: studies.layer_tokens(study, study.variants[name], steps[name]) for name in steps}
    # 2 of 4 layers process fewer tokens in the first 20 steps: 64 + 192 n/20, rounded down to a multiple of 16.
    lengths = [64 + 192 * step // 20 // 16 * 16 for step in range(20)] + [256] * 10
    assert tokens["random-LTD, equal steps"] == 8 * sum(2 * 256 + 2 * length for length in lengths)
    assert tokens["plain"] == 8 * 30 * 4 * 256
    step = 8 * 4 * 256
    assert 0 <= tokens["plain, random-LTD's layer tokens"] - tokens["random-LTD, equal steps"] < step
    assert 0 <= tokens["random-LTD, plain's layer tokens"] - tokens["plain"] < step
    assert steps["random-LTD, plain's layer tokens"] > 30 > steps["plain, random-LTD's layer tokens"]


def test_finished_run_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[object, ...]] = []

    def program(*words: object) -> None:
        started.append(words)
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "val_loss": 2.0}) + "\n")

    monkeypatch.setattr(studies, "run_program", program)
    first, second = (studies.train(tmp_path, ["model=llama_2m"]) for _ in range(2))
    assert len(started) == 1 and first == second and first.records[0]["val_loss"] == 2.0


SETTINGS = "model=llama_2m data=mock device=cpu data.seq_length=64 trainer.steps=3 trainer.precision=fp32".split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "bits"),
    [(False, None), (False, 8), pytest.param(True, None, marks=needs_compiler)],
    ids=["eager", "8-bit states", "compiled"],
)
def test_components_of_a_small_step(compiled: bool, bits: int | None, tmp_path: Path) -> None:
    """compile_strict also shows that the hooks cause no graph break."""
    compile_settings = f"trainer.compile=true trainer.compile_strict=true trainer.compile_cache={tmp_path / 'compiled'}"
    command = [sys.executable, str(ROOT / "benchmarks/verify/memory.py"), str(ROOT / "train.py"), *SETTINGS]
    command += [f"optim.state_bits={bits or 'null'}", f"run.dir={tmp_path / 'run'}"]
    command += compile_settings.split() if compiled else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    mib = {name: int(size) for name, size in re.findall(r"live at the peak: (.+?) +([\d,]+) MiB", done.stdout)}
    assert mib["weights"] == round(4 * 1_771_200 / 2**20)
    assert mib["optimizer states"] == round((2.25 if bits else 8) * 1_771_200 / 2**20)  # ignores the norms' 32 bits
    assert mib["weights"] + mib["optimizer states"] < mib["total"]
    assert mib["total"] == pytest.approx(sum(mib.values()) - mib["total"], abs=2)
