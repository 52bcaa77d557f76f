"""Read a run as a curve of the loss over consumed samples, from metrics.jsonl, TensorBoard or trainer_state.json."""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_llama.config import ConfigError, Problem
from megatron_llama.system.files import read_json
from megatron_llama.train.loss_curve import Floats
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics

EVENTS = "events.out.tfevents."
TRAINER_STATE = "trainer_state.json"
A_PATH = "write the path of a run folder, a TensorBoard folder or a metrics.jsonl"
# Names inside a run folder, which do not identify the run.
FILES_OF_A_RUN = (METRICS_FILE, TRAINER_STATE, "tensorboard")
# SessionLog status of TensorBoard's purge mark: points of an earlier attempt from its step on are invalid.
SESSION_START = 1


@dataclass
class Series:
    """A logged value over strictly ascending steps."""

    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Seconds since the epoch when the value was logged; NaN if unknown."""
    dropped: int = 0
    """Number of points replaced by a later attempt."""

    def add(self, step: float, value: float, time: float = math.nan) -> None:
        """Add a point. A repeated step means that the run was resumed: drop the earlier points from this step on."""
        self.drop_from(step)
        self.steps.append(step)
        self.values.append(value)
        self.times.append(time)

    def drop_from(self, step: float) -> None:
        """Drop the points at ``step`` and later."""
        count = bisect_left(self.steps, step)
        self.dropped += len(self.steps) - count
        for column in (self.steps, self.values, self.times):
            del column[count:]


Log = defaultdict[str, Series]
"""All series of a run by name."""


def read_log(path: Path) -> tuple[Path, Log]:
    """Read the log of a run folder, TensorBoard folder or file; return its path and series.

    Raises ConfigError if there is none.
    """
    try:
        if not path.exists():
            raise run_error(path, "no such file or folder", A_PATH)
        source = path if path.is_file() else _source_in(path)
        log = _read(source)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise run_error(path, f"cannot be read: {error}", "write the path of another log or run") from None
    if not log:
        raise run_error(path, f"{source.name} has no steps yet", "wait for its first steps")
    return source, log


def run_error(path: Path | str, rule: str, instead: str) -> ConfigError:
    """Create the error of a run that cannot be compared."""
    return ConfigError([Problem("run", str(path), rule, instead)])


def _source_in(folder: Path) -> Path:
    """Find the log in a folder: metrics.jsonl, else trainer_state.json, else event files at any depth."""
    for name in (METRICS_FILE, TRAINER_STATE):
        if (folder / name).is_file():
            return folder / name
    checkpoints = {path.name.removeprefix("checkpoint-"): path for path in folder.glob("checkpoint-*")}
    steps = [step for step, path in checkpoints.items() if step.isdecimal() and (path / TRAINER_STATE).exists()]
    if steps:
        return checkpoints[max(steps, key=int)] / TRAINER_STATE
    folders = sorted({file.parent for file in folder.rglob(f"{EVENTS}*")})
    if folder in folders or len(folders) == 1:
        return folder if folder in folders else folders[0]
    if folders:
        listed = ", ".join(str(path.relative_to(folder)) for path in folders[:8])
        rule = f"has {len(folders)} TensorBoard folders: {listed}{', ...' if len(folders) > 8 else ''}"
        raise run_error(folder, rule, f"write one of them, such as {folders[0]}")
    raise run_error(folder, f"has no {METRICS_FILE}, no {TRAINER_STATE} and no {EVENTS}* file", A_PATH)


def _read(source: Path) -> Log:
    """Read a log; the name selects the format."""
    log: Log = defaultdict(Series)
    if source.is_dir():
        files = [file for file in source.iterdir() if file.name.startswith(EVENTS)]
        # In the order of the attempts, by first event: the time in a file name has a resolution of one second.
        start_times = {file: next((float(event.wall_time) for event in _events(file)), math.inf) for file in files}
        for file in sorted(files, key=lambda file: (start_times[file], file.name)):
            _read_events(file, log)
    elif source.name.startswith(EVENTS):
        _read_events(source, log)
    elif source.suffix == ".json":
        content = read_json(source)
        history = content.get("log_history") if isinstance(content, dict) else None
        if not isinstance(history, list) or not all(isinstance(record, dict) for record in history):
            raise ValueError(f"{source.name} has no log_history")
        _add_records(log, history)
    else:
        _add_records(log, read_metrics(source, STEPS))
    return log


def _add_records(log: Log, records: Iterable[Mapping[str, Any]]) -> None:
    """Add each number of each record at its step; null means NaN."""
    for record in records:
        step = next((record[name] for name in STEPS if _is_number(record.get(name))), None)
        if step is None:
            raise ValueError(f"a record has no number under {' or '.join(STEPS)}: {str(record)[:80]}")
        for name, value in record.items():
            if value is None or _is_number(value):
                log[name].add(step, math.nan if value is None else float(value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _events(file: Path) -> Iterator[Any]:
    """Yield the events of a file; TensorBoard's reader skips a truncated last record.

    Raises ValueError for a damaged record.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    try:
        yield from LegacyEventFileLoader(str(file)).Load()
    except Exception as error:  # of the library, protobuf or struct
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{file.name} is damaged: {type(error).__name__}: {reason}") from None


