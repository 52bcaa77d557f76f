"""Ways to break a model on purpose, each by one invariant. They run inside forked ranks: what they patch there leaves
the test process alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import megatron_llama.model.loss as loss
import megatron_llama.model.rms_norm as norm
import megatron_llama.optim.gradient_norm as optim_norm
import megatron_llama.parallel.parallelize as parallelize
from megatron_llama.data.batches import Batches
from megatron_llama.devices import HOST, device_named, torch_attention
from megatron_llama.devices.attention_inputs import Documents
from megatron_llama.devices.cpu import attention as cpu_attention
from megatron_llama.model.inputs import InputBuilder, MicroBatch
from megatron_llama.optim import Optimizer
from megatron_llama.parallel import ParallelModel, Shard, context_parallel
from megatron_llama.parallel.exact import gradients
from megatron_llama.parallel.exact.sums import Tree
from megatron_llama.parallel.pipeline import TokenTotals
from megatron_llama.plan import Plan
from tests.parallel.symmetric_memory import wrong_pieces


def no_sequence_parallel_sum(model: ParallelModel) -> None:
    model.replicated.is_replicated = lambda name: False  # type: ignore[assignment]


def no_kv_copy_sum(model: ParallelModel) -> None:
    model.replicated.kv_group = None


def no_tied_sum(model: ParallelModel) -> None:
    model.replicated.tied = False


def replicated_gradients_twice(model: ParallelModel) -> None:
    once = model.replicated.reduce

    def twice(shards: list[Shard]) -> None:
        once(shards)
        once(shards)

    model.replicated.reduce = twice  # type: ignore[method-assign, assignment]


def local_token_count(model: ParallelModel) -> None:
    ranks, count = dist.get_world_size(), model.count

    def local(batches: Sequence[MicroBatch]) -> TokenTotals:
        tokens = torch.stack([batch.loss_mask.sum() for batch in batches]).sum()
        return count(batches)._replace(with_loss=ranks * tokens)

    model.count = local  # type: ignore[method-assign]


def tokens_counted_on_each_tensor_parallel_rank(model: ParallelModel) -> None:
    _scale_token_count(model, model.plan.config.trainer.tp)


def tokens_divided_by_context_parallel_ranks(model: ParallelModel) -> None:
    _scale_token_count(model, 1 / model.plan.config.trainer.cp)


def _scale_token_count(model: ParallelModel, factor: float) -> None:
    count = model.count

    def scaled(batches: Sequence[MicroBatch]) -> TokenTotals:
        totals = count(batches)
        return totals._replace(with_loss=totals.with_loss * factor)

    model.count = scaled  # type: ignore[method-assign]


def loss_not_divided_in_pipelines(model: ParallelModel) -> None:
    """The reported loss is divided by the tokens; the gradients are not."""
    schedule = parallelize.run_schedule
    parallelize.run_schedule = lambda chunks, plan, batches, total, *more: (
        schedule(chunks, plan, batches, torch.ones_like(total), *more) / total
    )


def mean_of_microbatch_means(model: ParallelModel) -> None:
    schedule = parallelize.run_schedule

    def of_means(chunks: Any, plan: Plan, batches: Sequence[MicroBatch], total: torch.Tensor, *more: Any) -> Any:
        share = total / (len(batches) * plan.dp)
        means = [replace(batch, loss_mask=batch.loss_mask / batch.loss_mask.sum() * share) for batch in batches]
        return schedule(chunks, plan, means, total, *more)

    parallelize.run_schedule = of_means


def same_samples_on_each_rank(model: ParallelModel) -> None:
    of_rank = Batches._micro_batch

    def of_the_first(self: Batches, indices: range, *more: Any) -> MicroBatch:
        back = self.topology.place["dp"] * len(indices)
        return of_rank(self, range(indices.start - back, indices.stop - back), *more)

    Batches._micro_batch = of_the_first  # type: ignore[method-assign]


def scheduler_stepped_per_microbatch(model: ParallelModel) -> None:
    advance = Optimizer.advance

    def advanced(self: Optimizer, updated: bool = True) -> None:
        advance(self, updated)
        for _ in range(self.model.plan.num_microbatches - 1):
            self.scheduler.step()

    Optimizer.advance = advanced  # type: ignore[method-assign]


def mean_over_data_parallel_ranks(model: ParallelModel) -> None:
    for module in model.chunks[0].modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(2.0)


def padding_in_the_loss(model: ParallelModel) -> None:
    loss.hide_padding = lambda logits, valid: logits


def chunks_of_12(model: ParallelModel) -> None:
    """No defect: the 32 tokens of a micro batch in chunks of 12, 12 and 8."""
    loss.loss_chunk = lambda hidden_size: 12


def passes_of_the_compiled_loss(model: ParallelModel) -> None:
    """No defect: what is compiled with trainer.compile, uncompiled, and by chunks of 12."""
    chunks_of_12(model)
    if model.chunks[-1].is_last:
        head, softmax = model.chunks[-1].lm_head, loss.fused_softmax(lambda function, what: function)
        head.spec = replace(head.spec, softmax=softmax, kernels=device_named(HOST).kernels(compiled=True))


def last_chunk_of_the_head_lost(model: ParallelModel) -> None:
    chunks_of_12(model)
    add = loss._add_weight_grad
    loss._add_weight_grad = lambda sums, grad_logits, hidden, *rest: (
        len(hidden) == 12 and add(sums, grad_logits, hidden, *rest)
    )


def loss_weights_only_in_the_loss(model: ParallelModel) -> None:
    original = loss._losses_and_gradients
    loss._losses_and_gradients = lambda x, labels, weights, *how: original(x, labels, torch.ones_like(weights), *how)


def exponentials_of_gathered_logits(model: ParallelModel) -> None:
    """The vocabulary counts once per tensor-parallel rank."""
    original = loss._losses_and_gradients

    def counted(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, spec: loss.LossSpec) -> Any:
        def statistics(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            largest, total = spec.softmax.statistics(values)
            return largest, dist.get_world_size(spec.group) * total

        return original(logits, labels, weights, replace(spec, softmax=spec.softmax._replace(statistics=statistics)))

    loss._losses_and_gradients = counted


def softmax_of_each_rank_alone(model: ParallelModel) -> None:
    original = loss._losses_and_gradients
    loss._losses_and_gradients = lambda x, ids, weights, spec: original(x, ids, weights, replace(spec, group=None))


def head_gradient_not_summed(model: ParallelModel) -> None:
    def own_part(output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        output.copy_(whole.chunk(dist.get_world_size(group))[dist.get_rank(group)])

    unsummed = {"all_reduce": lambda *args, **kwargs: None, "reduce_scatter_tensor": own_part}
    loss.dist = SimpleNamespace(**vars(dist) | unsummed)


def gathered_pieces_of_the_wrong_rank(model: ParallelModel) -> None:
    wrong_pieces("gather")


def scattered_pieces_of_the_wrong_rank(model: ParallelModel) -> None:
    wrong_pieces("scatter")


def norms_count_copies(model: ParallelModel) -> None:
    def all_of_it(shard: Shard, tensor: torch.Tensor, every_replica: bool = False) -> Iterator[torch.Tensor]:
        yield from (tensor[rectangle.local_slices] for rectangle in shard.rectangles)

    Shard.owned = all_of_it  # type: ignore[method-assign]


def norm_of_the_local_shard(model: ParallelModel) -> None:
    optim_norm._global_norm = lambda norms, device: torch.cat(norms).norm()


def norms_without_gradient(model: ParallelModel) -> None:
    gradients = norm.norm_gradients

    def of_the_input(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        grad_input, grad_weight = gradients(*arguments)
        assert grad_weight is not None
        return grad_input, torch.zeros_like(grad_weight)

    norm.norm_gradients = of_the_input


def documents_ignored(model: ParallelModel) -> None:
    whole = InputBuilder.__call__

    def build(self: InputBuilder, tokens: torch.Tensor, documents: Any = None, subsets: Any = None) -> Any:
        return replace(whole(self, tokens, documents, subsets), visible=whole(self, tokens).visible)

    InputBuilder.__call__ = build  # type: ignore[method-assign]


def documents_begin_one_token_late(model: ParallelModel) -> None:
    build = Documents.of.__func__  # type: ignore[attr-defined]
    Documents.of = classmethod(  # type: ignore[method-assign, assignment]
        lambda kind, ids: build(kind, torch.cat((ids[:, :1], ids[:, :-1]), dim=1))
    )


def compiled_gradients_of_one_token_more(model: ParallelModel) -> None:
    """Break the window's gradient only; the forward pass stays correct."""
    call = cpu_attention._call

    def changed(name: str, tensors: list[torch.Tensor], *rest: Any) -> None:
        *shape, first = rest
        earlier = (first - 1).clamp(min=0) if name == "attention_backward" else first
        call(name, tensors, *shape, earlier)

    cpu_attention._call = changed


