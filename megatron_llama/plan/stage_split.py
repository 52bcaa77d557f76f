"""Which layers a pipeline stage has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from megatron_llama.arch.flops import FORWARD_AND_BACKWARD, flops_per_token
from megatron_llama.arch.pattern import pattern_of
from megatron_llama.config.settings import Config

_WORTH = 0.94
"""A split that is not even must save 6 % of the heaviest stage's work: it also moves memory, and what a layer does
besides its products is not counted."""


def split_layers(layers: int, pp: int, vpp: int, pipeline_layers: Sequence[int] | None) -> list[tuple[int, ...]]:
    """Layer numbers of each virtual stage; entry v * pp + p is chunk v of stage p, ascending in that order."""
    if pipeline_layers is None:
        sizes = spread(layers, pp * vpp)
    else:
        chunks = [spread(count, vpp) for count in pipeline_layers]
        sizes = [chunks[stage][chunk] for chunk in range(vpp) for stage in range(pp)]
    return [tuple(range(end - size, end)) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


def fault_of(split: Sequence[int], layers: int, pp: int, vpp: int) -> str | None:
    """The rule that a split over ``pp`` stages breaks; None where it breaks none."""
    if len(split) != pp:
        return f"has {len(split)} numbers, and must have one for each of the pp={pp} stages"
    if min(split) < vpp:
        return f"every stage needs at least {vpp} layer{'s, one for each virtual stage' if vpp > 1 else ''}"
    if sum(split) != layers:
        return f"adds up to {sum(split)}, and must add up to model.num_hidden_layers={layers}"
    return None


def spread(total: int, parts: int) -> list[int]:
    """``total`` over ``parts`` as evenly as whole numbers allow, the first parts taking what is left over."""
    share, left_over = divmod(total, parts)
    return [share + (part < left_over) for part in range(parts)]


def head_in_layers(config: Config) -> float:
    """The work of the output head in a training step, as a multiple of a layer's.

    By FLOPs, with those that full recomputation repeats, and without what random-LTD leaves out. The embedding is a
    look-up and counts nothing.
    """
    model, finetune, trainer = config.model, config.finetune, config.trainer
    span, headless = pattern_of(model).span(config.data.length), replace(model, vocab_size=0)
    head = flops_per_token(replace(model, num_hidden_layers=0), span, finetune).causal
    layers = flops_per_token(headless, span, finetune).causal
    if trainer.recompute == "full":
        layers += flops_per_token(headless, span).causal / FORWARD_AND_BACKWARD / trainer.recompute_every
    return head * model.num_hidden_layers / layers


def uneven_layers(config: Config, microbatches: int) -> list[int] | None:
    """Layers of each stage where the last, which has the output head, gets fewer, so that the others wait less for it.
    None where an even split is as good. Of splits that are almost as good it is the one that is nearest to even.

    Each stage has at least one layer. Stages stay even with a single micro batch, which no two of them work on at a
    time, and with interleaved ones, which were not measured. Memory does not count, so that it is the same on every
    machine. Megatron-LM counts the head as a layer if asked to (``--account-for-loss-in-pipeline-split``); torchtitan
    always does.
    """
    layers, trainer = config.model.num_hidden_layers, config.trainer
    if trainer.pp == 1 or trainer.vpp > 1 or microbatches == 1:
        return None
    head = head_in_layers(config)

    def heaviest(split: Sequence[int]) -> float:
        return max(*split[:-1], split[-1] + head)

    even = spread(layers, trainer.pp)
    splits = [[*spread(layers - last, trainer.pp - 1), last] for last in range(even[-1], 0, -1)]
    least = min(map(heaviest, splits))
    found = next(split for split in splits if heaviest(split) * _WORTH <= least)
    return None if found == even else found
