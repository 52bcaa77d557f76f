"""metrics.csv and Weights & Biases match metrics.jsonl; their errors do not stop a run."""

from __future__ import annotations

import csv
import json
import struct
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_llama.train.metrics import EVERY_STEP, SOME_STEPS, MetricsLogger
from megatron_llama.train.metrics_file import read_metrics
from megatron_llama.train.sinks import CsvFile, WandbRun, write_samples
from tests.config.helpers import make, problems_of
from tests.train.full_disk import on_a_full_disk
from tests.train.steps import PEAK, STEPS, log_steps, measured, plan_of


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def as_cells(records: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{name: str(record.get(name, "")) for name in (*EVERY_STEP, *SOME_STEPS)} for record in records]


def test_csv_equals_metrics_jsonl_after_a_resume(tmp_path: Path) -> None:
    log_steps(plan_of(tmp_path, "logging.csv=true"), last=9)
    log_steps(plan_of(tmp_path, "logging.csv=true"), first=6)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows(tmp_path)] == [str(step) for step in range(1, STEPS + 1)]
    assert rows(tmp_path) == as_cells(records)
    assert rows(tmp_path)[0]["val_loss"] == "" and rows(tmp_path)[3]["val_loss"] == "2.25"


def test_csv_stops_on_a_full_disk(tmp_path: Path) -> None:
    def work() -> None:
        file = CsvFile(tmp_path / "metrics.csv", ["step", "loss"], [])
        for step in range(100):
            file.append({"step": step, "loss": 2.0})
        file.close()

    errors = on_a_full_disk(work, tmp_path / "errors", 200)
    assert errors == f"{tmp_path}/metrics.csv: stopped writing: File too large\n"


def test_samples_are_written_and_a_failure_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["a", "1 é <"]
    plan = plan_of(tmp_path)
    plan.config.logging.sample_prompts = prompts
    with MetricsLogger(plan, PEAK) as logger:
        logger.finish(["a b", "1 é < 2"])
    stored = json.loads((tmp_path / "samples.json").read_text(encoding="utf-8"))
    texts = [{"prompt": prompts[0], "text": "a b"}, {"prompt": prompts[1], "text": "1 é < 2"}]
    assert stored == {"step": plan.config.trainer.steps, "samples": texts}
    (tmp_path / "samples.json").unlink()
    (tmp_path / "samples.json").mkdir()
    capsys.readouterr()
    write_samples(plan, ["a b", "1"])
    assert capsys.readouterr().err == f"WARNING: {tmp_path}/samples.json was not written: Is a directory.\n"


def test_csv_path_is_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.csv").mkdir()
    log_steps(plan_of(tmp_path, "logging.csv=true"))
    assert f"{tmp_path}/metrics.csv: stopped writing: Is a directory\n" in capsys.readouterr().err


