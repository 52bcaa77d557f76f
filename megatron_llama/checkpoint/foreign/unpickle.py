"""Reader of untrusted pickles: nothing in them is executed, and their cost is bounded before anything is built.

``_Scanner`` is Python's own unpickler with limits: classes become ``Inert`` objects, which only store their arguments,
and unknown names are rejected. DCP's ``.metadata`` is read by it alone. Files of torch.save are scanned by it, and only
then loaded by torch's ``weights_only`` unpickler, which has no limits.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_llama.arch.foreign_tensor_layouts import VOCAB_ENDS
from megatron_llama.arch.hf_tp_mapping import EMBEDDING
from megatron_llama.checkpoint.tensor_source import CorruptFile
from megatron_llama.devices import HOST
from megatron_llama.system.files import open_regular

MOST_BYTES = 1_000_000_000
"""Size of a pickle, whose opcodes have a byte or more each. A chunk of a tensor takes about 150 bytes in ``.metadata``:
405B with moments on 1,024 ranks has 3.5 million chunks."""
MOST_DEPTH = 64
"""Nested containers."""
MOST_SHARING = 100
"""Values of a pickle per container, if shared containers are counted at each use. Readers visit each use."""

_DTYPES = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
_METADATA = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(\w+Metadata|MetadataIndex|StorageMeta|TensorProperties|_MEM_\w+)"
    r"|torch\.distributed\.checkpoint\.filesystem\._StorageInfo|torch\.serialization\._get_layout|torch\.(device|strided)"
    r"|torch\.distributed\.checkpoint\.metadata\.Metadata|torch\.distributed\.checkpoint\.planner\..*"
    r"|torch\.distributed\._shard\.sharded_tensor\.metadata\.(TensorProperties|MEM_FORMAT_ENCODING)"
    r"|pathlib\.(Path|PosixPath|PurePosixPath)|pathlib\._local\.PosixPath"
)
_TORCH = re.compile(
    r"torch\.(\w+Storage|storage\.\w+Storage|device|_utils\._rebuild_(tensor|tensor_v2|parameter)|nn\.parameter\.Parameter)"
)
_SETTINGS = re.compile(r"(megatron|deepspeed|signal|nemo|lightning|numpy|torch\.distributed\.checkpoint\.planner)\..*")
"""Classes in ``.metadata``; in files of torch.save; enums, settings and random states of other programs."""
_NAMESPACE = re.compile(r"argparse\.Namespace")
_ITEM_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2, "ComplexFloat": 8}
"""Bytes per value of torch's storages; one for the others."""


