"""The encoding of one run: blocks to the pool, results in order to the work folder, checkpoints now and then."""

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

from data_prep.lib.blocks import (
    START,
    BlockEncoder,
    BlockPosition,
    ExampleEncoder,
    Slots,
    TextBlock,
    TextEncoder,
    cut_blocks,
)
from data_prep.lib.encoders import Encoder
from data_prep.lib.input_files import QUARANTINE_SUFFIX
from data_prep.lib.job import BlockResult, PrepareJob, ProgressBar, RunOptions, short_time
from data_prep.lib.parquet_csv import part_sizes
from data_prep.lib.pool import Pool
from data_prep.lib.sources import Source
from data_prep.lib.workspace import QUARANTINE, KeyCounts, Ledger, Workspace, read_journal
from megatron_llama.corpus.indexed_format import write_index
from megatron_llama.system.errors import MachineError, Stopped, UserError
from megatron_llama.system.files import sha256_file, sync_folder, write_atomically
from megatron_llama.system.signals import STOP_SIGNALS, handle_signals


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
        """``cut`` is the range of the input that is done here; None: all of it."""
        self.cut = cut or InputRange(START, BlockPosition(len(job.sources)))
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

    def _disk(self, position: BlockPosition) -> int:
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
        with handle_signals((signal.SIGINT, *STOP_SIGNALS), self._note_signal), Pool(options.workers, worker) as pool:
            blocks = cut_blocks(job.sources, position, slots, job.max_line, block_bytes, self.cut.end)
            progress = ProgressBar(self._disk(self.cut.end) - first, self._disk(position) - first)
            try:
                for block, result in pool.run(blocks, self._check_stop):
                    self._take(block, result)
                    last = block.segments[-1]
                    progress.update(self.disk_before[last.source] + last.disk_end - first, *self._fresh)
            finally:
                progress.finish()
        self._check_stop()

    def _take(self, block: TextBlock, result: BlockResult) -> None:
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


def summarize_run(job: PrepareJob, options: RunOptions, ledger: Ledger) -> list[str]:
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


# A preparation over several machines: ``--part K/N`` does part K, and the last to be done joins all into one dataset.
#
# Each part is a range of the input, cut where a single run could be cut too, so that the parts' files one after another
# are the single run's. A part has a work folder of its own, ``.<name>.parts/K-of-N``, beside the output: a part that is
# killed goes on from there and costs the others nothing. Nobody waits: whoever finds all parts done joins them.


PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class PreparePart:
    """Part ``number``, counted from 1, of ``count``."""

    number: int
    count: int

    @staticmethod
    def parse(text: str) -> PreparePart:
        """K/N, as RunOptions has checked it."""
        number, _, count = text.partition("/")
        return PreparePart(int(number), int(count))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def folder(self, folder: Path, names: Sequence[str]) -> Path:
        """Its work folder, for an output of these names in ``folder``."""
        return parts_folder(folder, names) / f"{self.number}-of-{self.count}"


@dataclass(frozen=True)
class InputRange:
    """The input from ``begin`` up to ``end``."""

    begin: BlockPosition
    end: BlockPosition


@dataclass(frozen=True)
class FinishedPart:
    """A part that is done."""

    part: PreparePart
    folder: Path
    identity: dict[str, Any]
    """The run's options."""
    checkpoint: dict[str, Any]
    """The last of its journal."""

    @property
    def ledger(self) -> Ledger:
        return Ledger.from_json(self.checkpoint["ledger"])


def parts_folder(folder: Path, names: Sequence[str]) -> Path:
    """Holds the work folders of all parts."""
    return folder / f".{'+'.join(names)}.parts"


def split_input(sources: Sequence[Source], count: int) -> list[InputRange]:
    """The input cut into ``count`` ranges of about equal bytes on disk, some perhaps empty. A file of plain lines is
    cut anywhere, parquet and Arrow between their parts; any other file belongs to one range."""
    before = [0, *itertools.accumulate(source.size for source in sources)]

    def position(wanted: int) -> BlockPosition:
        index = min(bisect.bisect_right(before, wanted) - 1, len(sources))
        if index == len(sources):
            return BlockPosition(index)
        source, within = sources[index], wanted - before[index]
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
    """A part, where it is done."""
    work = part.folder(folder, names)
    identity, checkpoints = read_journal(work)
    if identity is None or not checkpoints or not checkpoints[-1].get("part_done"):
        return None
    identity.pop("part", None)
    return FinishedPart(part, work, identity, checkpoints[-1])


