"""The output head and its loss by chunks of tokens: neither whole logits nor their gradient are ever in memory.

The vocabulary is split over tensor-parallel ranks, and logits are never gathered. A chunk's gradients are made while
its logits are there, in the forward pass (as in Liger Kernel, Hsu et al. 2024, arXiv:2410.10989): three products, as
many as without chunks. Making them in the backward pass would take a fourth, of the logits once more. The gradient of
the weight is a sum over tokens, so each token's share in the loss must be known by then: the caller passes it, and what
comes back is one number, through which no other weighting can be asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_llama.arch.shapes import loss_chunk
from megatron_llama.devices.kernels import EAGER, Kernels

_ROWS_AT_ONCE = 2048
"""Rows of the weight whose gradient is added at once: their product is then still in the cache."""
_COLUMNS_AT_ONCE, _FEWEST_COLUMNS = 64, 16
"""Columns whose part of a row is read before the next row's: their cache lines hold parts of several rows. As many as
divide the vocabulary's share; 16 take 5 % more time than 64."""


class Passes(NamedTuple):
    """How a chunk's logits [n, vocabulary/t] are read and written."""

    wide: bool
    """Whether they are made fp32 first."""
    statistics: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Of each row, fp32 [n]: the largest logit, and the sum of the exponentials of all distances from it."""
    to_shares: Callable[[Tensor, Tensor, Tensor], None]
    """Of logits, the rows' largest and their scale: puts the scaled exponentials in the logits' place."""


def _statistics_in_place(logits: Tensor) -> tuple[Tensor, Tensor]:
    largest = logits.amax(1)
    return largest, logits.sub_(largest.unsqueeze(1)).exp_().sum(1)


def _scale_in_place(exponentials: Tensor, largest: Tensor, scale: Tensor) -> None:
    exponentials.mul_(scale.unsqueeze(1))


def _statistics(logits: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    at_once = math.gcd(logits.shape[1], _COLUMNS_AT_ONCE)
    if logits.stride(0) == 1 and at_once >= _FEWEST_COLUMNS:
        wide = wide.unflatten(1, (-1, at_once))
        largest = wide.amax(2).amax(1)
        return largest, (wide - largest[:, None, None]).exp().sum(2).sum(1)
    largest = wide.amax(1)
    return largest, (wide - largest.unsqueeze(1)).exp().sum(1)


def _to_shares(logits: Tensor, largest: Tensor, scale: Tensor) -> None:
    logits.copy_((logits.float() - largest.unsqueeze(1)).exp() * scale.unsqueeze(1))


IN_PLACE = Passes(True, _statistics_in_place, _scale_in_place)


def fused(compile: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> Passes:
    """Passes whose operators a compiler fuses into two: one reads the logits, one also writes them. They need no fp32
    copy, and compute the exponentials twice, which costs less than another pass over memory."""
    return Passes(False, compile(_statistics, "loss"), compile(_to_shares, "gradient of the loss"))


class Head(ColumnParallelLinear):
    """The output head: [s(/t), b, h] to logits, or to the loss.

    ``vocab_size`` counts the vocabulary without the rows that pad it to a multiple of tp. With ``tied``, ``forward`` is
    given the weight.
    """

    def __init__(
        self, hidden_size: int, padded_vocab_size: int, vocab_size: int, mcore: TransformerConfig, *, tied: bool
    ) -> None:
        super().__init__(
            hidden_size,
            padded_vocab_size,
            config=mcore,
            init_method=lambda _: None,  # init_weights (parallel/parallelize.py) fills it
            bias=False,
            skip_weight_param_allocation=tied,
        )
        self.vocab_size = vocab_size
        self.passes, self.kernels = IN_PLACE, EAGER

    def forward(
        self,
        x: Tensor,
        tied_weight: Tensor | None = None,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor:
        """This rank's logits [s, b, vocabulary/t], fp32; or with ``labels`` (next token ids [b, s], int64) the sum of
        the tokens' cross entropies times ``loss_weights`` [b, s], fp32 scalar. Without gradients, for validation, also
        the sum of the weights of the tokens whose label has the largest logit: fp32 [2]."""
        local = self.output_size_per_partition
        first = dist.get_rank(self.tp_group) * local
        valid = min(max(self.vocab_size - first, 0), local)  # rows of this rank that don't pad
        if labels is None:
            logits, _ = super().forward(x, tied_weight)
            return hide_padding(logits.float(), valid)
        assert loss_weights is not None
        weight = self.weight if tied_weight is None else tied_weight
        labels, loss_weights = (y.transpose(0, 1).reshape(-1) for y in (labels - first, loss_weights))
        wanted = x.requires_grad, weight.requires_grad
        how = valid, wanted, self.tp_group, self.sequence_parallel, self.passes, self.kernels
        if torch.is_grad_enabled():
            loss: Tensor = _LinearCrossEntropy.apply(x, weight, labels, loss_weights, *how)
            return loss
        hidden = _gathered(x, self.tp_group) if self.sequence_parallel else x
        over, right = self.tp_group if dist.get_world_size(self.tp_group) > 1 else None, torch.empty_like(loss_weights)
        losses, _ = _by_chunks(
            hidden.flatten(0, 1),
            weight,
            labels,
            loss_weights,
            valid,
            over,
            self.passes,
            self.kernels,
            None,
            False,
            right,
        )
        return torch.stack(((losses * loss_weights).sum(), (right * loss_weights).sum()))


def hide_padding(logits: Tensor, valid: int) -> Tensor:
    """Logits [.., local vocabulary] whose columns from ``valid`` on, the vocabulary's padding, get no probability.

    Otherwise the softmax, and with it the loss, would depend on how far tp pads the vocabulary. In place.
    """
    if valid < logits.shape[-1]:
        logits[..., valid:] = torch.finfo(logits.dtype).min
    return logits


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss of x [s(/t), b, h] times weight [vocabulary/t, h]; labels are counted from this rank's first row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss_weights: Tensor,
        valid: int,
        wanted: tuple[bool, bool],
        group: dist.ProcessGroup,
        split: bool,
        passes: Passes,
        kernels: Kernels,
    ) -> Tensor:
        ranks = dist.get_world_size(group)
        hidden = _gathered(x, group) if split else x
        # The gathered copy is our own: its gradient takes its place, chunk by chunk.
        grad_x = (hidden if split else torch.empty_like(x)) if wanted[0] else None
        rows = None if grad_x is None else grad_x.flatten(0, 1)
        over = group if ranks > 1 else None
        losses, sums = _by_chunks(
            hidden.flatten(0, 1), weight, labels, loss_weights, valid, over, passes, kernels, rows, wanted[1]
        )
        if grad_x is not None and split:
            whole, grad_x = grad_x, torch.empty_like(x)
            dist.reduce_scatter_tensor(grad_x, whole, group=group)
        elif grad_x is not None and ranks > 1:
            dist.all_reduce(grad_x, group=group)
        ctx.kernels = kernels
        ctx.save_for_backward(grad_x, None if sums is None else sums.to(weight.dtype))
        return (losses * loss_weights).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # In place: the gradients were made for this. A second backward pass is refused by autograd.
        as_made = ctx.kernels.is_one(grad)
        grads = (made if made is None or as_made else made.mul_(grad) for made in ctx.saved_tensors)
        return *grads, None, None, None, None, None, None, None, None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The whole sequence [s, b, h] of the ranks' parts [s/t, b, h]."""
    whole = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def _by_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor,
    valid: int,
    group: dist.ProcessGroup | None,
    passes: Passes,
    kernels: Kernels,
    grad_hidden: Tensor | None,
    trained: bool,
    right: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Cross entropies of hidden [n, h] in fp32 [n], and if ``trained`` the weight's gradient, the chunks' sum in fp32.

    Fills ``grad_hidden``, which may be ``hidden``, with this rank's part of the gradient, and ``right`` [n] with 1
    where the label has the largest logit, else 0.
    """
    tokens, size = hidden.shape[0], min(hidden.shape[0], loss_chunk(hidden.shape[1]))
    # Made once: pages of new memory cost as much as the softmax.
    products = kernels.logits_like(hidden, size, weight.shape[0])
    narrow = passes.wide and products.dtype != torch.float32
    scores = torch.empty_like(products, dtype=torch.float32) if narrow else products
    one_chunk = size == tokens
    sums = None
    if trained:
        sums = torch.empty_like(weight, dtype=weight.dtype if one_chunk else torch.float32)
    losses = torch.empty_like(loss_weights)
    for start in range(0, tokens, size):
        chunk = slice(start, min(start + size, tokens))
        own, count = hidden[chunk], chunk.stop - start
        logits = torch.mm(own, weight.t(), out=products[:count])
        own_scores = scores[:count].copy_(logits) if narrow else logits
        hide_padding(own_scores, valid)
        if right is not None:
            right[chunk] = _is_largest(own_scores, labels[chunk], group)
        losses[chunk] = _softmax(own_scores, labels[chunk], loss_weights[chunk], group, passes)
        grad_logits = logits.copy_(own_scores) if narrow else logits
        if sums is not None and one_chunk:
            torch.mm(grad_logits.t(), own, out=sums)
        elif sums is not None:
            _add_product(sums, grad_logits, own, kernels, is_first=start == 0)
        if grad_hidden is not None:
            torch.mm(grad_logits, weight, out=grad_hidden[chunk])
    return losses, sums


def _is_largest(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Whether the label is the arg max of logits [n, vocabulary/t], of equal ones the first, as fp32 [n]."""
    largest, index = logits.max(1)
    largest = largest.float()
    right = (index == labels).float()  # labels of other ranks are below 0, or beyond this rank's rows
    if group is None:
        return right
    ranks = largest.new_empty(dist.get_world_size(group), 2, len(logits))
    dist.all_gather_into_tensor(ranks, torch.stack((largest, right))[None], group=group)
    maxima, rights = ranks.unbind(1)
    return rights.gather(0, maxima.argmax(0, keepdim=True)).squeeze(0)


