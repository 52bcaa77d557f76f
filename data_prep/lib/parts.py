"""A preparation over several machines: ``--part K/N`` does part K, and the last to be done joins all into one dataset.

Each part is a range of the input, cut where a single run could be cut too, so that the parts' files one after another
are the single run's. A part has a work folder of its own, ``.<name>.parts/K-of-N``, beside the output: a part that is
killed goes on from there and costs the others nothing. Nobody waits: whoever finds all parts done joins them.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.lib.blocks import Position
from data_prep.lib.columnar import part_sizes
from data_prep.lib.ledger import KeyCounts, Ledger
from data_prep.lib.progress import Progress
from data_prep.lib.sources import Source
from data_prep.lib.workspace import QUARANTINE, Workspace, read_journal
from megatron_llama.system.errors import MachineError

PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """Part ``number``, counted from 1, of ``count``."""

    number: int
    count: int

    @staticmethod
    def parse(text: str) -> Part:
        """K/N, as RunOptions has checked it."""
        number, _, count = text.partition("/")
        return Part(int(number), int(count))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def folder(self, folder: Path, names: Sequence[str]) -> Path:
        """Its work folder, for an output of these names in ``folder``."""
        return parts_folder(folder, names) / f"{self.number}-of-{self.count}"


@dataclass(frozen=True)
class Range:
    """The input from ``begin`` up to ``end``."""

    begin: Position
    end: Position


@dataclass(frozen=True)
class Finished:
    """A part that is done."""

    part: Part
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


def ranges(sources: Sequence[Source], count: int) -> list[Range]:
    """The input cut into ``count`` ranges of about equal bytes on disk, some perhaps empty. A file of plain lines is
    cut anywhere, parquet and Arrow between their parts; any other file belongs to one range."""
    before = [0, *itertools.accumulate(source.size for source in sources)]

    def position(wanted: int) -> Position:
        index = min(bisect.bisect_right(before, wanted) - 1, len(sources))
        if index == len(sources):
            return Position(index)
        source, within = sources[index], wanted - before[index]
        if source.kind == "lines" and not source.is_stream:
            return Position(index, within)
        if source.in_parts:
            ends = [*itertools.accumulate(part_sizes(source.file, source.kind))]
            return Position(index, sum(end * source.size <= within * ends[-1] for end in ends))
        return Position(index + (2 * within > source.size))

    last = Position(len(sources))
    cuts = [Position(), *(position(before[-1] * number // count) for number in range(1, count)), last]
    return [Range(begin, end) for begin, end in itertools.pairwise(cuts)]


def finished_part(part: Part, folder: Path, names: Sequence[str]) -> Finished | None:
    """A part, where it is done."""
    work = part.folder(folder, names)
    identity, checkpoints = read_journal(work)
    if identity is None or not checkpoints or not checkpoints[-1].get("part_done"):
        return None
    identity.pop("part", None)
    return Finished(part, work, identity, checkpoints[-1])


def join(parts: Sequence[Finished], workspace: Workspace, sources: Sequence[Source], cuts: Sequence[Range]) -> Ledger:
    """Appends the parts' files to the workspace's, in order; returns the account of all, which is the sum of theirs.

    Raises:
        MachineError: a part's files are not what its journal says. That part is removed.
    """
    total = sum(sum(one.checkpoint["sizes"].values()) for one in parts)
    progress, done = Progress(total), 0
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
    whole.position = Position(len(sources))
    return whole


def _checked(one: Finished, name: str) -> Iterator[bytes]:
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


def numbers_in_words(numbers: Sequence[int]) -> str:
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
