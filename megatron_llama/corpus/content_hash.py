"""Hash of a dataset's content, cached per file, without torch.

A file of up to WHOLE_BYTES is hashed completely. Of a larger file, blocks of WHOLE_BYTES in total are hashed, evenly
distributed from the first to the last byte: a change between these blocks is not noticed.

The cache is in the user's cache folder, so the dataset's folder may be read-only. A file is hashed again if its inode,
size, modification time or change time differ. Without a writable cache each start hashes again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_llama.config.data_settings import MASK_SUFFIX
from megatron_llama.system import phase
from megatron_llama.system.files import open_regular, read_json, user_cache, write_atomically
from megatron_llama.system.limits import usable_cores

BLOCK = 16 << 20
WHOLE_BYTES = 16 << 30
"""Largest file that is hashed completely: half a minute at 555 MiB/s, the rate of one core."""
THREADS = 8
SETTLED_SECONDS = 2.0
"""Age of a file from which its hash is cached: a younger file may change without a new modification time."""
_REPORT_SECONDS = 10.0
_MAX_CACHE_BYTES = 1 << 16
_DIGEST_BYTES = 16


def content_hash(prefix: str) -> str:
    """Return the hash of a dataset's .bin and .idx, and of its loss masks if it has any. Raises OSError."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for suffix in (".bin", ".idx", MASK_SUFFIX + ".bin", MASK_SUFFIX + ".idx"):
        path = Path(prefix + suffix)
        if suffix in (".bin", ".idx") or path.exists():
            digest.update(f"{suffix} {file_hash(path)}\n".encode())
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """Return the hash of a file, from the cache if the file is unchanged. Raises OSError."""
    path = path.resolve()
    cache = Path(user_cache("hashes")) / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    with open_regular(path) as file:
        facts = _facts(file.fileno())
        if (known := _cached(cache, facts)) is not None:
            return known
        started = time.time()
        digest = _hash_blocks(file.fileno(), path, facts["size"])
        unchanged = _facts(file.fileno()) == facts
    if unchanged and facts["mtime_ns"] < (started - SETTLED_SECONDS) * 1e9:
        with suppress(OSError):
            write_atomically(cache, json.dumps({"path": str(path), **facts, "digest": digest}))
    return digest


def _facts(descriptor: int) -> dict[str, int]:
    status = os.fstat(descriptor)
    return {
        "inode": status.st_ino,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "whole_bytes": WHOLE_BYTES,
    }


def _cached(cache: Path, facts: dict[str, int]) -> str | None:
    """Return the hash in a cache file; None if it is of another state of the file, or another user could write it."""
    try:
        for path in (cache, cache.parent):
            status = path.lstat()
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            if stat.S_ISLNK(status.st_mode):
                return None
        saved: Any = read_json(cache, _MAX_CACHE_BYTES)
    except (OSError, ValueError):
        return None
    if not isinstance(saved, dict) or any(saved.get(key) != value for key, value in facts.items()):
        return None
    digest = saved.get("digest")
    is_valid = isinstance(digest, str) and len(digest) == 2 * _DIGEST_BYTES and set(digest) <= set("0123456789abcdef")
    return digest if is_valid else None


def _blocks(size: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) of the blocks that are hashed."""
    if size <= WHOLE_BYTES:
        return [(start, min(BLOCK, size - start)) for start in range(0, size, BLOCK)]
    count = max(2, WHOLE_BYTES // BLOCK)
    return [(number * (size - BLOCK) // (count - 1), BLOCK) for number in range(count)]


def _hash_blocks(descriptor: int, path: Path, size: int) -> str:
    def hashed(block: tuple[int, int]) -> bytes:
        offset, count = block
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        while count and (part := os.pread(descriptor, count, offset)):  # releases the GIL, as blake2b does
            digest.update(part)
            offset, count = offset + len(part), count - len(part)
        return digest.digest()

    blocks = _blocks(size)
    whole = hashlib.blake2b(f"{size} ".encode(), digest_size=_DIGEST_BYTES)
    threads = min(THREADS, len(usable_cores()), max(1, len(blocks)))
    with ThreadPoolExecutor(threads, "hash") as pool:
        for digest in _with_progress(pool.map(hashed, blocks), path, size, sum(count for _, count in blocks)):
            whole.update(digest)
    return whole.hexdigest()


def _with_progress(digests: Iterator[bytes], path: Path, size: int, hashed_size: int) -> Iterator[bytes]:
    """Yield the digests; report a file that takes long on stderr."""
    begun, reported = time.monotonic(), time.monotonic()
    for number, digest in enumerate(digests, start=1):
        yield digest
        done = min(number * BLOCK, hashed_size)
        phase.advance(f"hashed {done >> 20:,} MiB of {path.name}")
        if time.monotonic() - reported > _REPORT_SECONDS:
            reported = time.monotonic()
            sample = "" if hashed_size == size else f", a sample of its {size / 2**30:,.0f} GiB"
            rate = done / 2**30 / (reported - begun)
            sys.stderr.write(f"data: hashing {path.name}, {done / hashed_size:.0%} at {rate:.1f} GiB/s{sample}\n")
