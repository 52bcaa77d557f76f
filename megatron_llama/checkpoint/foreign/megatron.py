"""Checkpoints of Megatron-LM, Megatron-Bridge and NeMo 2: ``torch_dist`` folders, and older files of ranks.

A torch_dist folder is a DCP folder with ``common.pt``: arguments, iteration, parameter groups. All layouts of the
source write the same tensors. Megatron-Bridge adds ``train_state.pt``, and NeMo 2 prefixes names with ``module.``.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_llama.arch.checkpoint_formats import COMMON, RANKS, TORCH_DIST, rank_folders
from megatron_llama.arch.foreign_names import MEGATRON_TOP, Names, megatron_names
from megatron_llama.arch.names import Shape
from megatron_llama.checkpoint.foreign.dcp_files import DcpFolder, open_dcp
from megatron_llama.checkpoint.foreign.tensors import (
    MOMENTS,
    Foreign,
    ForeignTensors,
    SourceChunk,
    SourceTensor,
    map_tensors,
)
from megatron_llama.checkpoint.foreign.unpickle import load_pickle
from megatron_llama.checkpoint.stored_tensors import CorruptFile
from megatron_llama.config import ConfigError, ModelConfig, Problem
from megatron_llama.system.files import check_yaml, read_whole

MASTERS = ("fp32_param", "param")
"""Names of fp32 copies of bf16 weights in the optimizer's state."""
_STATE = "optimizer.state."
_ARGUMENTS = {
    "hidden_size": "model.hidden_size",
    "num_layers": "model.num_hidden_layers",
    "ffn_hidden_size": "model.intermediate_size",
    "num_attention_heads": "model.num_attention_heads",
    "rotary_base": "model.rope_theta",
    "norm_epsilon": "model.rms_norm_eps",
    "layernorm_epsilon": "model.rms_norm_eps",
    "seed": "trainer.seed",
    "global_batch_size": "trainer.global_batch_size",
    "seq_length": "data.seq_length",
    "split": "data.split",
    "adam_eps": "optim.eps",
    "weight_decay": "optim.weight_decay",
    "clip_grad": "optim.clip",
}
"""Megatron's arguments that a resume compares, and our settings."""
RUN_CONFIG = "run_config.yaml"
_RUN_CONFIG_SECTIONS = ("optimizer", "train", "dataset", "model")
_RENAMED = {
    ("dataset", "random_seed"): "seed",
    ("dataset", "sequence_length"): "seq_length",
    ("model", "gated_linear_unit"): "swiglu",
}
"""Names in run_config.yaml that differ from Megatron-LM's arguments."""
_UNSUPPORTED = {
    "rotary_interleaved": (True, "rotates neighboring elements of a head"),
    "add_bias_linear": (True, "has biases in all matrices"),
    "swiglu": (False, "has no SwiGLU"),
    "normalization": ("LayerNorm", "has LayerNorm instead of RMSNorm"),
    "position_embedding_type": ("learned_absolute", "has learned positions instead of a rotation"),
}
"""Arguments with a value that no Llama has."""
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


def open_torch_dist(folder: Path, model: ModelConfig, *, masters: bool = False) -> Foreign:
    """Open a torch_dist folder.

    Args:
        masters: Read the fp32 copies of bf16 weights, if the optimizer saved them.

    Raises:
        ConfigError: The model differs.
        CorruptFile: The folder is damaged or malicious.
    """
    dcp = open_dcp(folder)
    common = read_common(dcp)
    prefix = _prefix(dcp.tensors)
    stacked = any(f"{prefix}decoder.layers.mlp.linear_fc2.weight" == key for key in dcp.tensors)
    names = megatron_names(model, dcp.tensors, prefix, stacked=stacked)
    moments = {kind: partial(_moment, kind, dcp.tensors, prefix) for kind in MOMENTS}
    tensors = map_tensors(folder, dcp.tensors, names, moments)
    result = Foreign(TORCH_DIST, tensors)
    describe_source(result, common, folder)
    read_train_state(result, folder)
    if masters:
        result.tensors = _with_masters(tensors, dcp.tensors, names, prefix)
    if not result.has_moments:
        kind = _sharding_type(common)
        if kind and any(".gbuf" in key or "bucket" in key or "dp_group_idx" in key for key in dcp.tensors):
            reason = f"Adam's moments are stored by buffers ({kind}), whose layout is not in the checkpoint"
            result.missing.append(f"{reason}: save with --dist-ckpt-optim-fully-reshardable")
        else:
            result.missing.append("Adam's moments")
    return result


def _prefix(keys: Collection[str]) -> str:
    """Return the text before ``embedding.word_embeddings.weight``."""
    ending = MEGATRON_TOP["model.embed_tokens.weight"]
    names = sorted((key for key in keys if key.endswith(ending) and not key.startswith("optimizer")), key=len)
    return names[0].removesuffix(ending) if names else ""


def _moment(kind: str, keys: Collection[str], prefix: str, key: str) -> str:
    """Return the name of a weight's moment."""
    whole = f"{_STATE}{kind}.{key}"
    return whole if whole in keys else f"{_STATE}{kind}.{key.removeprefix(prefix)}"


