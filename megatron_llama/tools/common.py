"""How far a tool is, on stderr: a bar on a terminal; where the output goes to a file, only the lines that stay."""
from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from megatron_llama.train.console import duration


class ProgressBar:
    """The bar of one part of the work. It is drawn when it is told something, by no thread: what is measured meanwhile
    is not disturbed."""

    def __init__(self, what: str, unit: str, total: int | None) -> None:
        self._unit, self._total, self._begun, self._first = unit, total, time.monotonic(), 0
        self._console = Console(stderr=True)
        columns = (TextColumn(what), BarColumn(bar_width=24), TextColumn("{task.fields[text]}"))
        self._bar = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task(what, total=total, text="")

    def start_at(self, done: int) -> None:
        """What was done before takes no part in the rate."""
        self._first = done
        self.show(done)

    def show(self, done: int, now: str = "") -> None:
        """How much is done, how fast, how long the rest takes, and what is being done ``now``."""
        seconds, fresh = time.monotonic() - self._begun, done - self._first
        text = f"{done:,}{f' of {self._total:,}' if self._total else ''} {self._unit}"
        if fresh > 0 and seconds > 0:
            rate = fresh / seconds
            text += f", {rate:,.0f} a second" if rate >= 1 else f", {seconds / fresh:.0f} s each"
            if self._total:
                text += f", {duration(seconds / fresh * (self._total - done))} left"
        self._bar.update(self._task, completed=done, text=f"{text}{'  ' + now if now else ''}", refresh=True)

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(what: str, unit: str, total: int | None = None) -> Iterator[ProgressBar]:
    """A bar for the time of the block; nothing but lines where stderr is no terminal."""
    made = ProgressBar(what, unit, total)
    if sys.stderr.isatty():
        with made._bar:
            yield made
    else:
        yield made


# What tools override in a run whose ranks they start without training anything.


NO_FILES = ("data.mock=true", "data.prefixes=[]", "data.tokenizer=null", "data.prepare=null")
# The graphs and the collectives of a step depend on none of it. Placed last on the command line, so that it wins.
MOCK_RUN = (
    *NO_FILES,
    "trainer.epochs=null",
    "trainer.max_restarts=0",
    "logging.tensorboard=false",
    "logging.csv=false",
    "logging.wandb=off",
    "logging.sample_prompts=[]",
)


