"""The split of layers over pipeline stages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from megatron_llama.arch.attention_pattern import pattern_of
from megatron_llama.arch.flops import FORWARD_AND_BACKWARD, flops_per_token
from megatron_llama.config.settings import Config

_WORTH = 0.94
"""An uneven split must save 6 % of the slowest stage's work, since it also moves memory and the estimate counts only
matmuls."""


def split_layers(layers: int, pp: int, vpp: int, pipeline_layers: Sequence[int] | None) -> list[tuple[int, ...]]:
    """Return the layer numbers of each virtual stage; entry v * pp + p is chunk v of stage p, in ascending order."""
    if pipeline_layers is None:
        sizes = split_evenly(layers, pp * vpp)
    else:
        chunks = [split_evenly(count, vpp) for count in pipeline_layers]
        sizes = [chunks[stage][chunk] for chunk in range(vpp) for stage in range(pp)]
    return [tuple(range(end - size, end)) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


def check_split(split: Sequence[int], layers: int, pp: int, vpp: int) -> str | None:
    """Return the rule that a split over ``pp`` stages breaks; None if it is valid."""
    if len(split) != pp:
        return f"must have trainer.pp={pp} numbers, one per stage, not {len(split)}"
    if min(split) < vpp:
        return f"every stage needs at least {vpp} layer{'s, one per virtual stage' if vpp > 1 else ''}"
    if sum(split) != layers:
        return f"must add up to model.num_hidden_layers={layers}, not {sum(split)}"
    return None


def split_evenly(total: int, parts: int) -> list[int]:
    """Split ``total`` into ``parts`` whole numbers as evenly as possible, larger ones first."""
    share, remainder = divmod(total, parts)
    return [share + (part < remainder) for part in range(parts)]


def head_cost_in_layers(config: Config) -> float:
    """Return the output head's FLOPs in a training step as a multiple of a layer's.

    Counts full recomputation, but not the savings of random-LTD. The embedding lookup counts nothing.
    """
    model, finetune, trainer = config.model, config.finetune, config.trainer
    span, headless = pattern_of(model).span(config.data.length), replace(model, vocab_size=0)
    head = flops_per_token(replace(model, num_hidden_layers=0), span, finetune).causal
    layers = flops_per_token(headless, span, finetune).causal
    if trainer.recompute == "full":
        layers += flops_per_token(headless, span).causal / FORWARD_AND_BACKWARD / trainer.recompute_every
    return head * model.num_hidden_layers / layers


def balance_layers(config: Config, microbatches: int) -> list[int] | None:
    """Return the layers of each stage with fewer in the last stage, which has the output head.

    Among splits of almost equal cost, the most even one is chosen. Each stage has at least one layer. The split does
    not depend on memory, so that it is the same on every host. Megatron-LM counts the head as a layer with
    ``--account-for-loss-in-pipeline-split``; torchtitan always does.

    Returns:
        Layers per stage. None if an even split is as good, with a single micro batch (stages never work concurrently)
        and with virtual stages (not measured).
    """
    layers, trainer = config.model.num_hidden_layers, config.trainer
    if trainer.pp == 1 or trainer.vpp > 1 or microbatches == 1:
        return None
    head = head_cost_in_layers(config)

    def heaviest(split: Sequence[int]) -> float:
        return max(*split[:-1], split[-1] + head)

    even = split_evenly(layers, trainer.pp)
    splits = [[*split_evenly(layers - last, trainer.pp - 1), last] for last in range(even[-1], 0, -1)]
    least = min(map(heaviest, splits))
    best = next(split for split in splits if heaviest(split) * _WORTH <= least)
    return None if best == even else best
