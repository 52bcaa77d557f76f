"""Output head and cross entropy by chunks of tokens, so that the full logits are never in memory.

The vocabulary is split over tensor-parallel ranks, and logits are never gathered. The forward pass computes a chunk's
gradients right after its logits (as Liger Kernel, Hsu et al. 2024, arXiv:2410.10989). That takes three matmuls, the
same number as without chunks; the backward pass would have to recompute the logits. The weight's gradient is a sum over
tokens, so the forward pass needs each token's weight in the loss. The caller passes the weights and gets a scalar.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_llama.arch.parameters import loss_chunk
from megatron_llama.devices.kernels import EAGER, LossKernels
from megatron_llama.model.preference import Pairs, PreferenceLoss

_ROWS_AT_ONCE = 2048
"""Rows of the weight whose gradients are added together, so that the matmul's output is still in the cache."""
_COLUMNS_AT_ONCE, _FEWEST_COLUMNS = 64, 16
"""Most and fewest columns per reduction step of column-major logits, whose cache lines hold several rows. The number
must divide the vocabulary's share; 16 take 5 % more time than 64."""


class SoftmaxKernels(NamedTuple):
    """Elementwise kernels of the softmax over a chunk's logits [n, vocabulary/t]."""

    needs_fp32: bool
    """Whether the caller casts the logits to fp32 first."""
    statistics: Callable[[Tensor], tuple[Tensor, Tensor]]
    """From logits to (largest logit, sum of exp(logit - largest)) of each row, each fp32 [n]. May overwrite the logits
    with exp(logit - largest)."""
    write_softmax: Callable[[Tensor, Tensor, Tensor], None]
    """From (logits after ``statistics``, largest [n], scale [n]): overwrites them with exp(logit - largest) * scale."""


def _statistics_in_place(logits: Tensor) -> tuple[Tensor, Tensor]:
    largest = logits.amax(1)
    return largest, logits.sub_(largest.unsqueeze(1)).exp_().sum(1)


def _scale_in_place(exponentials: Tensor, largest: Tensor, scale: Tensor) -> None:
    exponentials.mul_(scale.unsqueeze(1))


def _statistics(logits: Tensor) -> tuple[Tensor, Tensor]:
    logits_fp32 = logits.float()
    at_once = math.gcd(logits.shape[1], _COLUMNS_AT_ONCE)
    if logits.stride(0) == 1 and at_once >= _FEWEST_COLUMNS:
        logits_fp32 = logits_fp32.unflatten(1, (-1, at_once))
        largest = logits_fp32.amax(2).amax(1)
        return largest, (logits_fp32 - largest[:, None, None]).exp().sum(2).sum(1)
    largest = logits_fp32.amax(1)
    return largest, (logits_fp32 - largest.unsqueeze(1)).exp().sum(1)


def _write_softmax(logits: Tensor, largest: Tensor, scale: Tensor) -> None:
    logits.copy_((logits.float() - largest.unsqueeze(1)).exp() * scale.unsqueeze(1))


IN_PLACE = SoftmaxKernels(True, _statistics_in_place, _scale_in_place)


