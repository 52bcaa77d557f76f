"""Atomic file writes, locks between processes, and limits on YAML files."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import filecmp
import glob
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megatron_llama.system.object_store import THREADS, Location, RemotePath, is_url

if TYPE_CHECKING:
    import yaml


_PREFIX = "megatron_llama-"
_OWNER = ".owner"
"""File in a folder of ``own_folder``, which its owner locks: device number of the run's disk, and register."""
DRAFT = ".draft"
"""Suffix of the temporary files of ``atomic_open``. A killed process leaves one behind."""


@contextlib.contextmanager
def atomic_open(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces ``path`` when the block ends; remove it if the block raises.

    If ``path`` already has the same content, it keeps its modification time. A device is written in place.

    Args:
        private: Only the user may read the file, regardless of the umask.

    Raises:
        OSError: The folder cannot be created or written, or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Processes that write the same file concurrently need different temporary files.
    draft = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}{DRAFT}")
    try:
        if path.parent == Path("/dev") or path.is_char_device():
            with open(path, "ab") as file:
                yield file
            return
        with open(draft, "wb", opener=lambda name, flags: os.open(name, flags, 0o600 if private else 0o666)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.is_file() and filecmp.cmp(draft, path, shallow=False):
            if private:
                path.chmod(0o600)
            return
        os.replace(draft, path)
        sync_folder(path.parent)
    except OSError as error:  # which names the draft, or no file if it was open
        error.filename = str(path) if str(error.filename or draft) == str(draft) else error.filename
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()


def write_atomically(path: Location, content: str | bytes, *, private: bool = False) -> None:
    """Replace ``path`` atomically by a file with this content (text in UTF-8). Raises OSError.

    Args:
        private: As in ``atomic_open``.
    """
    if isinstance(path, RemotePath):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return
    with atomic_open(path, private=private) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and sync it to disk. Raises FileExistsError if it exists, and OSError."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync ``folder``, so that new names and renames in it survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_VERSIONS = ".versions.json"
"""File of a local copy with the URL and the versions of its objects."""
_REPORTED_BYTES = 100 << 20
"""Downloads above this size are reported on stderr."""
MAX_WHOLE_BYTES = 1 << 30
"""Size limit of a file that is read at once: more than any tokenizer or manifest has, less than a host's memory."""


def open_regular(path: Location, *, follow: bool = True) -> BufferedReader:
    """Open a regular file for reading. Raises OSError, also for pipes and devices, which could block forever, and
    without ``follow`` for links."""
    if isinstance(path, RemotePath):
        return path.open()
    if not follow and path.is_symlink():
        raise OSError(errno.ELOOP, "is a link", str(path))
    more = os.O_NONBLOCK if follow else os.O_NONBLOCK | os.O_NOFOLLOW
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | more))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return file


def read_whole(path: Location, most: int = MAX_WHOLE_BYTES, *, follow: bool = True) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes. Raises OSError, without ``follow`` for links."""
    if isinstance(path, RemotePath):
        _check_size(path, path.facts().size, most)
        return path.read_bytes()
    with open_regular(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(path, size, most)
        return file.read(size)


def _check_size(path: Location, size: int, most: int) -> None:
    if size > most:
        raise OSError(errno.EFBIG, f"has {size:,} bytes; the limit is {most:,}", str(path))


def read_json(path: Location, most: int = MAX_WHOLE_BYTES, *, follow: bool = True) -> Any:
    """Return the value in a JSON file. Raises OSError, and ValueError if it is not JSON or nested too deeply."""
    try:
        return json.loads(read_whole(path, most, follow=follow))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sha256_file(path: Path) -> str:
    """Return the file's sha256 in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_size(path: Location) -> int:
    """Return a file's bytes. Raises OSError."""
    return path.facts().size if isinstance(path, RemotePath) else path.stat().st_size


def path_exists(path: str) -> bool:
    """Return whether there is a file or folder, or an object that can be read."""
    if not is_url(path):
        return os.path.exists(path)
    try:
        return RemotePath(path).is_file()
    except (OSError, ValueError):
        return False


