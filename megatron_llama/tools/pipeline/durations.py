"""How long each pass of a pipeline takes: by FLOPs, on a device of the hardware table, or as it was measured."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from megatron_llama.arch.shapes import head_dim, matrices_per_layer
from megatron_llama.plan import Plan
from megatron_llama.plan.job import job_of_plan
from megatron_llama.tools.forecast.hardware import find_device
from megatron_llama.tools.forecast.step_time import fitted, microbatch_seconds
from megatron_llama.tools.pipeline.timeline import Pass, Timeline
from megatron_llama.tools.settings import ClusterConfig

Durations = Callable[[int, Pass], float]
"""(pp rank, pass) to the time it takes."""
MILLISECONDS, BLOCKS = "ms", "forward passes of a block"


@dataclass(frozen=True)
class Passes:
    """The time of each chunk's passes, and where it is from."""

    source: str
    unit: str
    forward: tuple[float, ...]
    """Of each virtual stage."""
    backward: tuple[float, ...]

    def of(self, pp: int) -> Durations:
        """For ``pp`` ranks: chunk c of rank r is virtual stage c * pp + r."""
        return lambda rank, what: (self.backward if what.backward else self.forward)[what.chunk * pp + rank]


def by_flops(plan: Plan) -> Passes:
    """Blocks and output head in proportion to their FLOPs; one forward pass of a block is 1."""
    model, seq = plan.model, plan.config.data.length
    block = matrices_per_layer(model) + model.num_attention_heads * head_dim(model) * seq
    head = model.vocab_size * model.hidden_size / block
    return _passes(plan, 1.0, head, "by their floating-point operations", BLOCKS)


def on_cluster(plan: Plan, cluster: ClusterConfig) -> Passes:
    """As scripts/plan.py forecasts them for the cluster's device, in milliseconds; its total is divided into forward
    and backward pass by FLOPs."""
    whole = find_device(cluster.device)
    assert whole is not None, "load_cluster's caller has checked it"
    block, head = microbatch_seconds(job_of_plan(plan), whole.per_rank(), fitted())
    times = _backward_times(plan)
    return _passes(
        plan, 1000 * block / (1 + times[0]), 1000 * head / (1 + times[1]), f"as forecast on {whole.name}", MILLISECONDS
    )


def as_medians(measured: Timeline, vpp: int) -> Passes:
    """The median over micro batches of each chunk's passes, in milliseconds."""
    found: dict[tuple[int, bool], list[float]] = defaultdict(list)
    pp = len(measured.ranks)
    for rank, spans in enumerate(measured.ranks):
        for what, start, end in spans:
            found[what.chunk * pp + rank, what.backward].append(1000 * (end - start))
    stages = range(pp * vpp)
    forward, backward = (tuple(statistics.median(found[stage, kind]) for stage in stages) for kind in (False, True))
    return Passes("as measured, the median of each chunk's", MILLISECONDS, forward, backward)


def _backward_times(plan: Plan) -> tuple[float, float]:
    """Products of the backward pass for each one of the forward pass: (of a block, of the head)."""
    lora = plan.config.finetune.method == "lora"  # frozen weights have no gradient
    trainer = plan.config.trainer
    once_more = (trainer.recompute == "full") / trainer.recompute_every
    return (1 if lora else 2) + once_more, 1 if lora else 2


def _passes(plan: Plan, block: float, head: float, source: str, unit: str) -> Passes:
    """From the forward passes of a block and of the head."""
    layers = [len(stage) for stage in plan.stage_layers]
    heads = [0.0] * (len(layers) - 1) + [head]
    of_block, of_head = _backward_times(plan)
    return Passes(
        source,
        unit,
        tuple(count * block + more for count, more in zip(layers, heads, strict=True)),
        tuple(count * block * of_block + more * of_head for count, more in zip(layers, heads, strict=True)),
    )
