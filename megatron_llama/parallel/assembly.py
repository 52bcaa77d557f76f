"""Assembly of a rank's blocks: ``block_parts`` and ``layer_parts`` execute the steps of plan/build_steps.py.

Each step is a function of a table, except tp and pp, which megatron-core's layers and schedules apply. ``PARTS``
changes the ``BlockParts`` that constructors take, ``LAYERS`` the parts of one layer, ``WRAPPERS`` returns functions
around a block's methods, and ``CHUNKS`` changes a built chunk on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron_llama.arch.lora_targets import layer_adapters
from megatron_llama.devices.kernels import Kernels
from megatron_llama.model import recompute
from megatron_llama.model.fused_operators import fused_operators
from megatron_llama.model.init import torch_dtype
from megatron_llama.model.inputs import InputBuilder
from megatron_llama.model.llama import BlockParts, Llama, Wrapper, build_norm, parallel_linear
from megatron_llama.model.lora import TokenRows, freeze, lora_linear
from megatron_llama.model.loss import IN_PLACE, Head, fused_softmax
from megatron_llama.model.mlp_chunks import run_in_chunks
from megatron_llama.model.noise import EmbeddingNoise
from megatron_llama.model.offload import Offload
from megatron_llama.model.preference import PreferenceLoss
from megatron_llama.model.quantized import quantized_linear
from megatron_llama.model.random_ltd import run_on_subset
from megatron_llama.parallel.compiling import Compiler, traceable_matmul
from megatron_llama.parallel.context_parallel import divided_parts, logits_measure
from megatron_llama.parallel.data_parallel import DataGroups, shard_chunk
from megatron_llama.parallel.float8 import float8_linear
from megatron_llama.parallel.groups import Groups
from megatron_llama.plan import Plan
from megatron_llama.plan.build_steps import applied_steps
from megatron_llama.topology import Topology


@dataclass(frozen=True)
class Build:
    """Inputs of the steps."""

    plan: Plan
    topology: Topology
    kernels: Kernels
    groups: Groups
    data_groups: DataGroups
    exact: Any
    """``ExactSums`` with trainer.exact, otherwise None."""
    compiler: Any
    """``Compiler`` with trainer.compile, otherwise None."""
    offload: Any = None
    """``Offload`` of the chunk."""


def plain_parts(kernels: Kernels, compiler: Compiler | None = None, z_loss: float = 0.0) -> BlockParts:
    """Return the parts on a device: megatron-core's layers and plain torch, with the device's kernels."""
    softmax = fused_softmax(compiler.compile) if compiler is not None and kernels.fuses_loss else IN_PLACE
    return BlockParts(
        linear=partial(parallel_linear, matmul=None if compiler is None else traceable_matmul),
        attend=kernels.attend,
        head=partial(Head, kernels=kernels, softmax=softmax, z_loss=z_loss),
        inputs=partial(InputBuilder, build_visible=kernels.visible),
    )


def block_parts(build: Build) -> BlockParts:
    """Return the parts of this rank's blocks. Each applied step changes the parts of the steps before it."""
    parts = plain_parts(build.kernels, build.compiler, build.plan.config.trainer.z_loss)
    for name in applied_steps(build.plan):
        if name in PARTS:
            parts = PARTS[name](build, parts)
    return parts


def layer_parts(build: Build) -> Callable[[int, BlockParts], BlockParts]:
    """Return the function from a layer's global number and a new chunk's parts to the parts of the layer's block."""
    build = replace(build, offload=Offload())
    names = applied_steps(build.plan)

    def parts_of(layer: int, parts: BlockParts) -> BlockParts:
        for name in filter(LAYERS.__contains__, names):
            parts = LAYERS[name](build, parts, layer)
        wrappers = [wrapper for name in names if name in WRAPPERS for wrapper in WRAPPERS[name](build, layer)]
        return replace(parts, wrappers=wrappers)

    return parts_of


def finish_chunk(build: Build, chunk: Llama) -> None:
    """Apply the steps of ``CHUNKS`` to a chunk on the meta device, in place."""
    for name in applied_steps(build.plan):
        if name in CHUNKS:
            CHUNKS[name](build, chunk)


