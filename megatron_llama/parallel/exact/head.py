"""Output head and cross entropy of exact mode, by sequences, chunks of tokens and blocks of the vocabulary.

As in model/loss.py, the forward pass computes the gradients right after the logits. The sum of exponentials is a sum
over blocks; the losses of tokens and the weight's gradient are summed as integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_llama.arch.parameters import loss_chunk
from megatron_llama.model.loss import Head
from megatron_llama.parallel.exact.linear import Context, by_node, sequences
from megatron_llama.parallel.exact.matmuls import aligned
from megatron_llama.parallel.exact.sums import BITS, LOGP_BITS, Total, Tree, add_pairs, from_grid, to_grid


class HeadSettings(NamedTuple):
    """How a rank computes its part of the loss."""

    tree: Tree
    total: Total
    """Gradient of the weight; of the embedding if it is tied."""
    vocab_size: int
    """Vocabulary without padding."""
    z_loss: float
    context: Context
    split: bool
    """Whether the hidden states are split along the sequence (sequence parallelism)."""
    sums: list[Tensor]
    """Output: a pass appends the sum of its losses, int64 multiples of 2^-BITS (``ExactHead.total``)."""


class _LogitChunk(NamedTuple):
    """Logits of some tokens and this rank's blocks, and their statistics over the whole vocabulary."""

    exponentials: list[Tensor]
    """exp(logit - the block's largest logit) of each block [n, rows], fp32."""
    maxima: list[Tensor]
    """Largest logit of each block [n]."""
    labels: list[tuple[Tensor, Tensor]]
    """Logit of the label in each block, 0 elsewhere, and whether it is there, [n] each."""
    largest: Tensor
    """Largest logit [n]."""
    total: Tensor
    """Sum of exp(logit - largest) [n]."""
    label: Tensor
    """Logit of the label [n]."""
    is_largest: Tensor | None
    """Whether no logit is larger than the label's, nor equal with a smaller number, bool [n]. None in training."""


