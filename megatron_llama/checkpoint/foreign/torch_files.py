"""Checkpoints in files of torch.save: Meta's ``consolidated.*.pth``, litgpt's ``lit_model.pth``, DeepSpeed's ZeRO.

Sources of the layouts: meta-llama's ``llama/generation.py``, litgpt's ``scripts/convert_hf_checkpoint.py``, DeepSpeed's
``utils/zero_to_fp32.py`` and ``checkpoint/ds_to_universal.py``. Readers raise CorruptFile for damaged, malicious and
missing files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_llama.arch.foreign_tensor_layouts import litgpt_names, torchtitan_names
from megatron_llama.arch.hf_tp_mapping import Shape
from megatron_llama.arch.recognize_format import DEEPSPEED, LITGPT, META, META_FILE, UNIVERSAL
from megatron_llama.checkpoint.foreign.megatron import integer, joined, load_dict, parameter_groups
from megatron_llama.checkpoint.foreign.source_settings import (
    TABLES,
    read_arguments,
    read_config_json,
    read_group,
    read_yaml,
)
from megatron_llama.checkpoint.foreign.tensors import MOMENTS, WEIGHTS_ONLY, Foreign, SourceChunk, SourceTensor
from megatron_llama.checkpoint.foreign.torch_folders import naming
from megatron_llama.checkpoint.foreign.unpickle import check_stored, load_pickle
from megatron_llama.checkpoint.tensor_source import CorruptFile, read_json
from megatron_llama.config.rope import is_number

Sources = dict[str, SourceTensor]
Span = tuple[torch.Tensor, int, int]
"""(flat tensor, start, values)."""
_META_ROWS = ("wq.weight", "wk.weight", "wv.weight", "w1.weight", "w3.weight", "output.weight")
_META_COLUMNS = ("wo.weight", "w2.weight")
_META_KEYS, _META_SHAPE = TABLES["meta"], TABLES["meta_shape"].split()
_LITGPT_KEYS, _LITGPT_SHAPE = TABLES["litgpt"], TABLES["litgpt_shape"].split()
"""Megatron's names of keys; and keys that tensors show, that are converted, or that another key switches on."""
_LITGPT_VALUES = {"mlp_class_name": "LLaMAMLP", "parallel_residual": False}
_PART = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_00_(model|optim)_states\.pt")
_FP32 = "fp32"


def read_meta(folder: Path) -> Foreign:
    """Read Meta's folder."""
    params = read_json(folder / "params.json")
    if not isinstance(params, dict) or not isinstance(width := params.get("dim"), int):
        raise CorruptFile(f"{folder / 'params.json'}: has no dim")
    result = Foreign(META, folder, without_moments=WEIGHTS_ONLY)
    arguments: dict[str, Any] = {_META_KEYS.get(n, n): value for n, value in params.items() if n not in _META_SHAPE}
    arguments.setdefault("rotary_base", 10000.0)
    if arguments.get("use_rope_scaling"):  # Llama 3.2 has the same key as 3.1, and another factor
        arguments.setdefault("scale_factor", 32.0 if width in (2048, 3072) else 8.0)
    read_arguments(result, arguments, is_megatron=False)
    files = sorted(path for path in folder.iterdir() if META_FILE.fullmatch(path.name))
    if [META_FILE.fullmatch(path.name)[1] for path in files] != [f"{rank:02d}" for rank in range(len(files))]:  # type: ignore[index]
        raise CorruptFile(f"{folder}: the files of some tensor-parallel ranks are missing")
    shards = [_state_dict(path) for path in files]
    if any(shard.keys() != shards[0].keys() for shard in shards):
        raise CorruptFile(f"{folder}: its files have different tensors")
    for name in shards[0]:
        parts = [shard[name] for shard in shards]
        axis = 0 if name.endswith(_META_ROWS) else 1 if name.endswith(_META_COLUMNS) else None
        if name.endswith("tok_embeddings.weight") and parts[0].dim() == 2:  # by columns in Llama 1 and 2
            axis = 0 if parts[0].shape[1] == width else 1
        result.sources[name] = joined(name, parts, files, axis)
    result.names = partial(torchtitan_names, keys=result.sources)
    return result


