"""``ExactSums`` builds the parts of exact mode and sums gradients and losses over ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_llama.arch.exact_blocks import attention_rows, mlp_rows, num_blocks
from megatron_llama.arch.parameters import head_dim, kv_copies, kv_heads, qk_norm
from megatron_llama.config import ModelConfig
from megatron_llama.model.llama import COLUMN_PARALLEL, BlockParts, Llama, parallel_linear
from megatron_llama.model.loss import Head
from megatron_llama.parallel.data_parallel import DataGroups
from megatron_llama.parallel.exact import layers
from megatron_llama.parallel.exact.head import ExactHead, HeadSettings
from megatron_llama.parallel.exact.linear import ColumnMatmul, Context, ExactColumnLinear, ExactRowLinear, RowMatmul
from megatron_llama.parallel.exact.sums import BITS, LOGP_BITS, GradShards, Total, Tree, from_grid
from megatron_llama.parallel.groups import Groups
from megatron_llama.parallel.replicated_gradients import ReplicatedGradients, sum_together
from megatron_llama.parallel.shards import Shard
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
        self.kv_tree = Tree(plan.model.num_attention_heads // kv_heads(plan.model), replicated.kv_group)
        context = groups["cp"] if topology.sizes["cp"] > 1 else None
        self.context, self.attend = Context(context), layers.SharedHeads(self.kv_tree, context)
        # With more ranks than kv heads, the first of the ranks with a copy counts a head.
        self.counts_kv = replicated.kv_group is None or replicated.kv_group.rank() == 0
        self.replicas = data.mesh.get_group(0) if data.mesh.ndim == 2 else None
        self.shares = GradShards(topology.shard_size, data.mesh.get_group("shard"))
        self.totals: dict[str, Total] = {}
        self.losses: list[Tensor] = []
        self._built: dict[nn.Parameter, Total] = {}  # of the chunk under construction

    def parts(self, parts: BlockParts) -> BlockParts:
        """Return ``parts`` with the layers of exact mode."""
        activation = partial(layers.swiglu, units=layers.Units(self.tree.local, self.context))
        parts = replace(parts, attend=self.attend, activation=activation, linear=self._linear, norm=self._norm)
        return replace(parts, embedding=self._embedding, head=self._head)

    def name_totals(self, chunk: Llama) -> None:
        """Store the sums of a chunk's parameters by name, and give a tied head the embedding's."""
        names = {parameter: name for name, parameter in chunk.named_parameters()}
        self.totals |= {names[parameter]: total for parameter, total in self._built.items()}
        self._built.clear()
        if chunk.is_last:
            weight = "embed_tokens.weight" if chunk.lm_head.weight is None else "lm_head.weight"
            loss, context = (self.plan.model.vocab_size, self.plan.config.trainer.z_loss), (self.context, self.plan.sp)
            chunk.lm_head.how = HeadSettings(self.tree, self.totals[weight], *loss, *context, self.losses)

    def _total(self, parameter: nn.Parameter, per_token: int = 1) -> Total:
        """Return the sum of a new parameter's gradient, which ``per_token`` heads of a token use."""
        samples = self.plan.config.trainer.global_batch_size
        tokens, early = samples * self.plan.config.data.length * per_token, self.plan.config.trainer.zero >= 2
        total = self._built[parameter] = Total(parameter.shape, samples, tokens, self.shares, scatters_early=early)
        return total

    def _linear(self, matrix: str, model: ModelConfig, mcore: TransformerConfig) -> nn.Module:
        layer: Any = parallel_linear(matrix, model, mcore, kinds=(ExactColumnLinear, ExactRowLinear))
        total, tp = self._total(layer.weight), self.tree.ranks
        if matrix in COLUMN_PARALLEL:
            rows = attention_rows(model, tp, self.rank) if matrix == "qkv_proj" else mlp_rows(model, tp)
            layer.how = ColumnMatmul(rows, self.tree, total, self.context, self.plan.sp)
        else:
            layer.how = RowMatmul(self.tree.local, self.tree, total, self.context, self.plan.sp)
        layer.bias_total = None if layer.bias is None else self._total(layer.bias)
        return layer

    def _norm(self, name: str, size: int, model: ModelConfig, mcore: TransformerConfig) -> nn.Module:
        is_of_heads, is_k = name in ("q_norm", "k_norm"), name == "k_norm"
        per_token = model.num_attention_heads if is_of_heads else 1
        if is_of_heads and qk_norm(model) == "projection":
            heads = layers.Heads(self.tree, kv_copies(model, self.tree.ranks) if is_k else 1)
            projection = layers.ExactProjectionNorm(size, model.rms_norm_eps, mcore.params_dtype)
            projection.total, projection.heads = self._total(projection.weight, per_token), heads
            return projection
        norm = layers.ExactNorm(head_dim(model) if is_of_heads else size, model.rms_norm_eps, mcore.params_dtype)
        norm.total, norm.counts = self._total(norm.weight, per_token), self.counts_kv or not is_k
        return norm

    def _embedding(self, *args: Any, **kwargs: Any) -> layers.ExactEmbedding:
        embedding = layers.ExactEmbedding(*args, **kwargs)
        embedding.tree, embedding.total = self.tree, self._total(embedding.weight)
        return embedding

    def _head(self, *args: Any, **kwargs: Any) -> Head:
        head = ExactHead(*args, **kwargs)
        if head.weight is not None:
            self._total(head.weight)
        return head

    @torch.no_grad()
    def reduce(self, shards: Iterable[Shard]) -> None:
        """Set the shards' gradients to the sums over all sequences."""
        trained = [shard for shard in shards if shard.is_trained]
        taken = [self.totals[shard.name].take(shard.local.device) for shard in trained]
        rows = [total for total, _ in taken]
        by_group: dict[dist.ProcessGroup, list[Tensor]] = defaultdict(list)
        for shard, total in zip(trained, rows, strict=True):
            if (group := self.replicated.group_of(shard.name.removesuffix(".weight"))) is not None:
                by_group[group].append(total)
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
        bits = LOGP_BITS if self.plan.config.finetune.metrics else BITS
        return from_grid(total // self.replicated.copies_of_loss, bits)
