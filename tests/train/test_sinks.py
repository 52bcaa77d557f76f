"""Copies of metrics.jsonl: metrics.csv, samples.json, loss.png, W&B, trackio, MLflow; their errors stop no run."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import math
import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import Event
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot

from megatron_llama.arch.parameters import parameters
from megatron_llama.plan.rules import data
from megatron_llama.system.errors import MachineError
from megatron_llama.train import sinks
from megatron_llama.train.loss_curve import SMOOTHING, describe, draw, draw_run, moving_average
from megatron_llama.train.metrics import EVERY_STEP, SOME_STEPS, MetricsLogger
from megatron_llama.train.metrics_file import MetricsFile, read_metrics
from megatron_llama.train.sinks import CsvFile, PrometheusFile, TensorBoardFile, WandbRun, write_samples
from tests.config.helpers import make, problems_of
from tests.paths import ROOT
from tests.processes import run_forked
from tests.train.steps import PEAK, STEPS, log_steps, measured, plan_of

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def log_twice(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Log steps 1 to 9, then resume after step 5; return metrics.jsonl."""
    log_steps(plan_of(folder, *settings), last=9)
    log_steps(plan_of(folder, *settings), first=6)
    return read_metrics(folder / "metrics.jsonl")


def logged_values(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if value is not None}


# Files


