"""Tensor and sequence parallelism: gradient reductions that megatron-core's layers leave to the training loop.

Some weights are replicated on ranks that each compute only a part of their gradient, so the parts must be summed:

* under sequence parallelism, norm weights: each tensor-parallel rank has only its part of the sequence (Megatron-LM
  marks them ``sequence_parallel`` and sums them in finalize_model_grads.py); and LoRA's replicated A or B, likewise;
* kv heads shared by several tensor-parallel ranks, with their LoRA B: each rank has only its own query heads;
* tied embeddings of a pipeline: the first stage has the gradient of the lookup, the last that of the logits.

They are summed on the local shards, after the data-parallel reduction: both are sums, so their order does not matter,
and a shard is smaller than a gradient. The file also has the products that torch.compile traces, and their overlap.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor

from megatron_llama.arch.shapes import KV_HEADS, REPLICATED_UNDER_SP, kv_copies
from megatron_llama.devices import Device
from megatron_llama.model.quantized import is_quantized
from megatron_llama.parallel.groups import Groups, current_groups
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


# megatron-core's parallel linear product in a form that torch.compile traces into one graph. megatron-core's own waits
# for its collectives by hand, which are graph breaks; here they are functional collectives beside the products. The
# backward pass gathers the shard again, unless a compiler saves the gathered input, as Inductor does
# (docs/guides/tools/traffic.md).

def make_traceable(block: nn.Module) -> None:
    """Replaces the product of a block's parallel linear layers. That of quantized weights can be traced already."""
    for layer in block.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and not is_quantized(layer):
            layer._forward_impl = _multiply  # type: ignore[method-assign]


def _multiply(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None,
    **_: Any,
) -> torch.Tensor:
    """Input [s(/t), b, h] times weight [o, h] to [s, b, o]; a linear layer's ``_forward_impl``."""
    assert bias is None, "a Llama has no biases"
    if not allreduce_dgrad and not sequence_parallel:
        return torch.matmul(input, weight.t())
    product: torch.Tensor = _Product.apply(input, weight, tp_group, sequence_parallel)
    return product


class _Product(torch.autograd.Function):
    """x Wᵀ, where the gradient of x is summed over the tensor-parallel ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, split: bool) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)  # a frozen weight needs no x
        ctx.group, ctx.split = group, split
        return torch.matmul(all_gather_tensor(x, 0, group) if split else x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        partial = torch.matmul(grad, weight)
        if ctx.split:
            grad_x = reduce_scatter_tensor(partial, "sum", 0, ctx.group)
        else:
            grad_x = all_reduce(partial, "sum", ctx.group)
        if x is None:
            return grad_x, None, None, None
        whole = all_gather_tensor(x, 0, ctx.group) if ctx.split else x
        grad_weight = torch.matmul(grad.flatten(0, 1).t(), whole.flatten(0, 1))
        return grad_x, grad_weight, None, None


# trainer.async_tp: Inductor fuses sequence parallelism's gathers and scatters with the products beside them
# (fused_all_gather_matmul, fused_matmul_reduce_scatter). A device says whether and how (``Device.enable_async_tp``).
# The functions below count the fusions, because a compiler that recognises nothing says nothing.

_COLLECTIVES = ("_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor")


class NotOverlapped(RuntimeError):
    """The compiler has put no collective into a product, and trainer.async_tp would do nothing."""


class Overlap(NamedTuple):
    """What became of a graph's gathers and scatters, forward and backward."""

    inside: int
    """Those that run inside a product."""
    beside: int
    """Those that stayed operators of their own."""


class OverlapCount(CustomGraphPass):
    """Counts in each graph that Inductor compiles, after its own passes; graphs out of the cache do not come here."""

    def __init__(self) -> None:
        self._found = Overlap(0, 0)

    def __call__(self, graph: torch.fx.Graph) -> None:
        names = [node.target.name() for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        inside = sum(name.startswith("symm_mem::fused_") for name in names)
        beside = sum(name.startswith(_COLLECTIVES) for name in names)
        self._found = Overlap(self._found.inside + inside, self._found.beside + beside)

    def uuid(self) -> str:
        """Part of the cache's key. What is compiled does not depend on the count."""
        return "megatron_llama: OverlapCount"

    def take(self) -> Overlap:
        """What was counted since the last call."""
        found, self._found = self._found, Overlap(0, 0)
        return found


def overlap_products(device: Device) -> OverlapCount:
    """Turn on trainer.async_tp for all graphs that this process compiles later. A collective
    of the tensor-parallel ranks.

    Raises ConfigError where the devices can't do it."""
    device.enable_async_tp(current_groups()["tp"])
    count = OverlapCount()
    inductor.post_grad_custom_post_pass = count
    return count


def nothing_overlaps(found: Overlap | None, what: str, mode: str) -> str | None:
    """What is wrong with a graph in which all collectives stayed as they were; None for others."""
    if found is None or found.inside or not found.beside:
        return None
    return (
        f"trainer.async_tp: torch {torch.__version__} has put none of the {found.beside} gathers and scatters of "
        f"{what}, {mode}, into a product. Write trainer.async_tp=false"
    )
