"""The run's folder and the caches: can they be written, how fast, do locks and renames work there, do all nodes see the
same folder, and is there room for what the run will write."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import IO, Any

from megatron_llama.system.files import sync_folder, try_lock
from megatron_llama.system.tables import gib
from megatron_llama.tools.doctor.finding import BREAKS, WARNS, Finding, Node, names

CHECK = "disks"
RUN = "run.dir"
WRITTEN = 8 << 20
"""Bytes that the speed is measured with."""
LONG_SECONDS = 600.0
"""Writing one checkpoint should not take longer, at the speed that was measured."""
SLOWER = 5.0
"""A node that writes so many times slower than the middle one is named."""
_SEEN_SECONDS = 5.0


@dataclass(frozen=True)
class Need:
    """What the run will write into its folder."""

    checkpoint: int
    """Bytes of one checkpoint."""
    kept: int | None
    """Checkpoints that are there at once at most, the one that is being written included; None where that is not
    bounded."""


@dataclass
class Mark:
    """A locked file that the first node leaves for the others to see."""

    path: Path
    file: IO[bytes]

    def remove(self) -> None:
        """The lock goes with the file."""
        self.path.unlink(missing_ok=True)
        self.file.close()


def observe(folders: Mapping[str, Path]) -> dict[str, Any]:
    """For each folder, by its setting, how the disk below it behaves; nothing is left there."""
    return {name: _examine(_nearest(path)) for name, path in folders.items()}


def _nearest(path: Path) -> Path:
    """The folder, or what there is of the way to it."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


def _examine(folder: Path) -> dict[str, Any]:
    token = secrets.token_hex(8)
    draft, final = folder / f".doctor-{token}.draft", folder / f".doctor-{token}"
    found: dict[str, Any] = {"folder": str(folder), "fault": None, "free": None}
    try:
        space = os.statvfs(folder)
        found["free"] = space.f_bavail * space.f_frsize
        content = os.urandom(1 << 20)
        start = time.perf_counter()
        with draft.open("xb") as file:
            for _ in range(WRITTEN >> 20):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
            found["seconds"] = time.perf_counter() - start
            found["locks"] = try_lock(file)
        final.write_bytes(b"old")
        os.replace(draft, final)
        found["renames"] = final.stat().st_size == WRITTEN and not draft.exists()
        sync_folder(folder)
    except OSError as error:
        found["fault"] = error.strerror or str(error)
    finally:
        for path in (draft, final):
            with suppress(OSError):
                path.unlink()
    return found


def leave_mark(folder: Path) -> Mark | None:
    """On the first node, a locked file in the run's folder, or what there is of it; None where that can't be."""
    try:
        path = _nearest(folder) / f".doctor-{secrets.token_hex(8)}"
        file = path.open("xb")
    except OSError:
        return None
    try_lock(file)
    return Mark(path, file)


def look_for(path: str) -> dict[str, bool | None]:
    """On another node: whether it sees the file, and whether the lock keeps it out; a network's disk may be late."""
    deadline = time.monotonic() + _SEEN_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError), open(path, "rb") as file:
            return {"seen": True, "locked_out": try_lock(file) is False}
        time.sleep(0.2)
    return {"seen": False, "locked_out": None}


def judge(
    nodes: Sequence[Node], looks: Sequence[Mapping[str, bool | None] | None], need: Need | None
) -> Iterator[Finding]:
    """``looks``: what each node but the first made of its mark; ``need`` None where there is no plan."""
    for name in nodes[0].seen[CHECK]:
        yield from _judge_folder(name, nodes, need)
    folder = nodes[0].seen[CHECK][RUN]["folder"]
    if unseen := [node for node, look in zip(nodes, looks, strict=True) if look and not look["seen"]]:
        what = f"what {nodes[0].name} writes to {folder} is not seen: the folder is not shared between the nodes"
        remedy = "write run.dir=PATH on a disk that all nodes mount at the same place, or mount it there"
        yield Finding(CHECK, BREAKS, names(unseen), what, remedy)
    seen = [(node, look) for node, look in zip(nodes, looks, strict=True) if look and look["seen"]]
    if ignoring := [node for node, look in seen if not look["locked_out"]]:
        what = f"a lock that {nodes[0].name} holds in {folder} does not keep others out"
        remedy = (
            "mount the disk with locks (NFS: without nolock; Lustre: -o flock), or never start one run twice at once"
        )
        yield Finding(CHECK, WARNS, names(ignoring), what, remedy)


def _judge_folder(name: str, nodes: Sequence[Node], need: Need | None) -> Iterator[Finding]:
    other = f"write {name}=PATH on another disk" if name == RUN else f"write another {name}=PATH"
    seen = [(node, node.seen[CHECK][name]) for node in nodes]
    for node, found in seen:
        if found["fault"]:
            what = f"{found['folder']} can't be written ({name}): {found['fault']}"
            if found["free"] is not None and found["free"] < WRITTEN:
                what += f", {gib(found['free'])} are free"
            yield Finding(CHECK, BREAKS, node.name, what, f"remove old files there, or {other}")
    usable = [(node, found) for node, found in seen if not found["fault"]]
    for node, found in usable:
        if not found["renames"]:
            what = f"a rename in {found['folder']} ({name}) did not replace the older file"
            yield Finding(CHECK, BREAKS, node.name, what, f"checkpoints appear by renaming: {other}")
        if found["locks"] is None:
            what = f"{found['folder']} ({name}) has no locks: two runs could write to one folder unnoticed"
            remedy = f"mount it with locks (NFS: without nolock; Lustre: -o flock), or {other}"
            yield Finding(CHECK, WARNS, node.name, what, remedy)
    if name == RUN and usable and need is not None:
        yield from _judge_room(usable, need, other)
    if usable:
        usual = median_high(found["seconds"] for _, found in usable)
        for node, found in usable:
            slow = found["seconds"] > SLOWER * usual
            seconds = need.checkpoint / len(nodes) * found["seconds"] / WRITTEN if need and name == RUN else 0.0
            if slow or seconds > LONG_SECONDS:
                what = f"{found['folder']} ({name}) takes {WRITTEN / found['seconds'] / 1e6:,.1f} MB/s"
                what += f", and most nodes write {WRITTEN / usual / 1e6:,.1f}" if slow else ""
                what += f"; a checkpoint would take {seconds / 60:,.0f} minutes" if seconds > LONG_SECONDS else ""
                yield Finding(CHECK, WARNS, node.name, what, f"look at that node's mount and its network, or {other}")


def _judge_room(usable: Sequence[tuple[Node, Mapping[str, Any]]], need: Need, other: str) -> Iterator[Finding]:
    least = min(found["free"] for _, found in usable)
    short = [node for node, found in usable if found["free"] == least]
    has = f"{usable[0][1]['folder']} has {gib(least)} free"
    if least < need.checkpoint:
        what = f"{has}, and one checkpoint of this run takes {gib(need.checkpoint)}"
        yield Finding(CHECK, BREAKS, names(short), what, f"make room there, or {other}")
    elif need.kept is None or least < need.kept * need.checkpoint:
        most = "" if need.kept is None else f", and {need.kept} of them {gib(need.kept * need.checkpoint)}"
        fits = least // need.checkpoint
        what = f"{has}, and a checkpoint takes {gib(need.checkpoint)}{most}: {fits} fit, and all are kept"
        what = what if need.kept is None else what.replace(", and all are kept", "")
        remedy = (
            f"write checkpoint.keep={max(1, fits - 1)}, which leaves room for the one that is being written, or {other}"
        )
        yield Finding(CHECK, WARNS, names(short), what, remedy)
