"""Additional outputs of a run: TensorBoard, metrics.csv, Weights & Biases, trackio, MLflow, samples.json.

metrics.jsonl has all metrics. A failed output is reported once on stderr and does not stop the run.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

from megatron_llama.plan import Plan
from megatron_llama.system.errors import reason_of
from megatron_llama.system.files import DRAFT, write_atomically
from megatron_llama.train.metrics_file import METRICS_FILE, stream_run_records

CSV_FILE, SAMPLES_FILE = "metrics.csv", "samples.json"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})  # Prometheus rejects a file with others
Metrics = Mapping[str, Any]
Losses = Mapping[int, float | None]


class Sink:
    """An output of metrics. A failure, e.g. of disk or network, is reported once and ends its writes, not the run."""

    ERRORS: type[Exception] = OSError
    """Failures that do not stop the run."""

    def __init__(self, name: str) -> None:
        """``name``: name in messages."""
        self.name = name
        self.writes = True
        """Whether metrics are still written."""

    def append(self, metrics: Metrics) -> None:
        """Append the metrics of a step; ``step`` is one of them. A value may be None."""
        if self.writes:
            with self._reporting():
                self._write(metrics)

    def close(self) -> None:
        """Flush and close."""
        if self.writes:
            self.writes = False
            with self._reporting():
                self._finish()

    def _write(self, metrics: Metrics) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        """Flush and close, after the last step."""

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except self.ERRORS as error:
            self.writes = False
            sys.stderr.write(f"{self.name}: stopped writing: {reason_of(error)}\n")


def open_sinks(plan: Plan, start_step: int, columns: Sequence[str], repeated: Losses) -> list[Sink]:
    """Open the outputs of the plan's ``logging`` for a run that starts or resumes after ``start_step``.

    Args:
        columns: Names of all metrics.
        repeated: Losses of the later steps of an earlier start, which the run trains again.
    """
    logging, sinks = plan.config.logging, list[Sink]()
    if logging.tensorboard:
        sinks.append(TensorBoardFile(plan.run_dir / "tensorboard", start_step))
    if logging.csv:
        sinks.append(CsvFile(plan.run_dir / CSV_FILE, columns, stream_run_records(plan.run_dir / METRICS_FILE)))
    if logging.prometheus is not None:
        sinks.append(PrometheusFile(Path(logging.prometheus), plan.run_dir))
    if logging.wandb != "off":
        sinks.append(WandbRun(plan, start_step, repeated))
    if logging.trackio is not None:
        sinks.append(TrackioRun(plan, start_step, repeated))
    if logging.mlflow is not None:
        sinks.append(MLflowRun(plan, start_step, repeated))
    return sinks


class CsvFile(Sink):
    """metrics.csv: one row per step; missing metrics are empty."""

    def __init__(self, path: Path, columns: Sequence[str], records: Iterable[Metrics]) -> None:
        """Rewrite the file with ``records``, the steps before a resume."""
        super().__init__(str(path))
        self._columns = columns
        with self._reporting():
            self._file = path.open("w", encoding="utf-8", newline="")
        for record in ({name: name for name in columns}, *records):
            self.append(record)

    def _write(self, metrics: Metrics) -> None:
        try:
            csv.writer(self._file, lineterminator="\n").writerow(metrics.get(name) for name in self._columns)
            self._file.flush()
        except OSError:
            with suppress(OSError):
                self._file.close()
            raise

    def _finish(self) -> None:
        self._file.close()


class PrometheusFile(Sink):
    """Metrics of the newest step in Prometheus's text format, as gauges ``megatron_llama_NAME`` with the label ``run``.

    The part of a name after a slash, such as a validation set, is the label ``part``.
    """

    def __init__(self, path: Path, run_dir: Path) -> None:
        super().__init__(str(path))
        self._path, self._run = path, str(run_dir).translate(_ESCAPES)

    def _write(self, metrics: Metrics) -> None:
        gauges: dict[str, list[str]] = {}
        for name, value in metrics.items():
            gauge, _, part = name.partition("/")
            if value is not None:
                labels = f'run="{self._run}"' + (f',part="{part.translate(_ESCAPES)}"' if part else "")
                gauges.setdefault(f"megatron_llama_{gauge}", []).append(f"{{{labels}}} {float(value)!r}")
        texts = [f"# TYPE {gauge} gauge\n" + "".join(f"{gauge}{line}\n" for line in gauges[gauge]) for gauge in gauges]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}{DRAFT}")
        draft.write_text("".join(texts), encoding="utf-8")
        draft.replace(self._path)  # a reader needs a whole file; unlike write_atomically, no step waits for the disk


class _Service(Sink):
    """A run of a package that sends or stores metrics. Its errors may be of the account, network or package."""

    ERRORS = Exception
    TITLE = ""
    """Name in messages."""

    def __init__(self, plan: Plan, start_step: int, repeated: Losses) -> None:
        super().__init__(self.TITLE)
        self._repeated = repeated
        with self._reporting():
            self._run = self._start(plan, start_step)

    def _write(self, metrics: Metrics) -> None:
        self._log({name: value for name, value in metrics.items() if value is not None})

    def _finish(self) -> None:
        with redirect_stdout(io.StringIO()):  # packages print instructions
            self._run.finish()

    def _start(self, plan: Plan, start_step: int) -> Any:
        """Return the package's run."""
        raise NotImplementedError

    def _log(self, values: Metrics) -> None:
        raise NotImplementedError

    def _differs(self, values: Metrics) -> bool:
        """Return whether a step is trained again with another loss, e.g. with other settings or after a rewind."""
        loss = values.get("reduced_train_loss")
        return bool(self._repeated.get(values["step"], loss) != loss)