def _read_events(file: Path, log: Log) -> None:
    """Add the scalars of an event file.

    TensorBoard's EventAccumulator is not suitable. It drops points of an earlier attempt only at a purge mark, which
    Lightning's logger does not write. At a mark it also cuts series over samples at that number of steps. And it lists
    scalars stored as tensors (TensorFlow 2, torch's new_style) separately.
    """
    from tensorboard.util import tensor_util

    for event in _events(file):
        if event.HasField("session_log") and event.session_log.status == SESSION_START:
            for name, series in log.items():
                if not name.endswith(OVER_SAMPLES):  # the mark counts steps
                    series.drop_from(event.step)
        for value in event.summary.value:
            if value.HasField("simple_value"):
                log[value.tag].add(event.step, value.simple_value, event.wall_time)
            elif value.HasField("tensor") and value.metadata.plugin_data.plugin_name in ("scalars", ""):
                array = tensor_util.make_ndarray(value.tensor)
                if array.size == 1 and array.dtype.kind in "fiu":
                    log[value.tag].add(event.step, float(array.item()), event.wall_time)


# Names of the series in this project, NeMo, Megatron-LM, Lightning and the Hugging Face Trainer, and given by the user.

# Megatron-LM logs a series twice: over iterations, and under this longer name over consumed samples.
OVER_SAMPLES = " vs samples"
# Names of the step in JSON lines.
STEPS = ("step", "global_step", "iteration", "consumed_samples")


@dataclass(frozen=True)
class LogFormat:
    """Series names of a training program; of several names the first logged one counts."""

    name: str
    loss: Sequence[str] = ()
    """Training loss of a step, nats per token."""
    samples: Sequence[str] = ()
    """Sequences consumed so far."""
    tokens: Sequence[str] = ()
    """Tokens consumed so far."""
    batch: Sequence[str] = ()
    """Sequences per batch, summed if samples are not logged."""
    step_time: Sequence[str] = ()
    """Seconds per step."""
    throughput: Sequence[str] = ()
    """Sequences per second."""
    from_zero: bool = False
    """Whether steps count from 0, so that step N is batch N + 1."""


_FORMATS_FILE = Path(__file__).with_name("formats.toml")
FORMATS = tuple(
    LogFormat(name, **names) for name, names in tomllib.loads(_FORMATS_FILE.read_text(encoding="utf-8")).items()
)
ROLES = tuple(field.name for field in fields(LogFormat) if field.name not in ("name", "from_zero"))
KNOWN_LOSSES = ", ".join(name for program in FORMATS for name in program.loss)


def detect_format(series: Collection[str], tags: Mapping[str, Sequence[str]]) -> LogFormat | None:
    """Return the log format of a run with these series; None without a known loss.

    ``tags`` are names from the user by role. They replace the built-in names of a role, so that runs without the named
    loss do not fall back to a different loss.
    """
    names: dict[str, Any] = {role: tuple(tag_names) for role, tag_names in tags.items()}
    chosen = [replace(program, **names) for program in FORMATS]
    for original, program in zip(FORMATS, chosen, strict=True):
        if first_logged(original.loss, series) and first_logged(program.loss, series):
            return program
    if "loss" not in tags or not first_logged(tags["loss"], series):
        return None
    # A custom loss: other roles use any built-in name, except throughput, whose unit is unknown.
    merged: dict[str, Any] = {role: tuple(name for one in FORMATS for name in getattr(one, role)) for role in ROLES}
    merged |= {"throughput": ()} | names
    return LogFormat("named by --tag", **merged)


def first_logged(names: Sequence[str], series: Collection[str]) -> str | None:
    """Return the first of ``names`` that is logged, over steps or over samples."""
    return next((name for name in names if name in series or name + OVER_SAMPLES in series), None)


def first_common_loss(run: Path, log: Path) -> tuple[int, float, float] | None:
    """Return the first step that both logs have, and the losses in ``run`` and in ``log``; None without such a step.

    After an import, this is the loss of the first batch here, and in the other program. Raises ConfigError.
    """
    curves = []
    for path in (run, log):
        _, series = read_log(path)
        program = detect_format(series, {})
        name = first_logged(program.loss, series) if program is not None else None
        if program is None or name is None or name not in series:
            raise run_error(path, "has no known loss", f"write a log with {KNOWN_LOSSES}")
        steps = (round(step) + program.from_zero for step in series[name].steps)
        curves.append(dict(zip(steps, series[name].values, strict=True)))
    common = sorted(curves[0].keys() & curves[1].keys())
    return (common[0], curves[0][common[0]], curves[1][common[0]]) if common else None


# Curve of a run over samples.

# Largest number of series listed in a message.
MAX_LISTED = 40


