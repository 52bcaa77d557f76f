"""Blocks of objects in a store, cached on the local disk for all processes of a host.

Each version of an object has a folder in the user's cache. ``data`` is a sparse file of its size; ``map`` stores
the checksum and the time of the last use of each block. A block counts as cached if its bytes match the checksum, so
reads need no lock: after a kill, a crash or an eviction the block is fetched again.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_llama.system.files import file_lock, user_cache
from megatron_llama.system.object_store import THREADS, RemotePath

BLOCK = 64 << 10
"""Bytes of a block: a document's tokens are a few KiB, at a random position."""
_REQUEST = 8 << 20
"""Bytes that one request reads at most."""
_STRIPES = 1024
"""Locks of an object; a block's number selects one. Processes that need the same block send one request."""
_ENTRY = np.dtype([("checksum", "<u4"), ("used", "<u4")])
"""Entry of a map: crc32 of the block, 0 if it is not cached, and the time of its last use in seconds."""
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_FREED = 1 / 8
"""Share of the limit that an eviction frees."""


class _Limit:
    size = 100 << 30


def set_limit(gib: float) -> None:
    """Limit the disk space of all cached blocks of this user (``data.cache_gib``)."""
    _Limit.size = int(min(gib, 2**30) * 2**30)


class CachedObject:
    """One version of an object. Any thread and process may read it."""

    def __init__(self, remote: RemotePath) -> None:
        """Raises OSError if there is no such object, or the cache cannot be written."""
        self.remote, self.facts = remote, remote.facts()
        name = hashlib.sha256(f"{remote} {self.facts.size} {self.facts.version}".encode()).hexdigest()[:24]
        folder = _root() / f"{name}-{remote.name}"
        folder.mkdir(parents=True, exist_ok=True)
        blocks = -(-self.facts.size // BLOCK)
        self._data = _open_sized(folder / "data", self.facts.size)
        self._map = _open_sized(folder / "map", blocks * _ENTRY.itemsize)
        entries = np.memmap(self._map, _ENTRY, "r+", shape=(blocks,)) if blocks else np.zeros(0, _ENTRY)
        self._checksums, self._used = entries["checksum"], entries["used"]
        _make_room(0)  # the limit may be smaller than in earlier runs
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]

    def read(self, start: int, end: int) -> np.ndarray:
        """Return bytes ``start`` to ``end`` (exclusive), uint8.

        Raises OSError if the store does not answer, or the object has another version than at the start.
        """
        if end <= start:
            return np.zeros(0, np.uint8)
        blocks = range(start // BLOCK, -(-end // BLOCK))
        parts = {block: self._cached(block) for block in blocks}
        runs = list(_runs([block for block, part in parts.items() if part is None]))
        if len(runs) == 1:
            parts[runs[0].start] = self._fetch(runs[0])
        elif runs:
            with ThreadPoolExecutor(THREADS) as pool:
                parts.update(zip((run.start for run in runs), pool.map(self._fetch, runs), strict=True))
        content = b"".join(part for part in parts.values() if part is not None)  # a run's part is at its first block
        return np.frombuffer(content, np.uint8)[start - blocks.start * BLOCK : end - blocks.start * BLOCK]

    def _cached(self, block: int) -> bytes | None:
        checksum = int(self._checksums[block])
        if not checksum:
            return None
        content = os.pread(self._data.fileno(), BLOCK, block * BLOCK)
        if _checksum(content) != checksum:
            return None
        self._used[block] = int(time.time())
        return content

    def _fetch(self, run: range) -> bytes:
        """Return the bytes of consecutive blocks, from the store unless another process has fetched them meanwhile."""
        with self._claimed(run.start % _STRIPES):
            parts = [self._cached(block) for block in run]
            if all(part is not None for part in parts):
                return b"".join(part for part in parts if part is not None)
            content = self.remote.read_bytes(run.start * BLOCK, min(run.stop * BLOCK, self.facts.size))
            if self.remote.facts() != self.facts:
                raise OSError(errno.ESTALE, "the object has changed since the run opened it", self.remote.url)
            self._store(run, content)
            return content

    @contextmanager
    def _claimed(self, stripe: int) -> Iterator[None]:
        """Exclude other threads and, on file systems with locks, other processes from the blocks of a stripe."""
        with self._stripes[stripe]:  # a process holds a file lock for all of its threads
            with suppress(OSError):
                fcntl.lockf(self._data, fcntl.LOCK_EX, 1, stripe)
            try:
                yield
            finally:
                with suppress(OSError):
                    fcntl.lockf(self._data, fcntl.LOCK_UN, 1, stripe)

    def _store(self, run: range, content: bytes) -> None:
        """Write fetched blocks to the cache if there is space."""
        if not _make_room(len(content)):
            return
        try:
            os.pwrite(self._data.fileno(), content, run.start * BLOCK)
        except OSError as error:
            sys.stderr.write(f"data: {self.remote} is not cached in {_root()}: {error.strerror}\n")
            return
        for number, block in enumerate(run):
            self._used[block] = int(time.time())
            self._checksums[block] = _checksum(content[number * BLOCK : (number + 1) * BLOCK])


class CachedTokens:
    """Tokens of a .bin in a store, of which slices are read. A slice is a copy."""

    def __init__(self, content: CachedObject, dtype: np.dtype) -> None:
        self.dtype, self._content = dtype, content

    def __len__(self) -> int:
        return self._content.facts.size // self.dtype.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        return self._content.read(start * self.dtype.itemsize, stop * self.dtype.itemsize).view(self.dtype)


def _root() -> Path:
    return Path(user_cache("blocks"))


def _open_sized(path: Path, size: int) -> BinaryIO:
    """Open a file to read and write, and extend it to ``size`` bytes without using disk space."""
    file = open(path, "r+b", 0, opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o600))
    if os.fstat(file.fileno()).st_size < size:
        os.ftruncate(file.fileno(), size)
    return file  # type: ignore[return-value]


