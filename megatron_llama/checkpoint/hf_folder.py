"""Safetensors files of other programs: a Hugging Face model folder or one file. Each rank reads only its slices.

The safetensors library checks a file's header against its size on open, and maps the file into memory: a slice loads
only its pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_llama.arch.hf_tp_mapping import EMBEDDING, hf_shapes
from megatron_llama.checkpoint.tensor_source import (
    WEIGHT_DTYPES,
    CorruptFile,
    Rectangles,
    Stored,
    StoredTensor,
    check_file_name,
    check_finite,
    read_json,
)
from megatron_llama.config import ConfigError, ModelConfig, Problem
from megatron_llama.config.hf_config import missing_weights
from megatron_llama.config.hub import INDEX, SINGLE, short_name

# Old exporters wrote these tensors; the config defines their values.
_DERIVED = ".rotary_emb.inv_freq"
_BLOCK_VALUES = 1 << 24
_MEAN_ROWS = 256


@dataclass(frozen=True)
class NamedTensor(StoredTensor):
    """A tensor in a safetensors file."""

    file: str
    """File name in the folder."""
    key: str
    """Name of the tensor in the file."""


@dataclass(frozen=True)
class SafetensorsFiles(Stored):
    """Tensors in the safetensors files of a folder."""

    folder: Path
    tensors: Mapping[str, NamedTensor]

    @torch.no_grad()
    def load_into(self, targets: Mapping[str, Rectangles]) -> None:
        """Fill the rectangles of ``targets``. Reopens the file per tensor, which frees its mapped pages."""
        for name, rectangles in targets.items():
            self._fill(self.tensors[name], rectangles)

    def _fill(self, tensor: NamedTensor, rectangles: Rectangles) -> None:
        with open_safetensors(self.folder / tensor.file) as content:
            source = content.get_slice(tensor.key)
            for offset, target in rectangles.parts:
                rows = max(0, min(len(target), source.get_shape()[0] - offset[0]))  # the others are of new tokens
                sizes = (rows, *target.shape[1:])
                values = source[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))]
                check_finite(self.folder / tensor.file, tensor.key, values, offset)
                target[:rows].copy_(values)
                if rows < len(target):
                    target[rows:].copy_(mean_row(source, slice(offset[1], offset[1] + target.shape[1])))


def mean_row(source: Any, columns: slice) -> torch.Tensor:
    """Return the mean of the rows of a safetensors slice [rows, h], fp64 [columns]: the initial row of a new token.

    transformers' ``resize_token_embeddings`` draws new rows from a normal distribution with this mean and 1e-9 times
    the covariance of the rows. Here they have no random part, so that they are equal in all layouts. Additions are
    by element and in one order, so neither the columns nor the number of threads changes a bit.
    """
    rows = source.get_shape()[0]
    sums = torch.zeros(min(rows, _MEAN_ROWS), columns.stop - columns.start, dtype=torch.float64)
    for first in range(0, rows, _MEAN_ROWS):
        block = source[first : min(first + _MEAN_ROWS, rows), columns]
        sums[: len(block)] += block
    while len(sums) > 1:
        half = len(sums) // 2
        sums = torch.cat([sums[:half] + sums[half : 2 * half], sums[2 * half :]])
    return sums[0] / rows


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a file by ``safetensors.safe_open``. Raises CorruptFile, with the file's name, for any error."""
    if path.exists() and not path.is_file():
        raise CorruptFile(f"{path}: is not a regular file")  # opening a pipe would block
    try:
        with safe_open(path, framework="pt") as content:
            yield content
    except (SafetensorError, OSError) as error:
        raise CorruptFile(f"{path}: {error}") from error


def list_tensors(path: Path) -> dict[str, NamedTensor]:
    """Return the tensors of a safetensors file from its header.

    Raises:
        ConfigError: Tensors have a dtype that no Llama has. Quantized weights (GPTQ, AWQ, bitsandbytes, FP8) have
            integer or 8-bit dtypes, whose values are no weights.
        CorruptFile: The file cannot be read.
    """
    tensors, others = {}, list[str]()
    with open_safetensors(path) as content:
        for key in content.keys():  # noqa: SIM118  no mapping
            tensor = content.get_slice(key)
            dtype = tensor.get_dtype()
            if dtype in WEIGHT_DTYPES:
                tensors[key] = NamedTensor(WEIGHT_DTYPES[dtype], tuple(tensor.get_shape()), path.name, key)
            else:
                others.append(f"{key} has dtype {dtype}")
    if others:
        more = f", and {len(others) - 1} more tensors have dtypes that no Llama has" if len(others) > 1 else ""
        rule = f"{others[0]}{more}; weights are {', '.join(WEIGHT_DTYPES)}"
        instead = "name the folder of the model before its quantization, or download the file again"
        raise ConfigError([Problem("init_from", str(path), rule, instead)])
    return tensors


