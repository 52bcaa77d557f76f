"""Checkpoints of Megatron-LM, Megatron-Bridge and NeMo 2: ``torch_dist`` folders, and older files of ranks.

A torch_dist folder is a DCP folder with ``common.pt``: arguments, iteration, parameter groups. All layouts of the
source write the same tensors. Megatron-Bridge adds ``train_state.pt``, and NeMo 2 prefixes names with ``module.``.
Readers raise CorruptFile for damaged, malicious and missing files, and for shards of different shapes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_llama.arch.foreign_tensor_layouts import MEGATRON_TOP, megatron_names
from megatron_llama.arch.hf_tp_mapping import Shape
from megatron_llama.arch.recognize_format import COMMON, RANKS, TORCH_DIST, rank_folders
from megatron_llama.checkpoint.foreign.dcp_files import DcpFolder, open_dcp
from megatron_llama.checkpoint.foreign.source_settings import read_arguments, read_group, read_run_config
from megatron_llama.checkpoint.foreign.tensors import WEIGHTS_ONLY, Foreign, SourceChunk, SourceTensor
from megatron_llama.checkpoint.foreign.unpickle import check_stored, load_pickle
from megatron_llama.checkpoint.tensor_source import CorruptFile

_LAYER = re.compile(r"^decoder\.layers\.(\d{1,6})\.")
# Names in the files of Megatron-LM's legacy model classes, before megatron-core.
_LEGACY = (
    ("language_model.embedding.", "embedding."),
    ("language_model.encoder.final_norm.", "decoder.final_layernorm."),
    ("language_model.encoder.", "decoder."),
    ("language_model.output_layer.", "output_layer."),
    (".self_attention.query_key_value.", ".self_attention.linear_qkv."),
    (".self_attention.dense.", ".self_attention.linear_proj."),
    (".mlp.dense_h_to_4h.", ".mlp.linear_fc1."),
    (".mlp.dense_4h_to_h.", ".mlp.linear_fc2."),
    (".input_norm.", ".input_layernorm."),
    (".post_attention_norm.", ".pre_mlp_layernorm."),
)


def read_torch_dist(folder: Path) -> Foreign:
    """Read a torch_dist folder."""
    dcp = open_dcp(folder)
    common = read_common(dcp)
    embedding = MEGATRON_TOP["model.embed_tokens.weight"]
    embeddings = [key for key in dcp.tensors if key.endswith(embedding) and not key.startswith("optimizer")]
    prefix = min(embeddings, key=len, default=embedding).removesuffix(embedding)
    stacked = f"{prefix}decoder.layers.mlp.linear_fc2.weight" in dcp.tensors
    names = partial(megatron_names, keys=dcp.tensors, prefix=prefix, stacked=stacked)
    result = Foreign(TORCH_DIST, folder, dict(dcp.tensors), names, "optimizer.state.{kind}.{name}", prefix=prefix)
    _describe_source(result, common)
    _read_train_state(result)
    if any(".gbuf" in key or "bucket" in key or "dp_group_idx" in key for key in dcp.tensors):
        kind = _find(common.get("optimizer"), "param_state_sharding_type")
        kind = kind if isinstance(kind, str) else "a distributed optimizer's buffers"
        reason = f"Adam's moments are stored by buffers ({kind}), whose layout is not in the checkpoint"
        result.without_moments = f"{reason}: save with --dist-ckpt-optim-fully-reshardable"
    return result


def read_common(dcp: DcpFolder) -> dict[str, Any]:
    """Return the state that all ranks share: common.pt, or an object among the tensors (megatron-core 0.19)."""
    if (dcp.folder / COMMON).exists():
        return load_dict(dcp.folder / COMMON)
    names = [name for name in dcp.objects if name.partition("/")[0] == "common_state"]
    content = dcp.value(names[0], namespace=True) if names else None
    if not isinstance(content, list) or len(content) != 1 or not isinstance(content[0], dict):
        raise CorruptFile(f"{dcp.folder}: has neither {COMMON} nor an object common_state")
    return content[0]


def load_dict(path: Path) -> dict[str, Any]:
    """Return the dictionary in a file of torch.save."""
    content = load_pickle(path, path, namespace=True)
    if not isinstance(content, dict):
        raise CorruptFile(f"{path}: contains no dictionary")
    return content


def _describe_source(result: Foreign, content: Mapping[str, Any], tensor_ranks: int | None = None) -> None:
    """Set step, position, learning rate, facts and vocabulary from common.pt or from a rank's file."""
    has_arguments = isinstance(content.get("args"), argparse.Namespace)
    arguments = vars(content["args"]) if has_arguments else read_run_config(result.folder)
    read_arguments(result, arguments)
    result.step = integer(content.get("iteration"), content.get("global_step"))
    # NeMo 2 stores the state of its data module under the name of its class.
    samples = [each.get("consumed_samples") for each in content.values() if isinstance(each, dict)]
    result.samples = integer(arguments.get("consumed_train_samples"), *samples)
    batch, iterations = integer(arguments.get("global_batch_size")), integer(arguments.get("train_iters"))
    result.shuffled = integer(arguments.get("train_samples"))
    if result.shuffled is None and batch is not None and iterations is not None:
        result.shuffled = batch * iterations
    groups = list(parameter_groups(content.get("optimizer")))
    decays = ("wd_mult", "weight_decay")  # norms have a group with 0
    for group in sorted(groups, key=lambda group: 0 in [integer(group.get(name)) for name in decays]):
        read_group(result, group)
    step = groups[0].get("step") if groups else None
    result.updates = integer(step, _find(content.get("optimizer"), "common_step"), result.step)
    if result.samples is None:
        result.missing.append("consumed samples")
    ranks = integer(tensor_ranks, arguments.get("tensor_model_parallel_size")) or 1
    result.vocab_size = integer(arguments.get("vocab_size"))
    result.vocab_multiple = (integer(arguments.get("make_vocab_size_divisible_by")) or 128) * ranks


