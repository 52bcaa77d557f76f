"""Verdicts of the parts from results of runs and programs, without starting them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.config import load_config
from megatron_llama.devices import get_device
from megatron_llama.plan import resolve
from megatron_llama.tools.prove_gpu import attention, benchmark, cli, training
from megatron_llama.tools.prove_gpu.checks import CheckFailed, Clock, NotRun, run_parts
from megatron_llama.tools.prove_gpu.session import Process, Session, TrainingRun
from tests.paths import CONF


def run_of(losses: list[float], speed: float = 100.0, folder: Path = Path(), output: str = "") -> TrainingRun:
    records = [{"reduced_train_loss": x, "gradient_norm": 1.0, "tokens_per_second": speed} for x in losses]
    return TrainingRun(folder, output, records)


def session(folder: Path, **facts: Any) -> Session:
    facts = {"count": 1, "is_accelerator": True, "compiler_missing": None, "cards": [], **facts}
    return Session(folder / "results", folder / "work", Clock(600), "cpu", facts)


def test_losses_must_be_there_finite_and_fall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    falling = [5.0 - 0.1 * step for step in range(training.SMOKE_STEPS)]
    faults = {
        "3 of 20 steps": falling[:3],
        "loss of step 20 is nan": [*falling[:-1], float("nan")],
        "does not fall": falling[::-1],
        "is 0": [0.0] * training.SMOKE_STEPS,
    }
    (tmp_path / "checkpoints/step_00000020").mkdir(parents=True)
    for message, losses in faults.items():
        monkeypatch.setattr(Session, "train", lambda *_, losses=losses, **__: run_of(losses, folder=tmp_path))
        with pytest.raises(CheckFailed, match=message):
            training._smoke(session(tmp_path))


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
    (check,) = [check for check in training.resume(session(tmp_path)) if check.name == "fp32"]
    if changed:
        with pytest.raises(
            CheckFailed, match={"loss": "of step 8", "weight": "differ in rank", "step": "resume"}[changed]
        ):
            check.run(session(tmp_path))
    else:
        assert "bit-identical" in check.run(session(tmp_path)).detail


def test_memory_must_be_near_the_forecast(tmp_path: Path) -> None:
    assert training.judge_memory(105, 100).values["error"] == pytest.approx(0.05)
    with pytest.raises(CheckFailed, match=r"\+11.0%: more than 10% apart"):
        training.judge_memory(111, 100)
    allowed = training.judge_memory(115, 100, 15)
    assert allowed.values["error"] == pytest.approx(0.15) and "workspaces that the forecast omits" in allowed.detail
    for measured in (80, 116):
        with pytest.raises(CheckFailed):
            training.judge_memory(measured, 100, 15)
    rows = training.memory(session(tmp_path))
    assert len(rows) == 4 and training.memory(session(tmp_path, is_accelerator=False))


def test_runs_that_differ_fail() -> None:
    text, values = training.compare_runs("compiled", run_of([2.0, 1.0], 300.0), "eager", run_of([2.0, 1.001]), 1e-2)
    assert "3.00 times the speed" in text and values["error"] == pytest.approx(1e-3, rel=0.01)
    with pytest.raises(CheckFailed, match="at most 1e-02"):
        training.compare_runs("compiled", run_of([2.0, 1.1]), "eager", run_of([2.0, 1.0]), 1e-2)
    with pytest.raises(CheckFailed):
        training.compare_runs("compiled", run_of([float("nan")]), "eager", run_of([2.0]), 1e-2)


def test_compiled_graphs_must_come_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for output, failed in (
        ("compiled 2 graphs: cache hits 2, misses 0", False),
        ("hits 0, misses 2", True),
        ("", True),
    ):
        monkeypatch.setattr(Session, "train", lambda *_, output=output, **__: run_of([1.0] * 10, output=output))
        (check,) = training.compilation(session(tmp_path))
        if failed:
            with pytest.raises(CheckFailed, match="second start compiled"):
                check.run(session(tmp_path))
        else:
            assert "no new graphs" in check.run(session(tmp_path)).detail
    with pytest.raises(NotRun, match="no gcc"):
        check.run(session(tmp_path, compiler_missing="no gcc"))


def test_float8_has_an_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "train", lambda *_, **__: run_of([1.0] * 10))
    for check in training.float8(session(tmp_path)):
        with pytest.raises(CheckFailed, match="no effect"):
            check.run(session(tmp_path))


def test_attention_errors_are_judged() -> None:
    well = {"name": "causal", "kernel": "flash", "error": 1e-3, "tolerance": 2e-2}
    absent = well | {"error": None, "kernel": "cudnn"}
    assert "1 cases have no kernel here" in attention.judge([well, absent]).detail
    for wrong, message in ((1e-1, "1.0e-01 from fp64, at most 2e-02"), ("RuntimeError: x", "RuntimeError: x")):
        with pytest.raises(CheckFailed, match=message):
            attention.judge([well, well | {"error": wrong}])
    with pytest.raises(NotRun):
        attention.judge([absent])


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


def test_benchmark_records_are_judged(tmp_path: Path) -> None:
    task = {"batch_size": 2, "seq_length": 50}
    turn = {"step_seconds": [0.5, 0.5], "peak_flops": 1e6}
    facts = {"versions": {"transformers": "5.24.0"}}
    result = {"task": task, "turns": [turn], "facts": facts, "live_bytes": 7}
    record = {"cells": [{"flops_per_token": 2000.0, "results": [result]}], "left_out": {}}
    outcome = benchmark.judge(record, "transformers")
    assert outcome.detail == "200 tokens/s, MFU 40.0%, version 5.24.0" and outcome.values["peak_bytes"] == 7
    turn["peak_flops"] = 0.0
    assert "MFU unknown" in benchmark.judge(record, "ours").detail
    with pytest.raises(CheckFailed, match="does different work"):
        benchmark.judge(
            {"cells": [{"flops_per_token": 1.0, "results": []}], "left_out": {"x": "does different work"}}, "x"
        )
    output = f"excluded: torchtitan: {benchmark.NOT_INSTALLED}\n"
    one = session(tmp_path)
    one.start = lambda *_: Process(1, output)
    with pytest.raises(NotRun, match="not installed"):
        benchmark._measure(benchmark.SMALL_SHAPES[0], "torchtitan", "eager", one)


def test_shapes_fit_the_card(tmp_path: Path) -> None:
    large, small = ([{"memory_bytes": size << 30}] for size in (80, 24))
    assert benchmark.shapes(session(tmp_path, cards=large)) == list(benchmark.SHAPES)
    assert all(shape.batch == 1 for shape in benchmark.shapes(session(tmp_path, cards=small)))


@pytest.mark.parametrize("part", ["smoke", "resume", "memory", "compile", "float8", "benchmark"])
def test_runs_have_valid_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """All runs of a part are plans of a GPU."""
    planned = []

    def train(self: Session, name: str, *overrides: str, ranks: int = 1, **_: str) -> TrainingRun:
        planned.append(resolve(load_config(["device=cuda", *overrides], CONF), ranks))
        raise NotRun("planned only")

    monkeypatch.setattr(Session, "train", train)
    one = session(tmp_path, count=8, cards=[{"memory_bytes": 80 << 30}])
    one.device = "cuda"
    one.start = lambda *_: Process(1, "")
    (selected,) = [each for each in cli.parts() if each.name == part]
    (result,) = run_parts([selected], one, Clock(600))
    faults = [each.detail for each in result.results if "Error" in each.detail]
    assert planned and not faults