def read_litgpt(folder: Path) -> Foreign:
    """Read litgpt's folder."""
    path, settings = folder / "lit_model.pth", folder / "model_config.yaml"
    result = Foreign(LITGPT, folder, without_moments=WEIGHTS_ONLY)
    config = read_yaml(settings) if settings.is_file() else {}
    result.vocab_multiple = integer(config.get("padding_multiple")) or 1
    config |= config["rope_adjustments"] if isinstance(config.get("rope_adjustments"), dict) else {}
    arguments = {_LITGPT_KEYS.get(name, name): value for name, value in config.items() if name not in _LITGPT_SHAPE}
    if window := integer(config.get("sliding_window_size")):
        arguments["window_size"] = (window - 1, 0)
    for name, value in _LITGPT_VALUES.items():
        if name in arguments and arguments[name] == value:
            del arguments[name]
    read_arguments(result, arguments, is_megatron=False)
    result.sources = {name: joined(name, [tensor], [path], None) for name, tensor in _state_dict(path).items()}
    result.names = partial(litgpt_names, keys=result.sources)
    return result


def _state_dict(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, which may be under "model". Raises CorruptFile."""
    content = load_dict(path)
    inner = content.get("model", content)
    tensors = {str(n): t for n, t in inner.items() if isinstance(t, torch.Tensor)} if isinstance(inner, dict) else {}
    if not tensors:
        raise CorruptFile(f"{path}: contains no tensors")
    check_stored(path, tensors)
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("rope.freqs")}


def read_deepspeed(folder: Path) -> Foreign:
    """Read weights, ``exp_avg.NAME``, ``exp_avg_sq.NAME``, and the settings of DeepSpeed's folder."""
    result = Foreign(DEEPSPEED, folder, states="{kind}.{name}")
    files = [p for p in sorted(folder.iterdir()) if p.name.endswith("_model_states.pt") and "expert" not in p.name]
    others = [path.name for path in files if "mp_rank_00_model" not in path.name]
    if not files or others:
        rule = f"has tensor-parallel ranks ({others[0]}); convert it by ds_to_universal.py" if others else "is empty"
        raise CorruptFile(f"{folder}: {rule}")
    content = load_dict(files[0])
    result.step, skipped = integer(content.get("global_steps")), integer(content.get("skipped_steps")) or 0
    if result.step is not None:
        result.updates = integer(result.step - skipped)  # skipped: fp16 gradients overflowed
    result.samples = integer(content.get("global_samples"))
    settings = content.get("ds_config")
    for name, setting in {"train_batch_size": "trainer.global_batch_size", "gradient_clipping": "optim.clip"}.items():
        value = settings.get(name) if isinstance(settings, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            result.facts[setting] = value or None
    shapes, frozen = content.get("param_shapes"), content.get("frozen_param_shapes")
    groups = [dict(group) for group in (shapes if isinstance(shapes, list) else [shapes]) if isinstance(group, dict)]
    frozen = dict(frozen) if isinstance(frozen, dict) else {}
    pairs = [(str(name), shape) for group in (*groups, frozen) for name, shape in group.items()]
    for name, shape in pairs:
        if not isinstance(shape, tuple | list) or any(type(n) is not int or n < 0 for n in shape):
            raise CorruptFile(f"{files[0]}: {name} has no shape")
    shape_of = {name: tuple(shape) for name, shape in pairs}
    if (folder / UNIVERSAL).is_dir():
        sources = dict(_universal(folder / UNIVERSAL, shape_of, result))
    elif content.get("optimizer") is None:
        sources = _partitions(folder, [[str(name) for name in group] for group in groups], shape_of, result)
    else:  # stage 0
        sources = {}
    if frozen and _PART.fullmatch(files[0].name):  # stage 3
        sources |= _frozen(folder, {str(name): tuple(shape) for name, shape in frozen.items()})
    module, shared = (value if isinstance(value := content.get(n), dict) else {} for n in ("module", "shared_params"))
    whole = {n: t for n, t in module.items() if isinstance(t, torch.Tensor) and t.numel()}  # empty in stage 3
    whole = {str(n): t for n, t in whole.items() if n not in sources and n not in shared}
    check_stored(files[0], whole)
    sources |= {name: joined(name, [tensor], files[:1], None) for name, tensor in whole.items()}
    optimizer = settings.get("optimizer") if isinstance(settings, dict) else None
    if isinstance(optimizer, dict) and isinstance(params := optimizer.get("params"), dict):
        read_group(result, {"decoupled_weight_decay": params.get("adam_w_mode")})  # in no group of DeepSpeed's Adam
    read_config_json(result, folder.parent)
    result.missing.append("the position in the data")
    result.sources = sources
    result.names, result.prefix, _ = naming(folder, sources)
    return result


def _universal(folder: Path, shapes: Mapping[str, Shape], result: Foreign) -> Iterator[tuple[str, SourceTensor]]:
    """Yield the tensors of the universal layout, a folder for each: ``NAME/fp32.pt``, ``NAME/exp_avg.pt``."""
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        for kind in (_FP32, *MOMENTS):
            file = path / f"{kind}.pt"
            if not file.is_file():
                continue
            content = load_pickle(file, file)
            content = content.get("param") if isinstance(content, dict) else content
            if not isinstance(content, torch.Tensor):
                raise CorruptFile(f"{file}: contains no tensor")
            check_stored(file, {path.name: content})
            shape = shapes.get(path.name, tuple(content.shape)) if content.dim() == 1 else tuple(content.shape)
            name = path.name if kind == _FP32 else f"{kind}.{path.name}"
            yield name, _assembled(file, name, shape, [(content, 0, math.prod(shape))])
    states = folder / "optimizer_state.pt"
    for group in parameter_groups(load_dict(states)) if states.is_file() else ():
        read_group(result, group)


def _frozen(folder: Path, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, SourceTensor]]:
    """Yield the parameters that stage 3 does not train. Each rank's file of the model contains a span of each."""
    parts = []
    for path in _rank_files(folder, "model"):
        part = load_dict(path).get("frozen_param_fragments")
        parts.append({n: t for n, t in part.items() if isinstance(t, torch.Tensor)} if isinstance(part, dict) else {})
        check_stored(path, parts[-1])
    for name, shape in shapes.items():
        fragments, size = [part[name].flatten() for part in parts if name in part], math.prod(shape)
        most = max(map(len, fragments), default=0)  # ceil(size / ranks), on each rank
        if not most or any(len(each) != most for each in fragments) or -(-size // max(1, -(-size // most))) != most:
            raise CorruptFile(f"{folder}: {name} of {size:,} values has fragments of {[*map(len, fragments)]}")
        yield name, _assembled(folder, name, shape, list(_spans(folder, fragments, 0, size)))


def _rank_files(folder: Path, kind: str) -> list[Path]:
    """Return the files of a kind, "model" or "optim", by rank. Raises CorruptFile if one is missing."""
    matches = [(match, path) for path in folder.iterdir() if (match := _PART.fullmatch(path.name))]
    files = {int(match[1]): path for match, path in matches if match[2] == kind}
    if sorted(files) != list(range(len(files))):
        raise CorruptFile(f"{folder}: has the files of {len(files)} of {max(files) + 1} ranks (*_{kind}_states.pt)")
    return [files[rank] for rank in sorted(files)]


def _partitions(folder: Path, groups: list[list[str]], shapes: Mapping[str, Shape], result: Foreign) -> Sources:
    """Return the tensors in the flat partitions of ZeRO's ranks.

    Stages 1 and 2 divide the flat vector of a parameter group by ranks. Stage 3 divides each parameter.
    """
    files = _rank_files(folder, "optim")
    states = [load_dict(path).get("optimizer_state_dict") for path in files]
    first = states[0] if states and isinstance(states[0], dict) else {}
    count = first.get("partition_count")
    counts = count if isinstance(count, list) else [count]  # by parameter group
    if len(files) not in filter(is_number, counts):
        raise CorruptFile(f"{folder}: has the files of {len(files)} of {count} ranks (*_optim_states.pt)")
    vectors = [_vectors(files[rank], state) for rank, state in enumerate(states)]
    for group in parameter_groups(first):
        read_group(result, group)
    sharded = "fp32_flat_groups" in first
    sources: Sources = {}
    for kind in (_FP32, *MOMENTS):
        if not all(kind in vector for vector in vectors):
            continue
        flat = [vector[kind] for vector in vectors]  # [ranks][groups]
        lists = flat if sharded else [list(column) for column in zip(*flat, strict=False)]
        starts = [0] * len(lists)
        for number, group_names in enumerate(groups):
            for name in group_names:
                values = math.prod(shapes[name])
                each = -(-values // len(lists)) if sharded else values
                spans = list[Span]()
                for at in range(len(lists)) if sharded else [number]:
                    length = max(0, min(each, values - at * each)) if sharded else each
                    if at >= len(lists):
                        raise CorruptFile(f"{folder}: has {len(lists)} of {len(groups)} parameter groups")
                    spans += _spans(files[min(at, len(files) - 1)], lists[at], starts[at], length)
                    starts[at] += each
                key = name if kind == _FP32 else f"{kind}.{name}"
                sources[key] = _assembled(folder, key, shapes[name], spans)
        tails = [sum(part.numel() for part in parts) - start for parts, start in zip(lists, starts, strict=True)]
        if kind == _FP32 and any(tail > (0 if sharded else 2 * len(files)) for tail in tails):
            raise CorruptFile(f"{folder}: has {max(tails)} values of no parameter")
    return sources


def _vectors(path: Path, state: Any) -> dict[str, list[torch.Tensor]]:
    """Return {kind: flat partitions by group} of a rank."""
    if not isinstance(state, dict):
        raise CorruptFile(f"{path}: has no optimizer_state_dict")
    inner = state.get("optimizer_state_dict", state.get("base_optimizer_state"))
    inner = inner.get("state") if isinstance(inner, dict) else inner
    by_group = [*inner.values()] if isinstance(inner, dict) else inner if isinstance(inner, list) else []
    lists = {_FP32: state.get("fp32_flat_groups", state.get("single_partition_of_fp32_groups"))}
    lists |= {k: [group.get(k) if isinstance(group, dict) else None for group in by_group] for k in MOMENTS}
    result = dict[str, list[torch.Tensor]]()
    for kind, parts in lists.items():
        tensors = [part for part in parts if isinstance(part, torch.Tensor)] if isinstance(parts, list) else []
        if kind == _FP32 or tensors:
            if not tensors or any(t.dim() != 1 for t in tensors) or len(tensors) != len(result.get(_FP32, tensors)):
                raise CorruptFile(f"{path}: {kind} is no list of flat partitions")
            result[kind] = tensors
    check_stored(path, {f"{kind} of group {i}": part for kind, parts in result.items() for i, part in enumerate(parts)})
    return result


def _spans(path: Path, parts: Sequence[torch.Tensor], start: int, count: int) -> Iterator[Span]:
    """Yield the spans of ``count`` values of a vector in several parts. Raises CorruptFile if it is too short."""
    for part in parts:
        length = min(part.numel() - start, count)
        if length > 0:
            yield part, start, length
            count -= length
        start = max(0, start - part.numel())
    if count:
        raise CorruptFile(f"{path}: lacks {count} values")


def _assembled(path: Path, name: str, shape: Shape, spans: Sequence[Span]) -> SourceTensor:
    def load() -> torch.Tensor:
        return torch.cat([tensor.flatten()[start : start + count] for tensor, start, count in spans]).view(shape)

    if sum(min(count, tensor.numel() - start) for tensor, start, count in spans) != math.prod(shape):
        raise CorruptFile(f"{path}: {name} has not the shape {list(shape)}")
    dtype = spans[0][0].dtype if spans else torch.float32
    return SourceTensor(dtype, shape, [SourceChunk((0,) * len(shape), shape, path, load)])