def _softmax(
    logits: Tensor, labels: Tensor, loss_weights: Tensor, group: dist.ProcessGroup | None, passes: Passes
) -> Tensor:
    """Cross entropies [n] in fp32 of logits [n, vocabulary/t], which become the gradients of the weighted losses.

    One collective: a row's softmax over all ranks is this rank's, scaled by its share of the sum of exponentials.
    """
    here = (labels >= 0) & (labels < logits.shape[1])
    places = torch.arange(len(labels), device=labels.device), torch.where(here, labels, 0)
    target = logits[places].float()
    own, total = passes.statistics(logits)
    share = 1 / total  # of the whole sum of exponentials, by which this rank's are to be scaled
    largest, label = own, target * here
    if group is not None:
        ranks = own.new_empty(dist.get_world_size(group), 3, len(logits))
        dist.all_gather_into_tensor(ranks, torch.stack((own, total, label))[None], group=group)
        maxima, totals, targets = ranks.unbind(1)
        largest = maxima.amax(0)
        total = (totals * (maxima - largest).exp()).sum(0)
        label = targets.sum(0)
        share = (own - largest).exp() / total
    passes.to_shares(logits, own, share * loss_weights)
    # Next to 1 a probability is too coarse in 16 bits: the label's gradient is rounded once, after the subtraction.
    of_label = ((target - own).exp() * share - 1) * loss_weights
    logits[places] = torch.where(here, of_label.to(logits.dtype), logits[places])
    return total.log() + largest - label


def _add_product(sums: Tensor, grad_logits: Tensor, hidden: Tensor, kernels: Kernels, *, is_first: bool) -> None:
    """Adds the weight's gradient of a chunk [vocabulary/t, h] to fp32 ``sums``, or puts it there if it is the first."""
    if hidden.dtype == torch.float32 and is_first:
        torch.mm(grad_logits.t(), hidden, out=sums)
        return
    if hidden.dtype == torch.float32:
        sums.addmm_(grad_logits.t(), hidden)
        return
    product = hidden.new_empty(min(_ROWS_AT_ONCE, len(sums)), hidden.shape[1])
    for rows, columns in zip(sums.split(_ROWS_AT_ONCE), grad_logits.split(_ROWS_AT_ONCE, dim=1), strict=True):
        added = torch.mm(columns.t(), hidden, out=product[: len(rows)])
        if is_first:
            rows.copy_(added)
        else:
            kernels.add_(rows, added)