def fused_softmax(compile: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> SoftmaxKernels:
    """Return kernels that a compiler fuses into two: the first reads the logits, the second also writes them.

    They need no fp32 copy. They compute the exponentials twice, which takes less time than to store and read them.
    """
    return SoftmaxKernels(False, compile(_statistics, "loss"), compile(_write_softmax, "gradient of the loss"))


@dataclass(frozen=True)
class LossSpec:
    """How a rank computes the loss of its rows of the vocabulary."""

    valid: int
    """Rows without padding."""
    group: dist.ProcessGroup | None
    """Tensor-parallel ranks; None if there is one."""
    sequence_parallel: bool
    """Whether the ranks split the hidden states along the sequence."""
    softmax: SoftmaxKernels = IN_PLACE
    kernels: LossKernels = EAGER
    z_loss: float = 0.0
    """Coefficient of the term z_loss * log(sum of exp(logits))^2 in a token's loss."""


class Head(ColumnParallelLinear):
    """Output head: [s(/t), b, h] to logits, or to the loss.

    Args:
        padded_vocab_size: vocabulary with the rows that pad it to a multiple of tp.
        vocab_size: vocabulary without padding.
        tied: the head has no weight; ``forward`` takes it.
        preference: the loss of pairs of answers; None: cross entropy.
        loss: fields of ``LossSpec``: softmax, kernels, z_loss.
    """

    def __init__(
        self,
        hidden: int,
        padded_vocab_size: int,
        vocab_size: int,
        mcore: TransformerConfig,
        *,
        tied: bool,
        preference: PreferenceLoss | None = None,
        **loss: Any,
    ) -> None:
        super().__init__(
            hidden,
            padded_vocab_size,
            config=mcore,
            init_method=lambda _: None,  # init_weights (parallel/parallelize.py) fills it
            bias=False,
            skip_weight_param_allocation=tied,
        )
        self.first_row = dist.get_rank(self.tp_group) * self.output_size_per_partition
        valid = min(max(vocab_size - self.first_row, 0), self.output_size_per_partition)
        group = self.tp_group if dist.get_world_size(self.tp_group) > 1 else None
        self.spec, self.preference = LossSpec(valid, group, self.sequence_parallel, **loss), preference

    def forward(
        self,
        x: Tensor,
        tied_weight: Tensor | None = None,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
        pairs: Pairs | None = None,
    ) -> Tensor:
        """Return logits, or the weighted sum of cross entropies if ``labels`` are given.

        Args:
            x: [s(/t), b, h].
            tied_weight: [vocabulary/t, h], the embedding's weight if it is tied.
            labels: [b, s], int64, ids of the next tokens.
            loss_weights: [b, s], fp32, factor of each token's cross entropy.
            pairs: pairs of answers in the sequences, for preference training.

        Returns:
            Without labels, this rank's logits [s, b, vocabulary/t], fp32. With labels, the weighted sum, fp32 scalar.
            With labels under ``no_grad``, fp32 [2]: the weighted sum, and the sum of the weights of the tokens whose
            label has the largest logit. With pairs, see ``PreferenceLoss``.
        """
        if labels is None:
            return self.logits(x, tied_weight)
        assert loss_weights is not None
        weight = self.weight if tied_weight is None else tied_weight
        if pairs is not None:
            assert self.preference is not None
            return self.preference(self, x, weight, labels.t(), loss_weights.t(), pairs)
        compute = self.training_loss if torch.is_grad_enabled() else self.evaluation
        return compute(x, weight, labels.t(), loss_weights.t())

    def logits(self, x: Tensor, tied_weight: Tensor | None) -> Tensor:
        """Return this rank's logits [s, b, vocabulary/t], fp32."""
        logits, _ = super().forward(x, tied_weight)
        return hide_padding(logits.float(), self.spec.valid)

    def training_loss(self, x: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
        """Return the weighted sum of losses, fp32 scalar. ``labels`` and ``loss_weights``: [s, b]."""
        labels = (labels - self.first_row).reshape(-1)
        loss: Tensor = _LinearCrossEntropy.apply(x, weight, labels, loss_weights.reshape(-1), self.spec)
        return loss

    def evaluation(self, x: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
        """Return the weighted sums of losses, without z-loss, and of correct tokens, fp32 [2]."""
        correct = torch.empty_like(loss_weights, memory_format=torch.contiguous_format)
        losses = self.token_losses(x, weight, labels, correct)
        return self.total(torch.stack((losses, correct)) * loss_weights)

    def total(self, values: Tensor) -> Tensor:
        """Return the sums [n] of values [n, ...], which are this rank's part of the pass's result."""
        return values.flatten(1).sum(1)

    def token_losses(self, x: Tensor, weight: Tensor, labels: Tensor, correct: Tensor | None = None) -> Tensor:
        """Return the cross entropy of each token, without z-loss and gradient, fp32 [s, b].

        ``correct``: output [s, b], fp32, 1 where the label has the largest logit, else 0.
        """
        hidden, ids = _gather_sequence(x, self.spec).flatten(0, 1), (labels - self.first_row).reshape(-1)
        ones, spec = torch.ones(len(ids), device=x.device), replace(self.spec, z_loss=0.0)
        losses, _ = _by_chunks(hidden, weight, ids, ones, spec, correct=None if correct is None else correct.view(-1))
        return losses.view(labels.shape)


def hide_padding(logits: Tensor, valid: int) -> Tensor:
    """Mask the vocabulary's padding in logits [.., vocabulary/t], the columns from ``valid`` on, in place.

    Otherwise the loss would depend on the padding, and so on tp.
    """
    if valid < logits.shape[-1]:
        logits[..., valid:] = torch.finfo(logits.dtype).min
    return logits


class _LinearCrossEntropy(torch.autograd.Function):
    """Weighted cross entropy of x [s(/t), b, h] times weight [vocabulary/t, h].

    ``labels`` and ``loss_weights`` are [s * b]. Labels count from this rank's first row.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor, spec: LossSpec) -> Tensor:
        hidden = _gather_sequence(x, spec)
        # The gradient overwrites the gathered copy, chunk by chunk. Its rows are a view: x may have other strides.
        grad_x, needs_weight_grad = None, ctx.needs_input_grad[1]
        if ctx.needs_input_grad[0]:
            grad_x = hidden if spec.sequence_parallel else x.new_empty(x.shape)
        rows = None if grad_x is None else grad_x.view(-1, x.shape[-1])
        losses, sums = _by_chunks(
            hidden.flatten(0, 1), weight, labels, loss_weights, spec, rows, needs_weight_grad=needs_weight_grad
        )
        if grad_x is not None and spec.sequence_parallel:
            whole, grad_x = grad_x, x.new_empty(x.shape)
            dist.reduce_scatter_tensor(grad_x, whole, group=spec.group)
        elif grad_x is not None and spec.group is not None:
            dist.all_reduce(grad_x, group=spec.group)
        ctx.kernels = spec.kernels
        ctx.save_for_backward(grad_x, None if sums is None else sums.to(weight.dtype))
        return (losses * loss_weights).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # In place, as no one else reads the saved gradients. Autograd rejects a second backward pass.
        unscaled = ctx.kernels.is_one(grad)
        grads = (saved if saved is None or unscaled else saved.mul_(grad) for saved in ctx.saved_tensors)
        return *grads, None, None, None


def _gather_sequence(x: Tensor, spec: LossSpec) -> Tensor:
    """Gather the ranks' parts [s/t, b, h] to [s, b, h], under sequence parallelism."""
    if not spec.sequence_parallel:
        return x
    whole = x.new_empty(x.shape[0] * dist.get_world_size(spec.group), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=spec.group)
    return whole


def _by_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor,
    spec: LossSpec,
    grad_hidden: Tensor | None = None,
    correct: Tensor | None = None,
    *,
    needs_weight_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute cross entropies of hidden [n, h] and their gradients, chunk by chunk.

    Args:
        grad_hidden: output [n, h], this rank's part of the gradient. May be ``hidden``.
        correct: output [n], fp32, 1 where the label has the largest logit, else 0.
        needs_weight_grad: whether to compute the weight's gradient.

    Returns:
        Losses [n], fp32, and the weight's gradient: fp32, or the weight's dtype if there is one chunk.
    """
    tokens, size = hidden.shape[0], min(hidden.shape[0], loss_chunk(hidden.shape[1]))
    # Allocated once: the page faults of new memory take as long as the softmax.
    logits_buffer = spec.kernels.logits_like(hidden, size, weight.shape[0])
    upcasts = spec.softmax.needs_fp32 and logits_buffer.dtype != torch.float32
    scores_buffer = torch.empty_like(logits_buffer, dtype=torch.float32) if upcasts else logits_buffer
    one_chunk = size == tokens
    sums = None
    if needs_weight_grad:
        sums = torch.empty_like(weight, dtype=weight.dtype if one_chunk else torch.float32)
    losses = torch.empty_like(loss_weights)
    for start in range(0, tokens, size):
        chunk = slice(start, min(start + size, tokens))
        x, count = hidden[chunk], chunk.stop - start
        logits = torch.mm(x, weight.t(), out=logits_buffer[:count])
        scores = scores_buffer[:count].copy_(logits) if upcasts else logits
        hide_padding(scores, spec.valid)
        if correct is not None:
            correct[chunk] = _is_largest(scores, labels[chunk], spec.group)
        losses[chunk] = _losses_and_gradients(scores, labels[chunk], loss_weights[chunk], spec)
        grad_logits = logits.copy_(scores) if upcasts else logits
        if sums is not None and one_chunk:
            torch.mm(grad_logits.t(), x, out=sums)
        elif sums is not None:
            _add_weight_grad(sums, grad_logits, x, spec.kernels, start == 0)
        if grad_hidden is not None:
            torch.mm(grad_logits, weight, out=grad_hidden[chunk])
    return losses, sums


def _is_largest(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return whether the label is the argmax of logits [n, vocabulary/t] (the first of equal ones), as fp32 [n]."""
    largest, index = logits.max(1)
    largest = largest.float()
    correct = (index == labels).float()  # labels of other ranks are below 0, or beyond this rank's rows
    if group is None:
        return correct
    ranks = largest.new_empty(dist.get_world_size(group), 2, len(logits))
    dist.all_gather_into_tensor(ranks, torch.stack((largest, correct))[None], group=group)
    maxima, all_correct = ranks.unbind(1)
    return all_correct.gather(0, maxima.argmax(0, keepdim=True)).squeeze(0)


def _losses_and_gradients(logits: Tensor, labels: Tensor, loss_weights: Tensor, spec: LossSpec) -> Tensor:
    """Return the losses [n], fp32 (cross entropy and z-loss), and overwrite logits [n, vocabulary/t] with the gradients
    of the weighted losses.

    One collective: a row's softmax over all ranks is this rank's softmax times this rank's share of the sum of
    exponentials.
    """
    here = (labels >= 0) & (labels < logits.shape[1])
    label_index = torch.arange(len(labels), device=labels.device), torch.where(here, labels, 0)
    local_label_logit = logits[label_index].float()  # before ``statistics``, which may overwrite the logits
    local_max, total = spec.softmax.statistics(logits)
    scale = 1 / total  # of this rank's exponentials
    global_max, label_logit = local_max, local_label_logit * here
    if spec.group is not None:
        ranks = local_max.new_empty(dist.get_world_size(spec.group), 3, len(logits))
        dist.all_gather_into_tensor(ranks, torch.stack((local_max, total, label_logit))[None], group=spec.group)
        maxima, totals, label_logits = ranks.unbind(1)
        global_max = maxima.amax(0)
        total = (totals * (maxima - global_max).exp()).sum(0)
        label_logit = label_logits.sum(0)
        scale = (local_max - global_max).exp() / total
    log_sum = total.log() + global_max
    losses = log_sum - label_logit
    if spec.z_loss:
        penalty = spec.z_loss * log_sum
        losses += penalty * log_sum
        scale = scale * (1 + 2 * penalty)  # the derivative of log_sum + z_loss * log_sum^2
    spec.softmax.write_softmax(logits, local_max, scale * loss_weights)
    # bf16 is too coarse near probability 1: round the label's gradient once, after the subtraction.
    of_label = ((local_label_logit - local_max).exp() * scale - 1) * loss_weights
    logits[label_index] = torch.where(here, of_label.to(logits.dtype), logits[label_index])
    return losses


def _add_weight_grad(sums: Tensor, grad_logits: Tensor, hidden: Tensor, kernels: LossKernels, is_first: bool) -> None:
    """Add the weight's gradient of a chunk to fp32 ``sums`` [vocabulary/t, h]; the first chunk overwrites it."""
    if hidden.dtype == torch.float32 and is_first:
        torch.mm(grad_logits.t(), hidden, out=sums)
        return
    if hidden.dtype == torch.float32:
        sums.addmm_(grad_logits.t(), hidden)
        return
    buffer = hidden.new_empty(min(_ROWS_AT_ONCE, len(sums)), hidden.shape[1])
    for rows, columns in zip(sums.split(_ROWS_AT_ONCE), grad_logits.split(_ROWS_AT_ONCE, dim=1), strict=True):
        grad = torch.mm(columns.t(), hidden, out=buffer[: len(rows)])
        if is_first:
            rows.copy_(grad)
        else:
            kernels.add_(rows, grad)
