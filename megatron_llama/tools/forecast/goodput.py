"""Goodput: the share of a run's time that failures and checkpoints leave."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_llama.tools.forecast.step_time import COPY_TO_HOST


@dataclass(frozen=True)
class Goodput:
    """Shares of a run's time, and the checkpoint interval."""

    useful: float
    """Share of steps that are not lost."""
    waiting: float
    """Share in which training waits for checkpoints."""
    lost: float
    """Share of repeated steps and restarts."""
    interval: float
    """Seconds between checkpoints."""
    failures_a_day: float


def goodput(
    devices: int,
    checkpoint_bytes_a_device: float,
    *,
    failure_hours: float,
    restart_seconds: float,
    write_seconds: float,
    interval: float | None = None,
) -> Goodput:
    """Return the goodput of a run.

    Args:
        failure_hours: mean hours between failures of one device.
        restart_seconds: from a failure to the first new step.
        write_seconds: duration of a checkpoint write, concurrent with training.
        interval: seconds between checkpoints. None: the optimum sqrt(2 * wait / rate) (Young 1974, Daly 2006), at least
            ``write_seconds``.
    """
    rate = devices / (failure_hours * 3600)
    wait = max(0.1, checkpoint_bytes_a_device / COPY_TO_HOST)
    every = interval or max(math.sqrt(2 * wait / rate), write_seconds)
    waiting = wait / every
    # A failure costs the restart, half an interval, and the newest checkpoint if its write was incomplete.
    lost = min(1.0, rate * (restart_seconds + every / 2 + write_seconds / 2))
    return Goodput(max(0.0, (1 - waiting) * (1 - lost)), waiting, lost, every, rate * 86400)
