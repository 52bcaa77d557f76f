"""``ExactSums`` replaces a chunk's layers and sums gradients and losses over ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_llama.arch.blocks import attention_rows, mlp_rows, num_blocks
from megatron_llama.arch.shapes import kv_copies, kv_heads
from megatron_llama.model.llama import Llama
from megatron_llama.model.norm import ProjectionNorm, RMSNorm
from megatron_llama.model.recompute import recomputable
from megatron_llama.parallel.exact.head import HeadSettings, head_forward
from megatron_llama.parallel.exact.layers import (
    Heads,
    SharedHeads,
    Units,
    embed,
    norm_forward,
    projection_norm_forward,
    replace,
    swiglu,
)
from megatron_llama.parallel.exact.linear import Column, Context, Row, column_forward, row_forward
from megatron_llama.parallel.exact.sums import Shares, Total, Tree, from_grid
from megatron_llama.parallel.fsdp import DataGroups
from megatron_llama.parallel.groups import Groups
from megatron_llama.parallel.shards import Shard
from megatron_llama.parallel.tensor import ReplicatedGradients, sum_together
from megatron_llama.plan import Plan
from megatron_llama.topology import Topology


class ExactSums:
    """Sums of gradients and losses over sequences and ranks, without rounding that depends on the layout."""

    def __init__(
        self, plan: Plan, topology: Topology, groups: Groups, data: DataGroups, replicated: ReplicatedGradients
    ) -> None:
        self.plan, self.groups, self.replicated = plan, groups, replicated
        self.rank, tp = topology.place["tp"], topology.sizes["tp"]
        self.blocks = num_blocks(plan.model)
        self.tree = Tree(self.blocks, groups["tp"] if tp > 1 else None)
        queries = plan.model.num_attention_heads // kv_heads(plan.model)
        self.kv_tree = Tree(queries, replicated.kv_group)
        context = groups["cp"] if topology.sizes["cp"] > 1 else None
        self.context, self.attend = Context(context), SharedHeads(self.kv_tree, context)
        # With more ranks than kv heads, the first of the ranks with a copy counts a head.
        self.counts_kv = replicated.kv_group is None or replicated.kv_group.rank() == 0
        self.replicas = data.mesh.get_group(0) if data.mesh.ndim == 2 else None
        self.shares = Shares(topology.shard_size, data.mesh.get_group("shard"))
        self.totals: dict[str, Total] = {}
        self.losses: list[Tensor] = []

    def attach(self, chunk: Llama) -> None:
        """Replace the layers of a chunk, whose parameters have the shapes of a tensor-parallel rank."""
        model, trainer = self.plan.model, self.plan.config.trainer
        for name, parameter in chunk.named_parameters():
            per_token = model.num_attention_heads if name.removesuffix(".weight").endswith(("q_norm", "k_norm")) else 1
            tokens = trainer.global_batch_size * self.plan.config.data.length * per_token
            self.totals[name] = Total(
                parameter.shape, trainer.global_batch_size, tokens, self.shares, scatters_early=trainer.zero >= 2
            )
        for name, module in chunk.named_modules():
            if isinstance(module, RMSNorm):
                self._norm(module, name)
        for number, block in chunk.layers.items():
            self._block(block, f"layers.{number}")
        if chunk.is_first:
            total = self.totals["embed_tokens.weight"]
            replace(chunk.embed_tokens, partial(embed, chunk.embed_tokens, self.tree, total, self.plan.sp))
        if chunk.is_last:
            weight = "embed_tokens.weight" if chunk.lm_head.weight is None else "lm_head.weight"
            head = chunk.lm_head
            total, sizes = self.totals[weight], (model.vocab_size, trainer.z_loss)
            how = HeadSettings(self.tree, total, *sizes, self.context, self.plan.sp, self.losses)
            head.forward_once = head.forward
            replace(head, partial(head_forward, head, how))

    def _block(self, block: Any, name: str) -> None:
        attention, mlp, tp = block.self_attn, block.mlp, self.tree.ranks
        self._column(attention.qkv_proj, f"{name}.self_attn.qkv_proj", attention_rows(self.plan.model, tp, self.rank))
        self._row(attention.o_proj, f"{name}.self_attn.o_proj")
        self._column(mlp.gate_up_proj, f"{name}.mlp.gate_up_proj", mlp_rows(self.plan.model, tp))
        self._row(mlp.down_proj, f"{name}.mlp.down_proj")
        attention.attend = self.attend
        mlp.activation = partial(swiglu, units=Units(self.tree.local, self.context))

    def _norm(self, norm: RMSNorm, name: str) -> None:
        total, is_k = self.totals[f"{name}.weight"], name.endswith("k_norm")
        if isinstance(norm, ProjectionNorm):  # collectives: not recomputable
            copies = kv_copies(self.plan.model, self.tree.ranks) if is_k else 1
            replace(norm, partial(projection_norm_forward, norm, total, Heads(self.tree, copies)))
        else:
            replace(norm, recomputable(partial(norm_forward, norm, total, self.counts_kv or not is_k)))

    def _bias(self, name: str) -> Total | None:
        return self.totals.get(f"{name}.bias")

    def _column(self, layer: Any, name: str, rows: list[Any]) -> None:
        how = Column(rows, self.tree, self.totals[f"{name}.weight"], self.context, self.plan.sp)
        replace(layer, partial(column_forward, layer, how, self._bias(name)))

    def _row(self, layer: Any, name: str) -> None:
        how = Row(self.tree.local, self.tree, self.totals[f"{name}.weight"], self.context, self.plan.sp)
        replace(layer, partial(row_forward, layer, how, self._bias(name)))

    @torch.no_grad()
    def reduce(self, shards: Iterable[Shard]) -> None:
        """Set the shards' gradients to the sums over all sequences."""
        trained = [shard for shard in shards if shard.is_trained]
        taken = [self.totals[shard.name].take(shard.local.device) for shard in trained]
        rows = [total for total, _ in taken]
        by_group: dict[dist.ProcessGroup, list[Tensor]] = defaultdict(list)
        for shard, total in zip(trained, rows, strict=True):
            name = shard.name.removesuffix(".weight")
            if self.replicated.is_replicated(name):
                by_group[self.groups["tp"]].append(total)
            elif self.replicated.tied and name in ("embed_tokens", "lm_head"):
                assert self.groups.embedding is not None, "the stage has a tied embedding"
                by_group[self.groups.embedding].append(total)
        if self.replicas is not None and self.replicas.size() > 1:
            by_group[self.replicas] = rows
        for group, totals in by_group.items():
            sum_together(totals, group)
        too_large = torch.stack([large for _, large in taken]).any().int()
        dist.all_reduce(too_large, dist.ReduceOp.MAX)
        for shard, total in zip(trained, rows, strict=True):
            values = torch.where(too_large.bool(), torch.nan, from_grid(total[: shard.local.shape[0]]))
            grad = torch.empty_like(shard.parameter, requires_grad=False)
            (grad.to_local() if isinstance(grad, DTensor) else grad).copy_(values)
            shard.parameter.grad = grad

    def total_loss(self, means: Tensor) -> Tensor:
        """Return the sum of the losses of all ranks, shaped like ``means``, the rounded sums of this rank."""
        total = torch.zeros(means.shape, dtype=torch.int64, device=means.device)
        for part in self.losses:
            total += part.view(total.shape)
        self.losses.clear()
        dist.all_reduce(total)
        return from_grid(total // self.replicated.copies_of_loss)
