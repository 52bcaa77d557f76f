"""Sums of the gradients of weights that are replicated on ranks which each compute a part of the gradient.

Megatron-LM sums these parts in finalize_model_grads.py, outside the layers:

* Norm weights, biases of row-parallel layers and LoRA's replicated A or B under sequence parallelism
  (REPLICATED_UNDER_SP): each tensor-parallel rank has a part of the sequence.
* Norms whose weight all heads of q or k share, always: each tensor-parallel rank has its heads.
* kv heads that several tensor-parallel ranks share, with bias, norm and LoRA B: each rank has its query heads only.
* Tied embeddings in a pipeline: the first stage has the gradient of the lookup, the last stage the gradient of the
  logits.

``ReplicatedGradients`` sums the local shards after the data-parallel reduction. Both are sums, so the order does not
matter, and a shard is smaller than a gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist

from megatron_llama.arch.parameters import KV_HEADS, KV_MODULES, is_summed_over_tp, kv_copies
from megatron_llama.parallel.groups import Groups
from megatron_llama.parallel.shards import Shard
from megatron_llama.plan import Plan
from megatron_llama.topology import Topology


class ReplicatedGradients:
    """Sums the gradients of weights that are replicated over tensor- or pipeline-parallel ranks, and the losses."""

    def __init__(self, plan: Plan, topology: Topology, groups: Groups) -> None:
        self.groups = groups
        self.is_replicated = partial(is_summed_over_tp, model=plan.model, tp=topology.sizes["tp"], sp=plan.sp)
        self.copies_of_loss = plan.grid.product(*(name for name in plan.grid.same_tokens if name != "pp"))
        self.tied = plan.model.tie_word_embeddings and topology.sizes["pp"] > 1
        # The neighbours that share this rank's kv head: tp varies fastest, and the number of copies divides tp.
        # new_subgroups is a collective over all ranks.
        copies = kv_copies(plan.model, topology.sizes["tp"])
        self.kv_group = groups.label("tp", dist.new_subgroups(copies)[0]) if copies > 1 else None

    def group_of(self, name: str) -> dist.ProcessGroup | None:
        """Return the ranks over which a whole parameter is summed, by its name without ``.weight``."""
        if self.is_replicated(name):
            return self.groups["tp"]
        if not self.tied or name.partition(".")[0] not in ("embed_tokens", "lm_head", "embed_rows", "head_rows"):
            return None
        assert self.groups.embedding is not None, "the stage has a tied embedding"
        return self.groups.embedding

    def reduce(self, shards: Iterable[Shard]) -> None:
        """Sum the gradients in place, with one all-reduce per group. All ranks of a group pass the same parameters."""
        by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = defaultdict(list)
        for shard in shards:
            if shard.grad is None:
                continue
            name = shard.name.removesuffix(".weight").replace(".base_layer", "")  # a bias that LoraLinear wraps
            if (group := self.group_of(name)) is not None:
                by_group[group].append(shard.upcast_grad())
            elif self.kv_group is not None and name.endswith(KV_HEADS):
                kv = [p for p in shard.rectangles if set(p.name.split(".")) & set(KV_MODULES)]
                if kv:  # a shard may have only query rows; ranks that share a kv head have the same rows
                    grad = shard.upcast_grad()
                    by_group[self.kv_group].extend(grad[p.local_slices] for p in kv)
        for group, grads in by_group.items():
            sum_together(grads, group)

    def total_loss(self, means: torch.Tensor) -> torch.Tensor:
        """Return the global batch's means: the sum over all ranks, with equal parts of tensor-parallel ranks once."""
        # Equal on tensor-parallel ranks, parts of the sum on context-parallel ranks, 0 before the last stage.
        means = means / self.copies_of_loss
        dist.all_reduce(means)
        return means


def sum_together(grads: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over ``group`` in place, with one all-reduce."""
    if len(grads) == 1 and grads[0].is_contiguous():
        dist.all_reduce(grads[0], group=group)
        return
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, summed in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(summed.view_as(grad))
