"""A line that says how far a job is, how fast, and how long it will still take."""

from __future__ import annotations

import sys
import time
from typing import TextIO

TERMINAL_SECONDS = 0.2
LOG_SECONDS = 30.0


def short_time(seconds: float) -> str:
    """Hours, minutes and seconds as they are read aloud: 2h05m, 3m20s, 12s."""
    whole = int(seconds + 0.5)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


class Progress:
    """Draws a bar on a terminal, and writes a line now and then where the output goes to a file."""

    def __init__(self, total: int, done: int = 0, stream: TextIO | None = None) -> None:
        """`total` and `done` in bytes on disk."""
        self.total = max(1, total)
        self.begun_at = done
        self.stream = stream or sys.stderr
        self.terminal = self.stream.isatty()
        self.start = self.shown = time.monotonic()
        self.width = 0

    def update(self, done: int, work_bytes: int, tokens: int) -> None:
        """`done` bytes on disk of the total; text bytes and tokens since this process started."""
        now = time.monotonic()
        if now - self.shown < (TERMINAL_SECONDS if self.terminal else LOG_SECONDS):
            return
        self.shown = now
        seconds = max(1e-9, now - self.start)
        share = min(1.0, done / self.total)
        fresh = done - self.begun_at
        left = short_time(seconds * (self.total - done) / fresh) if fresh > 0 else "?"
        speed = f"{work_bytes / seconds / 1e6:.1f} MB/s  {tokens / seconds / 1e6:.2f} M tokens/s"
        text = f"{share:6.1%}  {speed}  {left} left"
        if self.terminal:
            full = int(share * 24)
            text = f"[{'#' * full}{'.' * (24 - full)}] {text}"
            self.stream.write("\r" + text.ljust(self.width))
            self.width = len(text)
        else:
            self.stream.write(text.strip() + "\n")
        self.stream.flush()

    def finish(self) -> None:
        """Takes the bar away."""
        if self.terminal and self.width:
            self.stream.write("\r" + " " * self.width + "\r")
            self.stream.flush()
