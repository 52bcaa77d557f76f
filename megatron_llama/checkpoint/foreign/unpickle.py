"""Pickles of other programs, loaded without executing code.

torch's ``weights_only`` unpickler loads tensors and plain values. Two kinds of files contain classes also: DCP's
``.metadata`` and Megatron's arguments. Classes on the lists below are loaded; enums and settings of Megatron become
``Inert`` objects, which only store their arguments. Any other class or function is rejected, with its name.
"""

from __future__ import annotations

import argparse
import importlib
import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from megatron_llama.checkpoint.stored_tensors import CorruptFile
from megatron_llama.devices import HOST
from megatron_llama.system.files import open_regular

_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "ChunkStorageMetadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch": {"Size", "device", "strided"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}
"""Classes in a ``.metadata`` file, by module. None of them executes code when it is built."""
_DTYPES = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
_INERT = ("megatron.", "signal.", "nemo.", "lightning.", "torch.distributed.checkpoint.planner.")
"""Modules whose classes are replaced by ``Inert``: enums and settings that the import does not use."""


class Inert:
    """A value of a class that is not loaded. Stores the arguments of the class."""

    def __init__(self, *values: Any, **named: Any) -> None:
        self.values, self.named = values, named

    def __setstate__(self, state: Any) -> None:
        self.values = (state,)

    def __hash__(self) -> int:
        return id(self)


class _Restricted(pickle.Unpickler):
    """An unpickler that finds only the classes of ``_METADATA``."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class, or ``Inert``. Raises UnpicklingError for any other name."""
        if name in _METADATA.get(module, ()) or (module == "torch" and name in _DTYPES):
            return getattr(importlib.import_module(module), name)
        if f"{module}.".startswith(_INERT) and "." not in name:
            return Inert
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which can execute code")

    def persistent_load(self, pid: Any) -> Any:
        """Reject references to other objects."""
        raise pickle.UnpicklingError(f"it refers to the object {pid!r}"[:200])


def load_metadata(path: Path) -> Any:
    """Return the Metadata of a DCP folder's ``.metadata``.

    Raises:
        CorruptFile: The file is damaged, or contains other classes than DCP's.
    """
    try:
        with open_regular(path) as file:
            metadata = _Restricted(file).load()
    except OSError as error:
        raise CorruptFile(f"{path}: {error.strerror}") from error
    except pickle.UnpicklingError as error:
        raise CorruptFile(f"{path}: is rejected: {error}") from error
    except Exception as error:  # a damaged pickle raises anything
        raise CorruptFile(f"{path}: is damaged: {type(error).__name__}: {error}") from error
    for name in ("state_dict_metadata", "storage_data"):
        if not isinstance(getattr(metadata, name, None), dict):
            raise CorruptFile(f"{path}: is not the metadata of torch.distributed.checkpoint: it has no {name}")
    return metadata


def load_pickle(source: Path | bytes, label: Path, *, namespace: bool = False) -> Any:
    """Return the content of a file that torch.save wrote, by ``torch.load(weights_only=True)``. Maps files to memory.

    Args:
        source: A file, or its content.
        label: File name for messages.
        namespace: Whether argparse.Namespace and Megatron's enums may be in the file; enums become ``Inert``.

    Raises:
        CorruptFile: The file is damaged, or contains objects that can execute code.
    """
    try:
        is_archive = _is_archive(source) if isinstance(source, Path) else source.startswith(b"PK")
        mapped = is_archive and isinstance(source, Path)
        reads_names = namespace and is_archive
        names = torch.serialization.get_unsafe_globals_in_checkpoint(_opened(source)) if reads_names else []
        inert = [name for name in names if name.startswith(_INERT)]
        if rejected := sorted({*names} - {*inert, "argparse.Namespace"}):
            raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {rejected[0]}")
        allowed: list[Any] = [argparse.Namespace, *((Inert, name) for name in inert)] if namespace else []
        with torch.serialization.safe_globals(allowed):
            return torch.load(_opened(source), map_location=HOST, weights_only=True, mmap=mapped)
    except OSError as error:
        raise CorruptFile(f"{label}: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        # torch's message ends with the advice to allow the object, which would execute it.
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        content = f"{named[1]}, which can execute code" if named else "other objects than tensors and plain values"
        raise CorruptFile(f"{label}: is rejected: it contains {content}") from error
    except Exception as error:  # a damaged file raises anything
        raise CorruptFile(f"{label}: is damaged: {type(error).__name__}: {str(error)[:200]}") from error


def _opened(source: Path | bytes) -> Any:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if not source.is_file():
        raise FileNotFoundError(2, "No such file" if not source.exists() else "is not a regular file")
    return str(source)


def _is_archive(path: Path) -> bool:
    """Return whether a file has torch's zip format, which can be mapped."""
    with open_regular(path) as file:
        return file.read(2) == b"PK"
