"""Preparation on several machines: ``--part K/N`` encodes part K of the input; the last finished part joins all parts.

Parts are cut at block boundaries, so their concatenated files equal the files of a single run. Each part has a work
folder next to the output, ``.<name>.parts/K-of-N``, and resumes from it. No process waits for another one.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.lib.blocks import START, BlockPosition, InputRange
from data_prep.lib.input_readers import Source
from data_prep.lib.parquet_csv import part_sizes
from data_prep.lib.run_options import PrepareProgress
from data_prep.lib.workspace import QUARANTINE, KeyCounts, Ledger, Workspace, read_journal, read_prefix
from megatron_llama.system.errors import MachineError


@dataclass(frozen=True)
class PreparePart:
    """Part ``number`` (from 1) of ``count``, whose work folders are in ``parent``."""

    number: int
    count: int
    parent: Path

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def folder(self) -> Path:
        return self.parent / f"{self.number}-of-{self.count}"


@dataclass(frozen=True)
class FinishedPart:
    """Finished part."""

    part: PreparePart
    identity: dict[str, Any]
    """Options of the run."""
    checkpoint: dict[str, Any]
    """Last checkpoint of the journal."""

    @property
    def ledger(self) -> Ledger:
        return Ledger.from_json(self.checkpoint["ledger"])


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
    cuts = [START, *(position(before[-1] * number // count) for number in range(1, count)), last]
    return [*itertools.pairwise(cuts)]


def finished_part(part: PreparePart) -> FinishedPart | None:
    """Return a part if it is finished, else None."""
    identity, checkpoints = read_journal(part.folder)
    if identity is None or not checkpoints or not checkpoints[-1].get("part_done"):
        return None
    identity.pop("part", None)
    return FinishedPart(part, identity, checkpoints[-1])


def join_parts(
    parts: Sequence[FinishedPart], workspace: Workspace, sources: Sequence[Source], cuts: Sequence[InputRange]
) -> Ledger:
    """Append the parts' files to the workspace in order; return the sum of their ledgers.

    Raises MachineError if a part's files differ from its journal; the part is removed.
    """
    total = sum(sum(one.checkpoint["sizes"].values()) for one in parts)
    done = 0
    whole = Ledger([KeyCounts() for _ in workspace.names])
    lines_before, source_before = 0, -1  # lines of a source in earlier parts
    with PrepareProgress(total) as progress:
        for one, (begin, _) in zip(parts, cuts, strict=True):
            offset = lines_before if begin.source == source_before else 0
            for name, size in one.checkpoint["sizes"].items():
                chunks = _checked(one, name)
                if name == QUARANTINE:
                    path = sources[begin.source].path if begin.source < len(sources) else ""
                    chunks = iter([_renumbered(b"".join(chunks), path, offset)])
                for chunk in chunks:
                    workspace.append(name, chunk)
                done += size
                progress.update(done, done, 0)
            ledger = one.ledger
            lines_before = ledger.line + (offset if ledger.position.source == begin.source else 0)
            source_before = ledger.position.source
            whole.add_ledger(ledger)
    whole.position = BlockPosition(len(sources))
    return whole


def _checked(one: FinishedPart, name: str) -> Iterator[bytes]:
    """Yield a part's file in chunks; compare its hash with the journal."""
    digest = hashlib.sha256()
    for chunk in read_prefix(one.part.folder / name, one.checkpoint["sizes"][name]):
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != one.checkpoint["sha256"][name]:
        shutil.rmtree(one.part.folder, ignore_errors=True)
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