def user_cache(name: str) -> str:
    """Return the path of a cache folder below XDG_CACHE_HOME or ~/.cache; it may not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(os.path.join("~", ".cache"))
    return os.path.join(home, "megatron_llama", name)


def mirror(remote: RemotePath, patterns: Sequence[str] = ("*",)) -> Path:
    """Return an object's copy in the user's cache, or a folder's copy with its objects but no nested folders.

    Downloads objects that the cache lacks or that have changed; other processes of the host wait for it.

    Args:
        patterns: Names of a folder's objects, as in fnmatch.

    Raises:
        FileNotFoundError: There is no such object or folder.
        OSError: The store does not answer, or the disk is full.
    """
    try:
        chosen, source = {remote.name: remote.facts()}, remote.parent
    except FileNotFoundError:
        objects, source = {name: facts for name, facts in remote.files().items() if "/" not in name}, remote
        if not objects:
            raise FileNotFoundError(errno.ENOENT, "there is no such object or folder", remote.url) from None
        chosen = {name: facts for name, facts in objects.items() if any(fnmatch(name, each) for each in patterns)}
    folder = Path(user_cache("objects")) / hashlib.sha256(remote.url.encode()).hexdigest()[:12] / remote.name
    with file_lock(folder / ".lock"):
        versions = folder / _VERSIONS
        known = read_json(versions)["versions"] if versions.exists() else {}
        missing = [n for n, f in chosen.items() if known.get(n) != f.version or not (folder / n).is_file()]
        size, free = sum(chosen[name].size for name in missing), shutil.disk_usage(folder).free
        if size > free:
            raise OSError(errno.ENOSPC, f"needs {size:,} bytes, and {free:,} are free", str(folder))
        if size > _REPORTED_BYTES:
            sys.stderr.write(f"downloading {remote} to {folder}: {size / 2**30:.1f} GiB\n")
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda name: _download(source / name, folder / name, chosen[name].size), missing))
        known |= {name: facts.version for name, facts in chosen.items()}
        write_atomically(versions, json.dumps({"url": source.url, "versions": known}))
    return folder if source == remote else folder / remote.name


def mirrored(folder: Path) -> RemotePath | None:
    """Return the folder of a store whose local copy ``folder`` is; None for other folders."""
    is_copy = folder.parent.parent == Path(user_cache("objects")) and (folder / _VERSIONS).is_file()
    return RemotePath(read_json(folder / _VERSIONS)["url"]) if is_copy else None


def _download(remote: RemotePath, path: Path, size: int) -> None:
    draft = path.with_name(f".{path.name}{DRAFT}")
    remote.download(draft)
    if (received := draft.stat().st_size) != size:
        raise OSError(errno.EIO, f"the store sent {received:,} of {size:,} bytes", remote.url)
    os.replace(draft, path)


def try_lock(file: IO[Any] | int, *, shared: bool = False) -> bool | None:
    """Try to lock an open file, or a folder by its descriptor.

    The lock lasts until ``unlock``, or until the file is closed in this process and all processes that inherited it.

    Returns:
        True if locked, False if another process holds the lock, None if the file system has no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def wait_for_lock(file: IO[Any]) -> None:
    """Lock an open file; wait until other processes release it."""
    fcntl.flock(file, fcntl.LOCK_EX)


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is created with its folder. A file system may have no locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        with contextlib.suppress(OSError):
            wait_for_lock(file)
        yield


def unlock(file: IO[Any]) -> None:
    """Release the lock of an open file in all processes that inherited it."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_UN)


def process_folder(name: str = "") -> Path:
    """Create a private temporary folder. It is removed when this process ends, not when a fork of it does."""
    folder, owner = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{name}")), os.getpid()
    lock = own_folder(folder)

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
            lock.close()

    atexit.register(remove)
    return folder


def copies_folder() -> Path:
    """Return this user's folder of copies in host memory; outside of Linux, in the folder for temporary files."""
    return Path("/dev/shm" if sys.platform == "linux" else tempfile.gettempdir(), f"{_PREFIX}{os.getuid()}")


def own_folder(folder: Path, register: str = "") -> IO[str]:
    """Keep a folder from ``remove_orphans`` while the file RUN/checkpoints/REGISTER or the returned lock exists."""
    device, file = -1, open(folder / _OWNER, "w", encoding="utf-8")
    with contextlib.suppress(OSError, IndexError):  # a URL, or none
        device = os.stat(Path(register).parents[2]).st_dev
    try_lock(file)
    file.write(f"{device} {register}")  # last: ``remove_orphans`` ignores an empty file
    file.flush()
    return file