class ExactHead(Head):
    """``Head`` with the losses of exact mode."""

    how: HeadSettings

    def training_loss(self, x: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
        """See ``Head``."""
        # The result of a pass over pairs is not this loss, but the ``total`` of their values.
        how = self.how if self.preference is None else self.how._replace(sums=[])
        loss: Tensor = _Loss.apply(x, weight, labels, loss_weights, how)
        return loss

    def token_losses(self, x: Tensor, weight: Tensor, labels: Tensor, correct: Tensor | None = None) -> Tensor:
        """See ``Head``."""
        how = self.how
        whole = how.tree.gather(x) if how.split else x
        losses, parts = torch.empty(labels.shape, device=x.device), _parts(weight, how)
        for i, sequence in enumerate(sequences(whole)):
            for tokens in _chunks(sequence, how):
                hidden = aligned(sequence[tokens])
                chunk = _logits(hidden, parts, labels[tokens, i], how, counts_correct=correct is not None)
                losses[tokens, i] = chunk.total.log() + chunk.largest - chunk.label
                if correct is not None and chunk.is_largest is not None:
                    correct[tokens, i] = chunk.is_largest.float()
        return losses

    def total(self, values: Tensor) -> Tensor:
        """See ``Head``."""
        bits = BITS if self.preference is None else LOGP_BITS
        self.how.sums.append(to_grid(values, bits).flatten(1).sum(1))
        return from_grid(self.how.sums[-1], bits)


def _chunks(sequence: Tensor, how: HeadSettings) -> Iterator[slice]:
    """Yield the tokens whose logits are computed together: a span, or parts of it."""
    size = loss_chunk(sequence.shape[1])
    for span in how.context.spans(len(sequence)):
        for start in range(span.start, span.stop, size):
            yield slice(start, min(start + size, span.stop))


def _parts(weight: Tensor, how: HeadSettings) -> list[Tensor]:
    return [aligned(part) for part in weight.chunk(how.tree.local)]


class _Loss(torch.autograd.Function):
    """Weighted sum of cross entropies of x [s(/t), b, h]; ``labels`` and ``loss_weights`` are [s, b]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor, how: HeadSettings) -> Tensor:
        whole = how.tree.gather(x) if how.split else x
        parts = _parts(weight, how)
        losses, nodes = torch.empty_like(loss_weights), []
        for i, sequence in enumerate(sequences(whole)):
            by_chunk = []
            for tokens in _chunks(sequence, how):
                hidden, weights = aligned(sequence[tokens]), loss_weights[tokens, i]
                chunk = _logits(hidden, parts, labels[tokens, i], how)
                log_sum = chunk.total.log() + chunk.largest
                losses[tokens, i] = log_sum - chunk.label + how.z_loss * log_sum * log_sum
                by_chunk.append(how.tree.nodes(_grads(chunk, hidden, parts, labels[tokens, i], weights, log_sum, how)))
            nodes.append([torch.cat(same) if len(same) > 1 else same[0] for same in zip(*by_chunk, strict=True)])
        how.total.end(x.device)
        total = to_grid(losses * loss_weights).sum()
        how.sums.append(total[None])
        ctx.save_for_backward(how.tree.total(by_node(nodes), scatter=how.split).to(x.dtype))
        return from_grid(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad_x,) = ctx.saved_tensors  # the weight's gradient is added already, so the factor must be 1
        return grad_x * grad.to(grad_x.dtype), None, None, None, None


def _first_row(parts: list[Tensor], how: HeadSettings) -> int:
    """Return the number of this rank's first row in the vocabulary."""
    return 0 if how.tree.group is None else how.tree.group.rank() * len(parts) * parts[0].shape[0]


def _logits(
    hidden: Tensor, parts: list[Tensor], labels: Tensor, how: HeadSettings, *, counts_correct: bool = False
) -> _LogitChunk:
    """Compute the logits of hidden [n, h] and their statistics. One collective."""
    first, size = _first_row(parts, how), parts[0].shape[0]
    exponentials, maxima_here, labels_here, local = [], [], [], []
    for j, part in enumerate(parts):
        scores = torch.mm(hidden, part.t()).float()
        start = first + j * size
        if start + size > how.vocab_size:  # padding must not change the loss
            scores[:, max(0, how.vocab_size - start) :] = torch.finfo(scores.dtype).min
        largest = scores.amax(1)  # torch's maximum with an index takes several times as long on a CPU
        is_label = labels == start + scores.argmax(1) if counts_correct else largest
        label, here = _label(scores, labels - start)
        exponentials.append(scores.sub_(largest.unsqueeze(1)).exp_())
        maxima_here.append(largest)
        labels_here.append((label, here))
        local.append(torch.stack((largest, scores.sum(1), label, is_label.float())))
    maxima, totals, targets, correct_here = how.tree.gather(torch.stack(local)).unbind(1)  # [blocks, n] each
    largest = maxima.amax(0)
    total = add_pairs((totals * torch.exp(maxima - largest)).unbind())
    correct = _of_first_block(maxima == largest, correct_here) if counts_correct else None
    return _LogitChunk(exponentials, maxima_here, labels_here, largest, total, targets.sum(0), correct)


def _of_first_block(is_largest: Tensor, values: Tensor) -> Tensor:
    """Return the values of the first block that has the largest logit, as argmax over the vocabulary finds it."""
    order = torch.arange(len(is_largest), 0, -1, device=is_largest.device).unsqueeze(1)
    first = (is_largest * order).argmax(0)
    return values.gather(0, first.unsqueeze(0)).squeeze(0).bool()


def _label(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the label's score, 0 if it is not among these columns, and whether it is."""
    here = (labels >= 0) & (labels < scores.shape[1])
    score = scores.gather(1, torch.where(here, labels, 0).unsqueeze(1)).squeeze(1)
    return torch.where(here, score, 0.0), here


def _grads(
    chunk: _LogitChunk,
    hidden: Tensor,
    parts: list[Tensor],
    labels: Tensor,
    weights: Tensor,
    log_sum: Tensor,
    how: HeadSettings,
) -> Iterator[Tensor]:
    """Yield each block's part of the gradient of hidden [n, h], and add the weight's gradient."""
    slope = 1 + 2 * how.z_loss * log_sum
    scale = slope / chunk.total * weights
    first, size = _first_row(parts, how), parts[0].shape[0]
    for j, (grads, part) in enumerate(zip(chunk.exponentials, parts, strict=True)):
        label, here = chunk.labels[j]
        of_label = (torch.exp(label - chunk.largest) / chunk.total * slope - 1) * weights
        grads.mul_((torch.exp(chunk.maxima[j] - chunk.largest) * scale).unsqueeze(1))
        index = torch.where(here, labels - (first + j * size), 0).unsqueeze(1)
        grads.scatter_(1, index, torch.where(here, of_label, grads.gather(1, index).squeeze(1)).unsqueeze(1))
        grads = grads.to(hidden.dtype)
        how.total.add(torch.mm(grads.t(), hidden), slice(j * size, (j + 1) * size))
        yield torch.mm(grads, part)
