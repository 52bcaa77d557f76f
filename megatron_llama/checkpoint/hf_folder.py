"""Other programs' safetensors files: a Hugging Face model's folder, or one file; each rank reads its own slices only.

The safetensors library reads them. It checks a file's header against its size when it opens the file, and maps the
values into memory, so that a slice touches no more of the file than its own pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_llama.arch.names import hf_shapes
from megatron_llama.checkpoint.stored_tensors import (
    DTYPES,
    CorruptFile,
    Rectangles,
    Stored,
    StoredTensor,
    check_file_name,
    check_finite,
    read_json,
)
from megatron_llama.config import ConfigError, ModelConfig, Problem
from megatron_llama.config.hf_config import download_hint

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Old exporters wrote these tensors although they follow from the config.
_DERIVED = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class NamedTensor(StoredTensor):
    """A tensor in a safetensors file."""

    file: str
    """Name of the file, in the folder."""
    key: str
    """The tensor's name there."""


@dataclass(frozen=True)
class SafetensorsFiles(Stored):
    """Tensors of a folder's safetensors files."""

    tensors: Mapping[str, NamedTensor]

    @torch.no_grad()
    def load_into(self, wanted: Mapping[str, Rectangles]) -> int:
        """Fills the rectangles, one tensor at a time: a file's mapped pages count as memory of this process, and are
        returned when the file is closed."""
        return sum(self._fill(self.tensors[name], rectangles) for name, rectangles in wanted.items())

    def _fill(self, tensor: NamedTensor, wanted: Rectangles) -> int:
        read = 0
        with open_safetensors(self.folder / tensor.file) as content:
            source = content.get_slice(tensor.key)
            for offset, target in wanted.parts:
                values = source[tuple(slice(o, o + n) for o, n in zip(offset, target.shape, strict=True))]
                check_finite(self.folder / tensor.file, tensor.key, values, offset)
                target.copy_(values)
                read += values.nbytes
        return read


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """safetensors' ``safe_open``; its errors, and the operating system's, become a CorruptFile that names the file."""
    if path.exists() and not path.is_file():
        raise CorruptFile(f"{path}: is no regular file")  # to open a pipe is to wait for its writer
    try:
        with safe_open(path, framework="pt") as content:
            yield content
    except (SafetensorError, OSError) as error:
        raise CorruptFile(f"{path}: {error}") from error


def list_tensors(path: Path) -> dict[str, NamedTensor]:
    """All tensors of a safetensors file, by its header. Raises CorruptFile."""
    found = {}
    with open_safetensors(path) as content:
        for key in content.keys():  # noqa: SIM118  no mapping
            tensor = content.get_slice(key)
            if tensor.get_dtype() not in DTYPES:
                raise CorruptFile(f"{path}: {key} has dtype {tensor.get_dtype()}, which is not supported")
            found[key] = NamedTensor(DTYPES[tensor.get_dtype()], tuple(tensor.get_shape()), path.name, key)
    return found


def open_hf_folder(folder: Path, model: ModelConfig) -> SafetensorsFiles:
    """The tensors of ``model`` in a folder. Reads headers only.

    Raises ConfigError where the folder does not hold exactly this model, and CorruptFile.
    """
    tensors = _all_tensors(folder)
    shapes = hf_shapes(model)
    missing = [name for name in shapes if name not in tensors]
    other = [name for name, shape in shapes.items() if name in tensors and tensors[name].shape != shape]
    ignored = {"lm_head.weight"} if model.tie_word_embeddings else set()
    unknown = sorted(n for n in tensors if n not in shapes and n not in ignored and not n.endswith(_DERIVED))
    problems = []
    if missing:
        rule = f"lacks {len(missing)} of the model's {len(shapes)} tensors, such as {missing[0]}"
        tied = missing == ["lm_head.weight"]
        instead = "write model.tie_word_embeddings=true" if tied else "name a folder with all of a Llama's tensors"
        problems.append(Problem("init_from", str(folder), rule, instead))
    if other:
        found, expected = list(tensors[other[0]].shape), list(shapes[other[0]])
        rule = f"{other[0]} is {found} there, and {expected} in model={model.name}"
        problems.append(
            Problem("init_from", str(folder), rule, "write model=from_hf to take the shape from the folder")
        )
    if unknown:
        rule = f"holds {unknown[0]}{' and others' if len(unknown) > 1 else ''}, which this Llama does not have"
        problems.append(Problem("init_from", str(folder), rule, "name a folder of a Llama without it"))
    if problems:
        raise ConfigError(problems)
    return SafetensorsFiles(folder, {name: tensors[name] for name in shapes})


def _all_tensors(folder: Path) -> dict[str, NamedTensor]:
    """Every tensor of the folder's safetensors files."""
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX)
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict):
            raise CorruptFile(f"{folder / INDEX}: has no weight_map")
        by_file = {file: list_tensors(folder / file) for file in set(map(check_file_name, files.values()))}
        absent = [name for name, file in files.items() if name not in by_file[file]]
        if absent:
            raise CorruptFile(f"{folder / files[absent[0]]}: does not hold {absent[0]}, which {INDEX} names")
        return {name: by_file[file][name] for name, file in files.items()}
    if (folder / SINGLE).exists():
        return list_tensors(folder / SINGLE)
    pickles = sorted(path.name for path in folder.glob("*.bin")) if folder.is_dir() else []
    rule = f"holds neither {SINGLE} nor {INDEX}"
    instead = "write the folder that holds config.json and the .safetensors files" + download_hint(str(folder))
    if pickles:
        rule += f", only {pickles[0]}: a pickle, which can run any program when it is read"
        instead = "have transformers save it again: its save_pretrained writes safetensors"
    raise ConfigError([Problem("init_from", str(folder), rule, instead)])