def test_metric_names_of_nemo_and_transformers(tmp_path: Path) -> None:
    with MetricsLogger(plan_of(tmp_path), PEAK) as logger:
        for step, seconds in enumerate((8.0, 1.0, 1.0, 2.0, 4.0, 2.0), start=1):
            logger.log_step(measured(step, step_time_s=seconds))
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["global_step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["train_step_timing"] for record in records] == [8.0, 1.0, 1.0, 2.0, 4.0, 2.0]
    throughput = [8 / 8, 16 / 9, 24 / 10, 32 / 12, 40 / 16, 48 / 18]
    assert [record["throughput"] for record in records] == pytest.approx(throughput)
    peaks = [max(throughput[: step + 1]) for step in range(6)]
    assert [record["throughput_peak"] for record in records] == pytest.approx(peaks)
    assert ["train_samples_per_second" in record for record in records] == [False] * 3 + [True] * 3
    after_warm_up = [record["train_samples_per_second"] for record in records[3:]]
    assert after_warm_up == pytest.approx([8 / 2, 16 / 6, 24 / 8])


def test_resume_keeps_the_throughput_peak_and_restarts_warm_up(tmp_path: Path) -> None:
    log_steps(plan_of(tmp_path), last=6)  # each step is slower: the first has the peak
    log_steps(plan_of(tmp_path), first=6)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert {record["throughput_peak"] for record in records} == {16.0}
    has = [record["step"] for record in records if "train_samples_per_second" in record]
    assert has == [4, 5, 9, 10, 11, 12], "the first three steps of each start warm up"


class FakeWandb:
    """The wandb functions that are used, with their signatures (wandb 0.31)."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished, self.fail_at = 0, fail_at

    Settings = SimpleNamespace
    __spec__ = ModuleSpec("wandb", None)

    def init(self, **arguments: Any) -> FakeWandb:
        if self.fail_at == 0:
            raise RuntimeError("api_key not configured (no-tty)\nmore")
        self.inits.append(arguments)
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, data: dict[str, Any]) -> None:
        if len(self.logged) == self.fail_at:
            raise OSError(28, "No space left on device")
        self.logged.append(data)

    def finish(self) -> None:
        self.finished += 1


def test_wandb_logs_all_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    settings = ("logging.wandb=online", "logging.wandb_project=mine")
    log_steps(plan_of(tmp_path, *settings), last=9)
    log_steps(plan_of(tmp_path, *settings), first=6)
    first, second = fake.inits
    assert first["project"] == "mine" and first["mode"] == "online" and first["dir"] == str(tmp_path)
    assert first["config"]["trainer"]["tp"] == 2
    assert (tmp_path / "wandb").stat().st_mode & 0o777 == 0o700, "its files have the settings"
    assert first["group"] == second["group"] and first["name"] != second["name"], "a start is a run of its group"
    assert fake.finished == 2
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert fake.logged[9:] == [{k: v for k, v in record.items() if v is not None} for record in records[5:]]


@pytest.mark.parametrize(
    ("fail_at", "message"),
    [(0, "api_key not configured (no-tty)"), (3, "No space left on device")],
    ids=["no account", "full disk"],
)
def test_wandb_never_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fail_at: int, message: str
) -> None:
    fake = FakeWandb(fail_at)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log_steps(plan_of(tmp_path, "logging.wandb=online"))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == STEPS
    assert capsys.readouterr().err == f"Weights & Biases: stopped writing: {message}\n"
    assert len(fake.logged) == fail_at


def test_missing_wandb_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else object())
    (problem,) = problems_of(make(**{"logging.wandb": "offline"}), 1)
    assert problem.field == "logging.wandb" and "pip install" in problem.instead and ".[wandb]" in problem.instead
    assert problems_of(make(), 1) == []


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: 7 bytes, then LevelDB's log (blocks of 32 KiB; crc, length, type, data)."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # made at import

    content, position, data = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if (left := -position % (32 << 10)) and left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        if position + 7 + length > len(content):
            return  # it is being written
        data += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(data)
            data = b""


WANDB_SECONDS = 60
"""Time limit for wandb's process, which writes the file."""


@pytest.mark.slow
def test_an_offline_run_of_the_real_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run").mkdir()
    log_steps(plan_of(tmp_path / "run", "logging.wandb=offline"))
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    logged = [record["reduced_train_loss"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    losses: list[float] = []
    deadline = time.monotonic() + WANDB_SECONDS
    while losses != logged and time.monotonic() < deadline:
        time.sleep(0.1)
        losses = [
            json.loads(item.value_json)
            for record in wandb_records(file)
            for item in record.history.item
            if "reduced_train_loss" in (item.key, *item.nested_key)
        ]
    assert losses == logged


def test_no_sink_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """wandb is installed where the plan was made, but not on this rank's machine."""
    plan = plan_of(tmp_path, "logging.wandb=offline")
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = WandbRun(plan, 0)
    run.append({"step": 1})
    run.close()
    assert capsys.readouterr().err.count("\n") == 1