def key_gradients_of_each_rank_alone(model: ParallelModel) -> None:
    def local(parts: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
        return tuple(x.permute(1, 2, 0, 3) for x in parts[dist.get_rank(group)].unbind(1))

    context_parallel._reduce_scatter = local


def documents_joined_at_a_chunk_boundary(model: ParallelModel) -> None:
    visible = context_parallel.AllGather.visible

    def joined(self: Any, tokens: torch.Tensor, documents: Any, pattern: Any) -> Any:
        inputs = visible(self, tokens, documents, pattern)
        return inputs._replace(lengths=tuple((first + second, *rest) for first, second, *rest in inputs.lengths))

    context_parallel.AllGather.visible = joined


def no_causal_mask(model: ParallelModel) -> None:
    product = torch_attention.F.scaled_dot_product_attention
    torch_attention.F.scaled_dot_product_attention = lambda q, k, v, is_causal, enable_gqa: product(
        q, k, v, enable_gqa=enable_gqa
    )


def other_order_of_blocks(model: ParallelModel) -> None:
    once = Tree.total

    def swapped(self: Tree, nodes: list[torch.Tensor], *, scatter: bool = False) -> torch.Tensor:
        # Three blocks and more: the sum of two does not depend on their order.
        return once(self, [nodes[-1], *nodes[:-1]], scatter=scatter)

    Tree.nodes = lambda self, leaves: [leaf.float() for leaf in leaves]  # type: ignore[method-assign]
    Tree.total = swapped  # type: ignore[method-assign]


def gradients_in_fp32(model: ParallelModel) -> None:
    exact: gradients.ExactSums = model.replicated  # type: ignore[assignment]
    for total in exact.totals.values():
        total.add = _total_in_fp32(total)  # type: ignore[method-assign]


def _total_in_fp32(total: gradients.Total) -> object:
    sums: dict[tuple, torch.Tensor] = {}

    def add(values: torch.Tensor, *where: slice) -> None:
        key = tuple((part.start, part.stop) for part in where)
        before = sums.get(key)
        sums[key] = values.float() if before is None else before + values
        total._buffer(values.device)[where] = (sums[key] * 2.0**50).to(torch.int64)

    return add