def join_parts(
    parts: Sequence[FinishedPart], workspace: Workspace, sources: Sequence[Source], cuts: Sequence[InputRange]
) -> Ledger:
    """Appends the parts' files to the workspace's, in order; returns the account of all, which is the sum of theirs.

    Raises:
        MachineError: a part's files are not what its journal says. That part is removed.
    """
    total = sum(sum(one.checkpoint["sizes"].values()) for one in parts)
    progress, done = ProgressBar(total), 0
    whole = Ledger([KeyCounts() for _ in workspace.names])
    lines_before, source_before = 0, -1  # the lines that earlier parts have read of a source
    try:
        for one, cut in zip(parts, cuts, strict=True):
            goes_on = lines_before if cut.begin.source == source_before else 0
            for name, size in one.checkpoint["sizes"].items():
                pieces = _checked(one, name)
                if name == QUARANTINE:
                    path = sources[cut.begin.source].path if cut.begin.source < len(sources) else ""
                    pieces = iter([_renumbered(b"".join(pieces), path, goes_on)])
                for piece in pieces:
                    workspace.append(name, piece)
                done += size
                progress.update(done, done, 0)
            ledger = one.ledger
            lines_before = ledger.line + (goes_on if ledger.position.source == cut.begin.source else 0)
            source_before = ledger.position.source
            whole.add_ledger(ledger)
    finally:
        progress.finish()
    whole.position = BlockPosition(len(sources))
    return whole


def _checked(one: FinishedPart, name: str) -> Iterator[bytes]:
    """A part's file, in pieces, compared with its journal while it is read."""
    digest, left = hashlib.sha256(), one.checkpoint["sizes"][name]
    with contextlib.suppress(FileNotFoundError), open(one.folder / name, "rb") as file:
        while left and (piece := file.read(min(left, PIECE_BYTES))):
            left -= len(piece)
            digest.update(piece)
            yield piece
    if left or digest.hexdigest() != one.checkpoint["sha256"][name]:
        shutil.rmtree(one.folder, ignore_errors=True)
        raise MachineError(
            f"{name} of part {one.part} is not what was written there. That part is removed: the same command with "
            f"--part {one.part} does it again"
        )


def _renumbered(entries: bytes, path: str, lines_before: int) -> bytes:
    """Quarantined lines of a part with the line numbers of the whole file ``path``, of which earlier parts have read
    ``lines_before`` lines."""
    if not lines_before:
        return entries
    found = []
    for line in entries.splitlines():
        entry = json.loads(line)
        if entry["file"] == path:
            entry["line"] += lines_before
        found.append(json.dumps(entry).encode() + b"\n")
    return b"".join(found)


def format_numbers(numbers: Sequence[int]) -> str:
    """1, 3-5, 8"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def remove_parts(folder: Path, names: Sequence[str]) -> None:
    """Removes the work folders of all parts."""
    if os.path.isdir(parts_folder(folder, names)):
        shutil.rmtree(parts_folder(folder, names), ignore_errors=True)


# From a finished work folder to the outputs under their final names; and telling whether they are there already.


SUFFIXES = (".bin", ".idx", ".json")


def write_outputs(
    workspace: Workspace, dtypes: Sequence[np.dtype], manifests: list[dict[str, Any]], ledger: Ledger
) -> None:
    """Writes indices and manifests into the work folder, notes in the journal that all is complete, and publishes.

    Sizes and hashes are added to ``manifests``.
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
    """Moves complete files to their final names. Killed in the middle, it is called again and finishes the job.

    A manifest comes last and an old one goes first: with a manifest, all files that it lists are in place.
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
    """Where the lines that were skipped end up."""
    return folder / f"{names[0]}{QUARANTINE_SUFFIX}"


def read_finished(folder: Path, names: list[str]) -> dict[str, Any] | None:
    """The manifest of a complete output, or None where there is none at all.

    Raises:
        UserError: files are there that no finished run of this program left.
    """
    manifests = []
    strange = []
    for name in names:
        files = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
        there = [path for path in files if path.exists()]
        if not there:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads(files[2].read_bytes())
            if all(path.stat().st_size == manifest["bytes"][path.suffix] for path in files[:2]):
                manifests.append(manifest)
                continue
        strange += [str(path) for path in there]
    if strange or (manifests and len(manifests) < len(names)):
        raise UserError(
            f"{', '.join(strange) or folder}: files are there that no finished run of this program left. "
            "Move them away, or replace them with --overwrite"
        )
    return manifests[0] if manifests else None


def describe_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two runs' options, in words."""
    words = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            before, now = json.dumps(old.get(key)), json.dumps(new.get(key))
            long = len(before) + len(now) > 200
            words.append(f"{key} differs" if long else f"{key} was {before} and is now {now}")
    return words
