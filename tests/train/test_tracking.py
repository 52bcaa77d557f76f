"""trackio and MLflow match metrics.jsonl; a resumed run continues the same run; their errors do not stop a run."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_llama.train import sinks
from megatron_llama.train.metrics_file import read_metrics
from tests.config.helpers import make, problems_of
from tests.train.steps import STEPS, log_steps, plan_of


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages pass the plan's check."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: name if name in ("trackio", "mlflow") else find_spec(name)
    )


def log_twice(folder: Path, setting: str) -> list[dict[str, Any]]:
    """Log steps 1 to 9, then resume after step 5; return metrics.jsonl."""
    log_steps(plan_of(folder, setting), last=9)
    log_steps(plan_of(folder, setting), first=6)
    return read_metrics(folder / "metrics.jsonl")


def logged_values(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if value is not None}


class FakeTrackio(ModuleType):
    """The functions of trackio that are used, with their arguments (trackio 0.43)."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__("trackio")
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished, self.fail_at = 0, fail_at

    def init(
        self,
        project: str,
        name: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str = "never",
        embed: bool = True,
        auto_log_gpu: bool | None = None,
        auto_log_cpu: bool | None = None,
    ) -> FakeTrackio:
        print("* Trackio project initialized")
        if self.fail_at == 0:
            raise ValueError("no such Space\nmore")
        assert (embed, auto_log_gpu, auto_log_cpu) == (False, False, False)
        self.inits.append({"project": project, "name": name, "config": config, "resume": resume})
        return self

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        assert step is not None and "step" not in metrics, "a reserved key"
        if len(self.logged) == self.fail_at:
            raise OSError(28, "No space left on device")
        self.logged.append((step, metrics))

    def finish(self) -> None:
        print("* Run finished.")
        self.finished += 1


def test_trackio_logs_all_metrics_to_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    records = log_twice(tmp_path, "logging.trackio=mine")
    first, second = fake.inits
    assert (first["project"], first["resume"], second["resume"]) == ("mine", "never", "allow")
    assert first["name"] == second["name"] and first["name"].startswith(tmp_path.name)
    assert first["config"]["trainer"]["tp"] == 2 and fake.finished == 2
    assert [{"step": step, **values} for step, values in fake.logged[9:]] == [*map(logged_values, records[5:])]
    assert "*" not in capsys.readouterr().out


@pytest.mark.parametrize(("fail_at", "message"), [(0, "no such Space"), (3, "No space left on device")])
def test_trackio_never_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fail_at: int, message: str
) -> None:
    fake = FakeTrackio(fail_at)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    log_steps(plan_of(tmp_path, "logging.trackio=mine"))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == STEPS and len(fake.logged) == fail_at
    assert capsys.readouterr().err == f"trackio: stopped writing: {message}\n"


