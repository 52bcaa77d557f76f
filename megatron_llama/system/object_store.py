"""Files in object stores, by URL (s3://bucket/folder/name), through fsspec. Imports it only when a URL is used.

An object is written by one request, so it is either complete or absent; no request leaves a part behind that costs
space. Credentials come from the provider's own chain (environment, files, instance), never from a setting.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import random
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from megatron_llama.system.errors import reason_of
from megatron_llama.system.missing_packages import pip_install

_URL = re.compile(r"[a-z][a-z0-9+]*://(?P<path>.+)", re.DOTALL)
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
"""Extras of this project by the protocols that their packages serve."""
_DELAYS = (0.5, 1.0, 2.0)
"""Seconds before a failed request is sent again; fsspec's file systems have separate retries."""
THREADS = 8
"""Requests that are sent at the same time for many objects."""
_READ_BYTES = 8 << 20
"""Bytes per request of a file that is read in small pieces."""
T = TypeVar("T")


def is_url(text: str) -> bool:
    """Return whether ``text`` is the URL of an object, such as s3://bucket/name."""
    return bool(_URL.fullmatch(text))


def is_plain_url(text: str) -> bool:
    """Return whether ``text`` is a URL without user name, query and fragment, which could have credentials."""
    match = _URL.fullmatch(text)
    return match is not None and not re.search(r"[@?#]|/\.{1,2}(/|$)", match["path"])


def hide_credentials(text: str) -> str:
    """Return a text without the user names and queries of its URLs."""
    return re.sub(r"(://)[^/\s@]*@", r"\1...@", re.sub(r"(://[^\s?]*\?)[^\s,\]]+", r"\1...", text))


@dataclass(frozen=True)
class ObjectFacts:
    """Size and version of an object."""

    size: int
    """Bytes."""
    version: str
    """The store's ETag, or another text that differs after a change."""


class RemotePath:
    """A file or folder of an object store, with the part of pathlib's interface that an object store has.

    All methods that send requests raise OSError with the URL as file name, after retries of temporary faults.
    """

    def __init__(self, url: str) -> None:
        """Raises ValueError unless ``url`` has a protocol and a path, and no user name or query."""
        if not is_plain_url(url):
            raise ValueError("must be a URL without credentials, such as s3://bucket/folder")
        self.url = url.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """Last part of the path."""
        return PurePosixPath(self.url).name

    @property
    def parent(self) -> RemotePath:
        """The folder of the file."""
        return RemotePath(self.url.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        """Return another file of the same folder."""
        return self.parent / name

    def absolute(self) -> RemotePath:
        """Return itself."""
        return self

    def facts(self) -> ObjectFacts:
        """Return size and version. Raises FileNotFoundError if there is no such object."""
        info = self._retried(lambda system, path: system.info(path, refresh=True))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "is a folder", self.url)
        return _facts(info)

    def is_file(self) -> bool:
        """Return whether there is an object with this name."""
        try:
            return self.facts().size >= 0
        except FileNotFoundError:
            return False

    def read_bytes(self, start: int = 0, end: int | None = None) -> bytes:
        """Return the object's bytes from ``start`` to ``end`` (exclusive; None: to its end)."""

        def read(system: Any, path: str) -> bytes:
            content: bytes = system.cat_file(path, start=start or None, end=end)
            if end is not None and len(content) != end - start:
                raise OSError(errno.EIO, f"the store sent {len(content):,} of {end - start:,} bytes", self.url)
            return content

        return b"" if end is not None and end <= start else self._retried(read)

    def write_bytes(self, content: bytes) -> None:
        """Write or replace the object by one request, for which s3fs needs an option."""
        one_request = {"chunksize": 2 * max(len(content), 1)} if self.url.startswith("s3") else {}
        self._retried(lambda system, path: system.pipe_file(path, content, **one_request))

    def open(self) -> io.BufferedReader:
        """Open the object to read; each request reads at least 8 MiB."""
        return io.BufferedReader(_Ranges(self), _READ_BYTES)

    def files(self) -> dict[str, ObjectFacts]:
        """Return all objects below this folder, by their names relative to it."""

        def listed(system: Any, path: str) -> dict[str, ObjectFacts]:
            system.invalidate_cache()
            every = system.find(path, detail=True)
            return {name[len(path) :].lstrip("/"): _facts(info) for name, info in every.items() if name != path}

        try:
            return self._retried(listed)
        except FileNotFoundError:
            return {}

    def delete(self) -> None:
        """Delete the object if it is there."""
        with suppress(FileNotFoundError):
            self._retried(lambda system, path: system.rm_file(path))

    def delete_files(self, names: Iterable[str]) -> None:
        """Delete objects below this folder."""
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda name: (self / name).delete(), names))

    def copy_to(self, other: RemotePath) -> None:
        """Copy the object within its store."""
        self._retried(lambda system, path: system.cp_file(path, system._strip_protocol(other.url)))

    def upload(self, path: Path) -> None:
        """Write or replace the object by a local file, in parts if it is large. A kill may leave parts in the store."""
        self._retried(lambda system, remote: system.put_file(str(path), remote))

    def download(self, path: Path) -> None:
        """Write the object to a local file."""
        self._retried(lambda system, remote: system.get_file(remote, str(path)))

    def _retried(self, request: Callable[[Any, str], T]) -> T:
        try:
            system, path = _file_system(self.url)
        except (ImportError, ValueError) as error:
            raise OSError(
                errno.EPROTONOSUPPORT, (missing_package(self.url) or (reason_of(error),))[0], self.url
            ) from error
        for delay in (*_DELAYS, None):
            try:
                return request(system, path)
            except (FileNotFoundError, PermissionError) as error:
                if isinstance(error, FileNotFoundError):
                    raise FileNotFoundError(errno.ENOENT, "there is no such bucket or object", self.url) from error
                raise PermissionError(errno.EACCES, "the store denies the access", self.url) from error
            except Exception as error:  # of the file system's HTTP library
                if delay is None:
                    raise OSError(errno.EIO, reason_of(error), self.url) from error
                time.sleep(delay * random.uniform(0.5, 1))
        raise AssertionError