class WandbRun(_Service):
    """A run of Weights & Biases (package wandb), offline or with an account.

    A resumed run continues the same run, whose id is in ``wandb/run_id``. Steps after the checkpoint from which a run
    resumes are not written twice: wandb drops steps that it has, also if their values differ, which is reported.
    """

    TITLE = "Weights & Biases"

    def _start(self, plan: Plan, start_step: int) -> Any:
        import wandb

        folder = plan.run_dir / "wandb"
        folder.mkdir(mode=0o700, exist_ok=True)  # has the settings
        file = folder / "run_id"
        if not (start_step and file.is_file()):
            write_atomically(file, f"{_key_of(plan)}-{secrets.token_hex(4)}\n")
        run = wandb.init(
            project=plan.config.logging.wandb_project,
            id=file.read_text(encoding="utf-8").strip(),
            resume="allow",
            name=plan.run_dir.name,
            dir=str(plan.run_dir),
            mode=cast(Any, os.environ.get("WANDB_MODE") or plan.config.logging.wandb),
            config=asdict(plan.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        run.define_metric("*", step_metric="step")
        return run

    def _log(self, values: Metrics) -> None:
        if self._differs(values):
            sys.stderr.write(
                f"Weights & Biases: from step {values['step']} on, the run keeps the values of an earlier start, which "
                "differ; without wandb/run_id in its folder, the next start begins a W&B run.\n"
            )
            self._repeated = {}
        self._run.log(values, step=values["step"])


class TrackioRun(_Service):
    """A run of trackio, in TRACKIO_DIR (by default in Hugging Face's cache), or on TRACKIO_SPACE_ID's Space.

    A resumed run continues the same run. Steps that it has are written again if their loss differs. trackio's own
    thread writes.
    """

    TITLE = "trackio"

    def _start(self, plan: Plan, start_step: int) -> Any:
        import trackio

        with redirect_stdout(io.StringIO()):  # it prints instructions
            run = trackio.init(
                project=plan.config.logging.trackio,
                name=f"{plan.run_dir.name}-{_key_of(plan)}",
                config=asdict(plan.config),
                resume="allow" if start_step else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self._first_new = getattr(run, "_next_step", 0)  # trackio 0.43
        return run

    def _log(self, values: Metrics) -> None:
        if values["step"] >= self._first_new or self._differs(values):
            self._run.log({name: value for name, value in values.items() if name != "step"}, step=values["step"])


MLFLOW_CLOSE_SECONDS = 30.0
"""Longest wait for metrics that MLflow has not written at the end of the run."""


class MLflowRun(_Service):
    """A run of MLflow, on MLFLOW_TRACKING_URI's server, otherwise in ``<run.dir>/mlflow.db``.

    A resumed run continues the same run, which a tag identifies. A thread writes: a server that does not answer makes
    MLflow retry for minutes.
    """

    TITLE = "MLflow"
    TAG = "megatron_llama.run"

    def _start(self, plan: Plan, start_step: int) -> threading.Thread:
        self._waiting: SimpleQueue[Metrics | None] = SimpleQueue()
        thread = threading.Thread(target=self._send, args=(plan, start_step), name="mlflow", daemon=True)
        thread.start()
        return thread

    def _log(self, values: Metrics) -> None:
        self._waiting.put(values)

    def _finish(self) -> None:
        self._waiting.put(None)
        self._run.join(MLFLOW_CLOSE_SECONDS)
        if self._run.is_alive():
            raise TimeoutError(f"no answer in {MLFLOW_CLOSE_SECONDS:g} s")

    def _send(self, plan: Plan, start_step: int) -> None:
        with self._reporting():
            from mlflow import MlflowClient
            from mlflow.entities import Metric

            uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{plan.run_dir.resolve()}/mlflow.db"
            client = MlflowClient(tracking_uri=uri)
            run = self._open(client, plan, start_step)
            history = client.get_metric_history(run, "step") if start_step else []
            # Steps after the checkpoint of a resume are not written twice.
            logged = max((metric.step for metric in history), default=-1)
            while (values := self._waiting.get()) is not None:
                now, step = int(1000 * time.time()), values["step"]
                if step > logged or self._differs(values):
                    metrics = [Metric(name, float(value), now, step) for name, value in values.items()]
                    client.log_batch(run, metrics=metrics)
            client.set_terminated(run)

    def _open(self, client: Any, plan: Plan, start_step: int) -> str:
        """Return the id of the run: of the run to continue, or of a new one."""
        name, key = str(plan.config.logging.mlflow), _key_of(plan)
        known = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if known is None else known.experiment_id
        if start_step:
            newest = {"order_by": ["attributes.start_time DESC"], "max_results": 1}
            for run in client.search_runs([experiment], filter_string=f"tags.`{self.TAG}` = '{key}'", **newest):
                client.update_run(run.info.run_id, status="RUNNING")
                return str(run.info.run_id)
        run = client.create_run(experiment, run_name=plan.run_dir.name, tags={self.TAG: key})
        client.log_dict(run.info.run_id, asdict(plan.config), "config.json")
        return str(run.info.run_id)


def _key_of(plan: Plan) -> str:
    """Return a key of the run's folder."""
    return hashlib.sha256(str(plan.run_dir.resolve()).encode()).hexdigest()[:12]


def write_samples(plan: Plan, samples: Sequence[str]) -> None:
    """Write samples.json: the texts generated at the end of a run, in the order of logging.sample_prompts."""
    path, prompts = plan.run_dir / SAMPLES_FILE, plan.config.logging.sample_prompts
    texts = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, samples, strict=True)]
    content = {"step": plan.config.trainer.steps, "samples": texts}
    try:
        write_atomically(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    except OSError as error:
        sys.stderr.write(f"WARNING: {path} was not written: {error.strerror or error}.\n")


# TensorBoard

FLUSH_SECONDS = 10
TAGS = (
    *("step", "consumed_samples", "consumed_tokens", "reduced_train_loss", "lr", "gradient_norm", "throughput"),
    *("tokens_per_second", "tflops_per_device", "mfu", "mfu_full", "step_time_s", "peak_memory_bytes"),
)
"""Metrics whose tag is their name. The others are group/name; ``training`` is the group without a row."""
GROUPS = {
    "validation": ("val_",),
    "speed": ("padded_tokens_per_second", "throughput_peak", "train_samples_per_second"),
    "waits": ("data_time_s", "waited_", "slowest_"),
    "spikes": ("spike_",),
    "curriculum": ("curriculum_", "random_ltd_", "consumed_layer_tokens"),
    "": ("global_step", "train_step_timing"),  # equal to step and step_time_s: not written
}
"""Groups of tags, by the start of a metric's name."""


def tag_of(name: str) -> str | None:
    """Return the TensorBoard tag of a metric; None if it repeats another metric."""
    group = next((group for group, starts in GROUPS.items() if name.startswith(starts)), "training")
    return name if name in TAGS else f"{group}/{name}" if group else None


class TensorBoardFile(Sink):
    """TensorBoard events of a run that resumes after ``start_step``; later events are purged."""

    def __init__(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(str(folder))
        # The writer's thread raises disk errors twice: uncaught in the thread, then in the next call.
        self._uncaught, threading.excepthook = threading.excepthook, self._handle_thread_error
        with self._reporting():
            purge_step = start_step + 1 if folder.exists() else None
            self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=FLUSH_SECONDS)

    def _write(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            tag = tag_of(name)
            if value is not None and tag is not None:
                self._writer.add_scalar(tag, value, metrics["step"])

    def close(self) -> None:
        super().close()
        threading.excepthook = self._uncaught

    def _finish(self) -> None:
        self._writer.close()

    def _handle_thread_error(self, uncaught: threading.ExceptHookArgs) -> None:
        if not isinstance(uncaught.exc_value, OSError):
            self._uncaught(uncaught)
