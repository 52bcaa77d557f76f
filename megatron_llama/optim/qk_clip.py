"""QK-Clip: weights of q and k are scaled down after an update, in heads with a large attention logit.

This is MuonClip of Kimi K2 (arXiv:2507.20534, section 2.1). Let S be the largest logit of a head in the step's forward
passes, and gamma = min(1, tau / S). The rows of W_q and W_k and their biases are multiplied by sqrt(gamma), so the
logits of the same input are at most tau. Query heads that share a kv head use the largest S of the group, as
Megatron-LM's ``Attention.clip_qk`` does (megatron/core/transformer/attention.py).

``parallel/context_parallel.py`` records S of a rank's heads, layers and samples. One all-reduce takes the maximum over
all ranks, so the factors do not depend on the layout. The weights are the optimizer's, with any optimizer and sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.arch.hf_tp_mapping import Rectangle
from megatron_llama.arch.parameters import head_dim, kv_heads
from megatron_llama.optim.base import Group, OptimizerInputs, ShardOptimizer
from megatron_llama.parallel import ParallelModel

QUERIES, KEYS = "q_proj", "k_proj"
STREAM = "qk_clip"
"""Name of the noise stream that rounds scaled bf16 weights."""


class _Part(NamedTuple):
    """Rows of q or k in a weight of this rank."""

    weight: Tensor
    group: Group
    rectangle: Rectangle
    layer: int
    kv_head: Tensor
    """Number of each row's kv head, int64 [rows]."""


class QKClip:
    """Reads the largest logits after a step and scales the weights of ``inner``."""

    def __init__(self, inner: ShardOptimizer, model: ParallelModel, inputs: OptimizerInputs) -> None:
        threshold = inputs.plan.config.optim.qk_clip
        assert threshold is not None
        self._threshold, self._inner, self._model, self._shape = threshold, inner, model, inputs.plan.model
        self._parts = list(self._find_parts(inner, inputs))
        self._largest: Tensor | None = None

    def _find_parts(self, inner: ShardOptimizer, inputs: OptimizerInputs) -> Iterator[_Part]:
        size = head_dim(self._shape)
        rows_per_kv_head = {QUERIES: self._shape.num_attention_heads // kv_heads(self._shape) * size, KEYS: size}
        for group in inner.param_groups:
            for weight in group["params"]:
                for part in inputs.rectangles[weight]:
                    module = part.name.split(".")[-2]
                    if module in rows_per_kv_head:  # model.layers.0.self_attn.q_proj.weight
                        rows = torch.arange(part.offset[0], part.offset[0] + part.size[0], device=weight.device)
                        yield _Part(weight, group, part, int(part.name.split(".")[2]), rows // rows_per_kv_head[module])

    @torch.no_grad()
    def clip(self, skip: Tensor | None) -> None:
        """Scale the weights by the logits since the last call. A collective over all ranks.

        Args:
            skip: Bool scalar. Where it is true, the weights keep their values.
        """
        self._largest = self._collect()
        by_kv_head = self._largest.unflatten(1, (kv_heads(self._shape), -1)).amax(2)
        scales = torch.where(by_kv_head > self._threshold, self._threshold / by_kv_head, 1.0).sqrt()
        for part in self._parts:
            scale = scales.to(part.weight.device)[part.layer].index_select(0, part.kv_head)
            scale = scale if skip is None else torch.where(skip, 1.0, scale)
            self._multiply(part, scale.view(-1, *[1] * (part.weight.dim() - 1)))

    def _collect(self) -> Tensor:
        """Return the largest logits of all heads [layers, heads], fp32, and forget them. A collective."""
        shape = self._shape.num_hidden_layers, self._shape.num_attention_heads
        table = torch.full(shape, -torch.inf, device=self._model.device)
        place = self._model.plan.topology(dist.get_rank()).place["tp"]
        for chunk in self._model.chunks:
            for number, block in chunk.layers.items():
                attention: Any = block.self_attn
                if attention.max_logits is not None:
                    first = place * attention.num_heads
                    table[int(number), first : first + attention.num_heads] = attention.max_logits
                attention.max_logits = None
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        return table

    def _multiply(self, part: _Part, scale: Tensor) -> None:
        values = part.weight.data[part.rectangle.local_slices]
        if values.dtype == torch.float32:
            values.mul_(scale)
            return
        rounding: Any = self._inner  # an ElementwiseOptimizer, as others have fp32 weights
        at_start = replace(part.rectangle, local_offset=(0,) * values.dim())
        step = rounding.state[part.weight]["step"]
        rounding.apply(_scale, {STREAM: values}, [at_start], scale.expand_as(values), step, part.group)

    def metrics(self) -> dict[str, float]:
        """Return the largest logit of the step. A collective after a step that the host skipped."""
        largest, self._largest = self._largest, None
        return {"max_attention_logit": (self._collect() if largest is None else largest).max().item()}


def _scale(tensors: Sequence[Tensor], scale: Tensor, step: Tensor, group: Group) -> None:
    (values,) = tensors
    values.mul_(scale)
