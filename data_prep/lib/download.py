"""Fetching many large files: resumable, size- and hash-checked, a few at a time.

A file grows as NAME.part and gets its name when its size, and its sha256 where one is known, are right. A part goes on
where it was only while the server still has the same file (its ETag or date is noted beside the part).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_llama.system.errors import MachineError, UserError
from megatron_llama.system.files import sha256_file

PIECE = 1 << 20
TIMEOUT_SECONDS = 60.0
# A connection that breaks is tried again this often without any progress, with growing pauses.
TRIES = 5


@dataclass(frozen=True)
class Item:
    """One file to fetch."""

    url: str
    path: Path
    sha256: str | None = None


def read_text(where: str) -> str:
    """A text from a URL or a file.

    Raises:
        UserError: it is not there.
    """
    try:
        if "://" in where:
            with urllib.request.urlopen(where, timeout=TIMEOUT_SECONDS) as response:
                return str(response.read().decode("utf-8"))
        return Path(where).read_text(encoding="utf-8")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(f"can't read {where}: {getattr(error, 'reason', None) or error}") from None


def fetch_all(items: Sequence[Item], jobs: int, say: Callable[[str], None]) -> None:
    """Fetches everything that is not there yet.

    Raises:
        UserError: files that the server does not have; all others are fetched first.
        MachineError: the connection broke again and again, the disk is full, or a hash is wrong.
    """
    failed: list[Exception] = []
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = {pool.submit(_fetch, item, stop): item for item in items}
        try:
            for number, future in enumerate(concurrent.futures.as_completed(futures), start=1):
                try:
                    say(f"[{number}/{len(items)}] {futures[future].path}: {future.result()}")
                except (UserError, MachineError) as error:
                    say(f"[{number}/{len(items)}] {error}")
                    failed.append(error)
        finally:
            stop.set()
            for future in futures:
                future.cancel()
    if failed:
        kind = MachineError if any(isinstance(error, MachineError) for error in failed) else UserError
        raise kind(
            f"{len(failed)} of {len(items)} files were not fetched; the others are in place. First: {failed[0]}. "
            "The same command goes on"
        )


def _fetch(item: Item, stop: threading.Event) -> str:
    """Fetches one file; returns what happened, in words."""
    note = item.path.with_name(item.path.name + ".part.json")
    part = item.path.with_name(item.path.name + ".part")
    if item.path.exists():
        if item.sha256 and sha256_file(item.path) != item.sha256:
            raise MachineError(
                f"{item.path} is there, but its sha256 is not the listed one: remove it to fetch it again"
            )
        return "there already"
    try:
        item.path.parent.mkdir(parents=True, exist_ok=True)
        size = _fetch_part(item, part, note, stop)
        if item.sha256 and sha256_file(part) != item.sha256:
            part.unlink()
            raise MachineError(f"{item.url}: the sha256 of what came is not the listed one; the part was removed")
        os.replace(part, item.path)
        note.unlink(missing_ok=True)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise MachineError(f"{item.url}: {getattr(error, 'reason', None) or error}") from None
    except OSError as error:
        raise MachineError(f"can't write {item.path}: {error.strerror or error}") from None
    return f"{size:,} bytes" + (", sha256 right" if item.sha256 else "")


def _fetch_part(item: Item, part: Path, note: Path, stop: threading.Event) -> int:
    """Completes the part, over as many connections as it takes; returns its size."""
    tries = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            size = _one_connection(item, part, note, stop)
            if size is None or part.stat().st_size == size:
                return part.stat().st_size
            error: Exception = ConnectionError(f"the connection ended after {part.stat().st_size:,} of {size:,} bytes")
        except urllib.error.HTTPError as problem:
            if problem.code in (401, 403, 404, 410):
                raise UserError(f"{item.url}: the server answers {problem.code} {problem.reason}") from None
            error = problem
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as problem:
            error = problem
        after = part.stat().st_size if part.exists() else 0
        tries = 1 if after > before else tries + 1
        if tries >= TRIES or stop.is_set():
            raise error
        stop.wait(min(30.0, 0.2 * 2**tries))


def _one_connection(item: Item, part: Path, note: Path, stop: threading.Event) -> int | None:
    """Gets as much as one connection gives; returns the whole file's size where the server tells it."""
    have = part.stat().st_size if part.exists() else 0
    known: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError, ValueError):
        known = json.loads(note.read_bytes())
    request = urllib.request.Request(item.url)
    if have and known.get("validator"):
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", known["validator"])
        if have == known.get("size"):
            return have
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        goes_on = response.status == 206
        length = response.headers.get("Content-Length")
        size = int(length) + (have if goes_on else 0) if length is not None else None
        validator = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if not goes_on:
            note.write_text(json.dumps({"validator": validator, "size": size}))
        with open(part, "ab" if goes_on else "wb") as file:
            while piece := response.read(PIECE):
                file.write(piece)
                if stop.is_set():
                    raise ConnectionError("stopped")
    return size


def parse_sums(text: str) -> dict[str, str]:
    """A sha256sum list: file name to hash."""
    sums = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and len(words[0]) == 64:
            sums[words[1].lstrip("*").removeprefix("./")] = words[0].lower()
    return sums
