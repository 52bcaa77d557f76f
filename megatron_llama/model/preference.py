"""Losses of pairs of answers: direct preference optimization (DPO, Rafailov et al. 2023, arXiv:2305.18290), and by odds
ratio (ORPO, Hong et al. 2024, arXiv:2403.07691).

A pair's loss is a function of log probabilities: of both answers from the trained and, for DPO, the initial weights.
The derivative by a token's log probability is the same for all tokens of an answer. So the head runs twice: the first
pass computes the tokens' log probabilities, and the second one the cross entropy, weighted by these derivatives.

Log probabilities are added as integers, so that a sum does not depend on the order of tokens and ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.config.settings import PREFERENCE_METRICS, FinetuneConfig

SCALE = 2.0**32
"""Integers are multiples of 1 / SCALE."""


class Head(Protocol):
    """The methods of an output head (model/loss.py) that the loss needs."""

    def token_losses(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor: ...

    def training_loss(self, x: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Pairs:
    """Pairs of a micro batch. Answer 2k of a row is the chosen answer of its pair k, answer 2k + 1 the rejected one."""

    answers: Tensor
    """[b, s], int64: the answer in the row that a label belongs to."""
    numbers: Tensor
    """[b, pairs], int64: number of each pair in its dataset, -1 after the last pair of a row."""
    lengths: Tensor
    """[b, 2 * pairs], fp32: labels with loss of each answer."""
    count: Tensor
    """Number of pairs, int64 scalar; 0 except on the first context-parallel rank."""
    reference: Tensor | None = None
    """[b, 2 * pairs], int64: log probabilities of the answers with the initial weights, times SCALE; 0 for ORPO. None:
    the head computes them, and no loss."""

    def on(self, move: Callable[[Tensor], Tensor]) -> Pairs:
        """Return a copy on the device to which ``move`` takes tensors."""
        reference = None if self.reference is None else move(self.reference)
        answers, numbers, lengths, count = map(move, (self.answers, self.numbers, self.lengths, self.count))
        return Pairs(answers, numbers, lengths, count, reference)


@dataclass(frozen=True)
class PreferenceLoss:
    """Loss of a micro batch's pairs, and the values of ``PREFERENCE_METRICS``."""

    finetune: FinetuneConfig
    context: dist.ProcessGroup | None
    """Context-parallel ranks, each with a part of every sequence; None if there is one."""

    def answer_logps(self, head: Head, x: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, pairs: Pairs) -> Tensor:
        """Return the log probability of each answer times SCALE, [b, 2 * pairs], int64, equal on all ranks.

        Args:
            x: [s(/t), b, h].
            labels: [s, b], int64.
            mask: [s, b], nonzero for tokens with loss.
        """
        with torch.no_grad():
            logps = -head.token_losses(x, weight, labels)
            values = torch.where(mask != 0, (logps * SCALE).round().long(), 0).t()
        sums = torch.zeros_like(pairs.lengths, dtype=torch.int64).scatter_add_(1, pairs.answers, values)
        if self.context is not None:
            dist.all_reduce(sums, group=self.context)
        return sums

    def __call__(
        self, head: Head, x: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor, pairs: Pairs
    ) -> Tensor:
        """Return the sums over pairs of the loss and of each metric, times the weight of a pair, fp32 [metrics + 1].

        ``loss_weights``: [s, b], fp32, the weight of a pair in the mean, 0 for tokens without loss. Only the loss has a
        gradient. On the first context-parallel rank; the other ones return 0. Without ``pairs.reference``, return
        ``answer_logps``.
        """
        logps = self.answer_logps(head, x, weight, labels, loss_weights, pairs)
        if pairs.reference is None:
            return logps
        values, derivatives = self._pair_values(logps, pairs)
        values = values * loss_weights.max()  # all nonzero weights are equal
        if self.context is not None and self.context.rank() > 0:
            values = torch.zeros_like(values)
        if not torch.is_grad_enabled():
            return values
        token_weights = -derivatives.gather(1, pairs.answers).t() * loss_weights
        weighted = head.training_loss(x, weight, labels, token_weights)
        return torch.cat(((weighted - weighted.detach() + values[0])[None], values[1:]))

    @torch.no_grad()
    def _pair_values(self, logps: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return the sums over pairs of loss and metrics, and the loss's derivative by each answer's log probability.

        Shapes: fp32 [metrics + 1] and fp32 [b, 2 * pairs].
        """
        beta, is_pair, by_odds = self.finetune.beta, pairs.numbers >= 0, self.finetune.objective == "orpo"
        assert pairs.reference is not None
        with torch.enable_grad():
            ratios = ((logps - pairs.reference).float() / SCALE).requires_grad_()
            # IPO compares means over an answer's tokens, as TRL does with its authors' consent.
            scores = ratios / pairs.lengths.clamp(min=1) if by_odds or self.finetune.loss_type == "ipo" else ratios
            chosen, rejected = scores.unflatten(1, (-1, 2)).unbind(2)
            losses = (self._orpo(chosen, rejected) if by_odds else self._dpo(chosen - rejected)) * is_pair
            (derivatives,) = torch.autograd.grad(losses.sum(), ratios)
        # TRL reports ORPO's means over an answer's tokens, and DPO's sums.
        values = (scores, beta * scores) if by_odds else (logps.float() / SCALE, beta * ratios)
        policy, rewards = (each.detach().unflatten(1, (-1, 2)).unbind(2) for each in values)
        margins = rewards[0] - rewards[1]
        metrics = (*rewards, margins > 0, margins, *policy)
        assert len(metrics) == len(PREFERENCE_METRICS)
        return torch.stack([(value * is_pair).sum() for value in (losses, *metrics)]), derivatives

    def _orpo(self, *answers: Tensor) -> Tensor:
        """Return the loss of each pair, Eq. 6, from the mean log probabilities of chosen and rejected answers."""
        # Probabilities below 1, also of missing pairs.
        chosen, rejected = (each - (-each.clamp(max=-1e-6).expm1()).log() for each in answers)
        return -answers[0] - self.finetune.beta * F.logsigmoid(chosen - rejected)

    def _dpo(self, margins: Tensor) -> Tensor:
        """Return the loss of each pair from the difference of its two scores, as TRL's DPOTrainer."""
        beta, smoothing = self.finetune.beta, self.finetune.label_smoothing
        if self.finetune.loss_type == "hinge":
            return F.relu(1 - beta * margins)
        if self.finetune.loss_type == "ipo":
            return (margins - 1 / (2 * beta)).square()
        return -(1 - smoothing) * F.logsigmoid(beta * margins) - smoothing * F.logsigmoid(-beta * margins)
