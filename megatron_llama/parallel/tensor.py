"""Tensor and sequence parallelism: the gradient sums that megatron-core's layers leave to the trainer.

Four kinds of weight are held by several ranks whose gradients each see only a part of the work:

* norm weights under sequence parallelism: each tensor-parallel rank saw its part of the sequence;
* the same holds for the side of LoRA that is whole on each rank: it works on the part of the sequence;
* kv heads that several tensor-parallel ranks share, and LoRA's B of them: each rank saw its own query heads;
* tied embeddings on a pipeline: the first stage saw the lookup, the last the logits.

They are summed on the local shards after the data-parallel reduction; both are sums, so their order does not matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_llama.parallel.shards import Shard
from megatron_llama.plan import Plan
from megatron_llama.plan.shapes import kv_copies
from megatron_llama.topology import Topology

# Whole on every tensor-parallel rank, and at work on its part of the sequence under sequence parallelism.
REPLICATED_UNDER_SP = ("norm.weight", "qkv_proj.lora_A", "gate_up_proj.lora_A", "o_proj.lora_B", "down_proj.lora_B")
KV_HEADS = ("qkv_proj.weight", "qkv_proj.lora_B")


class ReplicatedGradients:
    """Sums the gradients of weights that several tensor- or pipeline-parallel ranks hold."""

    def __init__(self, plan: Plan, topology: Topology) -> None:
        self.sums_over_sequence = plan.sp
        self.tied = plan.model.tie_word_embeddings and topology.pp > 1
        self.kv_group = _kv_group(topology, kv_copies(plan.model, topology.tp))

    def reduce(self, shards: Iterable[Shard]) -> None:
        """Sum in place; one all-reduce per group. Every rank of a group must call it with the same parameters."""
        wanted: dict[dist.ProcessGroup, list[torch.Tensor]] = defaultdict(list)
        for shard in shards:
            grad = shard.grad
            if grad is None:
                continue
            if self.sums_over_sequence and shard.name.endswith(REPLICATED_UNDER_SP):
                wanted[parallel_state.get_tensor_model_parallel_group()].append(grad)
            elif self.kv_group is not None and shard.name.endswith(KV_HEADS):
                kv = [p for p in shard.pieces if ".k_proj." in p.name or ".v_proj." in p.name]
                if kv:  # a shard may hold query rows alone; the ranks that share the head hold the same rows
                    wanted[self.kv_group].extend(grad[p.local_slices] for p in kv)
            elif self.tied and shard.name in ("embed_tokens.weight", "lm_head.weight"):
                wanted[parallel_state.get_embedding_group()].append(grad)
        for group, grads in wanted.items():
            _sum_together(grads, group)


def _sum_together(grads: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    if len(grads) == 1 and grads[0].is_contiguous():
        dist.all_reduce(grads[0], group=group)
        return
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, summed in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(summed.view_as(grad))


def _kv_group(topology: Topology, copies: int) -> dist.ProcessGroup | None:
    """The tensor-parallel neighbours that share this rank's kv head. All ranks must take part in making the groups."""
    if copies == 1:
        return None
    mine = None
    for first in range(0, topology.world_size, copies):  # tp varies fastest and copies divides tp
        ranks = list(range(first, first + copies))
        group = dist.new_group(ranks)
        if topology.rank in ranks:
            mine = group
    return mine