Location = Path | RemotePath
"""A path on this host or in an object store."""


def location(text: str) -> Location:
    """Return the path that ``text`` names. Raises ValueError for a URL with credentials."""
    return RemotePath(text) if is_url(text) else Path(text)


class _Ranges(io.RawIOBase):
    """An object as an unbuffered file."""

    def __init__(self, path: RemotePath) -> None:
        self.name, self._path = path.url, path
        self._size, self._position = path.facts().size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = (0, self._position, self._size)[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        content = self._path.read_bytes(self._position, min(self._position + len(buffer), self._size))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def end_threads() -> None:
    """End the threads of fsspec, which must not exist when this process forks; a later request starts new ones."""
    asyn = sys.modules.get("fsspec.asyn")
    if asyn is None or (loop := asyn.loop[0]) is None:
        return
    systems = tuple(sys.modules["fsspec.registry"].registry.values())
    for system in systems:
        system.clear_instance_cache()
    gc.collect()  # closes their connections
    # adlfs's finalizers keep their file system alive. A finalizer is the callback of a weak reference.
    for system in (each for each in gc.get_objects() if issubclass(type(each), systems)):
        for reference in weakref.getweakrefs(system):
            if isinstance(reference.__callback__, weakref.finalize):
                reference.__callback__()
    import asyncio

    asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    asyn.iothread[0].join()
    # join returns before OpenSSL's clean-up of the thread. A fork would copy its lock, and wait for it without end.
    while os.path.exists(f"/proc/self/task/{asyn.iothread[0].native_id}"):
        time.sleep(0.001)
    asyn.loop[0] = asyn.iothread[0] = None
    loop.close()


def missing_package(url: str) -> tuple[str, str] | None:
    """Return why the store of a URL cannot be used, and the remedy; None if it can."""
    protocol = url.partition("://")[0]
    try:
        _file_system(url)
    except ImportError:
        extra = _EXTRAS.get(protocol)
        return "needs a package that is not installed", pip_install(extra=extra) if extra else f"install {protocol}"
    except ValueError:
        return f"names the unknown protocol {protocol}", f"write one of: {', '.join(sorted(_EXTRAS))}"
    except Exception as error:  # of the file system: no credentials, a bad endpoint
        return f"cannot be opened: {reason_of(error)}", "set the provider's credentials"
    return None


def _facts(info: dict[str, Any]) -> ObjectFacts:
    version = next((info[key] for key in ("ETag", "etag", "md5Hash", "mtime", "created") if info.get(key)), "")
    return ObjectFacts(info["size"], str(version))


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system and the path in it; fsspec caches file systems by process."""
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    return system, path