@dataclass(frozen=True)
class Run:
    """A training curve with its origin."""

    name: str
    source: Path
    """Log file or folder."""
    program: str
    """Name of the training program."""
    samples: Floats
    """Sequences consumed after each logged step, ascending, each once."""
    losses: Floats
    """Loss of each logged step, nats per token; NaN if not finite."""
    speed: float | None = None
    """Median sequences per second; None if not logged."""
    tokens_per_sample: float | None = None
    """Mean sequence length; None if not logged."""
    notes: tuple[str, ...] = ()
    """Notes on the log for the report."""

    @property
    def step(self) -> float:
        """Median number of samples between logged steps."""
        return float(np.median(np.diff(self.samples)))


def read_run(path: str, name: str, tags: Mapping[str, Sequence[str]], samples_per_step: float | None) -> Run:
    """Read the run at ``path``. Raises ConfigError if it cannot be compared.

    Args:
        tags: Series names given by the user, by role.
        samples_per_step: Global batch size of a run that logs no samples.
    """
    source, log = read_log(Path(path))
    names = sorted(log)
    listed = ", ".join(names[:MAX_LISTED])
    listed += f", and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    program = detect_format(names, tags)
    if program is None:
        looked_for = ", ".join(tags["loss"]) if "loss" in tags else KNOWN_LOSSES
        rule = f"has no training loss in {source.name} (names tried: {looked_for})"
        raise run_error(path, rule, f"write --tag loss=NAME; available: {listed}")
    tag = first_logged(program.loss, log) or ""
    if tag + OVER_SAMPLES in log:
        tag += OVER_SAMPLES
    curve = _curve(log, program, tag, samples_per_step)
    if curve is None:
        rule = "logs no consumed samples, on which curves are aligned"
        instead = f"write --samples-per-step {path}=N (global batch size) or --tag samples=NAME; available: "
        raise run_error(path, rule, instead + listed)
    samples, losses = curve
    if len(samples) < 2:
        raise run_error(path, f"has {len(samples)} step of {tag}", "a curve needs at least two steps")
    counted = first_logged(program.tokens, log)
    notes = []
    if dropped := log[tag].dropped:
        notes.append(f"{dropped:,} steps were logged twice (resumed run); the later attempt counts")
    if bad := int((~np.isfinite(losses)).sum()):
        notes.append(f"{bad:,} of {len(losses):,} losses are not finite")
    return Run(
        name=name,
        source=source,
        program=program.name,
        samples=samples,
        losses=np.where(np.isfinite(losses), losses, np.nan),
        speed=_speed(log, program, tag, samples),
        tokens_per_sample=float(log[counted].values[-1] / samples[-1]) if counted and samples[-1] > 0 else None,
        notes=tuple(notes),
    )


def _curve(log: Log, program: LogFormat, tag: str, samples_per_step: float | None) -> tuple[Floats, Floats] | None:
    """Return (samples, losses) of the series ``tag``, without points of unknown or non-ascending samples.

    Samples come from the axis of the series, the logged samples, the sum of batch sizes, or --samples-per-step, in this
    order. A loss at step 0 means that steps count from 0.
    """
    steps, losses = _columns(log[tag])
    before_first = -1.0 if program.from_zero or steps[0] == 0 else 0.0
    counted = first_logged(program.samples, log)
    batch = first_logged(program.batch, log)
    if tag.endswith(OVER_SAMPLES):
        samples = steps
    elif counted is not None:
        samples = np.interp(steps, *_columns(log[counted]), left=np.nan, right=np.nan)
    elif batch is not None:
        samples = np.cumsum(np.interp(steps, *_columns(log[batch])) * np.diff(steps, prepend=before_first))
    elif samples_per_step is not None:
        samples = (steps - before_first) * samples_per_step
    else:
        return None
    known = np.isfinite(samples)
    samples, losses = samples[known], losses[known]
    # Event files store float32, which is exact only up to 2^24.
    ascends = samples > np.maximum.accumulate(np.concatenate(([-math.inf], samples)))[:-1]
    return samples[ascends], losses[ascends]


def _columns(series: Series) -> tuple[Floats, Floats]:
    return np.asarray(series.steps, dtype=np.float64), np.asarray(series.values, dtype=np.float64)


def _speed(log: Log, program: LogFormat, tag: str, samples: Floats) -> float | None:
    """Return the median sequences per second: from step times, else from the logged rate, else from log times."""
    timed, rate = first_logged(program.step_time, log), first_logged(program.throughput, log)
    steps_logged = log.get(tag.removesuffix(OVER_SAMPLES), Series()).steps
    if timed is not None and len(steps_logged) > 1:
        seconds = float(np.nanmedian(log[timed].values))
        steps = float(np.median(np.diff(steps_logged)))
        return float(np.median(np.diff(samples))) / steps / seconds if seconds > 0 else None
    if rate is not None:
        return float(np.nanmedian(log[rate].values))
    times = np.asarray(log[tag].times)
    if len(times) != len(samples) or not np.isfinite(times).all():
        return None
    waits = np.diff(times)
    return float(np.median(np.diff(samples)[waits > 0] / waits[waits > 0])) if (waits > 0).any() else None
