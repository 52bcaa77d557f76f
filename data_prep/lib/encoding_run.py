"""The encoding of one run: blocks to the pool, results in order to the work folder, checkpoints now and then."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import signal
import time
from types import FrameType
from typing import Any

from data_prep.lib.blocks import START, Block, Position, Slots, cut_blocks
from data_prep.lib.encode_blocks import BlockEncoder, ExampleEncoder, TextEncoder
from data_prep.lib.job import Job, Result, RunOptions
from data_prep.lib.ledger import Ledger
from data_prep.lib.parts import Range
from data_prep.lib.pool import Pool
from data_prep.lib.progress import Progress, short_time
from data_prep.lib.publish import quarantine_file
from data_prep.lib.workspace import QUARANTINE, Workspace
from megatron_llama.system.errors import Stopped, UserError
from megatron_llama.system.signals import ASKED_TO_STOP, handling
from megatron_llama.text.encoders import Encoder


class EncodingRun:
    """The encoding of one run."""

    def __init__(
        self,
        job: Job,
        options: RunOptions,
        encoder: Encoder,
        workspace: Workspace,
        ledger: Ledger,
        cut: Range | None = None,
    ) -> None:
        """``cut`` is the range of the input that is done here; None: all of it."""
        self.cut = cut or Range(START, Position(len(job.sources)))
        self.job, self.options, self.encoder = job, options, encoder
        self.workspace, self.ledger = workspace, ledger
        self.started_with = copy.deepcopy(ledger)
        self.start = self.saved = time.monotonic()
        self.signal: int | None = None
        self.disk_before = [0, *itertools.accumulate(source.size for source in job.sources)]
        """Bytes of the sources before each, and of all."""

    @property
    def _fresh(self) -> tuple[int, int]:
        """Bytes of text and tokens since this process started."""
        return self.ledger.text_bytes - self.started_with.text_bytes, self.ledger.tokens - self.started_with.tokens

    @property
    def seconds_worth(self) -> float:
        """Seconds of work in the ledger: this process's, and in proportion to their bytes those of earlier ones."""
        seconds = time.monotonic() - self.start
        fresh, _ = self._fresh
        return seconds * (self.ledger.text_bytes / fresh if fresh else 1.0)

    def _disk(self, position: Position) -> int:
        """Bytes on disk before a position; of a file that is no plain lines, before the file."""
        before = self.disk_before[position.source]
        sources = self.job.sources[position.source : position.source + 1]
        return before + sum(position.offset for one in sources if one.kind == "lines" and not one.is_stream)

    def encode(self) -> None:
        """Everything from the ledger's position to the range's end."""
        options, job = self.options, self.job
        block_bytes = int(options.block_mib * 2**20)
        streams = any(source.is_stream for source in job.sources)
        # These keep all workers busy: for each, a block is encoded and one waits; and two are filled.
        slots = Slots(2 * options.workers + 2 if streams else 1, block_bytes)
        worker: BlockEncoder[Any] = TextEncoder(job, self.encoder, slots)
        if job.chat is not None:
            worker = ExampleEncoder(job, self.encoder, slots, job.chat)
        position, first = self.ledger.position, self._disk(self.cut.begin)
        with handling((signal.SIGINT, *ASKED_TO_STOP), self._note_signal), Pool(options.workers, worker) as pool:
            blocks = cut_blocks(job.sources, position, slots, job.max_line, block_bytes, self.cut.end)
            progress = Progress(self._disk(self.cut.end) - first, self._disk(position) - first)
            try:
                for block, result in pool.run(blocks, self._check_stop):
                    self._take(block, result)
                    last = block.segments[-1]
                    progress.update(self.disk_before[last.source] + last.disk_end - first, *self._fresh)
            finally:
                progress.finish()
        self._check_stop()

    def _take(self, block: Block, result: Result) -> None:
        """Writes a block's documents and quarantines its bad lines."""
        for record in result.bad:
            source = self.job.sources[block.segments[record.segment].source]
            line = self.ledger.line_before(block, record.segment, result) + record.line + 1
            where = source.path if source.is_text else f"{source.path}, {source.unit} {line}"
            if block.segments[record.segment].source == self.cut.begin.source and self.cut.begin.offset:
                where += f" after {'byte' if source.kind == 'lines' else 'part'} {self.cut.begin.offset:,}"
            if self.options.on_bad_line == "error":
                raise UserError(
                    f"{where}: {record.reason}: {record.detail}. Nothing was written. "
                    "Mend the line, or leave bad lines out with --on-bad-line skip"
                )
            try:
                raw: dict[str, Any] = {"raw": record.raw.decode("utf-8")}
            except UnicodeDecodeError:
                raw = {"raw_base64": base64.b64encode(record.raw).decode("ascii")}
            entry = {"file": source.path, "line": line, "reason": record.reason, "detail": record.detail}
            entry |= {"bytes": record.size, "complete": record.complete, **raw}
            self.workspace.append(QUARANTINE, json.dumps(entry).encode() + b"\n")
        self.ledger.add(block, result)
        for name, tokens, lengths in zip(self.workspace.names, result.tokens, result.lengths, strict=True):
            self.workspace.append(f"{name}.bin", tokens)
            self.workspace.append(f"{name}.lengths", lengths)
        if time.monotonic() - self.saved >= self.options.checkpoint_seconds:
            self.workspace.checkpoint(self.ledger)
            self.saved = time.monotonic()

    def _note_signal(self, number: int, _: FrameType | None) -> None:
        self.signal = number

    def _check_stop(self) -> None:
        if self.signal is not None:
            self.workspace.checkpoint(self.ledger)
            raise Stopped(
                f"{signal.Signals(self.signal).name} after {self.ledger.documents_read:,} documents. "
                "They are kept: the same command goes on from there"
            )

    def speed(self) -> str:
        """What this process did, and how fast."""
        fresh, tokens = self._fresh
        seconds = time.monotonic() - self.start
        return (
            f"{fresh / 1e6:.1f} MB in {short_time(seconds) if seconds >= 60 else f'{seconds:.1f}s'}: "
            f"{fresh / seconds / 1e6:.1f} MB/s, {tokens / seconds / 1e6:.2f} M tokens/s, "
            f"{self.options.workers} workers, {self.encoder.name}"
        )


def account(job: Job, options: RunOptions, ledger: Ledger) -> list[str]:
    """What became of every document and every file, in words."""
    lines, names = [], job.names(options.output_prefix)
    for name, counts in list(zip(names, ledger.keys, strict=True))[: 1 if job.chat else None]:
        lines.append(
            f"{options.folder / name}: {ledger.documents_read:,} documents = {counts.written:,} written "
            f"+ {counts.empty:,} empty + {ledger.documents_skipped:,} skipped; {counts.tokens:,} tokens"
        )
    if job.not_taken:
        taken, others = len(job.sources), len(job.not_taken)
        lines.append(f"{taken + others:,} files found = {taken:,} taken + {others:,} not taken")
    if ledger.skipped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(ledger.skipped.items()))
        lines.append(f"skipped: {reasons}; see {quarantine_file(options.folder, names)}")
    if job.chat is not None:
        lines.append(f"{ledger.learned:,} tokens with loss")
    if ledger.notes:
        lines.append("changed: " + ", ".join(f"{count:,} {note}" for note, count in sorted(ledger.notes.items())))
    return lines
