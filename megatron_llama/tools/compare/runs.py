"""A run as a curve: loss over consumed samples, and how fast it went."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_llama.tools.compare.logs import (
    OVER_SAMPLES,
    Log,
    Program,
    Series,
    first,
    known_losses,
    program_of,
    read_log,
    refused,
)
from megatron_llama.train.loss_curve import Floats

# Series that a message lists.
MOST_LISTED = 40


@dataclass(frozen=True)
class Run:
    """What is compared."""

    name: str
    source: Path
    """The file or folder that was read."""
    program: str
    """Whose names it logs under."""
    samples: Floats
    """Sequences consumed after each logged step, ascending, each once."""
    losses: Floats
    """Loss of each logged step, nats per token; NaN where it was not finite."""
    speed: float | None = None
    """Sequences per second, the median over the steps; None where the log does not have it."""
    tokens_per_sample: float | None = None
    """Sequence length, all tokens over all samples; None where the log does not have it."""
    notes: tuple[str, ...] = ()
    """What the reader of a report should know about the log."""

    @property
    def step(self) -> float:
        """Samples between two logged steps, the median."""
        return float(np.median(np.diff(self.samples)))


def read_run(path: str, name: str, tags: Mapping[str, Sequence[str]], samples_per_step: float | None) -> Run:
    """The run at ``path``. Raises ConfigError where there is none that can be compared.

    ``tags`` are the user's names by role; ``samples_per_step`` is the global batch size of a run that logs steps only.
    """
    log = read_log(Path(path))
    names = sorted(log.series)
    listed = ", ".join(names[:MOST_LISTED])
    listed += f", and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    program = program_of(names, tags)
    if program is None:
        looked_for = ", ".join(tags["loss"]) if "loss" in tags else known_losses()
        rule = f"has no training loss in {log.source.name} (looked for: {looked_for})"
        raise refused(path, rule, f"write --tag loss=NAME; there are: {listed}")
    tag = first(program.loss, log.series) or ""
    if tag + OVER_SAMPLES in log.series:
        tag += OVER_SAMPLES
    curve = _curve(log, program, tag, samples_per_step)
    if curve is None:
        rule = "logs steps only, and curves are aligned on consumed samples"
        instead = f"write --samples-per-step {path}=N, its global batch size; or --tag samples=NAME; there are: "
        raise refused(path, rule, instead + listed)
    samples, losses = curve
    if len(samples) < 2:
        raise refused(path, f"has {len(samples)} step of {tag}", "a curve needs two steps at least")
    counted = first(program.tokens, log.series)
    notes = []
    if dropped := log.series[tag].dropped:
        notes.append(f"{dropped:,} steps are in the log twice (it was resumed); the later attempt counts")
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


def _curve(log: Log, program: Program, tag: str, samples_per_step: float | None) -> tuple[Floats, Floats] | None:
    """The loss ``tag`` over samples: the axis of the series itself, or as they are logged, or the sum of the batches,
    or by --samples-per-step, in this order. Points whose samples are unknown or no more than before are left out.

    A loss at step 0 says that steps are counted from 0: no batch, no loss."""
    steps, losses = _columns(log.series[tag])
    before_first = -1.0 if program.from_zero or steps[0] == 0 else 0.0
    counted = first(program.samples, log.series)
    batch = first(program.batch, log.series)
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
    # A float32 in an event file counts exactly only to 2^24.
    ascends = samples > np.maximum.accumulate(np.concatenate(([-math.inf], samples)))[:-1]
    return samples[ascends], losses[ascends]


def _columns(series: Series) -> tuple[Floats, Floats]:
    return np.asarray(series.steps, dtype=np.float64), np.asarray(series.values, dtype=np.float64)


def _speed(log: Log, program: Program, tag: str, samples: Floats) -> float | None:
    """Sequences per second, the median, which a slow first step does not move: from the steps' own seconds, else the
    rate that the program logs, else the times at which the losses were logged."""
    timed, rate = first(program.step_time, log.series), first(program.throughput, log.series)
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