def _checksum(content: bytes) -> int:
    return zlib.crc32(content) or 1


def _runs(blocks: Sequence[int]) -> Iterator[range]:
    """Yield ranges of consecutive blocks, each of at most ``_REQUEST`` bytes."""
    first = 0
    for number in range(1, len(blocks) + 1):
        is_next = number < len(blocks) and blocks[number] == blocks[number - 1] + 1
        if not is_next or (number - first) * BLOCK >= _REQUEST:
            yield range(blocks[first], blocks[number - 1] + 1)
            first = number


# Evictions.


def _used_bytes() -> int:
    total = 0
    for path in _root().glob("*/data"):
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def _make_room(size: int) -> bool:
    """Evict the blocks that were not used for the longest time until ``size`` bytes fit into the limit.

    Returns False if they never fit.
    """
    if size > _Limit.size * (1 - _FREED):
        return False
    if _used_bytes() + size <= _Limit.size:
        return True
    with file_lock(_root() / ".evict"):
        excess = _used_bytes() + size - _Limit.size
        if excess > 0:
            _evict(excess + int(_Limit.size * _FREED))
    return True


def _evict(size: int) -> None:
    """Free at least ``size`` bytes, or everything."""
    maps = {path: np.fromfile(path, _ENTRY) for path in _root().glob("*/map")}
    present = {path: np.flatnonzero(entries["checksum"]) for path, entries in maps.items()}
    if not present:
        return
    owners = np.repeat(np.arange(len(maps)), [len(blocks) for blocks in present.values()])
    blocks = np.concatenate(list(present.values()))
    used = np.concatenate([maps[path]["used"][each] for path, each in present.items()])
    oldest = np.argsort(used, kind="stable")[: -(-size // BLOCK)]
    for number, path in enumerate(maps):
        evicted = np.sort(blocks[oldest[owners[oldest] == number]])
        if len(evicted):
            _drop(path, evicted)


def _drop(path: Path, blocks: np.ndarray) -> None:
    """Remove blocks of the object with this map, or all of them on a file system without sparse files."""
    with open(path, "r+b") as file, open(path.with_name("data"), "r+b") as data:
        entries = np.memmap(file, _ENTRY, "r+")
        entries["checksum"][blocks] = 0
        for run in _runs(blocks.tolist()):
            if not _punch(data.fileno(), run.start * BLOCK, len(run) * BLOCK):
                size = os.fstat(data.fileno()).st_size
                entries["checksum"][:] = 0
                os.ftruncate(data.fileno(), 0)
                os.ftruncate(data.fileno(), size)
                return


def _punch(descriptor: int, start: int, size: int) -> bool:
    """Free a range of a file; return whether the file system can."""
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)  # of Linux
    offset = ctypes.c_int64
    return fallocate is not None and fallocate(descriptor, _PUNCH_HOLE, offset(start), offset(size)) == 0
