"""Mutations of this project's code. Each replaces one function, so that the code has a published bug."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import megatron_llama.model.loss as loss
import megatron_llama.model.norm as norms
import megatron_llama.optim.norm as norm
import megatron_llama.optim.optimizer as optimizer
import megatron_llama.parallel.parallelize as parallelize
import megatron_llama.parallel.tensor as tensor
import tests.oracle
from megatron_llama.arch.names import Rectangle
from megatron_llama.checkpoint.manifest import State
from megatron_llama.data.batches import Batches
from megatron_llama.devices.visibility import Documents
from megatron_llama.model.inputs import InputBuilder, MicroBatch
from megatron_llama.optim import Optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.parallel.fsdp import ComputeCopies
from megatron_llama.parallel.pipeline import Counts, run_schedule
from megatron_llama.plan import Plan
from megatron_llama.plan.schedules import RunPosition

Mutation = Callable[[pytest.MonkeyPatch], None]
Tamper = Callable[[ParallelModel], None]


def tampered(tamper: Tamper) -> Mutation:
    """Return a mutation that changes each model of several ranks after it is built (tests/layouts/tampers.py)."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        build = tests.oracle.build_model

        def build_and_tamper(plan: Plan, *arguments: Any) -> ParallelModel:
            model = build(plan, *arguments)
            if plan.world_size > 1:
                tamper(model)
            return model

        patch.setattr(tests.oracle, "build_model", build_and_tamper)

    mutate.__name__ = tamper.__name__

    return mutate


def norms_summed_under_sp_only(patch: pytest.MonkeyPatch) -> None:
    """Norms of q's and k's heads are summed over tensor-parallel ranks only with sequence parallelism."""
    is_summed = tensor.is_summed_over_tp
    patch.setattr(tensor, "is_summed_over_tp", lambda name, *, sp, **more: sp and is_summed(name, sp=sp, **more))


