"""Options of a preparation run, the job of its workers, their results, and the progress bar."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from data_prep.lib.input_readers import Source
from megatron_llama.system.errors import UserError
from megatron_llama.system.progress import ProgressBar, duration
from megatron_llama.system.rerun_command import ArgumentParser
from megatron_llama.system.ulimits import usable_cores
from megatron_llama.text.conversation import Template, TemplateContext, Turn
from megatron_llama.text.loss_spans import TextSpan
from megatron_llama.text.tokenizer import Tokenizer

T = TypeVar("T")


def cores() -> int:
    """Return the number of CPU cores available to this process."""
    return len(usable_cores())


@dataclass(frozen=True)
class RunOptions:
    """Output path and run options of a dataset."""

    output_prefix: str
    on_bad_line: str = "error"
    """``error`` stops at a bad line; ``skip`` moves bad lines to a quarantine file."""
    max_line_mib: float = 64.0
    """Longer lines are bad lines."""
    workers: int = field(default_factory=cores)
    """Number of encoding processes."""
    allow_empty: bool = False
    """Accept an input without documents."""
    part: str | None = None
    """K/N: process only part K of N; the last finished part joins all parts."""
    overwrite: bool = False
    """Replace an output written with other options."""
    checkpoint_seconds: float = 5.0
    """Seconds between checkpoints."""
    block_mib: float = 4.0
    """MiB of text per block."""

    def __post_init__(self) -> None:
        """Validate the options. Raises UserError."""
        reject(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.workers < 1:
            yield f"--workers must be at least 1, not {self.workers}"
        if not self.max_line_mib > 0:
            yield "--max-line-mib must be above 0"
        if not 2**-10 <= self.block_mib <= 256:
            yield "--block-mib must be between 1/1024 and 256"
        if not self.checkpoint_seconds >= 0:
            yield "--checkpoint-seconds must not be negative"
        if self.part is not None:
            number, slash, count = self.part.partition("/")
            if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
                yield f"--part {self.part}: write K/N with K from 1 to N, such as 1/16"
        if os.path.basename(self.output_prefix) in ("", ".", ".."):
            yield f"--output-prefix {self.output_prefix}: it must end in a file name, such as data/book"

    @staticmethod
    def of(args: argparse.Namespace) -> RunOptions:
        """Build the options from the flags of ``add_run_flags``. Raises UserError."""
        return RunOptions(**{one.name: vars(args)[one.name] for one in fields(RunOptions) if one.name in vars(args)})

    @property
    def max_line(self) -> int:
        """Maximum line length in bytes."""
        return int(self.max_line_mib * 2**20)

    @property
    def folder(self) -> Path:
        return Path(os.path.abspath(self.output_prefix)).parent


def reject(problems: Iterable[str]) -> None:
    """Raise one UserError with all problems, a line each, if there are any."""
    if lines := list(problems):
        raise UserError("\n".join(lines))


def collect(problems: list[str], make: Callable[[], T]) -> T | None:
    """Return the result of ``make``; None if it raises UserError, whose message is added to ``problems``."""
    try:
        return make()
    except UserError as error:
        problems.append(str(error))
        return None


def add_bad_line_flag(parser: argparse._ActionsContainer) -> None:
    """Add ``RunOptions.on_bad_line``."""
    choices, text = ["error", "skip"], "stop at a bad line, or skip it (default error)"
    parser.add_argument("--on-bad-line", choices=choices, default="error", help=text)


def parser_with_input(doc: str | None, guide: str) -> tuple[ArgumentParser, argparse._ArgumentGroup]:
    """Return the parser of a program with this docstring, and its group with --input."""
    parser = ArgumentParser(description=(doc or "").partition("\n\n")[0], epilog=guide)
    data = parser.add_argument_group("input")
    text = "files, folders or glob patterns; - reads stdin"
    data.add_argument("--input", nargs="+", required=True, metavar="PATH", help=text)
    return parser, data


def add_run_flags(data: argparse._ArgumentGroup, output: argparse._ArgumentGroup, writes: str) -> None:
    """Add the flags that preprocess.py and sft.py share; ``writes`` names the output files for the help."""
    add_bad_line_flag(data)
    add = data.add_argument
    text = "MiB; longer lines are bad lines (default 64)"
    add("--max-line-mib", type=float, default=RunOptions.max_line_mib, help=text)
    add("--allow-empty", action="store_true", help="accept an input without documents")
    add = output.add_argument
    add("--output-prefix", required=True, metavar="PATH", help=f"writes {writes}")
    add("--workers", type=int, default=cores(), help="processes (default: one per core)")
    add("--part", metavar="K/N", help="process part K of N on this machine; the last finished part joins all parts")
    add("--overwrite", action="store_true", help="replace an output written with other options")
    text = "seconds between checkpoints (default 5)"
    add("--checkpoint-seconds", type=float, default=RunOptions.checkpoint_seconds, help=text)


def add_token_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of new tokens, which are named like the settings of train.py."""
    for flag, kind in (("--add-tokens", ""), ("--add-special-tokens", "special ")):
        message = f"{kind}tokens to add to a tokenizer.json, as data.{flag[2:].replace('-', '_')}"
        group.add_argument(flag, nargs="+", default=[], metavar="TOKEN", help=message)


