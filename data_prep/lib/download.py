"""Download of large files: parallel, resumable, with checks of size and sha256. RedPajama's layout and filters.

A download is written to NAME.part and renamed once its size, and its sha256 if known, are verified. It resumes only if
the server's ETag or date, saved in NAME.part.json, is unchanged.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_llama.config.data_settings import RAW_DATA_SUFFIXES, strip_compression
from megatron_llama.system.errors import MachineError, UserError
from megatron_llama.system.files import sha256_file, try_lock, write_atomically

CHUNK_BYTES = 1 << 20
TIMEOUT_SECONDS = 60.0
# Attempts without progress before a download fails; pauses grow exponentially.
TRIES = 5


@dataclass(frozen=True)
class DownloadItem:
    """File to download."""

    url: str
    path: Path
    sha256: str | None = None

    @property
    def part(self) -> Path:
        """File of the bytes that are downloaded so far."""
        return self.path.with_name(self.path.name + ".part")

    @property
    def note(self) -> Path:
        """JSON file with the size and the validator (ETag or date) of the version that ``part`` belongs to."""
        return self.path.with_name(self.path.name + ".part.json")


def read_text(where: str) -> str:
    """Read text from a URL or a file. Raises UserError if it is unreadable."""
    try:
        if "://" in where:
            with urllib.request.urlopen(where, timeout=TIMEOUT_SECONDS) as response:
                return str(response.read().decode("utf-8"))
        return Path(where).read_text(encoding="utf-8")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(f"cannot read {where}: {getattr(error, 'reason', None) or error}") from None


def fetch_all(items: Sequence[DownloadItem], jobs: int, report: Callable[[str], None]) -> None:
    """Download the files that do not exist yet.

    Raises:
        UserError: The server lacks some files; the others are downloaded first.
        MachineError: The connection failed repeatedly, the disk is full, or a hash is wrong.
    """
    failed: list[Exception] = []
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = {pool.submit(_fetch, item, stop): item for item in items}
        try:
            for number, future in enumerate(concurrent.futures.as_completed(futures), start=1):
                try:
                    report(f"[{number}/{len(items)}] {futures[future].path}: {future.result()}")
                except (UserError, MachineError) as error:
                    report(f"[{number}/{len(items)}] {error}")
                    failed.append(error)
        finally:
            stop.set()
            for future in futures:
                future.cancel()
    if failed:
        kind = MachineError if any(isinstance(error, MachineError) for error in failed) else UserError
        raise kind(
            f"{len(failed)} of {len(items)} downloads failed; the others are complete. First: {failed[0]}. "
            "Rerun the same command to resume"
        )


def _fetch(item: DownloadItem, stop: threading.Event) -> str:
    """Download one file; return its status."""
    if item.path.exists():
        if item.sha256 and sha256_file(item.path) != item.sha256:
            raise MachineError(f"{item.path} exists with a wrong sha256: remove it to download it again")
        return "already downloaded"
    try:
        item.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(item):
            if item.path.exists():  # another process has just finished
                return "already downloaded"
            size = _fetch_part(item, stop)
            if item.sha256 and sha256_file(item.part) != item.sha256:
                item.part.unlink()
                raise MachineError(f"{item.url}: the downloaded file has a wrong sha256 and was removed")
            os.replace(item.part, item.path)
            item.note.unlink(missing_ok=True)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise MachineError(f"{item.url}: {getattr(error, 'reason', None) or error}") from None
    except OSError as error:
        raise MachineError(f"cannot write {item.path}: {error.strerror or error}") from None
    return f"{size:,} bytes" + (", sha256 verified" if item.sha256 else "")


@contextlib.contextmanager
def _locked(item: DownloadItem) -> Iterator[None]:
    """Lock the part, so that only one process writes it. Raises MachineError."""
    with open(item.part, "ab") as lock:
        if try_lock(lock) is False:
            raise MachineError(f"{item.path}: another process is downloading it")
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                if item.part.stat().st_size == 0:
                    item.part.unlink()


def _fetch_part(item: DownloadItem, stop: threading.Event) -> int:
    """Download the part, which ``_locked`` has created, reconnecting as needed; return its size."""
    tries, had = 0, item.part.stat().st_size
    while True:
        try:
            size = _one_connection(item, stop)
            have = item.part.stat().st_size
            if size is None or have == size:
                return have
            error: Exception = ConnectionError(f"the connection ended after {have:,} of {size:,} bytes")
        except urllib.error.HTTPError as problem:
            if problem.code in (401, 403, 404, 410):
                raise UserError(f"{item.url}: HTTP status {problem.code} {problem.reason}") from None
            error = problem
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as problem:
            error = problem
        have = item.part.stat().st_size
        tries, had = 1 if have > had else tries + 1, have
        if tries >= TRIES or stop.is_set():
            raise error
        stop.wait(min(30.0, 0.2 * 2**tries))


def _one_connection(item: DownloadItem, stop: threading.Event) -> int | None:
    """Download over one connection; return the file's size if the server reports it."""
    have = item.part.stat().st_size
    known: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError, ValueError):
        known = json.loads(item.note.read_bytes())
    request = urllib.request.Request(item.url)
    if have and known.get("validator"):
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", known["validator"])
        if have == known.get("size"):
            return have
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        is_resumed = response.status == 206
        length = response.headers.get("Content-Length")
        size = int(length) + (have if is_resumed else 0) if length is not None else None
        validator = response.headers.get("ETag") or response.headers.get("Last-Modified")
        with open(item.part, "ab" if is_resumed else "wb") as file:
            if not is_resumed:  # after the part is empty: a kill must not leave another version's bytes under this note
                item.note.write_text(json.dumps({"validator": validator, "size": size}))
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                if stop.is_set():
                    raise ConnectionError("stopped")
    return size


