"""Hash of a dataset's content, cached per file, without torch.

A run's files of up to WHOLE_BYTES together are hashed completely. Of larger ones, all files have the same limit. Of a
file above it, blocks of that size in total are hashed, evenly distributed from the first to the last byte: a change
between these blocks is not noticed. Of files in an object store, versions are hashed instead.

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_llama.config.data_settings import MASK_SUFFIX
from megatron_llama.system import phase
from megatron_llama.system.files import open_regular, read_json, user_cache, write_atomically
from megatron_llama.system.object_store import RemotePath, is_url
from megatron_llama.system.ulimits import usable_cores

BLOCK = 16 << 20
WHOLE_BYTES = 16 << 30
"""Bytes that a run hashes at most: half a minute at 555 MiB/s, the rate of one core."""
THREADS = 8
SETTLED_SECONDS = 2.0
"""Age of a file from which its hash is cached: a younger file may change without a new modification time."""
_REPORT_SECONDS = 10.0
_MAX_CACHE_BYTES = 1 << 16
_DIGEST_BYTES = 16
_SUFFIXES = (".bin", ".idx", MASK_SUFFIX + ".bin", MASK_SUFFIX + ".idx")


def content_facts(prefixes: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return {prefix: {key: hash}} of a run's datasets. Raises OSError.

    The key is ``content``, or ``content_<MiB>`` if this part of a file is hashed, or ``version`` for an object store.
    The part depends on the other datasets, so hashes of two runs can be compared only if their keys agree.
    """
    hashes = _hashed([prefix for prefix in prefixes if not is_url(prefix)])
    return {prefix: hashes.get(prefix) or {"version": _version_hash(prefix)} for prefix in prefixes}


def _version_hash(prefix: str) -> str:
    """Return the hash of sizes and versions of a dataset's objects."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for suffix in _SUFFIXES:
        path = RemotePath(prefix + suffix)
        if suffix in (".bin", ".idx") or path.is_file():
            facts = path.facts()
            digest.update(f"{suffix} {facts.size} {facts.version}\n".encode())
    return digest.hexdigest()


def _hashed(prefixes: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the content hashes of datasets on local disks."""
    sizes = {prefix: [path.stat().st_size for path in _files(prefix).values()] for prefix in prefixes}
    limit = WHOLE_BYTES
    while limit > 2 * BLOCK and sum(min(size, limit) for files in sizes.values() for size in files) > WHOLE_BYTES:
        limit //= 2
    part = f"content_{limit >> 20}"
    keys = {prefix: part if limit < min(max(files), WHOLE_BYTES) else "content" for prefix, files in sizes.items()}
    return {prefix: {key: content_hash(prefix, limit)} for prefix, key in keys.items()}


def _files(prefix: str) -> dict[str, Path]:
    """Return the files of a dataset by suffix: .bin and .idx, and its loss masks if it has any."""
    paths = {suffix: Path(prefix + suffix) for suffix in _SUFFIXES}
    return {suffix: path for suffix, path in paths.items() if suffix in (".bin", ".idx") or path.exists()}


def content_hash(prefix: str, limit: int | None = None) -> str:
    """Return the hash of a dataset, of at most ``limit`` bytes of each file (default WHOLE_BYTES). Raises OSError."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for suffix, path in _files(prefix).items():
        digest.update(f"{suffix} {file_hash(path, limit or WHOLE_BYTES)}\n".encode())
    return digest.hexdigest()


def file_hash(path: Path, limit: int | None = None) -> str:
    """Return the hash of a file, from the cache if the file is unchanged. Raises OSError."""
    path, limit = path.resolve(), limit or WHOLE_BYTES
    cache = Path(user_cache("hashes")) / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    with open_regular(path) as file:
        facts = _facts(file.fileno(), limit)
        if (known := _cached(cache, facts)) is not None:
            return known
        started = time.time()
        digest = _hash_blocks(file.fileno(), path, facts["size"], limit)
        unchanged = _facts(file.fileno(), limit) == facts
    if unchanged and facts["mtime_ns"] < (started - SETTLED_SECONDS) * 1e9:
        with suppress(OSError):
            write_atomically(cache, json.dumps({"path": str(path), **facts, "digest": digest}))
    return digest


def _facts(descriptor: int, limit: int) -> dict[str, int]:
    status = os.fstat(descriptor)
    return {
        "inode": status.st_ino,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "whole_bytes": limit if limit < status.st_size else WHOLE_BYTES,
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


def _blocks(size: int, limit: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) of the blocks that are hashed."""
    if size <= limit:
        return [(start, min(BLOCK, size - start)) for start in range(0, size, BLOCK)]
    count = max(2, limit // BLOCK)
    return [(number * (size - BLOCK) // (count - 1), BLOCK) for number in range(count)]


def _hash_blocks(descriptor: int, path: Path, size: int, limit: int) -> str:
    def hashed(block: tuple[int, int]) -> bytes:
        offset, count = block
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        while count and (part := os.pread(descriptor, count, offset)):  # releases the GIL, as blake2b does
            digest.update(part)
            offset, count = offset + len(part), count - len(part)
        return digest.digest()

    blocks = _blocks(size, limit)
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
