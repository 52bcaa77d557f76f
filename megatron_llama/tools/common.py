"""Command lines of tools, progress bars on stderr, and overrides that several tools add to a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from rich.progress import BarColumn, Progress, TextColumn

from megatron_llama.system.exit_status import EXIT_USER
from megatron_llama.system.programs import name_commands
from megatron_llama.system.tables import open_console
from megatron_llama.train.console import duration


def run_tool(usage: str, argv: Sequence[str], work: Callable[[], int]) -> int:
    """Print ``usage`` if ``argv`` asks for help, else call ``work`` and report its problems; return the exit status."""
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(name_commands(usage))
        return 0
    from megatron_llama.config import ConfigError, format_problems  # imported late to keep --help fast

    try:
        return work()
    except ConfigError as error:
        sys.stderr.write(format_problems(error) + "\n")
        return EXIT_USER


def show_line(text: str) -> None:
    """Show a text on stderr: a line that the next one replaces on a terminal, else a separate line; "" removes it."""
    is_terminal = sys.stderr.isatty()
    sys.stderr.write(f"\r\x1b[K{text[:79]}" if is_terminal else f"{text}\n" if text else "")
    sys.stderr.flush()


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


LOG_SECONDS = 30.0
"""Time between the lines that replace the bar if stderr is not a terminal."""


class ProgressBar:
    """Progress bar of one task. It has no refresh thread, which would disturb measurements."""

    def __init__(self, label: str, unit: str, total: int | None) -> None:
        self._unit, self._total, self._start, self._first = unit, total, time.monotonic(), 0
        self._label, self._logged = label, self._start
        self._console = open_console(stderr=True)
        columns = (TextColumn(label), BarColumn(bar_width=16), TextColumn("{task.fields[text]}"))
        self._bar = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task(label, total=total, text="")

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
        text += f"  {current}" if current else ""
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done, text=text, refresh=True)
        elif time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            self.print_line(f"{self._label}: {text}")

    def print_line(self, line: str) -> None:
        """Print a permanent line above the bar."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(label: str, unit: str, total: int | None = None) -> Iterator[ProgressBar]:
    """Show a progress bar during the block. Without a terminal on stderr, print only permanent lines."""
    progress = ProgressBar(label, unit, total)
    if sys.stderr.isatty():
        with progress._bar:
            yield progress
    else:
        yield progress


NO_FILES = ("data.mock=true", "data.prefixes=[]", "data.tokenizer=null", "data.prepare=null")
"""Overrides of a config that reads no dataset and no tokenizer."""
MOCK_RUN = (
    *NO_FILES,
    "trainer.epochs=null",
    "trainer.max_restarts=0",
    "logging.tensorboard=false",
    "logging.csv=false",
    "logging.wandb=off",
    "logging.sample_prompts=[]",
)
"""Overrides of a run that trains on mock data and writes no logs. They do not change the graphs or collectives of a
step. Tools append them to the command line, because the last override of a setting counts."""
