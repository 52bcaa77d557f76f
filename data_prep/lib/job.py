"""What a run of the preparation is to do, and what its workers give back."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from data_prep.lib.sources import Source
from megatron_llama.system.errors import UserError
from megatron_llama.text.chat_template import TextSpan
from megatron_llama.text.conversation import Template, Turn
from megatron_llama.text.tokenizer import Tokenizer


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class RunOptions:
    """Where a dataset is written, and how it is made."""

    output_prefix: str
    on_bad_line: str = "error"
    """``error``, or ``skip``: bad lines are left out and kept in a quarantine file."""
    max_line_mib: float = 64.0
    """A longer line is a bad line."""
    workers: int = field(default_factory=cores)
    """Processes that encode."""
    allow_empty: bool = False
    """An input without a document is an empty dataset, rather than a mistake."""
    part: str | None = None
    """K/N: do the K-th of N parts only; the last to be done joins them."""
    overwrite: bool = False
    """Replace an output that was made with other options."""
    checkpoint_seconds: float = 5.0
    """Work that a kill may cost."""
    block_mib: float = 4.0
    """Text that a worker takes at a time."""

    def __post_init__(self) -> None:
        """Raises UserError for values that can't work."""
        if self.workers < 1:
            raise UserError(f"--workers must be at least 1, not {self.workers}")
        if self.max_line_mib <= 0:
            raise UserError("--max-line-mib must be above 0")
        if not 2**-10 <= self.block_mib <= 256:
            raise UserError("--block-mib must be between 1/1024 and 256")
        if self.checkpoint_seconds < 0:
            raise UserError("--checkpoint-seconds must not be negative")
        if self.part is not None:
            number, slash, count = self.part.partition("/")
            if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
                raise UserError(f"--part {self.part}: write K/N, the K-th of N parts, such as 1/16 to 16/16")
        if os.path.basename(self.output_prefix) in ("", ".", ".."):
            raise UserError(f"--output-prefix {self.output_prefix}: it must end in a name, not in a folder")

    @staticmethod
    def of(args: argparse.Namespace) -> RunOptions:
        """From the flags of ``add_run_flags``. Raises UserError."""
        return RunOptions(**{one.name: vars(args)[one.name] for one in fields(RunOptions) if one.name in vars(args)})

    @property
    def max_line(self) -> int:
        """Bytes."""
        return int(self.max_line_mib * 2**20)

    @property
    def folder(self) -> Path:
        return Path(os.path.abspath(self.output_prefix)).parent


def add_run_flags(data: argparse._ArgumentGroup, output: argparse._ArgumentGroup, writes: str) -> None:
    """The flags that preprocess.py and sft.py share; ``writes`` says what comes of --output-prefix."""
    data.add_argument("--on-bad-line", choices=["error", "skip"], default="error", help="default: error")
    data.add_argument(
        "--max-line-mib", type=float, default=RunOptions.max_line_mib, help="a longer line is a bad line (default 64)"
    )
    data.add_argument("--allow-empty", action="store_true", help="take an input without a document for an empty one")
    output.add_argument("--output-prefix", required=True, metavar="PATH", help=f"writes {writes}")
    output.add_argument("--workers", type=int, default=cores(), help="processes (default: one a core)")
    output.add_argument(
        "--part",
        metavar="K/N",
        help="do the K-th of N parts, here or elsewhere; the last to be done joins them",
    )
    output.add_argument("--overwrite", action="store_true", help="replace an output made with other options")
    output.add_argument(
        "--checkpoint-seconds",
        type=float,
        default=RunOptions.checkpoint_seconds,
        help="work that a kill may cost (default 5)",
    )


@dataclass(frozen=True)
class ChatFormat:
    """How records of a fine-tuning set become examples."""

    tokenizer: Tokenizer
    pieces: Callable[[Sequence[Turn]], list[TextSpan]]
    """Renders a conversation."""
    format: str
    labelled: Template | None
    columns: Mapping[int, Sequence[str]]
    """The header of each source that is a table, by its position among the sources."""
    max_tokens: int
    truncate: bool
    """Cut what is longer, rather than count it as bad."""
    train_on_inputs: bool
    add_bos: bool
    own_template: bool
    options: Mapping[str, Any]
    """Everything above that decides what the output holds, for the manifest."""


@dataclass(frozen=True)
class PrepareJob:
    """What is encoded, the same for all blocks of a run."""

    sources: Sequence[Source]
    keys: Sequence[str]
    """JSON keys, each an output of its own; of a fine-tuning set the names of its two outputs."""
    max_line: int
    """Bytes."""
    append_eod: bool = False
    chat: ChatFormat | None = None
    """For a fine-tuning set: how records become examples."""
    not_taken: Mapping[str, str] = field(default_factory=dict)
    """Files that were found in folders and patterns and are no sources: path to reason."""

    def names(self, prefix: str) -> list[str]:
        """The outputs' names without their folder."""
        ending = "" if self.chat is not None else "_document"
        return [f"{Path(prefix).name}_{key}{ending}" for key in self.keys]

    def is_table(self, source: int) -> bool:
        """Whether a source begins with a header."""
        return self.chat is not None and source in self.chat.columns


@dataclass(frozen=True)
class BadRecord:
    """A line that was not taken."""

    segment: int
    """Position of its segment in the block."""
    line: int
    """Lines before it in the segment."""
    reason: str
    detail: str
    size: int
    """Bytes; for a line that is too long, at least that many."""
    complete: bool
    """Whether ``raw`` is all of it."""
    raw: bytes
    """At most its first KEEP_BAD_BYTES bytes."""

    KEEP_BAD_BYTES = 1 << 20


@dataclass
class BlockResult:
    """A block's documents as they go into the files, one entry per output, and the account of its lines."""

    tokens: list[bytes] = field(default_factory=list)
    lengths: list[bytes] = field(default_factory=list)
    """int32 per document, 0 for one without tokens."""
    documents_read: int = 0
    text_bytes: int = 0
    """Size of the lines."""
    lines: list[int] = field(default_factory=list)
    """Lines in each segment, blank ones included."""
    bad: list[BadRecord] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    """Records that were taken, but changed: how, and how many."""
    learned: int = 0
    """Of a fine-tuning set: tokens with loss."""


# A line that says how far a job is, how fast, and how long it will still take.


TERMINAL_SECONDS = 0.2
LOG_SECONDS = 30.0


def short_time(seconds: float) -> str:
    """Hours, minutes and seconds as they are read aloud: 2h05m, 3m20s, 12s."""
    whole = int(seconds + 0.5)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


class ProgressBar:
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
