"""Encoding of one run: submit blocks to the pool, write results in order, save checkpoints."""

from __future__ import annotations

import base64
import bisect
import contextlib
import copy
import hashlib
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from data_prep.lib.block_encoders import BlockEncoder, ExampleEncoder, TextEncoder
from data_prep.lib.blocks import START, BlockPosition, TextBlock, cut_blocks
from data_prep.lib.input_files import QUARANTINE_SUFFIX
from data_prep.lib.job import BlockResult, PrepareJob, PrepareProgress, RunOptions
from data_prep.lib.parquet_csv import part_sizes
from data_prep.lib.pool import Pool
from data_prep.lib.sources import Source
from data_prep.lib.tokenizer_backends import Encoder
from data_prep.lib.workspace import QUARANTINE, KeyCounts, Ledger, Workspace, read_journal, read_prefix
from megatron_llama.config.data_settings import is_table
from megatron_llama.corpus.indexed_format import write_index
from megatron_llama.system.errors import MachineError, Stopped, UserError
from megatron_llama.system.files import sha256_file, sync_folder, write_atomically
from megatron_llama.system.progress import duration
from megatron_llama.system.signals import JOB_SIGNALS, handle_signals


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
        self.cut = cut or InputRange(START, BlockPosition(len(job.sources)))
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
        position, first = self.ledger.position, self._disk(self.cut.begin)
        with (
            handle_signals((signal.SIGINT, *JOB_SIGNALS), self._note_signal),
            Pool(options.workers, worker.run) as pool,
        ):
            blocks = cut_blocks(job.sources, position, job.max_line, block_bytes, self.cut.end)
            with PrepareProgress(self._disk(self.cut.end) - first, self._disk(position) - first) as progress:
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
            if block.segments[record.segment].source == self.cut.begin.source and self.cut.begin.offset:
                where += f" after {'byte' if source.kind == 'lines' else 'part'} {self.cut.begin.offset:,}"
            if self.options.on_bad_line == "error":
                fix = f"Fix the {source.unit}, or write --on-bad-line skip"
                if self.job.chat is None and (is_table(source.path) or (line == 1 and record.raw[:1] == b"[")):
                    fix = "Only sft.py reads JSON arrays and .tsv tables: write a record per line, or .csv"
                raise UserError(f"{where}: {record.reason}: {record.detail}. Nothing was written. {fix}")
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


# Preparation on several machines: ``--part K/N`` encodes part K of the input; the last finished part joins all parts.
#
# Parts are cut at block boundaries, so their concatenated files equal the files of a single run. Each part has a work
# folder next to the output, ``.<name>.parts/K-of-N``, and resumes from it. No process waits for another one.


@dataclass(frozen=True)
class PreparePart:
    """Part ``number`` (from 1) of ``count``."""

    number: int
    count: int

    @staticmethod
    def parse(text: str) -> PreparePart:
        """Parse K/N, which RunOptions has validated."""
        number, _, count = text.partition("/")
        return PreparePart(int(number), int(count))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def folder(self, folder: Path, names: Sequence[str]) -> Path:
        """Return the part's work folder for outputs ``names`` in ``folder``."""
        return parts_folder(folder, names) / f"{self.number}-of-{self.count}"


@dataclass(frozen=True)
class InputRange:
    """Input range [begin, end)."""

    begin: BlockPosition
    end: BlockPosition


@dataclass(frozen=True)
class FinishedPart:
    """Finished part."""

    part: PreparePart
    folder: Path
    identity: dict[str, Any]
    """Options of the run."""
    checkpoint: dict[str, Any]
    """Last checkpoint of the journal."""

    @property
    def ledger(self) -> Ledger:
        return Ledger.from_json(self.checkpoint["ledger"])


def parts_folder(folder: Path, names: Sequence[str]) -> Path:
    """Return the parent of the parts' work folders."""
    return folder / f".{'+'.join(names)}.parts"