def on_a_full_disk(work: Callable[[], None], errors: Path, size: int) -> str:
    """Run ``work`` with files limited to ``size`` bytes; return stderr. The exit status must be 0."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        work()

    assert run_forked(limited, errors, errors, 100) == 0, errors.read_text()
    return errors.read_text()


def test_csv_equals_metrics_jsonl_after_a_resume(tmp_path: Path) -> None:
    records = log_twice(tmp_path, "logging.csv=true")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(step) for step in range(1, STEPS + 1)]
    assert rows == [{name: str(record.get(name, "")) for name in (*EVERY_STEP, *SOME_STEPS)} for record in records]
    assert rows[0]["val_loss"] == "" and rows[3]["val_loss"] == "2.25"


def test_prometheus_reads_the_newest_step(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / 'a "b"' / "training.prom"
    file.parent.mkdir()
    records = log_twice(tmp_path, f"logging.prometheus='{file}'")
    lines = file.read_text().splitlines()
    run = f'run="{tmp_path}"'
    assert f"megatron_llama_step{{{run}}} {float(STEPS)}" in lines
    assert f"megatron_llama_reduced_train_loss{{{run}}} {records[-1]['reduced_train_loss']!r}" in lines
    names = [line.split("{")[0] for line in lines if not line.startswith("#")]
    assert [line.split()[2] for line in lines if line.startswith("# TYPE")] == list(dict.fromkeys(names))
    sink = PrometheusFile(file, Path('r"n\t\\\n'))
    sink.append({"val_loss": 1.5, "val_loss/a-b": math.nan, "mfu": None})
    run = r'run="r\"n' + "\t" + r'\\\n"'  # no other escapes
    values = [f"{{{run}}} 1.5", f'{{{run},part="a-b"}} nan']
    assert file.read_text().splitlines()[1:] == [f"megatron_llama_val_loss{value}" for value in values]
    file.unlink()
    file.mkdir()
    sink.append({"step": 1})
    assert f"{file}: stopped writing: Is a directory\n" in capsys.readouterr().err


def test_csv_path_is_a_folder(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "metrics.csv").mkdir()
    log_steps(plan_of(tmp_path, "logging.csv=true"))
    assert f"{tmp_path}/metrics.csv: stopped writing: Is a directory\n" in capsys.readouterr().err


def test_samples_are_written_and_a_failure_is_a_warning(tmp_path: Path, capsys: Capture) -> None:
    plan = plan_of(tmp_path)
    plan.config.logging.sample_prompts = ["a", "1 é <"]
    with MetricsLogger(plan, PEAK) as logger:
        logger.finish(["a b", "1 é < 2"])
    stored = json.loads((tmp_path / "samples.json").read_text(encoding="utf-8"))
    texts = [{"prompt": "a", "text": "a b"}, {"prompt": "1 é <", "text": "1 é < 2"}]
    assert stored == {"step": plan.config.trainer.steps, "samples": texts}
    (tmp_path / "samples.json").unlink()
    (tmp_path / "samples.json").mkdir()
    capsys.readouterr()
    write_samples(plan, ["a b", "1"])
    assert capsys.readouterr().err == f"WARNING: {tmp_path}/samples.json was not written: Is a directory.\n"


def test_metrics_that_cannot_be_written_end_the_run(tmp_path: Path) -> None:
    def work() -> None:
        file = MetricsFile(tmp_path / "metrics.jsonl", 0)
        with pytest.raises(MachineError, match=r"metrics\.jsonl: File too large\.\nthe same command resumes"):
            for step in range(100):
                file.append({"step": step})
        file.close()

    assert on_a_full_disk(work, tmp_path / "errors", 200) == ""
    assert (tmp_path / "metrics.jsonl").stat().st_size == 200


def test_csv_and_tensorboard_stop_on_a_full_disk(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sinks, "FLUSH_SECONDS", 0.01)

    def work() -> None:
        board = TensorBoardFile(tmp_path / "tensorboard", 0)
        deadline = time.monotonic() + 60
        while board.writes and time.monotonic() < deadline:
            board.append({"step": 1, "loss": 2.0})
        board.append({"step": 2, "loss": 2.0})
        board.close()
        file = CsvFile(tmp_path / "metrics.csv", ["step", "loss"], [])
        for step in range(500):
            file.append({"step": step, "loss": 2.0})
        file.close()

    expected = [f"{tmp_path}/{name}: stopped writing: File too large" for name in ("tensorboard", "metrics.csv")]
    assert on_a_full_disk(work, tmp_path / "errors", 1000).splitlines() == expected


# Services, replaced by modules with the functions and arguments that are used (wandb 0.31, trackio 0.43, mlflow 3.17)


class Service(ModuleType):
    """A module that fails at its start, if ``fail_at`` is 0, or after ``fail_at`` records."""

    def __init__(self, name: str, fail_at: int | None = None) -> None:
        super().__init__(name)
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished, self.fail_at = 0, fail_at

    def start(self, arguments: dict[str, Any]) -> None:
        if self.fail_at == 0:
            raise RuntimeError("no account\nmore")
        self.inits.append(arguments)

    def add(self, record: dict[str, Any]) -> None:
        if len(self.logged) == self.fail_at:
            raise OSError(28, "No space left on device")
        self.logged.append(record)

    def finish(self) -> None:
        self.finished += 1

    def install(self, monkeypatch: Patch) -> None:
        monkeypatch.setitem(sys.modules, self.__name__, self)


class FakeWandb(Service):
    Settings = SimpleNamespace
    __spec__ = ModuleSpec("wandb", None)

    def init(self, **arguments: Any) -> FakeWandb:
        self.start(arguments)
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, data: dict[str, Any], step: int) -> None:
        assert step == data["step"]
        if all(step > record["step"] for record in self.logged):  # as wandb does
            self.add(data)


class FakeTrackio(Service):
    def init(self, project: str, name: str, config: dict[str, Any], resume: str, **more: bool) -> FakeTrackio:
        print("* Trackio project initialized")
        assert more == {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self.start({"project": project, "name": name, "config": config, "resume": resume})
        self._next_step = max((record["step"] for record in self.logged), default=-1) + 1
        return self

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        assert step is not None and "step" not in metrics, "a reserved key"
        self.add({"step": step, **metrics})


class FakeMlflow(Service):
    """A server with the methods of MlflowClient."""

    def __init__(self, name: str, fail_at: int | None = None) -> None:
        super().__init__(name, fail_at)
        self.experiments: dict[str, str] = {}
        self.runs: list[SimpleNamespace] = []
        self.answers = Event()
        self.answers.set()

    def install(self, monkeypatch: Patch) -> None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        entities = ModuleType("mlflow.entities")
        entities.Metric = self.metric  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
        super().install(monkeypatch)

    def MlflowClient(self, tracking_uri: str) -> FakeMlflow:  # noqa: N802
        self.start({"uri": tracking_uri})
        return self

    @staticmethod
    def metric(key: str, value: float, timestamp: int, step: int) -> tuple[str, float, int]:
        assert type(value) is float and type(timestamp) is int
        return key, value, step

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        assert name not in self.experiments
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def create_run(self, experiment_id: str, *, tags: dict[str, str], run_name: str) -> SimpleNamespace:
        info = SimpleNamespace(run_id=f"id{len(self.runs)}", status="RUNNING", run_name=run_name)
        self.runs.append(SimpleNamespace(info=info, experiment=experiment_id, tags=tags, metrics=[], files={}))
        return self.runs[-1]

    def search_runs(
        self, experiment_ids: list[str], filter_string: str, max_results: int, order_by: list[str]
    ) -> list[SimpleNamespace]:
        assert order_by == ["attributes.start_time DESC"]
        name, _, value = filter_string.removeprefix("tags.").partition(" = ")
        matches = [run for run in self.runs if run.tags.get(name.strip("`")) == value.strip("'")]
        return [run for run in reversed(matches) if run.experiment in experiment_ids][:max_results]

    def run(self, run_id: str) -> SimpleNamespace:
        return next(run for run in self.runs if run.info.run_id == run_id)

    def get_metric_history(self, run_id: str, key: str) -> list[SimpleNamespace]:
        values = (value for batch in self.run(run_id).metrics for value in batch)
        return [SimpleNamespace(step=step) for name, _, step in values if name == key]

    def update_run(self, run_id: str, status: str) -> None:
        self.run(run_id).info.status = status

    def set_terminated(self, run_id: str) -> None:
        self.finished += 1
        self.update_run(run_id, "FINISHED")

    def log_dict(self, run_id: str, dictionary: dict[str, Any], artifact_file: str) -> None:
        self.run(run_id).files[artifact_file] = dictionary

    def log_batch(self, run_id: str, metrics: list[tuple[str, float, int]]) -> None:
        self.answers.wait()
        self.add({name: value for name, value, _ in metrics})
        assert {step for *_, step in metrics} == {self.logged[-1]["step"]}
        self.run(run_id).metrics.append(metrics)


SERVICES = {
    "wandb": (FakeWandb, ("logging.wandb=online", "logging.wandb_project=mine"), "Weights & Biases"),
    "trackio": (FakeTrackio, ("logging.trackio=mine",), "trackio"),
    "mlflow": (FakeMlflow, ("logging.mlflow=mine",), "MLflow"),
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: Patch) -> None:
    """The packages pass the plan's check."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(data, "find_spec", lambda name: name if name in SERVICES else find_spec(name))


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_all_metrics_of_a_resumed_run(
    name: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    kind, settings, _ = SERVICES[name]
    fake = kind(name)
    fake.install(monkeypatch)
    records = log_twice(tmp_path, *settings)
    assert fake.logged[9:] == [*map(logged_values, records[9:])] and fake.finished == 2
    first, second = fake.inits
    if name == "wandb":
        assert first["project"] == "mine" and first["mode"] == "online" and first["dir"] == str(tmp_path)
        assert (tmp_path / "wandb").stat().st_mode & 0o777 == 0o700, "its files have the settings"
        assert first["id"] == second["id"] and first["resume"] == "allow", "wandb drops the steps that the run has"
    elif name == "trackio":
        assert (first["project"], first["resume"], second["resume"]) == ("mine", "never", "allow")
        assert first["name"] == second["name"] and first["name"].startswith(tmp_path.name)
        assert "*" not in capsys.readouterr().out
    if isinstance(fake, FakeMlflow):
        (run,) = fake.runs
        assert fake.experiments == {"mine": "0"} and first == second == {"uri": f"sqlite:///{tmp_path}/mlflow.db"}
        assert (run.info.run_name, run.info.status) == (tmp_path.name, "FINISHED")
        first["config"] = run.files["config.json"]
    assert first["config"]["trainer"]["tp"] == 2


@pytest.mark.parametrize("name", SERVICES)
def test_steps_that_are_trained_again_with_another_loss(
    name: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """W&B cannot replace a step; the others have the later value last."""
    kind, settings, _ = SERVICES[name]
    (fake := kind(name)).install(monkeypatch)
    plan = plan_of(tmp_path, *settings)
    log_steps(plan, last=9)
    with MetricsLogger(plan, PEAK, start_step=5) as logger:
        for step in range(6, 11):
            logger.log_step(measured(step, reduced_train_loss=8.0 / step if step < 8 else 3.0))
    assert [record["step"] for record in fake.logged[9:]] == ([10] if name == "wandb" else [8, 9, 10])
    assert ("from step 8 on, the run keeps" in capsys.readouterr().err) == (name == "wandb")


@pytest.mark.parametrize(("fail_at", "message"), [(0, "no account"), (3, "No space left on device")])
@pytest.mark.parametrize("name", SERVICES)
def test_a_service_never_stops_a_run(
    name: str, fail_at: int, message: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    kind, settings, title = SERVICES[name]
    fake = kind(name, fail_at)
    fake.install(monkeypatch)
    log_steps(plan_of(tmp_path, *settings))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == STEPS and len(fake.logged) == fail_at
    assert capsys.readouterr().err == f"{title}: stopped writing: {message}\n"


@pytest.mark.parametrize("name", SERVICES)
def test_a_missing_package_is_rejected(monkeypatch: Patch, name: str) -> None:
    monkeypatch.setattr(data, "find_spec", lambda package: None if package == name else object())
    value = "offline" if name == "wandb" else "mine"
    (problem,) = problems_of(make(**{f"logging.{name}": value}), 1)
    assert problem.field == f"logging.{name}" and "pip install" in problem.instead and f"[{name}]" in problem.instead
    assert problems_of(make(), 1) == []


def test_no_sink_without_its_package(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """wandb is installed where the plan was made, but not on this rank's machine."""
    plan = plan_of(tmp_path, "logging.wandb=offline")
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = WandbRun(plan, 0, {})
    run.append({"step": 1})
    run.close()
    assert capsys.readouterr().err.count("\n") == 1


def test_mlflow_makes_a_run_per_start_from_step_0_and_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    fake = FakeMlflow("mlflow")
    fake.install(monkeypatch)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host")
    for name in ("one", "one", "two"):
        (tmp_path / name).mkdir(exist_ok=True)
        log_steps(plan_of(tmp_path / name, "logging.mlflow=mine"))
    fake.runs[1].metrics.pop()  # the server does not have the last step
    log_steps(plan_of(tmp_path / "one", "logging.mlflow=mine"), first=STEPS)
    assert [len(run.metrics) for run in fake.runs] == [STEPS, STEPS, STEPS]
    assert {each["uri"] for each in fake.inits} == {"http://host"}


def test_a_silent_mlflow_server_delays_the_end_by_its_limit_only(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    fake = FakeMlflow("mlflow")
    fake.answers.clear()
    fake.install(monkeypatch)
    monkeypatch.setattr(sinks, "MLFLOW_CLOSE_SECONDS", 0.1)
    log_steps(plan_of(tmp_path, "logging.mlflow=mine"))
    fake.answers.set()
    assert capsys.readouterr().err == "MLflow: stopped writing: no answer in 0.1 s\n"
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == STEPS


# The real packages, if they are installed


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


def losses_of_wandb(folder: Path) -> list[tuple[int, float]]:
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime)
    assert len(files) == 2, "one of each start"
    losses = []
    for record in (record for file in files for record in wandb_records(file)):
        items = {(*item.nested_key, item.key)[0]: item.value_json for item in record.history.item}
        if "reduced_train_loss" in items:
            losses.append((json.loads(items["step"]), json.loads(items["reduced_train_loss"])))
    return losses


def losses_of_trackio(folder: Path) -> list[tuple[int, float]]:
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("mine")
    logged = SQLiteStorage.get_logs("mine", name)
    assert [entry["step"] for entry in logged].count(7) == 2, "steps after the checkpoint are logged twice"
    return [(entry["step"], entry["reduced_train_loss"]) for entry in logged]


def losses_of_mlflow(folder: Path) -> list[tuple[int, float]]:
    client = importlib.import_module("mlflow").MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == folder.name
    return [(entry.step, entry.value) for entry in client.get_metric_history(run.info.run_id, "reduced_train_loss")]


REAL = {
    "wandb": (("wandb",), "logging.wandb=offline", losses_of_wandb),
    "trackio": (("trackio",), "logging.trackio=mine", losses_of_trackio),
    "mlflow": (("mlflow", "sqlalchemy"), "logging.mlflow=mine", losses_of_mlflow),  # mlflow-skinny has no store
}


@pytest.mark.slow
@pytest.mark.parametrize(("packages", "setting", "read"), REAL.values(), ids=REAL)
def test_a_run_of_the_real_package(
    packages: tuple[str, ...], setting: str, read: Callable[[Path], Any], tmp_path: Path, monkeypatch: Patch
) -> None:
    """In a fork: the packages leave threads, after which no test may fork ranks."""
    for package in packages:
        pytest.importorskip(package, reason=f"{package}, an extra, is not installed")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr(sinks, "MLFLOW_CLOSE_SECONDS", 120.0)  # the first start makes the database
    (folder := tmp_path / "run").mkdir()
    status = run_forked(lambda: log_twice(folder, setting), tmp_path / "stdout", tmp_path / "stderr", 100)  # type: ignore[arg-type, return-value]
    assert status == 0, (tmp_path / "stderr").read_text()
    logged = {record["step"]: record["reduced_train_loss"] for record in read_metrics(folder / "metrics.jsonl")}
    assert dict(read(folder)) == logged


HEAD = struct.Struct(">8s4s4sII")


@pytest.mark.timeout(60)
def test_a_run_gets_a_picture(tmp_path: Path) -> None:
    """The picture replaces a pipe."""
    plan = plan_of(tmp_path)
    os.mkfifo(tmp_path / "loss.png")
    (tmp_path / "metrics.jsonl").touch()
    assert draw_run(plan) is None, "no steps"
    log_steps(plan)
    picture = draw_run(plan)
    assert picture is not None and picture == tmp_path / "loss.png"
    signature, _, _, width, height = HEAD.unpack(picture.read_bytes()[: HEAD.size])
    assert signature == b"\x89PNG\r\n\x1a\n" and width > 1000 and height > 600


def test_matplotlib_writes_no_lines_without_a_home(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": "/proc/none", "MPLCONFIGDIR": "", "XDG_CONFIG_HOME": ""}
    command = [sys.executable, "-c", "from megatron_llama.system.output import import_pyplot; import_pyplot()"]
    assert subprocess.run(command, env=environment, capture_output=True, check=True, cwd=ROOT).stderr == b""


CURVES: dict[str, list[float]] = {
    "one step": [8.0],
    "three steps": [8.0, 7.5, 7.1],
    "falling": [3 + 6 * math.exp(-step / 15) for step in range(60)],
    "rising": [3 + step / 20 for step in range(60)],
    "resumed": [9.0] * 40 + [3.0] * 3,
}


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("name", CURVES)
def test_nothing_is_written_where_curves_are(
    name: str, validated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    losses = CURVES[name]
    rows = [
        {"step": step, "consumed_tokens": 64 * step, "reduced_train_loss": loss, "lr": 1e-3}
        for step, loss in enumerate(losses, start=1)
    ]
    if validated:
        rows[-1]["val_loss"] = losses[-1] - 0.5
    long = "405.9 B parameters  |  tp8·pp16·dp128 zero1  |  fp32_ZeroOptMaster on 16384 × neuron  |  redpajama"
    draw(rows, tmp_path / "loss.png", r"405b $\frac$", long)
    figure = pyplot.gcf()
    try:
        above, below = figure.axes
        frame, shown = above.get_window_extent(), [*above.texts, above.get_legend()]
        value = next(text for text in above.texts if text.get_text().startswith(("training\n", "validation\n")))
        last = losses[-1] - 0.5 if validated else np.mean(losses[-max(1, round(SMOOTHING * len(losses))) :])
        assert value.get_text() == f"{'validation' if validated else 'training'}\n{last:.3f}"
        for index, one in enumerate(shown):
            place = one.get_window_extent()
            assert not place.overlaps(frame)
            assert figure.bbox.containsx(place.x0) and figure.bbox.containsx(place.x1), "it is cut off"
            assert figure.bbox.containsy(place.y0) and figure.bbox.containsy(place.y1), "it is cut off"
            assert not any(place.overlaps(other.get_window_extent()) for other in shown[:index])
        assert all(tick == round(tick) for tick in below.get_xticks())
        drawn = [line for axes in figure.axes for line in axes.lines if line.get_label() != "validation loss"]
        assert all(len(line.get_xdata()) > 1 or line.get_marker() == "o" or line.get_alpha() for line in drawn)
    finally:
        monkeypatch.undo()
        pyplot.close(figure)


def test_the_subtitle_names_model_layout_and_device(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    line = describe(plan)
    for word in (f"{parameters(plan.model) / 1e6:.1f} M parameters", "tp2", "fp32", "2 × cpu", "mock"):
        assert word in line


def test_the_moving_average_keeps_lines_and_uses_whole_windows() -> None:
    """Values that are not finite are omitted."""
    steps = np.arange(1.0, 31.0)
    line = 3.0 - 0.1 * steps
    middles = moving_average(steps, 5)
    assert middles.tolist() == list(range(3, 29))
    assert moving_average(line, 5) == pytest.approx(3.0 - 0.1 * middles), "a mean that only looks back would lag"
    assert moving_average([1.0 + (-1) ** step for step in range(100)], 20) == pytest.approx(1.0)
    assert moving_average([], 1).shape == (0,)
    assert moving_average([2.0, 4.0], 1).tolist() == [2.0, 4.0]
    assert moving_average([2.0, 4.0], 2).tolist() == [3.0]
    assert moving_average(np.ones((3, 10)), 4).shape == (3, 7)
    smooth = moving_average([1.0, math.nan, 3.0, math.inf, math.nan, 5.0], 2)
    assert smooth[[0, 1, 2, 4]].tolist() == [1.0, 3.0, 3.0, 5.0]
    assert math.isnan(smooth[3]), "no finite value in the window"