def parse_sums(text: str) -> dict[str, str]:
    """Parse a sha256sum list to {file name: hash}."""
    sums = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and len(words[0]) == 64:
            sums[words[1].lstrip("*").removeprefix("./")] = words[0].lower()
    return sums


# RedPajama: subsets, their shares in Llama's training, and V2's quality signals.

URL_LIST = "https://data.together.xyz/redpajama-data-1T/v1.0.0/urls.txt"
# Sampling shares in percent, Llama paper (arXiv 2302.13971), table 1.
LLAMA_SHARES = {
    "common_crawl": 67.0,
    "c4": 15.0,
    "github": 4.5,
    "wikipedia": 4.5,
    "book": 4.5,
    "arxiv": 2.5,
    "stackexchange": 2.0,
}
# Other names of subsets. The book subset was withdrawn.
ALIASES = {"books": "book", "cc": "common_crawl", "commoncrawl": "common_crawl", "wiki": "wikipedia"}
V2 = "v2"


def subset_of(name: str) -> str:
    """Return the subset's canonical name."""
    lower = name.lower()
    return ALIASES.get(lower, lower)


def find_subsets(folder: str) -> dict[str, str]:
    """Map the subsets that have files to their folders; V2's documents are one subset.

    Raises UserError if ``folder`` does not exist or has no subset.
    """
    if not os.path.isdir(folder):
        raise UserError(f"--input {folder} is not a folder")
    folders = {}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if subset_of(name) in LLAMA_SHARES and os.path.isdir(path) and _has_records(path):
            folders[subset_of(name)] = path
    documents = next(Path(folder).rglob("documents"), None)
    if documents is not None and _has_records(str(documents)):
        folders[V2] = str(documents)
    if not folders:
        raise UserError(
            f"{folder} has no RedPajama subset: expected folders {', '.join(LLAMA_SHARES)}, or V2's documents"
        )
    return {name: folders[name] for name in [*LLAMA_SHARES, V2] if name in folders}


def _has_records(folder: str) -> bool:
    return any(strip_compression(name).endswith(RAW_DATA_SUFFIXES) for _, _, names in os.walk(folder) for name in names)


def shares(subsets: Sequence[str]) -> dict[str, float]:
    """Return Llama's shares of the given subsets, normalized to 1; V2 alone has 1.

    Raises UserError for V2 together with others, for which no shares are published.
    """
    if list(subsets) == [V2]:
        return {V2: 1.0}
    if V2 in subsets:
        raise UserError("no shares are published for a mix of V1 and V2: prepare them separately, or write --subsets")
    total = sum(LLAMA_SHARES[name] for name in subsets)
    return {name: LLAMA_SHARES[name] / total for name in subsets}


def write_conf(path: Path, prefixes: dict[str, str], tokenizer: str, split: str, command: str) -> None:
    """Write the config file of ``train.py data=NAME``, with NAME the file's stem.

    Args:
        prefixes: Subset to dataset prefix.
    """
    weights = shares(list(prefixes))
    lines = [
        "# Written by data_prep/redpajama.py prepare. The weights are the Llama paper's shares of the training samples",
        "# (arXiv 2302.13971, table 1), renormalized over these subsets.",
        f"name: {json.dumps(path.stem)}",
        "prefixes:",
    ]
    for name, prefix in prefixes.items():
        lines += [f"  - {weights[name]:.6f}", f"  - {json.dumps(prefix)}"]
    lines += [
        f"split: {json.dumps(split)}",
        f"tokenizer: {json.dumps(tokenizer)}",
        "seq_length: 4096",
        f"prepare: {json.dumps(command)}",
    ]
    write_atomically(path, "\n".join(lines) + "\n")