class FakeMLflow:
    """A server with the methods of MlflowClient that are used, with their arguments (mlflow 3.17)."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: list[SimpleNamespace] = []
        self.uris: list[str] = []
        self.batches, self.fail_at = 0, fail_at
        self.hang_seconds = 0.0

    def modules(self) -> dict[str, ModuleType]:
        mlflow, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
        mlflow.MlflowClient, entities.Metric = self.connect, self.metric  # type: ignore[attr-defined]
        return {"mlflow": mlflow, "mlflow.entities": entities}

    def connect(self, tracking_uri: str) -> FakeMLflow:
        self.uris.append(tracking_uri)
        if self.fail_at == 0:
            raise RuntimeError("API request failed\nmore")
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

    def update_run(self, run_id: str, status: str) -> None:
        self.run(run_id).info.status = status

    def set_terminated(self, run_id: str) -> None:
        self.update_run(run_id, "FINISHED")

    def log_dict(self, run_id: str, dictionary: dict[str, Any], artifact_file: str) -> None:
        self.run(run_id).files[artifact_file] = dictionary

    def log_batch(self, run_id: str, metrics: list[tuple[str, float, int]]) -> None:
        time.sleep(self.hang_seconds)
        self.batches += 1
        if self.batches == self.fail_at:
            raise OSError(28, "No space left on device")
        self.run(run_id).metrics.append(metrics)


def use(fake: FakeMLflow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def test_mlflow_logs_all_metrics_to_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMLflow()
    use(fake, monkeypatch)
    records = log_twice(tmp_path, "logging.mlflow=mine")
    (run,) = fake.runs
    assert fake.experiments == {"mine": "0"} and set(fake.uris) == {f"sqlite:///{tmp_path}/mlflow.db"}
    assert run.files["config.json"]["trainer"]["tp"] == 2
    assert (run.info.run_name, run.info.status) == (tmp_path.name, "FINISHED")
    expected = [[(name, float(value), r["step"]) for name, value in logged_values(r).items()] for r in records[5:]]
    assert run.metrics[9:] == expected


def test_mlflow_makes_a_run_per_start_from_step_0_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMLflow()
    use(fake, monkeypatch)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host")
    for name in ("one", "one", "two"):
        (tmp_path / name).mkdir(exist_ok=True)
        log_steps(plan_of(tmp_path / name, "logging.mlflow=mine"))
    log_steps(plan_of(tmp_path / "one", "logging.mlflow=mine"), first=STEPS)
    assert [len(run.metrics) for run in fake.runs] == [STEPS, STEPS + 1, STEPS]
    assert set(fake.uris) == {"http://host"}


@pytest.mark.parametrize(("fail_at", "message"), [(0, "API request failed"), (3, "No space left on device")])
def test_mlflow_never_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fail_at: int, message: str
) -> None:
    use(FakeMLflow(fail_at), monkeypatch)
    log_steps(plan_of(tmp_path, "logging.mlflow=mine"))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == STEPS
    assert capsys.readouterr().err == f"MLflow: stopped writing: {message}\n"


def test_a_silent_mlflow_server_delays_the_end_by_its_limit_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeMLflow()
    fake.hang_seconds = 30.0
    use(fake, monkeypatch)
    monkeypatch.setattr(sinks, "MLFLOW_CLOSE_SECONDS", 0.1)
    log_steps(plan_of(tmp_path, "logging.mlflow=mine"))
    assert capsys.readouterr().err == "MLflow: stopped writing: no answer in 0.1 s\n"
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == STEPS


@pytest.mark.parametrize("name", ["trackio", "mlflow"])
def test_a_missing_package_is_rejected(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None if package == name else object())
    (problem,) = problems_of(make(**{f"logging.{name}": "mine"}), 1)
    assert problem.field == f"logging.{name}" and f"[{name}]" in problem.instead


# The real packages, if they are installed


@pytest.mark.slow
def test_a_run_of_the_real_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="trackio, an extra, is not installed")
    from trackio.sqlite_storage import SQLiteStorage

    records = log_twice(tmp_path, "logging.trackio=mine")
    (name,) = SQLiteStorage.get_runs("mine")
    logged = SQLiteStorage.get_logs("mine", name)
    by_step = {entry["step"]: entry["reduced_train_loss"] for entry in logged}
    assert by_step == {record["step"]: record["reduced_train_loss"] for record in records}
    assert [entry["step"] for entry in logged].count(7) == 2, "steps after the checkpoint are logged twice"


@pytest.mark.slow
def test_a_run_of_the_real_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow, an extra, is not installed")
    pytest.importorskip("sqlalchemy", reason="mlflow-skinny has no store")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sinks, "MLFLOW_CLOSE_SECONDS", 120.0)  # the first start makes the database
    records = log_twice(tmp_path, "logging.mlflow=mine")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    history = client.get_metric_history(run.info.run_id, "reduced_train_loss")
    by_step = {entry.step: entry.value for entry in history}
    assert by_step == {record["step"]: record["reduced_train_loss"] for record in records}
    assert run.info.status == "FINISHED" and run.info.run_name == tmp_path.name


