"""Encoding of one run: submit blocks to the pool, write results in order, save checkpoints."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import signal
import time
from types import FrameType
from typing import Any

from data_prep.lib.block_encoders import BlockEncoder, ExampleEncoder, TextEncoder
from data_prep.lib.blocks import START, BlockPosition, InputRange, TextBlock, cut_blocks
from data_prep.lib.output_files import quarantine_file
from data_prep.lib.pool import Pool
from data_prep.lib.run_options import BlockResult, PrepareJob, PrepareProgress, RunOptions
from data_prep.lib.tokenizer_backends import Encoder
from data_prep.lib.workspace import QUARANTINE, Ledger, Workspace
from megatron_llama.config.data_settings import is_table
from megatron_llama.system.errors import Stopped, UserError
from megatron_llama.system.progress import duration
from megatron_llama.system.signals import JOB_SIGNALS, handle_signals


class BadRecord(UserError):
    """A bad line that stops the run."""

    def __init__(self, rule: str, instead: str) -> None:
        super().__init__(f"{rule}. Nothing was written. {instead}")
        self.rule = rule


class EncodingRun:
    """The encoding of one run."""

    def __init__(
        self,
        job: PrepareJob,
        options: RunOptions,
        encoder: Encoder,
        workspace: Workspace,
        ledger: Ledger,
        cut: InputRange | None = None,
    ) -> None:
        """``cut`` is the input range to encode; None: all of it."""
        self.begin, self.end = cut or (START, BlockPosition(len(job.sources)))
        self.job, self.options, self.encoder = job, options, encoder
        self.workspace, self.ledger = workspace, ledger
        self.started_with = copy.deepcopy(ledger)
        self.start = self.saved = time.monotonic()
        self.signal: int | None = None
        self.disk_before = [0, *itertools.accumulate(source.size for source in job.sources)]
        """Cumulative size of the sources on disk, [sources + 1]."""

    @property
    def _fresh(self) -> tuple[int, int]:
        """Text bytes and tokens since this process started."""
        return self.ledger.text_bytes - self.started_with.text_bytes, self.ledger.tokens - self.started_with.tokens

    @property
    def seconds_worth(self) -> float:
        """Estimated seconds of work in the ledger, earlier processes included."""
        seconds = time.monotonic() - self.start
        fresh, _ = self._fresh
        return seconds * (self.ledger.text_bytes / fresh if fresh else 1.0)

    def _disk(self, position: BlockPosition) -> int:
        """Return the bytes on disk before a position, rounded down to whole files for streams."""
        before = self.disk_before[position.source]
        sources = self.job.sources[position.source : position.source + 1]
        return before + sum(position.offset for one in sources if one.kind == "lines" and not one.is_stream)

    def encode(self) -> None:
        """Encode from the ledger's position to the end of the range."""
        options, job = self.options, self.job
        block_bytes = int(options.block_mib * 2**20)
        worker: BlockEncoder[Any] = TextEncoder(job, self.encoder)
        if job.chat is not None:
            worker = ExampleEncoder(job, self.encoder, job.chat)
        position, first = self.ledger.position, self._disk(self.begin)
        with (
            handle_signals((signal.SIGINT, *JOB_SIGNALS), self._note_signal),
            Pool(options.workers, worker.run) as pool,
        ):
            blocks = cut_blocks(job.sources, position, job.max_line, block_bytes, self.end)
            with PrepareProgress(self._disk(self.end) - first, self._disk(position) - first) as progress:
                for block, result in pool.run(blocks, self._check_stop):
                    self._take(block, result)
                    last = block.segments[-1]
                    progress.update(self.disk_before[last.source] + last.disk_end - first, *self._fresh)
        self._check_stop()

    def _take(self, block: TextBlock, result: BlockResult) -> None:
        """Write a block's documents; quarantine its bad lines."""
        for record in result.bad:
            source = self.job.sources[block.segments[record.segment].source]
            line = self.ledger.line_before(block, record.segment, result) + record.line + 1
            where = source.path if source.is_text else f"{source.path}, {source.unit} {line}"
            if block.segments[record.segment].source == self.begin.source and self.begin.offset:
                where += f" after {'byte' if source.kind == 'lines' else 'part'} {self.begin.offset:,}"
            if self.options.on_bad_line == "error":
                fix = f"Fix the {source.unit}, or write --on-bad-line skip"
                if self.job.chat is None and (is_table(source.path) or (line == 1 and record.raw[:1] == b"[")):
                    fix = "Only sft.py reads JSON arrays and .tsv tables: write a record per line, or .csv"
                raise BadRecord(f"{where}: {record.reason}: {record.detail}", fix)
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
                "They are saved: rerun the same command to resume"
            )

    def speed(self) -> str:
        """Format the amount of work of this process and its speed."""
        fresh, tokens = self._fresh
        seconds = time.monotonic() - self.start
        return (
            f"{fresh / 1e6:.1f} MB in {duration(seconds) if seconds >= 60 else f'{seconds:.1f}s'}: "
            f"{fresh / seconds / 1e6:.1f} MB/s, {tokens / seconds / 1e6:.2f} M tokens/s, "
            f"{self.options.workers} workers, {self.encoder.name}"
        )


def summarize_run(job: PrepareJob, options: RunOptions, ledger: Ledger) -> list[str]:
    """Return report lines with the counts of documents, files and skipped lines."""
    lines, names = [], job.names(options.output_prefix)
    for name, counts in list(zip(names, ledger.keys, strict=True))[: 1 if job.chat else None]:
        lines += [
            f"{options.folder / name}: {counts.tokens:,} tokens",
            f"{ledger.documents_read:,} documents = {counts.written:,} written + {counts.empty:,} empty "
            f"+ {ledger.documents_skipped:,} skipped",
        ]
    if job.not_taken:
        taken, others = len(job.sources), len(job.not_taken)
        lines.append(f"{taken + others:,} files found = {taken:,} used + {others:,} ignored")
    if ledger.skipped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(ledger.skipped.items()))
        lines += [f"skipped: {reasons}", f"skipped lines are in {quarantine_file(options.folder, names)}"]
    if job.chat is not None:
        lines.append(f"{ledger.learned:,} tokens with loss")
    if ledger.notes:
        lines.append("modified: " + ", ".join(f"{count:,} {note}" for note, count in sorted(ledger.notes.items())))
    return lines
