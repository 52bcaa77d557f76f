"""Series from the log of a run (metrics.jsonl, event files of TensorBoard, trainer_state.json), and their names."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron_llama.config import ConfigError, Problem
from megatron_llama.system.files import read_json
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics

EVENTS = "events.out.tfevents."
TRAINER_STATE = "trainer_state.json"
A_PATH = "write the path of a run folder, a TensorBoard folder or a metrics.jsonl"
# Names inside a run's folder, which don't identify the run.
FILES_OF_A_RUN = (METRICS_FILE, TRAINER_STATE, "tensorboard", "/")
# A SessionLog of this status is TensorBoard's purge mark: an earlier attempt's points from its step on are void.
SESSION_START = 1


@dataclass
class Series:
    """One logged value over steps, in ascending order; each step once."""

    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When it was logged, seconds since the epoch; NaN where that is not known."""
    dropped: int = 0
    """Points that a later attempt replaced."""

    def add(self, step: float, value: float, time: float = math.nan) -> None:
        """Adds a point. A step that was reached before means that the run was resumed from an earlier checkpoint: what
        the attempt before logged from there on is dropped."""
        self.drop_from(step)
        self.steps.append(step)
        self.values.append(value)
        self.times.append(time)

    def drop_from(self, step: float) -> None:
        """Drops every point at ``step`` and later."""
        kept = bisect_left(self.steps, step)
        self.dropped += len(self.steps) - kept
        for column in (self.steps, self.values, self.times):
            del column[kept:]


@dataclass
class Log:
    """Everything that a run logged, by name."""

    source: Path
    series: defaultdict[str, Series] = field(default_factory=lambda: defaultdict(Series))


def read_log(path: Path) -> Log:
    """The log of a run folder, TensorBoard folder or file. Raises ConfigError where the path has none."""
    try:
        if not path.exists():
            raise refused(path, "there is no such file or folder", A_PATH)
        log = _read(path if path.is_file() else _source_in(path))
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise refused(path, f"can't be read: {error}", "name another log of this run, or another run") from None
    if not log.series:
        raise refused(path, f"{log.source.name} holds no step yet", "wait for its first steps")
    return log


def refused(path: Path | str, rule: str, instead: str) -> ConfigError:
    """The error of a run that can't be compared."""
    return ConfigError([Problem("run", str(path), rule, instead)])


def _source_in(folder: Path) -> Path:
    """The one log in a folder: ours first, then Trainer's, then TensorBoard's, wherever below the folder."""
    for name in (METRICS_FILE, TRAINER_STATE):
        if (folder / name).is_file():
            return folder / name
    checkpoints = {one.name.removeprefix("checkpoint-"): one for one in folder.glob("checkpoint-*")}
    steps = [step for step, one in checkpoints.items() if step.isdecimal() and (one / TRAINER_STATE).exists()]
    if steps:
        return checkpoints[max(steps, key=int)] / TRAINER_STATE
    folders = sorted({file.parent for file in folder.rglob(f"{EVENTS}*")})
    if folder in folders or len(folders) == 1:
        return folder if folder in folders else folders[0]
    if folders:
        listed = ", ".join(str(one.relative_to(folder)) for one in folders[:8]) + (", ..." if len(folders) > 8 else "")
        rule = f"there are {len(folders)} TensorBoard folders in it: {listed}"
        raise refused(folder, rule, f"name one of them, such as {folders[0]}")
    raise refused(folder, f"holds no {METRICS_FILE}, no {TRAINER_STATE} and no {EVENTS}* file", A_PATH)