def exponentials_of_gathered_logits(patch: pytest.MonkeyPatch) -> None:
    """The sum of exponentials counts the vocabulary once per tensor-parallel rank: the loss has log(tp) in addition."""
    softmax = loss._softmax

    def counted(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, group: Any, how: Any) -> Any:
        ranks = 1 if group is None else torch.distributed.get_world_size(group)

        def statistics(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            largest, total = how.statistics(values)
            return largest, ranks * total

        return softmax(logits, labels, weights, group, how._replace(statistics=statistics))

    patch.setattr(loss, "_softmax", counted)


def loss_not_divided_in_pipelines(patch: pytest.MonkeyPatch) -> None:
    """A pipeline's backward pass starts from the sum of losses; only the reported loss is divided by the tokens."""

    def schedule(chunks: Any, plan: Plan, batches: Any, total: torch.Tensor, *more: Any) -> torch.Tensor:
        if plan.config.trainer.pp == 1:
            return run_schedule(chunks, plan, batches, total, *more)
        return run_schedule(chunks, plan, batches, torch.ones_like(total), *more) / total

    patch.setattr(parallelize, "run_schedule", schedule)


def mean_of_microbatch_means(patch: pytest.MonkeyPatch) -> None:
    """Each micro batch divides its loss by its own tokens."""

    def schedule(chunks: Any, plan: Plan, batches: Sequence[MicroBatch], total: torch.Tensor, *more: Any) -> Any:
        parts = len(batches) * plan.dp
        means = [
            replace(batch, loss_mask=batch.loss_mask / batch.loss_mask.sum().clamp(min=1) * total / parts)
            for batch in batches
        ]
        return run_schedule(chunks, plan, means, total, *more)

    patch.setattr(parallelize, "run_schedule", schedule)


def tokens_counted_on_each_tensor_parallel_rank(patch: pytest.MonkeyPatch) -> None:
    """Tokens with loss are summed over all ranks, and tensor-parallel ranks have the same tokens."""
    count = ParallelModel.count

    def counted(model: ParallelModel, batches: Sequence[MicroBatch]) -> Counts:
        counts = count(model, batches)
        return counts._replace(with_loss=counts.with_loss * model.plan.config.trainer.tp)

    patch.setattr(ParallelModel, "count", counted)


def tokens_divided_by_context_parallel_ranks(patch: pytest.MonkeyPatch) -> None:
    """The count treats parts of a sequence as copies of it, so that it is too small by the number of ranks."""
    count = ParallelModel.count

    def counted(model: ParallelModel, batches: Sequence[MicroBatch]) -> Counts:
        counts = count(model, batches)
        return counts._replace(with_loss=counts.with_loss // model.plan.config.trainer.cp)

    patch.setattr(ParallelModel, "count", counted)


def norms_without_gradient(patch: pytest.MonkeyPatch) -> None:
    """The backward pass of a norm computes the gradient of its input only."""
    gradients = norms._gradients

    def of_the_input(ctx: Any, grad: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        grad_input, grad_weight = gradients(ctx, grad, group)
        assert grad_weight is not None
        return grad_input, torch.zeros_like(grad_weight)

    patch.setattr(norms, "_gradients", of_the_input)


def documents_ignored(patch: pytest.MonkeyPatch) -> None:
    """Tokens attend to earlier documents of their sequence. Positions start again in each document."""
    whole = InputBuilder.__call__

    def build(self: InputBuilder, tokens: torch.Tensor, documents: Any = None, subsets: Any = None) -> Any:
        inputs = whole(self, tokens, documents, subsets)
        return inputs if documents is None else replace(inputs, visible=whole(self, tokens).visible)

    patch.setattr(InputBuilder, "__call__", build)


def documents_begin_one_token_late(patch: pytest.MonkeyPatch) -> None:
    """The first token of a document belongs to the document before."""
    build = Documents.of.__func__  # type: ignore[attr-defined]

    def shifted(kind: type[Documents], ids: torch.Tensor) -> Documents:
        documents: Documents = build(kind, torch.cat((ids[:, :1], ids[:, :-1]), dim=1))
        return documents

    patch.setattr(Documents, "of", classmethod(shifted))


def positions_continue_after_the_end_of_a_document(patch: pytest.MonkeyPatch) -> None:
    """Positions count the tokens of a sequence, not of a document."""

    def positions(self: Documents) -> torch.Tensor:
        length = self.ids.shape[1]
        return torch.arange(length, device=self.ids.device).expand(len(self.ids), length)

    patch.setattr(Documents, "positions", positions)


def same_values_on_each_tensor_parallel_rank(patch: pytest.MonkeyPatch) -> None:
    """Each rank draws the values of its shard from the same state of the generator."""
    values = parallelize.initial_values

    def of_the_first_rank(rectangle: Rectangle, *more: Any) -> torch.Tensor:
        return values(replace(rectangle, offset=(0,) * len(rectangle.offset)), *more)

    patch.setattr(parallelize, "initial_values", of_the_first_rank)


def other_masks_on_each_tensor_parallel_rank(patch: pytest.MonkeyPatch) -> None:
    """Without sequence parallelism, tensor-parallel ranks drop other elements of the activations that they share."""
    seed = torch.manual_seed
    patch.setattr(torch, "manual_seed", lambda number: seed(number + 100 * torch.distributed.get_rank()))


def same_masks_on_each_rank(patch: pytest.MonkeyPatch) -> None:
    """All ranks drop the same elements of different samples."""
    seed = torch.manual_seed
    patch.setattr(torch, "manual_seed", lambda number: seed(0))


def scheduler_stepped_per_microbatch(patch: pytest.MonkeyPatch) -> None:
    """The learning rate advances once per micro batch."""
    advance = Optimizer.advance

    def advanced(self: Optimizer, updated: bool = True) -> None:
        advance(self, updated)
        for _ in range(self.model.plan.num_microbatches - 1):
            self.scheduler.step()

    patch.setattr(Optimizer, "advance", advanced)


def norms_decay(patch: pytest.MonkeyPatch) -> None:
    """Weight decay applies to norm weights."""
    patch.setattr(optimizer, "decays", lambda name: True)


def norm_of_the_local_shard(patch: pytest.MonkeyPatch) -> None:
    """The gradient norm is not summed over ranks."""
    patch.setattr(norm, "_global_norm", lambda norms, device: torch.cat(norms).norm())


def microbatches_summed_in_bf16(patch: pytest.MonkeyPatch) -> None:
    """Gradients of micro batches are added in bf16."""
    init = ComputeCopies.__init__

    def initialized(self: ComputeCopies, *arguments: Any) -> None:
        init(self, *arguments)
        self._sums_in_bf16 = True

    patch.setattr(ComputeCopies, "__init__", initialized)


def data_restarts_after_a_resume(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint's position in the data is zero."""
    patch.setattr(State, "position", property(lambda state: RunPosition(state.step, 0, 0)))


def updates_restart_after_a_resume(patch: pytest.MonkeyPatch) -> None:
    """Adam's bias correction starts from the first update after a resume."""
    restore = Optimizer.restore
    patch.setattr(Optimizer, "restore", lambda self, updates, steps: restore(self, 0, steps))


def schedule_restarts_after_a_resume(patch: pytest.MonkeyPatch) -> None:
    """The learning rate starts from its first value after a resume."""
    restore = Optimizer.restore
    patch.setattr(Optimizer, "restore", lambda self, updates, steps: restore(self, updates, 0))


def same_samples_on_each_rank(patch: pytest.MonkeyPatch) -> None:
    """Each data-parallel rank reads the samples of the first one."""
    of_rank = Batches._micro_batch

    def of_the_first(self: Batches, indices: range, *more: Any) -> MicroBatch:
        back = self.topology.place["dp"] * len(indices)
        return of_rank(self, range(indices.start - back, indices.stop - back), *more)

    patch.setattr(Batches, "_micro_batch", of_the_first)