@dataclass(frozen=True)
class ChatFormat:
    """Conversion of records to examples of a fine-tuning dataset."""

    tokenizer: Tokenizer
    render: Callable[[Sequence[Turn], TemplateContext, list[str]], list[TextSpan]]
    """Chat template: conversation to text spans; adds to the notes on the record."""
    format: str
    labelled: Template | None
    columns: Mapping[int, Sequence[str]]
    """Header of each source that is a table, by index of the source."""
    max_tokens: int
    truncate: bool
    """Truncate longer examples instead of rejecting them."""
    train_on_inputs: bool
    add_bos: bool
    own_template: bool
    options: Mapping[str, Any]
    """Fields above that determine the output, for the manifest."""


@dataclass(frozen=True)
class PrepareJob:
    """Input and encoding options, the same for all blocks of a run."""

    sources: Sequence[Source]
    keys: Sequence[str]
    """JSON keys, one output each. For a fine-tuning dataset, the names of its two outputs."""
    max_line: int
    """Maximum line length in bytes."""
    append_eod: bool = False
    prepend_bos: bool = False
    chat: ChatFormat | None = None
    """Set for fine-tuning datasets only."""
    not_taken: Mapping[str, str] = field(default_factory=dict)
    """Ignored files of folders and patterns: path to reason."""

    def names(self, prefix: str) -> list[str]:
        """Return the file names of the outputs, without suffix."""
        ending = "" if self.chat is not None else "_document"
        return [f"{Path(prefix).name}_{key}{ending}" for key in self.keys]

    def is_table(self, source: int) -> bool:
        """Whether a source starts with a table header."""
        return self.chat is not None and source in self.chat.columns


@dataclass(frozen=True)
class BadRecord:
    """Rejected line."""

    segment: int
    """Index of the segment in the block."""
    line: int
    """Number of lines before it in the segment."""
    reason: str
    detail: str
    size: int
    """Size in bytes; a lower bound for a line that is too long."""
    complete: bool
    """Whether ``raw`` is the complete line."""
    raw: bytes
    """First KEEP_BAD_BYTES bytes at most."""

    KEEP_BAD_BYTES = 1 << 20


@dataclass
class BlockResult:
    """Encoded documents of a block, one entry per output, and its line counts."""

    tokens: list[bytes] = field(default_factory=list)
    lengths: list[bytes] = field(default_factory=list)
    """Tokens per document, int32; 0 if empty."""
    documents_read: int = 0
    text_bytes: int = 0
    """Total size of the lines."""
    lines: list[int] = field(default_factory=list)
    """Lines per segment, including blank ones."""
    bad: list[BadRecord] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    """Number of modified records by kind of modification."""
    learned: int = 0
    """Tokens with loss, of a fine-tuning dataset."""


REDRAW_SECONDS = 0.2


class PrepareProgress(ProgressBar):
    """Progress bar of a preparation: share done, speed and remaining time."""

    def __init__(self, total: int, done: int = 0) -> None:
        """``total`` and ``done`` are bytes on disk."""
        self.total, self.begun_at, self.drawn = max(1, total), done, 0.0
        super().__init__("prepare", total=self.total)
        self.base: tuple[float, int, int, int] | None = None
        """(time, done, work_bytes, tokens) of the first progress. The rate excludes the start of the workers."""

    def update(self, done: int, work_bytes: int, tokens: int) -> None:
        """Show ``done`` bytes on disk; ``work_bytes`` and ``tokens`` count from the start of this process."""
        now = time.monotonic()
        if self.base is None and done > self.begun_at:
            self.base = now, done, work_bytes, tokens
        if now - self.drawn < REDRAW_SECONDS:
            return
        self.drawn = now
        text = f"{min(1.0, done / self.total):.1%}"
        start, first, bytes_before, tokens_before = self.base or (now, done, 0, 0)
        if done > first:
            seconds = max(1e-9, now - start)
            left = duration(seconds * (self.total - done) / (done - first))
            speed, rate = (work_bytes - bytes_before) / seconds / 1e6, (tokens - tokens_before) / seconds / 1e6
            text += f"  {speed:.1f} MB/s  {rate:.2f} M tokens/s  {left} left"
        self.draw(done, text)