def _read(source: Path) -> Log:
    """Reads a log by its name."""
    log = Log(source)
    if source.is_dir():
        files = [file for file in source.iterdir() if file.name.startswith(EVENTS)]
        # In the order of the run's attempts, by their first events; a file's name has whole seconds only.
        begun = {file: next((float(event.wall_time) for event in _events(file)), math.inf) for file in files}
        for file in sorted(files, key=lambda file: (begun[file], file.name)):
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
    """Adds each number of each record at the record's step; null is what JSON has for NaN."""
    for record in records:
        step = next((record[name] for name in STEPS if _is_number(record.get(name))), None)
        if step is None:
            raise ValueError(f"a record has no number under {' or '.join(STEPS)}: {str(record)[:80]}")
        for name, value in record.items():
            if value is None or _is_number(value):
                log.series[name].add(step, math.nan if value is None else float(value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _events(file: Path) -> Iterator[Any]:
    """An event file's events; TensorBoard's reader leaves out a last record that is only half written.

    Raises ValueError for a damaged one.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    try:
        yield from LegacyEventFileLoader(str(file)).Load()
    except Exception as error:  # the library's own, protobuf's, struct's
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{file.name} is damaged: {type(error).__name__}: {reason}") from None


def _read_events(file: Path, log: Log) -> None:
    """Adds an event file's scalars.

    TensorBoard's EventAccumulator can't do it: it drops an earlier attempt's points only at a purge mark, which
    Lightning's logger does not write; it then cuts series over samples at that number of steps; and it lists scalars
    stored as tensors (TensorFlow 2, torch's new_style) elsewhere.
    """
    from tensorboard.util import tensor_util

    for event in _events(file):
        if event.HasField("session_log") and event.session_log.status == SESSION_START:
            for name, series in log.series.items():
                if not name.endswith(OVER_SAMPLES):  # the mark counts steps
                    series.drop_from(event.step)
        for value in event.summary.value:
            if value.HasField("simple_value"):
                log.series[value.tag].add(event.step, value.simple_value, event.wall_time)
            elif value.HasField("tensor") and value.metadata.plugin_data.plugin_name in ("scalars", ""):
                array = tensor_util.make_ndarray(value.tensor)
                if array.size == 1 and array.dtype.kind in "fiu":
                    log.series[value.tag].add(event.step, float(array.item()), event.wall_time)


# What the series of a run are called: here, in NeMo, Megatron-LM and Hugging Face's Trainer, and by the user.


# Megatron-LM logs a series twice: over iterations, and under this longer name over consumed samples.
OVER_SAMPLES = " vs samples"
# What a JSON line may call its step.
STEPS = ("step", "global_step", "iteration", "consumed_samples")


@dataclass(frozen=True)
class Program:
    """The names that a program logs under; of several, the first that a run has."""

    name: str
    loss: tuple[str, ...] = ()
    """The training loss of a step, nats per token."""
    samples: tuple[str, ...] = ()
    """Sequences consumed so far."""
    tokens: tuple[str, ...] = ()
    """Tokens consumed so far."""
    batch: tuple[str, ...] = ()
    """Sequences in a step's batch; adds up to the samples where those are not logged."""
    step_time: tuple[str, ...] = ()
    """Seconds of a step."""
    throughput: tuple[str, ...] = ()
    """Sequences per second."""
    from_zero: bool = False
    """Its steps are counted from 0: what is logged at step N is of the N+1st batch."""


PROGRAMS = (
    # neuronx-nemo-megatron and NxDT log under NeMo's names, and so do we.
    Program(
        "megatron_llama or NeMo",
        loss=("reduced_train_loss",),
        samples=("consumed_samples",),
        tokens=("consumed_tokens",),
        step_time=("step_time_s", "train_step_timing in s", "train_step_timing"),
        throughput=("throughput",),
    ),
    # Its "throughput" is TFLOP/s of a GPU. The names with a slash are Megatron-DeepSpeed's.
    Program(
        "Megatron-LM",
        loss=("lm loss", "lm-loss-training/lm loss"),
        batch=("batch-size", "batch-size/batch-size"),
        step_time=("iteration-time", "iteration-time/iteration-time"),
    ),
    # "train/" in TensorBoard, without it in trainer_state.json.
    Program(
        "Hugging Face Trainer",
        loss=("train/loss", "loss"),
        tokens=("train/num_input_tokens_seen", "num_input_tokens_seen"),
        throughput=("train/train_samples_per_second", "train_samples_per_second"),
    ),
    # With log_every_n_steps=50 it logs at steps 49, 99, ...
    Program("Lightning", loss=("train_loss",), from_zero=True),
)
ROLES = tuple(field.name for field in fields(Program) if field.name not in ("name", "from_zero"))


def program_of(there: Collection[str], named: Mapping[str, Sequence[str]]) -> Program | None:
    """Whose names the run with the series ``there`` uses; None where none of the losses looked for is among them.

    ``named`` are the user's names by role. Where the user names a role, only those names count: that one run has
    ``val_loss`` and the other falls back to ``reduced_train_loss`` would be a comparison of two things.
    """
    names: dict[str, Any] = {role: tuple(given) for role, given in named.items()}
    chosen = [replace(program, **names) for program in PROGRAMS]
    for original, program in zip(PROGRAMS, chosen, strict=True):
        if first(original.loss, there) and first(program.loss, there):
            return program
    if "loss" not in named or not first(named["loss"], there):
        return None
    # A loss of the user's own: the rest by whichever known name is there, but for speeds, whose unit would be a guess.
    merged: dict[str, Any] = {role: tuple(name for one in PROGRAMS for name in getattr(one, role)) for role in ROLES}
    merged |= {"throughput": ()} | names
    return Program("named by --tag", **merged)


def first(names: Sequence[str], there: Collection[str]) -> str | None:
    """The first of ``names`` that is there, on its own or over samples."""
    return next((name for name in names if name in there or name + OVER_SAMPLES in there), None)


def known_losses() -> str:
    """The built-in names of the loss, for messages."""
    return ", ".join(name for program in PROGRAMS for name in program.loss)
