"""Files that are written whole or not at all, locks between processes, and bounds on YAML files."""
from __future__ import annotations

import contextlib
import errno
import fcntl
import filecmp
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import yaml


DRAFT = ".draft"
"""How the hidden name of a file ends that ``atomic_open`` writes; a process that is killed leaves it behind."""


@contextlib.contextmanager
def atomic_open(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for writing that replaces ``path`` when the block ends, and leaves no trace if it raises.

    A file that has the same content already is left untouched, with its modification time.

    Raises:
        OSError: the folder can't be made or written, or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Processes that write the same file at the same time must not share a draft.
    draft = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}{DRAFT}")
    try:
        with open(draft, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.is_file() and filecmp.cmp(draft, path, shallow=False):
            return
        os.replace(draft, path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces ``path`` by a file with this content (text in UTF-8), or leaves what is there. Raises OSError."""
    with atomic_open(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_synced(path: Path, content: bytes) -> None:
    """Writes a new file and returns once it is on disk. Raises FileExistsError where there is one, and OSError."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes renames and new names in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MOST_WHOLE_BYTES = 1 << 30
"""Of a file that is read as one piece: more than any tokenizer, index or manifest has, less than a machine's memory."""


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading. Raises OSError, for a pipe or device too: to open one may be to wait for ever."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return file


def read_whole(path: Path, most: int = MOST_WHOLE_BYTES) -> bytes:
    """The content of a regular file of at most ``most`` bytes. Raises OSError."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"has {size:,} bytes, and {most:,} are the most that are read", str(path))
        return file.read(size)


def read_json(path: Path, most: int = MOST_WHOLE_BYTES) -> Any:
    """The value in a JSON file. Raises OSError, and ValueError for what is no JSON or nested too deeply."""
    try:
        return json.loads(read_whole(path, most))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sha256_file(path: Path) -> str:
    """The file's sha256 in hexadecimal, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def user_cache(name: str) -> str:
    """A folder for what can be made again, below XDG_CACHE_HOME or ~/.cache; it need not exist."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(os.path.join("~", ".cache"))
    return os.path.join(home, "megatron_llama", name)


def try_lock(file: IO[Any], *, shared: bool = False) -> bool | None:
    """Locks an open file without waiting: True if locked, False if another process holds it, None if the file system
    has no locks (some network file systems; callers continue without one).

    The lock lasts until the file is closed in this process and in all that inherited it.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def wait_for_lock(file: IO[Any]) -> None:
    """Locks an open file, waiting for other processes to release it."""
    fcntl.flock(file, fcntl.LOCK_EX)


# Bounds on YAML files from strangers, before anything is built from them. Aliases share nodes, so a few hundred bytes
# can stand for billions of values ("billion laughs"). YAML's reader shares such objects; OmegaConf copies each one.

MOST_BYTES = 256 << 10
MOST_VALUES = 50_000
"""Scalars, lists and mappings, aliases written out."""
MOST_DEPTH = 32
"""Lists and mappings inside one another: whoever reads them takes a part of the stack for each."""
_MAPPING = "tag:yaml.org,2002:map"
_WORDS = {"seq": "sequence", "str": "text", "int": "number", "float": "number"}


def check_yaml(path: Path) -> None:
    """Checks that a file is a mapping, or empty, within the bounds.

    Raises:
        ValueError: it is too large, too deep, stands for too many values, or is no mapping: OmegaConf reads a text at
            the top as YAML once more, and fails without a message on what it finds there.
        OSError, yaml.YAMLError: it can't be read.
    """
    import yaml

    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{path} has {size:,} bytes; a YAML file may have {MOST_BYTES:,}")
    try:
        root = yaml.compose(read_whole(path).decode(), Loader=yaml.SafeLoader)  # libyaml crashes on deep nesting
        count = _values(root, {}, MOST_DEPTH) if root is not None else 0
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply, or holds itself") from None
    if count > MOST_VALUES:
        raise ValueError(
            f"{path} stands for {count:,} values once its aliases are written out; {MOST_VALUES:,} are allowed"
        )
    if root is not None and root.tag != _MAPPING:
        kind = root.tag.rpartition(":")[2]
        raise ValueError(f"{path} holds a {_WORDS.get(kind, kind)}, where names and their values are expected")


def _values(node: yaml.Node, known: dict[int, int], room: int) -> int:
    """Values below a node, itself included; each shared node is counted as often as it is used, but visited once."""
    import yaml

    if not room:
        raise RecursionError
    if id(node) not in known:
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            parts = node.value
        elif isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_values(part, known, room - 1) for part in parts)
    return known[id(node)]
