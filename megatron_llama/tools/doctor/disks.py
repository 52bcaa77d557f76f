"""Checks of the run folder and the caches: writable, fast, locks, renames, shared by all nodes, enough free space."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Any

from megatron_llama.system.files import sync_folder, try_lock
from megatron_llama.system.tables import gib
from megatron_llama.tools.doctor.finding import BREAKS, WARNS, Finding, NodeState, names

CHECK = "disks"
RUN = "run.dir"
WRITTEN = 8 << 20  # bytes written to measure the speed
MAX_SECONDS = 600.0  # longest acceptable time to write one checkpoint at the measured speed
SLOW_FACTOR = 5.0  # a node that writes this many times slower than the median node is reported
_VISIBLE_SECONDS = 5.0


@dataclass(frozen=True)
class Need:
    """Disk space that the run needs in its folder."""

    checkpoint: int
    """Bytes per checkpoint."""
    retained: int | None
    """Largest number of checkpoints on disk at once, including the one being written; None: unlimited."""


def observe(folders: Mapping[str, Path]) -> dict[str, Any]:
    """Test the disk of each folder, by setting; leaves no files."""
    return {name: _examine(_nearest(path)) for name, path in folders.items()}


def _nearest(path: Path) -> Path:
    """Return the folder or its nearest existing parent."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


def _examine(folder: Path) -> dict[str, Any]:
    token = secrets.token_hex(8)
    draft, final = folder / f".doctor-{token}.draft", folder / f".doctor-{token}"
    disk: dict[str, Any] = {"folder": str(folder), "fault": None, "free": None}
    try:
        space = os.statvfs(folder)
        disk["free"] = space.f_bavail * space.f_frsize
        content = os.urandom(1 << 20)
        start = time.perf_counter()
        with draft.open("xb") as file:
            for _ in range(WRITTEN >> 20):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
            disk["seconds"] = time.perf_counter() - start
            disk["locks"] = try_lock(file)
        final.write_bytes(b"old")
        os.replace(draft, final)
        disk["renames"] = final.stat().st_size == WRITTEN and not draft.exists()
        sync_folder(folder)
    except OSError as error:
        disk["fault"] = error.strerror or str(error)
    finally:
        for path in (draft, final):
            with suppress(OSError):
                path.unlink()
    return disk


@contextmanager
def marker(folder: Path) -> Iterator[Path | None]:
    """Hold a locked file in the run folder or its nearest existing parent, for ``check_marker``; None if that fails."""
    path = _nearest(folder) / f".doctor-{secrets.token_hex(8)}"
    try:
        file = path.open("xb")
    except OSError:
        yield None
        return
    with file:
        try_lock(file)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def check_marker(path: str) -> dict[str, bool | None]:
    """On another node, test whether the file is visible and its lock works; retry, because network disks lag."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError), open(path, "rb") as file:
            return {"seen": True, "locked_out": try_lock(file) is False}
        time.sleep(0.2)
    return {"seen": False, "locked_out": None}


def judge(
    nodes: Sequence[NodeState], marker_checks: Sequence[Mapping[str, bool | None] | None], need: Need | None
) -> Iterator[Finding]:
    """Judge the disks of all nodes.

    Args:
        marker_checks: The result of ``check_marker`` per node; None for the first node.
        need: Disk space for the run; None without a plan.
    """
    for name in nodes[0].seen[CHECK]:
        yield from _judge_folder(name, nodes, need)
    folder = nodes[0].seen[CHECK][RUN]["folder"]
    if unseen := [node for node, check in zip(nodes, marker_checks, strict=True) if check and not check["seen"]]:
        message = f"files that {nodes[0].name} writes to {folder} are not visible here: the folder is not shared"
        remedy = "set run.dir=PATH to a disk that all nodes mount at the same path, or mount this disk there"
        yield Finding(CHECK, BREAKS, names(unseen), message, remedy)
    visible = [(node, check) for node, check in zip(nodes, marker_checks, strict=True) if check and check["seen"]]
    if ignoring := [node for node, check in visible if not check["locked_out"]]:
        message = f"a lock held by {nodes[0].name} in {folder} does not exclude other nodes"
        remedy = "mount the disk with locks (NFS: without nolock; Lustre: -o flock), or never start a run twice at once"
        yield Finding(CHECK, WARNS, names(ignoring), message, remedy)


def _judge_folder(name: str, nodes: Sequence[NodeState], need: Need | None) -> Iterator[Finding]:
    other = f"set {name}=PATH to another disk"
    observed = [(node, node.seen[CHECK][name]) for node in nodes]
    for node, disk in observed:
        if disk["fault"]:
            message = f"{disk['folder']} is not writable ({name}): {disk['fault']}"
            if disk["free"] is not None and disk["free"] < WRITTEN:
                message += f"; {gib(disk['free'])} free"
            yield Finding(CHECK, BREAKS, node.name, message, f"remove old files there, or {other}")
    usable = [(node, disk) for node, disk in observed if not disk["fault"]]
    for node, disk in usable:
        if not disk["renames"]:
            message = f"a rename in {disk['folder']} ({name}) did not replace the existing file"
            yield Finding(CHECK, BREAKS, node.name, message, f"checkpoints need atomic renames: {other}")
        if disk["locks"] is None:
            message = f"{disk['folder']} ({name}) has no file locks: two runs could write to one folder undetected"
            remedy = f"mount it with locks (NFS: without nolock; Lustre: -o flock), or {other}"
            yield Finding(CHECK, WARNS, node.name, message, remedy)
    if name == RUN and usable and need is not None:
        yield from _judge_free_space(usable, need, other)
    if usable:
        usual = median_high(disk["seconds"] for _, disk in usable)
        for node, disk in usable:
            slow = disk["seconds"] > SLOW_FACTOR * usual
            seconds = need.checkpoint / len(nodes) * disk["seconds"] / WRITTEN if need and name == RUN else 0.0
            if slow or seconds > MAX_SECONDS:
                message = f"{disk['folder']} ({name}) writes {WRITTEN / disk['seconds'] / 1e6:,.1f} MB/s"
                message += f"; the median node writes {WRITTEN / usual / 1e6:,.1f} MB/s" if slow else ""
                message += f"; a checkpoint would take {seconds / 60:,.0f} minutes" if seconds > MAX_SECONDS else ""
                yield Finding(CHECK, WARNS, node.name, message, f"check the mount and network of that node, or {other}")


def _judge_free_space(
    usable: Sequence[tuple[NodeState, Mapping[str, Any]]], need: Need, other: str
) -> Iterator[Finding]:
    least = min(disk["free"] for _, disk in usable)
    short = [node for node, disk in usable if disk["free"] == least]
    has = f"{usable[0][1]['folder']} has {gib(least)} free"
    if least < need.checkpoint:
        message = f"{has}, but one checkpoint of this run takes {gib(need.checkpoint)}"
        yield Finding(CHECK, BREAKS, names(short), message, f"free disk space, or {other}")
    elif need.retained is None or least < need.retained * need.checkpoint:
        most = "" if need.retained is None else f", and {need.retained} of them {gib(need.retained * need.checkpoint)}"
        fits = least // need.checkpoint
        message = f"{has}, and a checkpoint takes {gib(need.checkpoint)}{most}: {fits} fit"
        message += " and none is deleted" if need.retained is None else ""
        remedy = f"set checkpoint.keep={max(1, fits - 1)} (one more fits while it is being written), or {other}"
        yield Finding(CHECK, WARNS, names(short), message, remedy)