class Inert:
    """A value of a class that is not loaded. Stores the arguments and the state of the class."""

    state: Any = None

    def __new__(cls, *values: Any, **named: Any) -> Inert:
        """Store the arguments."""
        self = super().__new__(cls)
        self.__dict__.update(values=values, named=named)
        return self

    def __init__(self, *values: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(name)


class _Mapping(dict):
    """OrderedDict or defaultdict, whose items follow as separate opcodes."""

    def __init__(self, *values: Any) -> None:
        if any(isinstance(value, list | tuple | dict) for value in values):
            raise pickle.UnpicklingError("it builds a dictionary from a list")
        super().__init__()


def _new_set(values: list[Any]) -> set[Any]:
    return set(filter(_check_key, values))


def _check_key(key: Any) -> bool:
    """Reject nested tuples as keys: their hashes take exponential time if parts are shared."""
    items = key if isinstance(key, tuple) else (key,)
    if len(items) > MOST_DEPTH or any(isinstance(item, tuple | _Mapping) for item in items):
        raise pickle.UnpicklingError("it has a nested key")
    return True


def _typed(build: Any, kind: Any, arguments: Any, state: Any) -> list[Any]:
    """Return a tensor and its attributes: ZeRO 3 sets ``ds_id``. Others could replace the tensor's methods."""
    is_plain = (
        getattr(build, "__name__", "") == "_rebuild_tensor_v2" and kind == "torch.Tensor" and isinstance(state, dict)
    )
    if not is_plain or not all(isinstance(name, str) and name.startswith("ds_") for name in state):
        raise pickle.UnpicklingError("it contains a tensor with unknown attributes")
    return [build(*arguments), state]


_PLAIN: dict[str, Any] = {
    "torch.Tensor": "torch.Tensor",  # a text, which nothing can call
    "torch._tensor._rebuild_from_type_v2": _typed,
    "torch.Size": tuple,
    "collections.OrderedDict": _Mapping,
    "collections.defaultdict": _Mapping,
    "builtins.set": _new_set,
    "__builtin__.set": _new_set,
    "_codecs.encode": Inert,
}
"""Names of plain values."""


class _Scanner(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """An unpickler that builds plain values, and ``Inert`` objects of permitted classes."""

    stack: list[Any]

    def __init__(self, file: BinaryIO, permitted: tuple[re.Pattern[str], ...]) -> None:
        super().__init__(file, encoding="utf-8")
        self.permitted = permitted
        self.classes: dict[str, type[Inert]] = {}
        self.storages: dict[str, int] = {}
        """Bytes of each storage."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a builder of plain values, or a subclass of ``Inert``. Raises UnpicklingError for unknown names."""
        full = f"{module}.{name}"
        if module == "torch" and name in _DTYPES:
            return getattr(torch, name)
        if full in _PLAIN:
            return _PLAIN[full]
        if any(pattern.fullmatch(full) for pattern in self.permitted):
            return self.classes.setdefault(full, type(name, (Inert,), {}))
        effect = "an unknown kind of tensor" if full.startswith("torch._utils._rebuild_") else "which can execute code"
        raise pickle.UnpicklingError(f"it contains {full}, {effect}")

    def persistent_load(self, pid: Any) -> Any:
        """Record the size of a storage. Raises UnpicklingError for other references."""
        try:
            kind, storage, key, _, count = pid[:5]
            name = storage.__name__.removesuffix("Storage")
        except (TypeError, ValueError, AttributeError):
            kind, name = None, ""
        if kind != "storage" or not isinstance(key, str) or type(count) is not int or count < 0:
            raise pickle.UnpicklingError("it refers to an unknown object")
        self.storages[key] = max(
            self.storages.get(key, 0), count * _ITEM_BYTES.get(name, 16 if "Complex" in name else 1)
        )
        return Inert(key)


def _reject(_: _Scanner) -> None:
    raise pickle.UnpicklingError("it contains an opcode that neither torch.save nor DCP writes")


def _set_items(reader: _Scanner) -> None:
    for key in reader.stack[::2]:
        _check_key(key)
    pickle._Unpickler.load_setitems(reader)  # type: ignore[attr-defined]


def _set_item(reader: _Scanner) -> None:
    _check_key(reader.stack[-2])
    pickle._Unpickler.load_setitem(reader)  # type: ignore[attr-defined]


def _dispatch() -> dict[int, Any]:
    """Return the opcodes that are read. Omitted ones allocate by a stated size, or build sets, buffers or classes."""
    omitted = {"BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER", "EXT1", "EXT2", "EXT4", "PERSID", "INST", "OBJ", "LONG4"}
    omitted |= {"EMPTY_SET", "ADDITEMS", "FROZENSET", "DICT"}
    opcodes: dict[int, Any] = dict.fromkeys(range(256), _reject) | pickle._Unpickler.dispatch  # type: ignore[attr-defined]
    opcodes |= {getattr(pickle, name)[0]: _reject for name in omitted}
    return opcodes | {pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items}


_Scanner.dispatch = _dispatch()


def _check_size(root: Any) -> None:
    """Raise UnpicklingError if values are nested too deeply, contain themselves or are shared too often."""
    known: dict[int, tuple[int, int] | None] = {}
    stored = 0

    def measure(value: Any, depth: int) -> tuple[int, int]:
        """Return (values, height) of a value, each shared container counted at each use."""
        nonlocal stored
        parts = _parts(value)
        if parts is None:
            return 1, 0
        if id(value) in known:
            if (size := known[id(value)]) is None:
                raise pickle.UnpicklingError("it contains itself")
            return size
        known[id(value)] = None
        sizes = [measure(part, depth - 1) for part in parts] if depth else []
        height = 1 + max((size[1] for size in sizes), default=0)
        if height > MOST_DEPTH or not depth:
            raise pickle.UnpicklingError(f"it has more than {MOST_DEPTH} nested values")
        stored += len(parts)
        size = known[id(value)] = 1 + sum(size[0] for size in sizes), height
        return size

    values, _ = measure(root, MOST_DEPTH)
    if values > MOST_SHARING * (stored + MOST_DEPTH):
        raise pickle.UnpicklingError(f"it stands for {values:,} values")


def _parts(value: Any) -> list[Any] | None:
    """Return the values in a container; None for other values."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set):
        return list(value)
    return [*value.values, *value.named.values(), value.state] if isinstance(value, Inert) else None


def _scan(file: BinaryIO, size: int, permitted: tuple[re.Pattern[str], ...]) -> tuple[Any, _Scanner]:
    """Return the plain content of a pickle, and its scanner. Raises UnpicklingError for hostile or damaged ones."""
    if size > MOST_BYTES:
        raise pickle.UnpicklingError(f"its pickle has more than {MOST_BYTES:,} bytes")
    scanner = _Scanner(file, permitted)
    try:
        content = scanner.load()
        _check_size(content)
    except (pickle.UnpicklingError, OSError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"{type(error).__name__}: {str(error)[:200]}") from error
    return content, scanner


@contextmanager
def _named(label: Path) -> Iterator[None]:
    """Turn the errors of a reader into CorruptFile, which names the file."""
    try:
        yield
    except OSError as error:
        raise CorruptFile(f"{label}: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        # torch's message ends with the advice to allow the object, which would execute it.
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it contains {named[1]}, which can execute code" if named else str(error)[:200]
        raise CorruptFile(f"{label}: is rejected: {reason}") from error
    except Exception as error:  # a damaged file raises anything
        raise CorruptFile(f"{label}: is damaged: {type(error).__name__}: {str(error)[:200]}") from error


def load_metadata(path: Path) -> Any:
    """Return the Metadata of a DCP folder's ``.metadata``, as ``Inert`` objects.

    Raises:
        CorruptFile: The file is damaged or hostile, or contains other classes than DCP's.
    """
    with _named(path), open_regular(path) as file:
        metadata, _ = _scan(file, os.fstat(file.fileno()).st_size, (_METADATA,))
    for name in ("state_dict_metadata", "storage_data"):
        if not isinstance(getattr(metadata, name, None), dict):
            raise CorruptFile(f"{path}: is not the metadata of torch.distributed.checkpoint: it has no {name}")
    return metadata


def load_pickle(source: Path | bytes, label: Path, *, namespace: bool = False) -> Any:
    """Return the content of a file that torch.save wrote, by ``torch.load(weights_only=True)``. Maps files to memory.

    Args:
        source: A file, or its content.
        label: File name for messages.
        namespace: Whether argparse.Namespace and other programs' classes may be in the file; these become ``Inert``.

    Raises:
        CorruptFile: The file is damaged or hostile, or contains objects that can execute code.
    """
    with _named(label), open_regular(source) if isinstance(source, Path) else io.BytesIO(source) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        is_archive = file.read(2) == b"PK"
        file.seek(0)
        permitted = (_TORCH, _SETTINGS, _NAMESPACE) if namespace else (_TORCH,)
        classes = _scan_archive(file, size, permitted) if is_archive else _scan_legacy(file, size, permitted)
        allowed: list[Any] = [(Inert, name) for name in classes if _SETTINGS.fullmatch(name)]
        allowed += [argparse.Namespace] if namespace else []
        file.seek(0)
        mapped = is_archive and isinstance(source, Path)
        with _only(allowed):
            return torch.load(str(source) if mapped else file, map_location=HOST, weights_only=True, mmap=mapped)


@contextmanager
def _only(allowed: list[Any]) -> Iterator[None]:
    """Let torch load only these classes, not the ones that other packages, such as megatron-core, allow."""
    before = list(torch.serialization.get_safe_globals())
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(allowed)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _scan_archive(file: BinaryIO, size: int, permitted: tuple[re.Pattern[str], ...]) -> Collection[str]:
    """Check torch's zip archive; return the names of its classes. Raises UnpicklingError or another exception."""
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        if len({name.lower() for name in entries}) != len(archive.infolist()):
            raise pickle.UnpicklingError("it has two entries of one name")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
            raise pickle.UnpicklingError("it is compressed, which torch.save never does")
        if sum(entry.file_size for entry in entries.values()) > size:
            raise pickle.UnpicklingError("its entries overlap")
        (name,) = [name for name in entries if name.partition("/")[2] == "data.pkl"]
        with archive.open(name) as content:
            _, scanner = _scan(content, entries[name].file_size, permitted)  # type: ignore[arg-type]
    folder = name.removesuffix("data.pkl")
    for key, length in scanner.storages.items():
        if entries[f"{folder}data/{key}"].file_size < length:
            raise pickle.UnpicklingError(f"its storage {key!r:.40} has fewer than {length} bytes")
    return scanner.classes


def _scan_legacy(file: BinaryIO, size: int, permitted: tuple[re.Pattern[str], ...]) -> Collection[str]:
    """Check a file of torch before 1.6, five pickles and the storages; return the names of its classes."""
    scans = [_scan(file, min(size, MOST_BYTES), permitted) for _ in range(5)]  # the storages follow
    _, scanner = scans[3]
    if sum(scanner.storages.values()) > size:
        raise pickle.UnpicklingError("its storages exceed the file")
    return scanner.classes


def check_stored(where: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CorruptFile if tensors of a file have more values than bytes, or share bytes as no tied head does."""
    spans = []
    for name, values in tensors.items():
        if values.layout != torch.strided or values.is_meta or values.is_quantized:
            raise CorruptFile(f"{where}: {name} is no plain tensor")
        dense = 1
        for stride, count in sorted(zip(values.stride(), values.shape, strict=True)):
            if count > 1 and stride < dense:
                raise CorruptFile(f"{where}: {name} has several values in the same bytes")
            dense = stride * count if count > 1 else dense
        if values.numel():
            start = values.data_ptr()
            spans.append((start, start + values.nbytes, name))
    spans.sort()
    for (first, end, name), (start, last, other) in pairwise(spans):
        ends = (EMBEDDING, *VOCAB_ENDS)
        tied = (first, end) == (start, last) and name.endswith(ends) and other.endswith(ends)
        if start < end and not (tied and tensors[name].stride() == tensors[other].stride()):
            raise CorruptFile(f"{where}: {name} and {other} are in the same bytes")
