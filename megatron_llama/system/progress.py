"""Progress bars on stderr, and times as text."""

from __future__ import annotations

import sys
import time
from typing import Self

from megatron_llama.system.tables import open_console

LOG_SECONDS = 30.0
"""Time between the lines that replace the bar if stderr is not a terminal."""


def duration(seconds: float) -> str:
    """Format seconds as 0:42, 12:05, 3:07:00 or 2d 04:10."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days}d {hours_left:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class ProgressBar:
    """Progress bar of one task, shown within its context. It has no refresh thread, which would disturb measurements.

    Without a terminal on stderr, it prints permanent lines, and a line every LOG_SECONDS.
    """

    def __init__(self, label: str, unit: str = "", total: int | None = None) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._unit, self._total, self._start, self._first = unit, total, time.monotonic(), 0
        self._label, self._logged = label, self._start
        self._console, self._live = open_console(stderr=True), sys.stderr.isatty()
        columns = (TextColumn(label), BarColumn(bar_width=16), TextColumn("{task.fields[text]}"))
        self._bar = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task(label, total=total, text="")

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._bar.stop()

    def start_at(self, done: int) -> None:
        """Set the units that an earlier start or a warm-up completed; the rate excludes them and the time so far."""
        self._first, self._start = done, time.monotonic()
        self.show(done)

    def show(self, done: int, current: str = "") -> None:
        """Draw the completed units, the rate, the remaining time and the label of the ``current`` unit."""
        seconds, fresh = time.monotonic() - self._start, done - self._first
        text = f"{done:,}{f' of {self._total:,}' if self._total else ''} {self._unit}"
        if fresh > 0 and seconds > 0:
            rate = fresh / seconds
            text += f", {rate:,.0f} a second" if rate >= 1 else f", {seconds / fresh:.0f} s each"
            if self._total:
                text += f", {duration(seconds / fresh * (self._total - done))} left"
        self.draw(done, text + (f"  {current}" if current else ""))

    def draw(self, done: int, text: str) -> None:
        """Draw the completed units and a text."""
        if self._live:
            self._bar.update(self._task, completed=done, text=text, refresh=True)
        elif time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            self.print_line(f"{self._label}: {text}")

    def print_line(self, line: str) -> None:
        """Print a permanent line above the bar."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
