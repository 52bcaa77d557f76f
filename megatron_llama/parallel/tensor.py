"""Tensor and sequence parallelism: gradient reductions that megatron-core's layers leave to the training loop.

Some weights are replicated on ranks that each compute only a part of their gradient, so the parts must be summed:

* under sequence parallelism, norm weights: each tensor-parallel rank has only its part of the sequence (Megatron-LM
  marks them ``sequence_parallel`` and sums them in finalize_model_grads.py); and LoRA's replicated A or B, likewise;
* kv heads shared by several tensor-parallel ranks, with their LoRA B: each rank has only its own query heads;
* tied embeddings of a pipeline: the first stage has the gradient of the lookup, the last that of the logits.

They are summed on the local shards, after the data-parallel reduction: both are sums, so their order does not matter,
and a shard is smaller than a gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist

from megatron_llama.arch.shapes import KV_HEADS, REPLICATED_UNDER_SP, kv_copies
from megatron_llama.parallel.groups import Groups
from megatron_llama.parallel.shards import Shard
from megatron_llama.plan import Plan
from megatron_llama.topology import Topology


class ReplicatedGradients:
    """Sums the gradients of weights that are replicated over tensor- or pipeline-parallel ranks."""

    def __init__(self, plan: Plan, topology: Topology, groups: Groups) -> None:
        self.groups, self.sequence_parallel = groups, plan.sp
        self.tied = plan.model.tie_word_embeddings and topology.sizes["pp"] > 1
        # The neighbours that share this rank's kv head: tp varies fastest, and the number of copies divides it. A
        # collective, as torch makes groups on all ranks.
        copies = kv_copies(plan.model, topology.sizes["tp"])
        self.kv_group = groups.add("tp", dist.new_subgroups(copies)[0]) if copies > 1 else None

    def reduce(self, shards: Iterable[Shard]) -> None:
        """Sums in place, with one all-reduce per group. A collective: all ranks of a group pass the same parameters."""
        by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = defaultdict(list)
        for shard in shards:
            if shard.grad is None:
                continue
            name = shard.name.removesuffix(".weight")
            if self.sequence_parallel and name.endswith(REPLICATED_UNDER_SP):
                by_group[self.groups["tp"]].append(shard.widened_grad())
            elif self.kv_group is not None and name.endswith(KV_HEADS):
                kv = [p for p in shard.pieces if ".k_proj." in p.name or ".v_proj." in p.name]
                if kv:  # a shard may have only query rows; ranks that share a kv head have the same rows
                    grad = shard.widened_grad()
                    by_group[self.kv_group].extend(grad[p.local_slices] for p in kv)
            elif self.tied and name in ("embed_tokens", "lm_head"):
                assert self.groups.embedding is not None, "the stage has a tied embedding"
                by_group[self.groups.embedding].append(shard.widened_grad())
        for group, grads in by_group.items():
            _sum_together(grads, group)


def _sum_together(grads: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    if len(grads) == 1 and grads[0].is_contiguous():
        dist.all_reduce(grads[0], group=group)
        return
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, summed in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(summed.view_as(grad))