def split_input(sources: Sequence[Source], count: int) -> list[InputRange]:
    """Split the input into ``count`` ranges of about equal bytes on disk, some possibly empty.

    Plain line files are cut anywhere, Parquet and Arrow between row groups or batches, other files not at all.
    """
    before = [0, *itertools.accumulate(source.size for source in sources)]

    def position(target: int) -> BlockPosition:
        index = min(bisect.bisect_right(before, target) - 1, len(sources))
        if index == len(sources):
            return BlockPosition(index)
        source, within = sources[index], target - before[index]
        if source.kind == "lines" and not source.is_stream:
            return BlockPosition(index, within)
        if source.in_parts:
            ends = [*itertools.accumulate(part_sizes(source.file, source.kind))]
            return BlockPosition(index, sum(end * source.size <= within * ends[-1] for end in ends))
        return BlockPosition(index + (2 * within > source.size))

    last = BlockPosition(len(sources))
    cuts = [BlockPosition(), *(position(before[-1] * number // count) for number in range(1, count)), last]
    return [InputRange(begin, end) for begin, end in itertools.pairwise(cuts)]


def finished_part(part: PreparePart, folder: Path, names: Sequence[str]) -> FinishedPart | None:
    """Return a part if it is finished, else None."""
    work = part.folder(folder, names)
    identity, checkpoints = read_journal(work)
    if identity is None or not checkpoints or not checkpoints[-1].get("part_done"):
        return None
    identity.pop("part", None)
    return FinishedPart(part, work, identity, checkpoints[-1])


def join_parts(
    parts: Sequence[FinishedPart], workspace: Workspace, sources: Sequence[Source], cuts: Sequence[InputRange]
) -> Ledger:
    """Append the parts' files to the workspace in order; return the sum of their ledgers.

    Raises:
        MachineError: A part's files differ from its journal. The part is removed.
    """
    total = sum(sum(one.checkpoint["sizes"].values()) for one in parts)
    done = 0
    whole = Ledger([KeyCounts() for _ in workspace.names])
    lines_before, source_before = 0, -1  # lines of a source in earlier parts
    with PrepareProgress(total) as progress:
        for one, cut in zip(parts, cuts, strict=True):
            offset = lines_before if cut.begin.source == source_before else 0
            for name, size in one.checkpoint["sizes"].items():
                chunks = _checked(one, name)
                if name == QUARANTINE:
                    path = sources[cut.begin.source].path if cut.begin.source < len(sources) else ""
                    chunks = iter([_renumbered(b"".join(chunks), path, offset)])
                for chunk in chunks:
                    workspace.append(name, chunk)
                done += size
                progress.update(done, done, 0)
            ledger = one.ledger
            lines_before = ledger.line + (offset if ledger.position.source == cut.begin.source else 0)
            source_before = ledger.position.source
            whole.add_ledger(ledger)
    whole.position = BlockPosition(len(sources))
    return whole


def _checked(one: FinishedPart, name: str) -> Iterator[bytes]:
    """Yield a part's file in chunks; compare its hash with the journal."""
    digest = hashlib.sha256()
    for chunk in read_prefix(one.folder / name, one.checkpoint["sizes"][name]):
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != one.checkpoint["sha256"][name]:
        shutil.rmtree(one.folder, ignore_errors=True)
        raise MachineError(
            f"{name} of part {one.part} is damaged, so the part was removed: rerun with --part {one.part}"
        )


def _renumbered(entries: bytes, path: str, lines_before: int) -> bytes:
    """Add ``lines_before`` to the line numbers of quarantined lines from the file ``path``."""
    if not lines_before:
        return entries
    renumbered = []
    for line in entries.splitlines():
        entry = json.loads(line)
        if entry["file"] == path:
            entry["line"] += lines_before
        renumbered.append(json.dumps(entry).encode() + b"\n")
    return b"".join(renumbered)


def remove_parts(folder: Path, names: Sequence[str]) -> None:
    """Remove the work folders of all parts."""
    if os.path.isdir(parts_folder(folder, names)):
        shutil.rmtree(parts_folder(folder, names), ignore_errors=True)


# Publication: move the files of a finished work folder to their final names.


SUFFIXES = (".bin", ".idx", ".json")


def write_outputs(
    workspace: Workspace, dtypes: Sequence[np.dtype], manifests: list[dict[str, Any]], ledger: Ledger
) -> None:
    """Write indices and manifests, mark the journal complete, and publish.

    Adds sizes and hashes to ``manifests``.
    """
    for name, dtype, manifest in zip(workspace.names, dtypes, manifests, strict=True):
        index = workspace.folder / f"{name}.idx"
        with open(index, "wb") as file:
            sequences, tokens = write_index(file, workspace.folder / f"{name}.lengths", dtype)
            file.flush()
            os.fsync(file.fileno())
        size = (workspace.folder / f"{name}.bin").stat().st_size
        assert (sequences, tokens) == (manifest["documents_written"], manifest["tokens"])
        assert size == tokens * dtype.itemsize, f"{size} bytes of tokens, {tokens * dtype.itemsize} expected"
        manifest |= {
            "bytes": {".bin": size, ".idx": index.stat().st_size},
            "sha256": {".bin": workspace.sha256(f"{name}.bin"), ".idx": sha256_file(index)},
        }
        write_atomically(workspace.folder / f"{name}.json", json.dumps(manifest, indent=1) + "\n")
    workspace.checkpoint(ledger, publish=True)
    workspace.close()
    publish(workspace.folder, workspace.folder.parent, workspace.names)


def publish(work: Path, folder: Path, names: list[str]) -> None:
    """Move complete files to their final names. The call can be repeated after a crash.

    The manifest is removed first and written last, so a manifest implies that its files are complete.
    """
    for name in names:
        files = [f"{name}{suffix}" for suffix in SUFFIXES]
        if (work / files[-1]).exists():
            if (work / files[0]).exists():
                for file in reversed(files):
                    (folder / file).unlink(missing_ok=True)
            for file in files:
                if (work / file).exists():
                    os.replace(work / file, folder / file)
            sync_folder(folder)
    quarantine = work / QUARANTINE
    if quarantine.exists():
        final = quarantine_file(folder, names)
        if quarantine.stat().st_size:
            os.replace(quarantine, final)
        else:
            final.unlink(missing_ok=True)


def quarantine_file(folder: Path, names: list[str]) -> Path:
    """Return the path of the file with the skipped lines."""
    return folder / f"{names[0]}{QUARANTINE_SUFFIX}"


def read_finished(folder: Path, names: list[str]) -> dict[str, Any] | None:
    """Return the manifest of a complete output, or None if no file exists.

    Raises:
        UserError: Files exist that do not form a complete output.
    """
    manifests = []
    unexpected = []
    for name in names:
        files = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
        existing = [path for path in files if path.exists()]
        if not existing:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads(files[2].read_bytes())
            if all(path.stat().st_size == manifest["bytes"][path.suffix] for path in files[:2]):
                manifests.append(manifest)
                continue
        unexpected += [str(path) for path in existing]
    if unexpected or (manifests and len(manifests) < len(names)):
        raise UserError(
            f"{', '.join(unexpected) or folder}: not a complete output of this program. "
            "Move the files, or write --overwrite"
        )
    return manifests[0] if manifests else None


# Options that are digests, which name nothing to users.
_CONTENTS = {
    "input_state": "the content of the input",
    "tokenizer_sha256": "the tokenizer",
    "chat_template_sha256": "the chat template",
    "chat_template_source": "the chat template",
}


def describe_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Format the differences between two runs' options, one string each."""
    changes = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            before, now = json.dumps(old.get(key)), json.dumps(new.get(key))
            if key in _CONTENTS:
                changes.append(f"{_CONTENTS[key]} changed")
                continue
            long = len(before) + len(now) > 200
            changes.append(f"{key} differs" if long else f"{key} was {before} and is now {now}")
    return changes
