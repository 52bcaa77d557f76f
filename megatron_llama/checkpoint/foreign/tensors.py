"""Tensors of another program's checkpoint under Hugging Face's names, read by rectangles from the source's chunks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron_llama.arch.foreign_tensor_layouts import HEADS, VOCAB_ENDS, Names, TensorPart, plain_names, whole_run
from megatron_llama.arch.hf_tp_mapping import EMBEDDING, Shape
from megatron_llama.checkpoint.rank_files import STATES
from megatron_llama.checkpoint.tensor_source import (
    WEIGHT_DTYPES,
    CorruptFile,
    Rectangles,
    Stored,
    StoredTensor,
    check_finite,
    overlap,
)
from megatron_llama.config import ConfigError, ModelConfig, Problem

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's states, by torch's names."""
WEIGHTS_ONLY = "Adam's moments (this format is read for its weights only)"
NO_SETTINGS = "settings of its model: rope_theta, rms_norm_eps and others are not compared"
_SQUARES = f"{STATES}{MOMENTS[1]}."
MASTERS = ("fp32_param", "param")
"""Megatron's names of fp32 copies of bf16 weights."""
_OTHERS = (*MOMENTS, "optimizer.", "lr_scheduler", "train_state", "dataloader", "rng_state", "rerun_state", "chained_")
_DERIVED = ("_extra_state", "inv_freq", "freqs_cis")
"""Parts of names of tensors that are no weights."""


@dataclass(frozen=True)
class SourceChunk:
    """A rectangle of a tensor, as the other program stored it."""

    offset: Shape
    size: Shape
    file: Path
    load: Callable[[], torch.Tensor]
    """Return the values, of shape ``size``. Raises CorruptFile."""


@dataclass(frozen=True)
class SourceTensor(StoredTensor):
    """A tensor of the other program."""

    chunks: Sequence[SourceChunk]


@dataclass(frozen=True)
class MappedTensor(StoredTensor):
    """A tensor under Hugging Face's name."""

    runs: Sequence[TensorPart]


@dataclass(frozen=True)
class ForeignTensors(Stored):
    """Tensors of another program, by Hugging Face's names; moments by the names in our checkpoints."""

    tensors: Mapping[str, MappedTensor]
    sources: Mapping[str, SourceTensor]

    @torch.no_grad()
    def load_into(self, targets: Mapping[str, Rectangles]) -> None:
        """Fill the rectangles of ``targets``. Loads each chunk that overlaps them once, one at a time.

        Raises CorruptFile, also if chunks are missing.
        """
        copies: dict[int, tuple[SourceChunk, list[tuple[str, Shape, torch.Tensor, tuple[slice | int, ...]]]]] = {}
        for name, rectangles in targets.items():
            for offset, target in rectangles.parts:
                values = 0
                for run in self.tensors[name].runs:
                    if (within := overlap(offset, tuple(target.shape), run.offset, run.size)) is None:
                        continue
                    for chunk in self.sources[run.key].chunks:
                        if (region := _overlap(run, chunk, within, offset, target)) is not None:
                            values += region[1].numel()
                            copies.setdefault(id(chunk), (chunk, []))[1].append((name, *region))
                if values != target.numel():
                    raise CorruptFile(f"{self.folder}: has {values} of {target.numel()} values of {name} at {offset}")
        for chunk, parts in sorted(copies.values(), key=lambda item: str(item[0].file)):
            values_there = chunk.load()
            for name, place, here, there in parts:
                part = values_there[there]
                check_finite(chunk.file, name, part, place, negative=not name.startswith(_SQUARES))
                here.copy_(part)


