"""The encoding of one run: blocks to the pool, results in order to the work folder, checkpoints now and then."""

from __future__ import annotations

import base64
import json
import signal
import time
from types import FrameType
from typing import Any

from data_prep.lib.blocks import Block, Position, Slots, cut_blocks
from data_prep.lib.encode_examples import ExampleEncoder
from data_prep.lib.encode_text import TextEncoder
from data_prep.lib.job import Job, Result, RunOptions
from data_prep.lib.ledger import Ledger
from data_prep.lib.pool import Pool, slots_for
from data_prep.lib.progress import Progress, short_time
from data_prep.lib.publish import quarantine_file
from data_prep.lib.workspace import QUARANTINE, Workspace
from megatron_llama.system.errors import Stopped, UserError
from megatron_llama.system.signals import handling
from megatron_llama.text.encoders import Encoder


class EncodingRun:
    """The encoding of one run."""

    def __init__(self, job: Job, options: RunOptions, encoder: Encoder, workspace: Workspace, ledger: Ledger) -> None:
        self.job = job
        self.options = options
        self.encoder = encoder
        self.workspace = workspace
        self.ledger = ledger
        self.started_with = Ledger.from_json(json.loads(json.dumps(ledger.to_json())))
        self.start = self.saved = time.monotonic()
        self.signal: int | None = None
        self.disk_before = [0]
        for source in job.sources:
            self.disk_before.append(self.disk_before[-1] + source.size)

    @property
    def seconds_worth(self) -> float:
        """Seconds that this process has worked, and those that stood behind it in proportion to its bytes."""
        seconds = time.monotonic() - self.start
        fresh = self.ledger.text_bytes - self.started_with.text_bytes
        return seconds * (self.ledger.text_bytes / fresh if fresh else 1.0)

    def encode(self) -> None:
        """Everything from the ledger's position to the input's end."""
        options, job = self.options, self.job
        block_bytes = int(options.block_mib * 2**20)
        streams = any(source.is_stream for source in job.sources)
        slots = Slots(slots_for(options.workers) if streams else 1, block_bytes)
        chat = job.chat
        worker = TextEncoder(job, self.encoder, slots) if chat is None else ExampleEncoder(job, chat, slots)
        with handling((signal.SIGINT, signal.SIGTERM), self._note_signal), Pool(options.workers, worker) as pool:
            blocks = cut_blocks(job.sources, self.ledger.position, slots, job.max_line, block_bytes)
            progress = Progress(self.disk_before[-1], self._disk_done(self.ledger.position))
            try:
                for block, result in pool.run(blocks, self._check_stop):
                    self._take(block, result)
                    self._show(progress, block)
            finally:
                progress.finish()
        self._check_stop()

    def _disk_done(self, position: Position) -> int:
        sources = self.job.sources
        if position.source >= len(sources):
            return self.disk_before[-1]
        # of a stream, the unpacked offset is no measure; it counts from its beginning
        inside = 0 if sources[position.source].is_stream else position.offset
        return self.disk_before[position.source] + inside

    def _show(self, progress: Progress, block: Block) -> None:
        last = block.segments[-1]
        fresh_bytes = self.ledger.text_bytes - self.started_with.text_bytes
        fresh_tokens = sum(counts.tokens for counts in self.ledger.keys) - sum(
            counts.tokens for counts in self.started_with.keys
        )
        progress.update(self.disk_before[last.source] + last.disk_end, fresh_bytes, fresh_tokens)

    def _take(self, block: Block, result: Result) -> None:
        """Writes a block's documents and quarantines its bad lines."""
        for record in result.bad:
            source = self.job.sources[block.segments[record.segment].source]
            line = self.ledger.line_before(block, record.segment, result) + record.line + 1
            unit = "record" if source.is_array else "line"
            where = source.path if source.is_text else f"{source.path}, {unit} {line}"
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

    def summary(self) -> str:
        """What was done, checked to add up."""
        ledger, seconds = self.ledger, time.monotonic() - self.start
        lines = []
        for name, counts in list(zip(self.workspace.names, ledger.keys, strict=True))[: 1 if self.job.chat else None]:
            lines.append(
                f"{self.options.folder / name}: {ledger.documents_read:,} documents = {counts.written:,} written "
                f"+ {counts.empty:,} empty + {ledger.documents_skipped:,} skipped; {counts.tokens:,} tokens"
            )
        if ledger.skipped:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(ledger.skipped.items()))
            lines.append(f"skipped: {reasons}; see {quarantine_file(self.options.folder, self.workspace.names)}")
        if self.job.chat is not None:
            lines.append(f"{ledger.learned:,} tokens with loss")
        if ledger.notes:
            lines.append("changed: " + ", ".join(f"{count:,} {note}" for note, count in sorted(ledger.notes.items())))
        fresh = ledger.text_bytes - self.started_with.text_bytes
        tokens = sum(counts.tokens for counts in ledger.keys) - sum(key.tokens for key in self.started_with.keys)
        lines.append(
            f"{fresh / 1e6:.1f} MB in {short_time(seconds) if seconds >= 60 else f'{seconds:.1f}s'}: "
            f"{fresh / seconds / 1e6:.1f} MB/s, {tokens / seconds / 1e6:.2f} M tokens/s, "
            f"{self.options.workers} workers, {self.encoder.name}"
        )
        return "\n".join(lines)