def open_hf_folder(folder: Path, model: ModelConfig, *, grows: bool = False) -> SafetensorsFiles:
    """Return the tensors of ``model`` in a folder. Reads headers only.

    Args:
        grows: The model has new tokens: the folder may have fewer rows, and the others are ``mean_row``.

    Raises:
        ConfigError: The folder has missing, additional or differently shaped tensors, or other dtypes than floats.
        CorruptFile: A file cannot be read.
    """
    tensors = all_tensors(folder)
    if grows and EMBEDDING in tensors:
        rows = min(tensors[EMBEDDING].shape[0], model.vocab_size)
        stored, shapes = open_hf_folder(folder, replace(model, vocab_size=rows)), hf_shapes(model)
        return replace(stored, tensors={n: replace(t, shape=shapes[n]) for n, t in stored.tensors.items()})
    shapes = hf_shapes(model)
    missing = [name for name in shapes if name not in tensors]
    other = [name for name, shape in shapes.items() if name in tensors and tensors[name].shape != shape]
    ignored = {"lm_head.weight"} if model.tie_word_embeddings else set()
    unknown = sorted(n for n in tensors if n not in shapes and n not in ignored and not n.endswith(_DERIVED))
    problems = []
    if missing:
        rule = f"has no {missing[0]} ({len(missing)} of {len(shapes)} tensors are missing)"
        tied = missing == ["lm_head.weight"]
        instead = "write model.tie_word_embeddings=true" if tied else "name the folder of a complete Llama model"
        problems.append(Problem("init_from", str(folder), rule, instead))
    if other:
        actual, expected = list(tensors[other[0]].shape), list(shapes[other[0]])
        rule = f"{other[0]} has shape {actual}; model={model.name} expects {expected}"
        from_folder = model.name == short_name(folder)
        instead = "correct its config.json" if from_folder else "write model=from_hf to take the shape from the folder"
        problems.append(Problem("init_from", str(folder), rule, instead))
    if ignored & tensors.keys() and not missing and _differ(folder, tensors["lm_head.weight"], tensors[EMBEDDING]):
        rule = f"its config.json ties the embeddings, but lm_head.weight differs from {EMBEDDING}"
        instead = "write model.tie_word_embeddings=false, or set it in config.json, to use both as transformers does"
        problems.append(Problem("init_from", str(folder), rule, instead))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        rule = f"has the unknown tensor {unknown[0]}{more}"
        problems.append(Problem("init_from", str(folder), rule, "name the folder of a Llama model"))
    if problems:
        raise ConfigError(problems)
    return SafetensorsFiles(folder, {name: tensors[name] for name in shapes})


def _differ(folder: Path, one: NamedTensor, other: NamedTensor) -> bool:
    if one.shape != other.shape:
        return True
    with open_safetensors(folder / one.file) as first, open_safetensors(folder / other.file) as second:
        slices = first.get_slice(one.key), second.get_slice(other.key)
        rows = max(1, _BLOCK_VALUES // max(1, one.shape[-1]))
        blocks = (slice(start, start + rows) for start in range(0, one.shape[0], rows))
        return any(not torch.equal(*(values[block] for values in slices)) for block in blocks)


def all_tensors(folder: Path) -> dict[str, NamedTensor]:
    """Return all tensors of the folder's safetensors files. As in transformers, one file has precedence over an index:
    a folder that was saved twice may have both."""
    if (folder / SINGLE).exists():
        return list_tensors(folder / SINGLE)
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX)
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict):
            raise CorruptFile(f"{folder / INDEX}: has no weight_map")
        try:
            names = set(map(check_file_name, files.values()))
        except CorruptFile as error:
            raise CorruptFile(f"{folder / INDEX}: {error}") from error
        by_file = {file: list_tensors(folder / file) for file in names}
        absent = [name for name, file in files.items() if name not in by_file[file]]
        if absent:
            raise CorruptFile(f"{folder / files[absent[0]]}: has no {absent[0]}, which {INDEX} lists")
        return {name: by_file[file][name] for name, file in files.items()}
    raise ConfigError([missing_weights(folder)])
