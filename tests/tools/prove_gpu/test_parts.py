"""Verdicts of the parts from results of runs and programs, without starting them."""

from __future__ import annotations

import copy
import gzip
import json
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.config import load_config
from megatron_llama.devices import get_device
from megatron_llama.plan import resolve
from megatron_llama.system.files import read_json
from megatron_llama.tools.prove_gpu import attention, cli, parity, training
from megatron_llama.tools.prove_gpu.run_checks import TABLE, Part, Row, Status, read_rows, run_parts
from megatron_llama.tools.prove_gpu.session import CheckFailed, Clock, NotRun, Process, Session, TrainingRun
from tests import warm  # noqa: F401
from tests.golden import GoldenFiles
from tests.paths import CONF
from tests.processes import run_train_py


def run_of(losses: list[float], speed: float = 100.0, folder: Path = Path(), output: str = "") -> TrainingRun:
    records = [{"reduced_train_loss": x, "gradient_norm": 1.0, "tokens_per_second": speed} for x in losses]
    return TrainingRun(folder, output, records)


def session(folder: Path, **facts: Any) -> Session:
    facts = {"count": 1, "is_accelerator": True, "compiler_missing": None, "cards": [], **facts}
    return Session(folder / "results", folder / "work", Clock(600), "cpu", facts)


def verdict(judge: Callable[[], Any]) -> str:
    """Return a result as text: detail and values, the fault, or the reason why it did not run."""
    try:
        return f"passed: {judge()}"
    except (CheckFailed, NotRun) as error:
        return f"{'FAILED' if isinstance(error, CheckFailed) else 'not run'}: {error}"


def memory(*numbers: int) -> str:
    return verdict(lambda: training.judge_memory(*numbers))


def differ(compiled: TrainingRun, eager: list[float]) -> str:
    return verdict(lambda: training.compare_runs("compiled", compiled, "eager", run_of(eager), 1e-2))


def attend(*cases: dict[str, Any]) -> str:
    return verdict(lambda: training.judge_attention(cases))


def benchmarked(peak: float) -> str:
    turn = {"step_seconds": [0.4, 0.5, 0.6], "peak_flops": peak}
    result = {"task": {"batch_size": 2, "seq_length": 50}, "turns": [turn], "live_bytes": 7 << 30}
    cells = [{"flops_per_token": 2000.0, "results": [result | {"name": name} for name in ("ours", "transformers")]}]
    left_out = {"torchtitan": training.NOT_INSTALLED}
    return verdict(lambda: training.judge_benchmark({"cells": cells, "left_out": left_out}))