def remove_orphans(keep: str = "") -> int:
    """Remove this user's folders whose owners have ended and whose run was deleted; return the bytes of copies.

    A run is deleted if the folder around it contains no run with these copies (a run may be renamed), and is on the
    same disk as before (a disk may be unmounted). The folder named ``keep`` stays.
    """
    freed = 0
    for folder in (*Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"), *copies_folder().glob("*")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if os.lstat(folder).st_uid != os.getuid() or folder.name == keep:
                continue
            with open(folder / _OWNER, encoding="utf-8") as file:
                device, register = file.read().split(" ", 1)
                if register:
                    runs, names = Path(register).parents[2], map(glob.escape, Path(register).parts[-2:])
                    texts = (path.read_text() for path in runs.glob("/".join(("*", *names))))
                    if os.stat(runs).st_dev != int(device) or any(folder.name in text for text in texts):
                        continue
                if try_lock(file):
                    freed += sum(path.lstat().st_blocks << 9 for path in folder.rglob("*") if register)
                    shutil.rmtree(folder, ignore_errors=True)
    return freed


class FolderTaken(OSError):
    """Another process is writing the folder."""


@contextlib.contextmanager
def locked_folder(folder: Path, *, shared: bool = False) -> Iterator[int]:
    """Exclude other processes from a folder, which is created if it is missing. Yields its descriptor.

    Args:
        shared: Only exclude processes that lock the folder without ``shared``.

    Raises:
        FolderTaken: Another process has locked it.
        OSError: The folder cannot be created.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # another process finished in between
            continue
        try:
            if try_lock(descriptor, shared=shared) is False:
                raise FolderTaken(errno.EBUSY, "another process is writing it", str(folder))
            if is_at(folder, os.fstat(descriptor)):  # else another process renamed or removed it between open and lock
                yield descriptor
                return
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Create an empty folder, locked against other processes, and remove it when the block ends.

    The block may rename it. The files of a killed process are deleted.

    Raises:
        FolderTaken: Another process uses the folder.
        OSError: The folder cannot be created.
    """
    with locked_folder(path) as lock:
        try:
            remove_contents(path)
            yield path
        finally:
            if is_at(path, os.fstat(lock)):  # not the folder of a later process
                shutil.rmtree(path, ignore_errors=True)


def is_at(path: Path, status: os.stat_result, *, follow: bool = True) -> bool:
    """Return whether ``path`` is the file or folder with this status. ``follow``: also as a link."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=follow), status)
    except FileNotFoundError:
        return False


def remove_contents(folder: Path) -> None:
    """Remove all files and folders in ``folder``."""
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Open a temporary folder that becomes ``path`` when the block ends; remove it if the block raises.

    A lock excludes other processes, and the files of a killed process are deleted. An empty folder at ``path`` is
    replaced.

    Raises:
        FolderTaken: Another process writes this folder at the same time.
        OSError: The folder cannot be created, or ``path`` has files.
    """
    with scratch_folder(path.with_name(f".{path.name}.partial")) as partial:
        check_free(path)
        yield partial
        sync_folder(partial)
        check_free(path)
        os.rename(partial, path)
        sync_folder(path.parent)


def check_free(path: Path) -> None:
    """Raise FileExistsError if ``path`` exists and is not an empty folder."""
    if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


# Limits on untrusted YAML files, checked before objects are built. Aliases share nodes, so a few hundred bytes can
# stand for billions of values ("billion laughs"). PyYAML shares such objects; OmegaConf copies each one.

MOST_BYTES = 256 << 10
MOST_VALUES = 50_000
"""Scalars, lists and mappings, after aliases are expanded."""
MOST_DEPTH = 32
"""Nested lists and mappings. Readers recurse into each level."""
_MAPPING = "tag:yaml.org,2002:map"
_WORDS = {"seq": "sequence", "str": "text", "int": "number", "float": "number"}


def check_yaml(path: Path) -> None:
    """Check that a YAML file is empty or a mapping within the limits.

    Other top-level values are rejected: OmegaConf parses a string at the top as YAML and fails without a message.

    Raises:
        ValueError: The file is too large, nested too deeply, has too many values or is not a mapping.
        OSError, yaml.YAMLError: The file cannot be read.
    """
    import yaml

    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{path} has {size:,} bytes; the limit for YAML files is {MOST_BYTES:,}")
    try:
        root = yaml.compose(read_whole(path).decode(), Loader=yaml.SafeLoader)  # libyaml crashes on deep nesting
        count = _values(root, {}, MOST_DEPTH) if root is not None else 0
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply, or contains itself") from None
    if count > MOST_VALUES:
        raise ValueError(f"{path} has {count:,} values after aliases are expanded; the limit is {MOST_VALUES:,}")
    if root is not None and root.tag != _MAPPING:
        kind = root.tag.rpartition(":")[2]
        raise ValueError(f"{path} contains a {_WORDS.get(kind, kind)} where a mapping is expected")


def _values(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Count the values of a node, itself included. A shared node counts once per use but is visited once."""
    import yaml

    if not depth:
        raise RecursionError
    if id(node) not in known:
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            parts = node.value
        elif isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_values(part, known, depth - 1) for part in parts)
    return known[id(node)]