def _read_train_state(result: Foreign) -> None:
    """Set step and position from Megatron-Bridge's train_state.pt."""
    path = result.folder / "train_state.pt"
    if not path.is_file():
        return
    content = load_dict(path)
    step, samples = integer(content.get("step")), integer(content.get("consumed_train_samples"))
    result.step = result.step if step is None else step
    result.updates = result.step if result.updates is None else result.updates
    if samples is not None:
        result.samples = samples
        result.missing = [part for part in result.missing if part != "consumed samples"]


def integer(*values: Any) -> int | None:
    """Return the first value that is an integer of at least 0, or a tensor of one."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
            value = value.item()
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53:
            return value
    return None


def parameter_groups(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameter groups in a nested optimizer state."""
    if isinstance(value, dict):
        groups = value.get("param_groups")
        if isinstance(groups, list):
            yield from (group for group in groups if isinstance(group, dict))
        for inner in value.values():
            yield from parameter_groups(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from parameter_groups(inner)


def _find(value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        return None
    if name in value:
        return value[name]
    return next((inner for item in value.values() if (inner := _find(item, name)) is not None), None)


def read_ranks(folder: Path) -> Foreign:
    """Read Megatron's older files, ``mp_rank_00_000/model_optim_rng.pt``: weights only."""
    files = rank_folders(folder)
    tensor_ranks, stages = (1 + max(rank[axis] for rank in files) for axis in (0, 1))
    absent = [(t, p) for t in range(tensor_ranks) for p in range(stages) if (t, p) not in files]
    if absent:
        raise CorruptFile(f"{folder}: has no file of tensor-parallel rank {absent[0][0]}, stage {absent[0][1]}")
    contents = {rank: load_dict(path) for rank, path in sorted(files.items())}
    result, first = Foreign(RANKS, folder, without_moments=WEIGHTS_ONLY), 0
    for stage in range(stages):
        shards = [_weights_of_rank(contents[rank, stage], files[rank, stage]) for rank in range(tensor_ranks)]
        layers = {match[1] for key in shards[0] if (match := _LAYER.match(key))}
        for key in shards[0]:
            if any(key not in shard or shard[key].shape != shards[0][key].shape for shard in shards):
                rule = f"a tensor-parallel rank of stage {stage} has no {key}, or one of another shape"
                raise CorruptFile(f"{folder}: {rule}")
            match = _LAYER.match(key)
            name = f"decoder.layers.{first + int(match[1])}.{key[match.end() :]}" if match else key
            paths = [files[rank, stage] for rank in range(tensor_ranks)]
            result.sources.setdefault(name, _joined(name, [shard[key] for shard in shards], paths))
        first += len(layers)
    result.names = partial(megatron_names, keys=result.sources, stacked=False)
    _describe_source(result, contents[0, 0], tensor_ranks)
    return result


def _weights_of_rank(content: Mapping[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a rank, under megatron-core's names."""
    if "model0" in content:
        raise CorruptFile(f"{path}: has virtual pipeline stages; save it with one model chunk per rank")
    flat = dict[str, torch.Tensor]()

    def collect(value: Any, prefix: str) -> None:
        for name, item in value.items() if isinstance(value, dict) else ():
            if isinstance(item, torch.Tensor):
                flat[prefix + str(name)] = item
            else:
                collect(item, f"{prefix}{name}.")

    collect(content.get("model"), "")
    check_stored(path, flat)
    renamed = {}
    for name, tensor in flat.items():
        for old, new in _LEGACY:
            name = name.replace(old, new)
        if not name.endswith("_extra_state"):
            renamed[name] = tensor
    if not renamed:
        raise CorruptFile(f"{path}: has no tensors under 'model'")
    return renamed


def _joined(name: str, shards: list[torch.Tensor], files: list[Path]) -> SourceTensor:
    """Return the tensor whose shards Megatron's tensor-parallel ranks hold."""
    whole, count = shards[0], len(shards)
    if whole.dim() == 2 and name.endswith("linear_fc1.weight"):  # each shard has its rows of gate, then of up
        half = whole.shape[0] // 2
        parts: list[tuple[Shape, torch.Tensor]] = [((rank * half, 0), part[:half]) for rank, part in enumerate(shards)]
        parts += [(((count + rank) * half, 0), shard[half:]) for rank, shard in enumerate(shards)]
        return _of_parts((2 * half * count, whole.shape[1]), parts, files * 2)
    rows = ("linear_qkv.weight", "linear_qkv.bias", "word_embeddings.weight", "output_layer.weight")
    columns = ("linear_proj.weight", "linear_fc2.weight")
    return joined(name, shards, files, 1 if name.endswith(columns) else 0 if name.endswith(rows) else None)


def joined(name: str, shards: Sequence[torch.Tensor], files: Sequence[Path], axis: int | None) -> SourceTensor:
    """Return a tensor whose shards are consecutive along ``axis``; None: all files have the whole tensor."""
    whole = shards[0]
    if whole.dim() not in (1, 2) or (axis or 0) >= whole.dim() or any(s.shape != whole.shape for s in shards):
        raise CorruptFile(f"{files[0]}: {name} has {whole.dim()} dimensions, or another shape than in other files")
    shape = list(whole.shape)
    if axis is None:
        return _of_parts(tuple(shape), [((0,) * whole.dim(), whole)], files[:1])
    offsets = [tuple(rank * shape[axis] if d == axis else 0 for d in range(whole.dim())) for rank in range(len(shards))]
    shape[axis] *= len(shards)
    return _of_parts(tuple(shape), list(zip(offsets, shards, strict=True)), files)


def _of_parts(shape: Shape, parts: list[tuple[Shape, torch.Tensor]], files: Sequence[Path]) -> SourceTensor:
    chunks = [
        SourceChunk(offset, tuple(part.shape), file, partial(torch.Tensor.detach, part))
        for (offset, part), file in zip(parts, files, strict=True)
    ]
    return SourceTensor(parts[0][1].dtype, shape, chunks)