def _with_masters(
    tensors: ForeignTensors, sources: Mapping[str, SourceTensor], names: Names, prefix: str
) -> ForeignTensors:
    """Return the tensors with fp32 copies instead of bf16 weights."""
    for kind in MASTERS:
        renamed = {key: _moment(kind, sources, prefix, key) for key in names.shapes}
        if all(new in sources and sources[new].shape == sources[key].shape for key, new in renamed.items()):
            replaced = {**tensors.sources, **{key: sources[new] for key, new in renamed.items()}}
            return ForeignTensors(tensors.folder, tensors.tensors, replaced)
    return tensors


def read_common(dcp: DcpFolder) -> dict[str, Any]:
    """Return the state that all ranks share: common.pt, or an object among the tensors (megatron-core 0.19).

    Raises:
        CorruptFile: It is missing, damaged or malicious.
    """
    if (dcp.folder / COMMON).exists():
        return load_dict(dcp.folder / COMMON)
    names = [name for name in dcp.objects if name.partition("/")[0] == "common_state"]
    content = dcp.value(names[0], namespace=True) if names else None
    if not isinstance(content, list) or len(content) != 1 or not isinstance(content[0], dict):
        raise CorruptFile(f"{dcp.folder}: has neither {COMMON} nor an object common_state")
    return content[0]


def load_dict(path: Path) -> dict[str, Any]:
    content = load_pickle(path, path, namespace=True)
    if not isinstance(content, dict):
        raise CorruptFile(f"{path}: contains no dictionary")
    return content


def describe_source(result: Foreign, content: Mapping[str, Any], folder: Path) -> None:
    """Set step, position, learning rate and facts from common.pt or from a rank's file. Raises ConfigError."""
    has_arguments = isinstance(content.get("args"), argparse.Namespace)
    arguments = vars(content["args"]) if has_arguments else _read_run_config(folder)
    for name, (value, rule) in _UNSUPPORTED.items():
        if arguments.get(name) == value:
            rule = f"the source's model {rule}"
            raise ConfigError([Problem("model", str(folder), rule, "name a Llama's checkpoint")])
    for name, setting in _ARGUMENTS.items():
        if isinstance(arguments.get(name), int | float | str):
            result.facts[setting] = arguments[name]
    if result.facts.get("optim.clip") == 0:
        result.facts["optim.clip"] = None  # no clipping
    groups = arguments.get("num_query_groups") if arguments.get("group_query_attention", True) else None
    if isinstance(groups, int):
        result.facts["model.num_key_value_heads"] = groups
    betas = [arguments.get(f"adam_beta{number}") for number in (1, 2)]
    if None not in betas:
        result.facts["optim.betas"] = betas
    result.step = _integer(content.get("iteration"), content.get("global_step"))
    result.samples = _integer(arguments.get("consumed_train_samples"), *_data_module_samples(content))
    batch, iterations = arguments.get("global_batch_size"), arguments.get("train_iters")
    result.shuffled = _integer(arguments.get("train_samples"))
    if result.shuffled is None and isinstance(batch, int) and isinstance(iterations, int):
        result.shuffled = batch * iterations
    group = next(_parameter_groups(content.get("optimizer")), {})
    if isinstance(group.get("lr"), int | float):
        result.lr = float(group["lr"])
    state = _find(content.get("optimizer"), "common_step")
    result.updates = _integer(group.get("step"), state, result.step)
    if not arguments:
        result.missing.append("Megatron's arguments (args)")
    if result.samples is None:
        result.missing.append("consumed samples")


def _data_module_samples(content: Mapping[str, Any]) -> Iterator[Any]:
    """Yield consumed samples of NeMo 2's data module, whose state is stored under its class name."""
    for value in content.values():
        if isinstance(value, dict) and "consumed_samples" in value:
            yield value["consumed_samples"]


def _read_run_config(folder: Path) -> dict[str, Any]:
    """Return the settings in Megatron-Bridge's run_config.yaml, by the names of Megatron-LM's arguments."""
    path = folder / RUN_CONFIG
    if not path.is_file():
        return {}
    try:
        check_yaml(path)
        content = yaml.safe_load(read_whole(path).decode())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise CorruptFile(f"{path}: cannot be read: {str(error)[:200]}") from error
    arguments: dict[str, Any] = {}
    for section in _RUN_CONFIG_SECTIONS:
        values = content.get(section) if isinstance(content, dict) else None
        for name, value in values.items() if isinstance(values, dict) else ():
            arguments[_RENAMED.get((section, str(name)), str(name))] = value
    return arguments


def read_train_state(result: Foreign, folder: Path) -> None:
    """Set step and position from Megatron-Bridge's train_state.pt."""
    path = folder / "train_state.pt"
    if not path.is_file():
        return
    content = load_dict(path)
    step, samples = _integer(content.get("step")), _integer(content.get("consumed_train_samples"))
    result.step = result.step if step is None else step
    result.updates = result.step if result.updates is None else result.updates
    if samples is not None:
        result.samples = samples
        result.missing = [part for part in result.missing if part != "consumed samples"]


