"""The progress of a benchmark on stderr: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_llama.train.console import duration


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function to call with what begins next, ``total`` times in all."""
    console = Console(stderr=True)
    columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task, begin, done = bar.add_task("", total=total), time.monotonic(), -1

    def advance(text: str) -> None:
        nonlocal done
        done += 1
        left = f", {duration((time.monotonic() - begin) / done * (total - done))} left" if done else ""
        line = f"{done}/{total}{left}  {text}"
        bar.update(task, completed=done, description=line)
        if not console.is_terminal:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    with bar:
        yield advance