def _fused(build: Build, parts: BlockParts) -> BlockParts:
    operators = fused_operators(build.kernels)
    if operators is None:  # no C compiler on this machine
        return parts
    norm = partial(build_norm, apply=operators.normalize)
    return replace(parts, norm=norm, rotate=operators.rotate, activation=operators.activation)


def _preference(build: Build, parts: BlockParts) -> BlockParts:
    context = build.groups["cp"] if build.plan.config.trainer.cp > 1 else None
    return replace(parts, head=partial(parts.head, preference=PreferenceLoss(build.plan.config.finetune, context)))


def _noise(build: Build, parts: BlockParts) -> BlockParts:
    topology, config = build.topology, build.plan.config
    part = (topology.place["tp"], topology.sizes["tp"]) if build.plan.sp else (0, 1)
    assert config.finetune.neftune_noise_alpha is not None
    return replace(parts, noise=EmbeddingNoise(config.finetune.neftune_noise_alpha, config.data.length, part))


PARTS: dict[str, Callable[[Build, BlockParts], BlockParts]] = {
    "cp": lambda b, parts: divided_parts(parts, b.topology, b.kernels, b.groups, b.plan.config.trainer.cp_comm),
    "exact": lambda b, parts: b.exact.parts(parts),
    "preference": _preference,
    "token rows": lambda b, parts: replace(
        parts, token_rows=partial(TokenRows, b.plan.config.finetune.trainable_token_indices)
    ),
    "NEFTune": _noise,
    "QK-Clip": lambda b, parts: replace(parts, measure_logits=logits_measure(b.plan, b.groups)),
    "fused operators": _fused,
    "quantized": lambda b, parts: replace(parts, linear=partial(quantized_linear, kind=str(b.plan.quantized))),
    "float8": lambda b, parts: replace(
        parts, linear=partial(float8_linear, name=str(b.plan.config.trainer.float8), kernels=b.kernels, groups=b.groups)
    ),
}


LAYERS: dict[str, Callable[[Build, BlockParts, int], BlockParts]] = {
    "LoRA": lambda b, parts, layer: replace(
        parts,
        linear=partial(
            lora_linear,
            parts.linear,
            layer_adapters(b.plan.model, b.plan.config.finetune, layer),
            b.plan.config.finetune,
        ),
    ),
}


def _recompute(build: Build, layer: int) -> list[Wrapper]:
    kind, draws = build.plan.recompute(layer), build.plan.config.finetune.lora_dropout > 0
    block = Wrapper("block", partial(recompute.wrap_block, kind, draws), f"recompute {kind}")
    attention = Wrapper("attention", recompute.wrap_core_attention, "recompute")
    return [] if kind == "none" else [block, attention] if kind == "selective" else [block]


def _mlp_chunks(build: Build, layer: int) -> list[Wrapper]:
    chunks = build.plan.config.trainer.mlp_chunks
    return [Wrapper("mlp", lambda mlp, forward: partial(run_in_chunks, chunks, mlp, forward), f"{chunks} chunks")]


WRAPPERS: dict[str, Callable[[Build, int], list[Wrapper]]] = {
    "MLP chunks": _mlp_chunks,
    "recompute": _recompute,
    "compile": lambda b, _: [Wrapper("block", lambda block, forward: b.compiler.compile(forward, "block"), "compile")],
    "random-LTD": lambda b, _: [Wrapper("block", lambda _, forward: partial(run_on_subset, forward), "random-LTD")],
    "offload": lambda b, _: [Wrapper("block", b.offload.wrap, "offload")],
}


CHUNKS: dict[str, Callable[[Build, Llama], None]] = {
    "exact": lambda b, chunk: b.exact.name_totals(chunk),
    "LoRA": lambda b, chunk: freeze(chunk, b.plan.config.finetune, torch_dtype(b.plan.frozen_dtype)),
    "data parallel": lambda b, chunk: shard_chunk(chunk, b.data_groups, b.plan),
}