def _overlap(
    run: TensorPart, chunk: SourceChunk, within: tuple[Shape, Shape], offset: Shape, target: torch.Tensor
) -> tuple[Shape, torch.Tensor, tuple[slice | int, ...]] | None:
    """Return the overlap of a chunk with [low, high) ``within`` a Hugging Face tensor; None without any.

    Args:
        target: The rectangle at ``offset`` of that tensor.

    Returns:
        (offset of the overlap, its part of ``target``, its index in the chunk).
    """
    lead = len(run.lead)
    if any(not o <= i < o + n for i, o, n in zip(run.lead, chunk.offset[:lead], chunk.size[:lead], strict=True)):
        return None
    index: list[slice | int] = [i - o for i, o in zip(run.lead, chunk.offset[:lead], strict=True)]
    place, ends = list[int](), list[int]()
    for axis, (first, last) in enumerate(zip(*within, strict=True)):
        step = run.step if axis == 0 else 1
        begin, count = chunk.offset[lead + axis], chunk.size[lead + axis]
        # Element i is at start + step (i - run.offset) there.
        zero = run.start[axis] - step * run.offset[axis]
        first, last = max(first, -((zero - begin) // step)), min(last, (begin + count - 1 - zero) // step + 1)
        if first >= last:
            return None
        place.append(first)
        ends.append(last)
        index.append(slice(zero + step * first - begin, zero + step * (last - 1) - begin + 1, step))
    here = target[tuple(slice(a - o, b - o) for a, b, o in zip(place, ends, offset, strict=True))]
    return tuple(place), here, tuple(index)


@dataclass
class Foreign:
    """A checkpoint of another program, read without a config of its model."""

    format: str
    """Format, by arch/recognize_format.py."""
    folder: Path
    sources: dict[str, SourceTensor] = field(default_factory=dict)
    """Tensors by the program's names: weights, Adam's moments and others."""
    names: Callable[[ModelConfig], Names] = plain_names
    """Return the names of a model's weights in ``sources``. Raises ConfigError."""
    states: str = ""
    """Name of a state of the optimizer, with the fields ``kind`` and ``name``; "" for a format with weights only."""
    name_states: Callable[[Names], None] = lambda names: None
    """Name states that are stored by number after the weights. Raises CorruptFile if their order is another one."""
    prefix: str = ""
    """Start of the weights' names, which the names of their states may lack."""
    step: int | None = None
    """Completed steps; None: unknown."""
    updates: int | None = None
    """Updates of the optimizer; None: ``step``."""
    samples: int | None = None
    """Samples consumed; None: the format has no position in the data."""
    lr: float | None = None
    """Learning rate of the last step."""
    vocab_size: int | None = None
    """Tokens in the vocabulary, without padding; None: unknown."""
    vocab_multiple: int = 1
    """Multiple to which the rows of the embedding are padded."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Settings of the source that the checkpoint contains, by our names."""
    has_settings: bool = False
    """Whether the checkpoint contains settings of its model."""
    changes: list[tuple[str, Any, Any]] = field(default_factory=list)
    """(name in the source, value, value here) of settings that exist only in the source."""
    problems: list[Problem] = field(default_factory=list)
    """Reasons for which the source's model is not supported."""
    unresumable: list[str] = field(default_factory=list)
    """Reasons for which no run can resume from the optimizer's state, in words."""
    missing: list[str] = field(default_factory=list)
    """Parts that the checkpoint lacks, in words; without the moments."""
    without_moments: str = "Adam's moments"
    """The missing part if Adam's moments of some weights are not stored."""
    shuffled: int | None = None
    """Samples that megatron-core shuffles together: all samples of the source's run."""
    tensors: ForeignTensors = field(init=False)
    """The tensors of a model, under Hugging Face's names; set by ``open_foreign``."""

    def state_of(self, kind: str, weight: str) -> str:
        """Return the name of a weight's state."""
        whole = self.states.format(kind=kind, name=weight)
        if whole in self.sources:
            return whole
        return self.states.format(kind=kind, name=weight.removeprefix(self.prefix))

    @property
    def weights(self) -> dict[str, SourceTensor]:
        """The tensors that are weights."""
        return {key: self.sources[key] for key in weight_names(self.sources)}

    @property
    def moments(self) -> int:
        """Number of weights with all of Adam's moments."""
        names = [re.escape(self.states.format(kind=kind, name="\0")).replace("\0", ".*") for kind in MOMENTS]
        return min(sum(re.fullmatch(name, key) is not None for key in self.sources) for name in names)

    @property
    def has_moments(self) -> bool:
        """Whether Adam's moments of all weights of the model are stored."""
        weights = [name for name in self.tensors.tensors if not name.startswith(STATES)]
        return all(f"{STATES}{kind}.{name}" in self.tensors.tensors for kind in MOMENTS for name in weights)


def map_tensors(foreign: Foreign, model: ModelConfig, *, masters: bool = False) -> ForeignTensors:
    """Return the weights of ``model``, and the moments that exist.

    Args:
        masters: Read the fp32 copies of bf16 weights, if the optimizer saved them.

    Raises:
        ConfigError: The folder has missing, additional or differently shaped weights, or other dtypes than floats.
        CorruptFile: The optimizer's states have another order than the weights.
    """
    names = foreign.names(model)
    folder, sources = foreign.folder, foreign.sources
    heads = _check_tensors(foreign, names)
    foreign.name_states(names)
    tensors = {name: _mapped(runs, sources) for name, runs in names.runs.items()}
    used = {key: sources[key] for key in names.shapes}

    def find_states(kind: str, keys: Iterable[str]) -> dict[str, str] | None:
        """Return the states of weights, by weight; None if one is missing or has another shape."""
        names_of_states = {key: foreign.state_of(kind, key) for key in keys} if foreign.states else {}
        same = all(new in sources and sources[new].shape == sources[key].shape for key, new in names_of_states.items())
        return names_of_states if names_of_states and same else None

    for kind in MOMENTS:
        for name, runs in names.runs.items():
            if keys := find_states(kind, [run.key for run in runs]):
                moved = [replace(run, key=keys[run.key]) for run in runs]
                tensors[f"{STATES}{kind}.{name}"] = _mapped(moved, sources)
                used |= {new: sources[new] for new in keys.values()}
    copies = [states for kind in MASTERS if (states := find_states(kind, names.shapes))] if masters else []
    for key, new in copies[0].items() if copies else ():
        used[key] = sources[new]
    if others := [name for name, tensor in used.items() if tensor.dtype not in WEIGHT_DTYPES.values()]:
        dtype = str(used[others[0]].dtype).removeprefix("torch.")
        more = f", and {len(others) - 1} more tensors have such dtypes" if len(others) > 1 else ""
        rule = f"{others[0]} has dtype {dtype}{more}; weights are {', '.join(WEIGHT_DTYPES)}"
        raise ConfigError([Problem("model", str(folder), rule, "name a checkpoint that is not quantized")])
    if heads:
        _check_heads(folder, sources, heads, names.runs[EMBEDDING][0].key)
    return ForeignTensors(folder, tensors, used)


def _check_heads(folder: Path, sources: Mapping[str, SourceTensor], heads: Sequence[str], embedding: str) -> None:
    """Raise ConfigError if the head of a model with tied embeddings differs from the embedding."""
    table = sources[embedding]
    for head in heads:
        pair = {key: sources[key] for key in (head, embedding)}
        both = ForeignTensors(folder, {key: _mapped([whole_run(key, t.shape)], pair) for key, t in pair.items()}, pair)
        bounds = sorted({(c.offset[0], c.offset[0] + c.size[0]) for c in table.chunks}) if table.shape else []
        if pair[head].shape != table.shape or not all(
            torch.equal(both.rows(head, *span), both.rows(embedding, *span)) for span in bounds
        ):
            rule = f"model.tie_word_embeddings is true, but {head} differs from {embedding}"
            instead = "write model.tie_word_embeddings=false, to use both"
            raise ConfigError([Problem("model", str(folder), rule, instead)])


def weight_names(keys: Iterable[str]) -> list[str]:
    """Return the names that are weights: no states of the optimizer, and no values that settings define."""
    return [key for key in keys if not key.startswith(_OTHERS) and not any(part in key for part in _DERIVED)]


def _mapped(runs: Sequence[TensorPart], sources: Mapping[str, SourceTensor]) -> MappedTensor:
    ends = [[o + n for o, n in zip(run.offset, run.size, strict=True)] for run in runs]
    return MappedTensor(sources[runs[0].key].dtype, tuple(max(axis) for axis in zip(*ends, strict=True)), runs)


def _check_tensors(foreign: Foreign, names: Names) -> list[str]:
    """Return the heads that a model with tied embeddings lacks. Raises ConfigError for other differences."""
    folder, sources, vocab_multiple = foreign.folder, foreign.sources, foreign.vocab_multiple
    missing = [key for key in names.shapes if key not in sources]
    unknown = [key for key in weight_names(sources) if key not in names.shapes]
    problems = []
    if missing:
        rule = f"has no {missing[0]} ({len(missing)} of {len(names.shapes)} tensors are missing)"
        tied = all(key.endswith(VOCAB_ENDS) for key in missing) and len(missing) == 1
        instead = "write model.tie_word_embeddings=true" if tied else "name a checkpoint of this model"
        problems.append(Problem("model", str(folder), rule, instead))
    elif unknown and ("lm_head.weight" in names.runs or not all(key.endswith(HEADS) for key in unknown)):
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        rule = f"has the tensor {unknown[0]}{more}, which this model lacks"
        problems.append(Problem("model", str(folder), rule, "write the model's settings as in the source's run"))
    for key, shape in names.shapes.items():
        if key not in sources or (actual := sources[key].shape) == shape:
            continue
        instead = "write the model's settings as in the source's run"
        if key.endswith(VOCAB_ENDS) and len(actual) == len(shape) and actual[1:] == shape[1:] and actual[0] > shape[0]:
            if math.ceil(shape[0] / vocab_multiple) * vocab_multiple == actual[0]:
                continue  # padding
            instead = f"write model.vocab_size={actual[0]}"
        rule = f"{key} has shape {list(actual)}; this model has {list(shape)}"
        problems.append(Problem("model", str(folder), rule, instead))
        break
    if problems:
        raise ConfigError(problems)
    return unknown
