"""The linear layers that LoRA adapts, with ranks and scales by PEFT's rules, without torch.

target_modules, exclude_modules    full names, or their endings after a dot
layers_to_transform                applies to endings only
rank_pattern, alpha_pattern        regular expressions of endings; the first match applies
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from megatron_llama.config.settings import LORA_TARGETS, FinetuneConfig, ModelConfig

_ATTENTION = LORA_TARGETS[:4]


@dataclass(frozen=True)
class Adapter:
    """The adapter of one Hugging Face module."""

    rank: int
    scaling: float
    """Factor of the adapter's output."""


LayerAdapters = Mapping[str, Adapter]
"""Adapters of a layer by module, such as q_proj, in file order."""


def module_name(layer: int, module: str) -> str:
    """Return the full name of a linear layer: model.layers.3.mlp.up_proj."""
    return f"model.layers.{layer}.{'self_attn' if module in _ATTENTION else 'mlp'}.{module}"


def module_names(model: ModelConfig) -> list[str]:
    """Return the full names of the blocks' linear layers."""
    return [module_name(layer, module) for layer in range(model.num_hidden_layers) for module in LORA_TARGETS]


def is_named(name: str, ending: str) -> bool:
    """Return whether a module's full name is ``ending``, or has it after a dot."""
    return name == ending or name.endswith(f".{ending}")


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a key of rank_pattern or alpha_pattern matches a module's full name."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def layer_adapters(model: ModelConfig, finetune: FinetuneConfig, layer: int) -> LayerAdapters:
    """Return the adapters of a layer; empty without LoRA."""
    if finetune.method != "lora":
        return {}
    lists = (finetune.lora_target_modules, finetune.exclude_modules, finetune.layers_to_transform)
    patterns = (finetune.rank_pattern.items(), finetune.alpha_pattern.items())
    numbers = (finetune.lora_rank, finetune.lora_alpha, finetune.use_rslora)
    return _adapters_of(model.num_hidden_layers, numbers, *map(tuple, lists), *map(tuple, patterns))[layer]  # type: ignore[arg-type]


def layer_kinds(
    model: ModelConfig, finetune: FinetuneConfig, layers: Iterable[int]
) -> list[tuple[LayerAdapters, list[int]]]:
    """Group layers by their adapters."""
    groups: dict[int, tuple[LayerAdapters, list[int]]] = {}
    for layer in layers:
        adapters = layer_adapters(model, finetune, layer)  # layers with equal adapters share one mapping
        groups.setdefault(id(adapters) if adapters else 0, (adapters, []))[1].append(layer)
    return list(groups.values())


def adapted_modules(model: ModelConfig, finetune: FinetuneConfig) -> list[str]:
    """Return the modules, such as q_proj, that are adapted in some layer."""
    kinds = layer_kinds(model, finetune, range(model.num_hidden_layers))
    return [module for module in LORA_TARGETS if any(module in adapters for adapters, _ in kinds)]


@lru_cache
def _adapters_of(
    layers: int,
    numbers: tuple[int, float, bool],
    targets: tuple[str, ...],
    excluded: tuple[str, ...],
    only_layers: tuple[int, ...],
    ranks: tuple[tuple[str, int], ...],
    alphas: tuple[tuple[str, float], ...],
) -> tuple[LayerAdapters, ...]:
    """Return the adapters of each layer. Layers with equal adapters share one mapping."""
    lora_rank, lora_alpha, use_rslora = numbers
    shared: dict[tuple[tuple[str, Adapter], ...], LayerAdapters] = {}
    by_layer = []
    for layer in range(layers):
        adapters = {}
        for module in LORA_TARGETS:
            name = module_name(layer, module)
            is_target = name in targets or (
                any(is_named(name, target) for target in targets) and (not only_layers or layer in only_layers)
            )
            if not is_target or any(is_named(name, each) for each in excluded):
                continue
            rank = next((value for pattern, value in ranks if matches_pattern(name, pattern)), lora_rank)
            alpha = next((value for pattern, value in alphas if matches_pattern(name, pattern)), lora_alpha)
            adapters[module] = Adapter(rank, alpha / (math.sqrt(rank) if use_rslora else rank))
        by_layer.append(shared.setdefault(tuple(adapters.items()), MappingProxyType(adapters)))
    return tuple(by_layer)
