"""Gradients that do not come from a model."""

from __future__ import annotations

import torch

from megatron_llama.parallel import ParallelModel


def make_up_gradients(model: ParallelModel, step: int) -> None:
    """bf16 gradients that depend only on name and position."""
    for shard in model.shards:
        shard.parameter.grad = torch.zeros_like(shard.parameter)
        for rectangle in shard.rectangles:
            generator = torch.Generator().manual_seed(sum(rectangle.name.encode()) + step)
            whole = torch.randn(rectangle.global_shape, generator=generator)
            part = whole[tuple(slice(o, o + n) for o, n in zip(rectangle.offset, rectangle.size, strict=True))]
            assert shard.grad is not None
            shard.grad[rectangle.local_slices] = part.bfloat16()