def _integer(*values: Any) -> int | None:
    """Return the first value that is an integer of at least 0, or a tensor of one."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def _parameter_groups(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameter groups in a nested optimizer state."""
    if isinstance(value, dict):
        groups = value.get("param_groups")
        if isinstance(groups, list):
            yield from (group for group in groups if isinstance(group, dict))
        for inner in value.values():
            yield from _parameter_groups(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _parameter_groups(inner)


def _find(value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        return None
    if name in value:
        return value[name]
    return next((inner for item in value.values() if (inner := _find(item, name)) is not None), None)


def _sharding_type(content: Mapping[str, Any]) -> str:
    """Return the layout of the distributed optimizer's state."""
    kind = _find(content.get("optimizer"), "param_state_sharding_type")
    return kind if isinstance(kind, str) else "a distributed optimizer's buffers"


def open_ranks(folder: Path, model: ModelConfig) -> Foreign:
    """Open Megatron's older files, ``mp_rank_00_000/model_optim_rng.pt``: weights only.

    Raises:
        ConfigError: The model differs.
        CorruptFile: A file is damaged, malicious or missing.
    """
    files = rank_folders(folder)
    tensor_ranks, stages = (1 + max(rank[axis] for rank in files) for axis in (0, 1))
    absent = [(t, p) for t in range(tensor_ranks) for p in range(stages) if (t, p) not in files]
    if absent:
        raise CorruptFile(f"{folder}: has no file of tensor-parallel rank {absent[0][0]}, stage {absent[0][1]}")
    contents = {rank: load_dict(path) for rank, path in sorted(files.items())}
    sources, first = dict[str, SourceTensor](), 0
    for stage in range(stages):
        shards = [weights_of_rank(contents[rank, stage], files[rank, stage]) for rank in range(tensor_ranks)]
        layers = {int(key.split(".")[2]) for key in shards[0] if key.startswith("decoder.layers.")}
        for key in shards[0]:
            if any(key not in shard for shard in shards):
                raise CorruptFile(f"{folder}: a tensor-parallel rank of stage {stage} has no {key}")
            name = _global_layer(key, first)
            paths = [files[rank, stage] for rank in range(tensor_ranks)]
            sources.setdefault(name, _joined(name, [shard[key] for shard in shards], paths))
        first += len(layers)
    names = megatron_names(model, sources, stacked=False)
    result = Foreign(RANKS, map_tensors(folder, sources, names, {}))
    describe_source(result, contents[0, 0], folder)
    result.missing.append("Adam's moments (this format is read for its weights only)")
    return result


def weights_of_rank(content: Mapping[str, Any], path: Path) -> dict[str, torch.Tensor]:
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
    renamed = {}
    for name, tensor in flat.items():
        for old, new in _LEGACY:
            name = name.replace(old, new)
        if not name.endswith("_extra_state"):
            renamed[name] = tensor
    if not renamed:
        raise CorruptFile(f"{path}: has no tensors under 'model'")
    return renamed


def _global_layer(key: str, first: int) -> str:
    if not key.startswith("decoder.layers."):
        return key
    _, _, number, rest = key.split(".", 3)
    return f"decoder.layers.{first + int(number)}.{rest}"


def _joined(name: str, shards: list[torch.Tensor], files: list[Path]) -> SourceTensor:
    """Return the tensor whose shards the tensor-parallel ranks hold."""
    whole, count = shards[0], len(shards)
    parts: list[tuple[Shape, torch.Tensor]]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        parts = [((0, rank * whole.shape[1]), shard) for rank, shard in enumerate(shards)]
        return _of_parts((whole.shape[0], whole.shape[1] * count), parts, files)
    if name.endswith("linear_fc1.weight"):  # each shard has its rows of gate, then of up
        half = whole.shape[0] // 2
        parts = [((rank * half, 0), shard[:half]) for rank, shard in enumerate(shards)]
        parts += [(((count + rank) * half, 0), shard[half:]) for rank, shard in enumerate(shards)]
        return _of_parts((2 * half * count, whole.shape[1]), parts, files * 2)
    if name.endswith(("linear_qkv.weight", "linear_qkv.bias", "word_embeddings.weight", "output_layer.weight")):
        others = (0,) * (whole.dim() - 1)
        parts = [((rank * whole.shape[0], *others), shard) for rank, shard in enumerate(shards)]
        return _of_parts((whole.shape[0] * count, *whole.shape[1:]), parts, files)
    return _of_parts(tuple(whole.shape), [((0,) * whole.dim(), whole)], files[:1])


def _of_parts(shape: Shape, parts: list[tuple[Shape, torch.Tensor]], files: list[Path]) -> SourceTensor:
    chunks = [
        SourceChunk(offset, tuple(part.shape), file, partial(_same, part))
        for (offset, part), file in zip(parts, files, strict=True)
    ]
    return SourceTensor(parts[0][1].dtype, shape, chunks)


def _same(values: torch.Tensor) -> torch.Tensor:
    return values


