"""What failures and checkpoints take of a long run's time."""

from __future__ import annotations

import math
from dataclasses import dataclass

COPY_TO_HOST = 20e9
"""Bytes/s from a device to its host's memory, for which training waits (PCIe 4 x16 carries 25)."""


@dataclass(frozen=True)
class Goodput:
    """Shares of the time of a run, and how often it saves."""

    useful: float
    """Share in which steps are done that count."""
    waiting: float
    """Share in which training waits for checkpoints."""
    lost: float
    """Share in which steps are done again, or the job starts again."""
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
    """Of a run on ``devices`` that saves every ``interval`` seconds; None is the best interval, sqrt(2 * wait / rate)
    (Young 1974, Daly 2006), and no less than a checkpoint takes to write."""
    rate = devices / (failure_hours * 3600)
    wait = max(0.1, checkpoint_bytes_a_device / COPY_TO_HOST)
    every = interval or max(math.sqrt(2 * wait / rate), write_seconds)
    waiting = wait / every
    # A failure costs the start, half an interval, and the newest checkpoint if it was still being written.
    lost = min(1.0, rate * (restart_seconds + every / 2 + write_seconds / 2))
    return Goodput(max(0.0, (1 - waiting) * (1 - lost)), waiting, lost, every, rate * 86400)
