"""What the scripts that measure or prove something share: running programs, Markdown tables, figures, the commit."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_program(program: str, *words: object, folder: Path = ROOT) -> None:
    """Runs one of the project's programs in ``folder``, as a user does. Raises CalledProcessError."""
    subprocess.run([sys.executable, str(ROOT / program), *map(str, words)], cwd=folder, check=True)


def commit() -> str:
    """The short name of the commit that is checked out; empty outside of git."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table in Markdown, each as soon as its row is there."""
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield "| " + " ".join(f"{cell} |".lstrip() for cell in row)  # an empty cell is one space wide


@contextlib.contextmanager
def figure(path: Path, rows: int, columns: int, **options: Any) -> Iterator[Any]:
    """Panels to draw in, as ``pyplot.subplots`` makes them; saved to ``path`` when the block ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, panels = pyplot.subplots(rows, columns, **options)
    yield panels
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    drawn.tight_layout()
    drawn.savefig(path, dpi=150)
    pyplot.close(drawn)