def test_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, graphs, memory, attention and benchmarks with a known answer."""
    falling = [5.0 - 0.1 * step for step in range(training.SMOKE_STEPS)]
    (tmp_path / "checkpoints/step_00000020").mkdir(parents=True)

    def of_run(check: Callable[[Session], Any], losses: list[float], output: str = "", **facts: Any) -> str:
        run = run_of(losses, folder=tmp_path, output=output)
        monkeypatch.setattr(Session, "train", lambda *_, **__: run)
        return verdict(lambda: check(session(tmp_path, **facts)))

    def smoke(losses: list[float]) -> str:
        return of_run(lambda one: training.smoke(one, Row("smoke")), losses)

    def compiles(output: str, **facts: Any) -> str:
        return of_run(lambda one: training.compilation(one, Row("compile")), [1.0] * 10, output, **facts)

    one, other = session(tmp_path), {"flops_per_token": 1.0, "results": []}
    excluded = {"cells": [other], "left_out": {"x": "does different work"}}
    one.start = lambda *_: Process(1, f"excluded: torchtitan: {training.NOT_INSTALLED}\n")
    well = {"name": "causal", "kernel": "flash", "error": 1e-3, "tolerance": 2e-2}
    absent = well | {"error": None, "kernel": "cudnn"}
    page = {
        "smoke": smoke(falling),
        "smoke of 3 steps": smoke(falling[:3]),
        "smoke that ends in NaN": smoke([*falling[:-1], float("nan")]),
        "smoke whose loss rises": smoke(falling[::-1]),
        "smoke whose loss is 0": smoke([0.0] * training.SMOKE_STEPS),
        **{f"memory of {numbers}": memory(*numbers) for numbers in ((105, 100), (111, 100), (115, 100, 15))},
        **{f"memory of {number}, 100, 15": memory(number, 100, 15) for number in (80, 116)},
        "compiled, near": differ(run_of([2.0, 1.0], 300.0), [2.0, 1.001]),
        "compiled, far": differ(run_of([2.0, 1.1]), [2.0, 1.0]),
        "compiled, NaN": differ(run_of([float("nan")]), [2.0]),
        "graphs of the cache": compiles("compiled 2 graphs: cache hits 2, misses 0"),
        "new graphs": compiles("hits 0, misses 2"),
        "no line about graphs": compiles(""),
        "no compiler": compiles("", compiler_missing="no gcc"),
        **{
            f"equal losses, {row.name}": of_run(partial(training.float8, row=row), [1.0] * 10)
            for row in read_rows("float8")
        },
        "attention": attend(well, absent),
        "attention that is far": attend(well, well | {"error": 1e-1}),
        "attention that raises": attend(well, well | {"error": "RuntimeError: x"}),
        "no attention": attend(absent),
        "benchmark": benchmarked(1e6),
        "benchmark, peak unknown": benchmarked(0.0),
        "other work": verdict(lambda: training.judge_benchmark(excluded)),
        "not installed": verdict(lambda: training._run_benchmark(one, Row("x", (), 1, "7B"))),
    }
    GoldenFiles.check("tools/prove_gpu/verdicts.txt", "".join(f"{name}\n    {text}\n" for name, text in page.items()))


def test_the_table_of_kernels(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    kernels = [
        {"cat": "kernel", "name": name, "dur": dur} for name, dur in (("gemm", 3000), ("add", 500), ("add", 500))
    ]
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": [*kernels, {"cat": "cpu_op", "name": "x", "dur": 9}]}, file)
    assert training.kernel_table(trace) == [
        "3 kernels, 4.0 ms",
        " 75.0%     3.00 ms     1  gemm",
        " 25.0%     1.00 ms     2  add",
    ]


def write_checkpoint(folder: Path, value: float) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path = folder / f"checkpoints/step_{training.RESUME_STEPS:08d}/rank_00000.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + struct.pack("f", value))


@pytest.mark.parametrize("changed", ["loss", "weight", "step", ""])
def test_a_resume_must_be_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    write_checkpoint(whole, 1.0)
    write_checkpoint(resumed, 1.0000001 if changed == "weight" else 1.0)
    losses = [1.0] * training.RESUME_STEPS
    other = [*losses[:-1], 1.0 + 2**-52] if changed == "loss" else losses
    output = "step 1/8  loss 1" if changed == "step" else "step 6/8  loss 1"
    runs = [run_of(losses, folder=whole), run_of(losses[:5]), run_of(other, folder=resumed, output=output)]
    monkeypatch.setattr(Session, "train", lambda *_, **__: runs.pop(0))
    (row,) = [row for row in read_rows("resume") if row.name == "fp32"]
    if changed:
        with pytest.raises(
            CheckFailed, match={"loss": "of step 8", "weight": "differ in rank", "step": "resume"}[changed]
        ):
            training.resume(session(tmp_path), row)
    else:
        assert "bit-identical" in training.resume(session(tmp_path), row).detail


@pytest.mark.parametrize("mask", attention.MASKS)
def test_attention_of_the_cpu_is_near_fp64(mask: str) -> None:
    """The reference is right, and a kernel with another mask is far from it."""
    device = get_device("cpu")
    case = attention.Case(mask, "float32", 32, **attention.MASKS[mask])
    place = device.enter(0, 1)
    ((_, attend),) = attention._kernels(device, case, "eager", 97, place)
    error = attention._measure(attend, case, 97, place)
    assert isinstance(error, float) and error < attention.TOLERANCES["float32"]
    other = attention.Case("window", "float32", 32, **(attention.MASKS["window" if mask != "window" else "causal"]))
    wrong = attention._measure(attend, other, 97, place)
    assert isinstance(wrong, float) and wrong > 0.1


def test_shapes_fit_the_card(tmp_path: Path) -> None:
    large, small = ([{"memory_bytes": size << 30}] for size in (80, 24))
    assert training.layers_of(session(tmp_path, cards=large), "7B") == (*TABLE["shapes"]["7B"],)
    halves = [training.layers_of(session(tmp_path, cards=small), name) for name in ("7B", "1B", "8B")]
    assert [(half.layers, half.batch) for half in halves] == [(2, 1), (8, 1), (2, 1)]


@pytest.mark.parametrize("part", ["parity", "smoke", "resume", "generation", "memory", "compile", "float8", "extras"])
def test_runs_have_valid_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """All runs of a part are plans of a GPU."""
    planned = []

    def train(self: Session, name: str, *overrides: str, ranks: int = 1, **_: str) -> TrainingRun:
        planned.append(resolve(load_config(["device=cuda", *overrides], CONF), ranks))
        raise NotRun("planned only")

    monkeypatch.setattr(Session, "train", train)
    one = session(tmp_path, count=8, cards=[{"memory_bytes": 80 << 30}])
    one.start = lambda *_: Process(1, "")
    (selected,) = [each for each in cli.parts() if each.name == part]
    (result,) = run_parts([selected], one)
    assert planned and not [each.detail for each in result.results if "Error" in each.detail]


# Parity: the recorded losses are the CPU's, and a wrong value is found.
RECORDED = read_json(parity.ORACLE)["models"]
FP32 = TABLE["tolerances"]["fp32"]
ROWS = read_rows("parity")


def forked(folder: Path) -> Session:
    """A session whose processes are forks of this one, which has imported torch."""

    def start(words: Sequence[str], limit: float) -> Process:
        target = Path(next(word for word in words if word.startswith("run.dir=")).partition("=")[2])
        target.parent.mkdir(parents=True, exist_ok=True)
        return Process(*run_train_py(target, *words[2:], timeout=limit))

    return Session(folder / "results", folder / "work", Clock(600), "cpu", start=start)


def test_recorded_losses(tmp_path: Path) -> None:
    """Training the first model again has the recorded losses, on any CPU."""
    session = forked(tmp_path)
    values = parity.values_of(session.train("plain", *parity.row_settings(Row("plain", model="plain"))))
    outcome = parity.compare(values, RECORDED["plain"], (1e-5, 1e-4))
    assert outcome.values["error"] <= 1e-5
    assert values["reduced_train_loss"][-1] < values["reduced_train_loss"][0]
    assert (tmp_path / "results/plain/metrics.jsonl").exists() and (tmp_path / "results/plain/plan.txt").exists()


def test_all_models_are_recorded_and_differ() -> None:
    assert RECORDED.keys() == TABLE["models"].keys()
    assert len({tuple(values["reduced_train_loss"]) for values in RECORDED.values()}) == len(RECORDED)
    assert all(len(values[name]) == parity.STEPS for values in RECORDED.values() for name in parity.RECORDED)


@pytest.mark.parametrize("metric", parity.RECORDED)
def test_a_wrong_recorded_value_fails(metric: str) -> None:
    wrong = copy.deepcopy(RECORDED["plain"])
    wrong[metric][3] *= 1.01
    with pytest.raises(CheckFailed, match=f"{metric} of step 4 is"):
        parity.compare(RECORDED["plain"], wrong, FP32)
    assert parity.compare(RECORDED["plain"], RECORDED["plain"], FP32).values["error"] == 0


def test_a_wrong_oracle_makes_the_part_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part compares the losses of its runs with the file."""

    def train(self: Session, name: str, *overrides: str, ranks: int = 1, **_: str) -> TrainingRun:
        model = next(row.model for row in ROWS if [*overrides] == parity.row_settings(row))
        steps = zip(*RECORDED[model].values(), strict=True)
        return TrainingRun(tmp_path, "", [dict(zip(parity.RECORDED, step, strict=True)) for step in steps])

    monkeypatch.setattr(Session, "train", train)
    part = Part("parity", "", 1.0, ROWS, parity.check)
    (result,) = run_parts([part], forked(tmp_path))
    assert result.status == Status.PASSED and len(result.results) == sum(row.ranks == 1 for row in ROWS)
    wrong = copy.deepcopy(read_json(parity.ORACLE))
    wrong["models"]["window"]["reduced_train_loss"][-1] *= 1.001
    monkeypatch.setattr(parity, "read_json", lambda path: wrong)
    (result,) = run_parts([part], forked(tmp_path))
    assert [failed.name for failed in result.named(Status.FAILED)] == ["window"]
