"""Read a run as a curve of the loss over consumed samples, with its speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_llama.tools.compare.logs import (
    OVER_SAMPLES,
    Log,
    LogFormat,
    Series,
    detect_format,
    first_logged,
    known_losses,
    read_log,
    run_error,
)
from megatron_llama.train.loss_curve import Floats

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
    log = read_log(Path(path))
    names = sorted(log.series)
    listed = ", ".join(names[:MAX_LISTED])
    listed += f", and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    program = detect_format(names, tags)
    if program is None:
        looked_for = ", ".join(tags["loss"]) if "loss" in tags else known_losses()
        rule = f"has no training loss in {log.source.name} (names tried: {looked_for})"
        raise run_error(path, rule, f"write --tag loss=NAME; available: {listed}")
    tag = first_logged(program.loss, log.series) or ""
    if tag + OVER_SAMPLES in log.series:
        tag += OVER_SAMPLES
    curve = _curve(log, program, tag, samples_per_step)
    if curve is None:
        rule = "logs no consumed samples, on which curves are aligned"
        instead = f"write --samples-per-step {path}=N (global batch size) or --tag samples=NAME; available: "
        raise run_error(path, rule, instead + listed)
    samples, losses = curve
    if len(samples) < 2:
        raise run_error(path, f"has {len(samples)} step of {tag}", "a curve needs at least two steps")
    counted = first_logged(program.tokens, log.series)
    notes = []
    if dropped := log.series[tag].dropped:
        notes.append(f"{dropped:,} steps were logged twice (resumed run); the later attempt counts")
    if bad := int((~np.isfinite(losses)).sum()):
        notes.append(f"{bad:,} of {len(losses):,} losses are not finite")
    return Run(
        name=name,
        source=log.source,
        program=program.name,
        samples=samples,
        losses=np.where(np.isfinite(losses), losses, np.nan),
        speed=_speed(log, program, tag, samples),
        tokens_per_sample=float(log.series[counted].values[-1] / samples[-1]) if counted and samples[-1] > 0 else None,
        notes=tuple(notes),
    )


def _curve(log: Log, program: LogFormat, tag: str, samples_per_step: float | None) -> tuple[Floats, Floats] | None:
    """Return (samples, losses) of the series ``tag``, without points of unknown or non-ascending samples.

    Samples come from the axis of the series, the logged samples, the sum of batch sizes, or --samples-per-step, in this
    order. A loss at step 0 means that steps count from 0.
    """
    steps, losses = _columns(log.series[tag])
    before_first = -1.0 if program.from_zero or steps[0] == 0 else 0.0
    counted = first_logged(program.samples, log.series)
    batch = first_logged(program.batch, log.series)
    if tag.endswith(OVER_SAMPLES):
        samples = steps
    elif counted is not None:
        samples = np.interp(steps, *_columns(log.series[counted]), left=np.nan, right=np.nan)
    elif batch is not None:
        sizes = np.interp(steps, *_columns(log.series[batch]))
        samples = np.cumsum(sizes * np.diff(steps, prepend=before_first))
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
    timed, rate = first_logged(program.step_time, log.series), first_logged(program.throughput, log.series)
    steps_logged = log.series.get(tag.removesuffix(OVER_SAMPLES), Series()).steps
    if timed is not None and len(steps_logged) > 1:
        seconds = float(np.nanmedian(log.series[timed].values))
        steps = float(np.median(np.diff(steps_logged)))
        return float(np.median(np.diff(samples))) / steps / seconds if seconds > 0 else None
    if rate is not None:
        return float(np.nanmedian(log.series[rate].values))
    times = np.asarray(log.series[tag].times)
    if len(times) != len(samples) or not np.isfinite(times).all():
        return None
    waits = np.diff(times)
    return float(np.median(np.diff(samples)[waits > 0] / waits[waits > 0])) if (waits > 0).any() else None
