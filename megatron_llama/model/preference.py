"""Preference losses.

* Pairs: direct preference optimization (DPO, Rafailov et al. 2023, arXiv:2305.18290) and odds ratio (ORPO, Hong et al.
  2024, arXiv:2403.07691).
* Single answers with a label: KTO (Ethayarajh et al. 2024, arXiv:2402.01306).

The loss is a function of log probabilities: of answers from the trained and, except for ORPO, the initial weights. The
derivative by a token's log probability is the same for all tokens of an answer. So the head runs twice: the first pass
computes the tokens' log probabilities, and the second one the cross entropy, weighted by these derivatives.

Log probabilities are added as integers, so that a sum does not depend on the order of tokens and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.config.settings import PREFERENCE_METRICS, FinetuneConfig

SCALE = 2.0**32
"""Integers are multiples of 1 / SCALE."""
_LANES = 16
"""Copies of a value in a tensor: on a CPU, torch's functions have other bits at the end of a tensor, which is no whole
vector register, than elsewhere."""


class Head(Protocol):
    """The methods of an output head (model/loss.py) that the loss needs."""

    def token_losses(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor: ...

    def training_loss(self, x: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor: ...

    def total(self, values: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Pairs:
    """Examples of a micro batch: pairs of answers, or single answers with a label (KTO).

    Answer 2k of a row is the chosen answer of its pair k, answer 2k + 1 the rejected one. Single answers are counted
    by k.
    """

    answers: Tensor
    """[b, s], int64: the answer in the row that a label belongs to."""
    numbers: Tensor
    """[b, examples], int64: number of each example in its dataset, -1 after the last one of a row."""
    lengths: Tensor
    """[b, answers], fp32: labels with loss of each answer."""
    count: Tensor
    """Number of examples, int64 scalar; 0 except on the first context-parallel rank."""
    reference: Tensor | None = None
    """[b, answers], int64: log probabilities of the answers with the initial weights, times SCALE; 0 for ORPO. None:
    the head computes them, and no loss."""
    desirable: Tensor | None = None
    """[b, examples], bool: labels of single answers. None: pairs."""
    kl: Tensor | None = None
    """KTO's estimate of the KL divergence from the initial weights, of the global batch, fp32 scalar."""
    weight: Tensor | None = None
    """Weight of an example in the mean, fp32 scalar; the head needs it for a loss."""

    def on(self, move: Callable[[Tensor], Tensor]) -> Pairs:
        """Return a copy on the device to which ``move`` takes tensors."""
        values = (getattr(self, field.name) for field in fields(self))
        return Pairs(*(None if value is None else move(value) for value in values))  # type: ignore[arg-type]


@dataclass(frozen=True)
class PreferenceLoss:
    """Loss of a micro batch's examples, and the values of ``FinetuneConfig.metrics``."""

    finetune: FinetuneConfig
    context: dist.ProcessGroup | None
    """Context-parallel ranks, each with a part of every sequence; None if there is one."""

    def answer_logps(self, head: Head, x: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, pairs: Pairs) -> Tensor:
        """Return the log probability of each answer times SCALE, [b, answers], int64, equal on all ranks.

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
        """Return the weighted sums over examples of the loss, which has a gradient, and of each metric, fp32
        [metrics + 1]; 0 except on the first context-parallel rank. Without ``pairs.reference``: ``answer_logps``.

        ``loss_weights``: [s, b], fp32, ``pairs.weight``; 0 for tokens without loss.
        """
        logps = self.answer_logps(head, x, weight, labels, loss_weights, pairs)
        if pairs.reference is None:
            return logps
        values, derivatives = self._values(logps, pairs)
        is_counted = (pairs.numbers >= 0) * (self.context is None or self.context.rank() == 0)
        assert pairs.weight is not None  # this rank's part of the sequence may have no loss, and so no weight
        values = head.total(values * is_counted * pairs.weight)
        if not torch.is_grad_enabled():
            return values
        weighted = head.training_loss(x, weight, labels, -derivatives.gather(1, pairs.answers).t() * loss_weights)
        return torch.cat(((weighted - weighted.detach() + values[0])[None], values[1:]))

    @torch.no_grad()
    def _values(self, logps: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return loss and metrics of each example, and the loss's derivative by each answer's log probability.

        Shapes: fp32 [metrics + 1, b, examples] and fp32 [b, answers].
        """
        assert pairs.reference is not None
        objective = self.finetune.objective
        with torch.enable_grad():
            ratios = ((logps - pairs.reference).float() / SCALE).requires_grad_()
            lanes = ratios[..., None].expand(-1, -1, _LANES).contiguous()
            losses = {"dpo": self._dpo, "orpo": self._orpo, "kto": self._kto}[objective](lanes, pairs)[..., 0]
            (derivatives,) = torch.autograd.grad(losses.sum(), ratios)
        policy, rewards = logps.float() / SCALE, self.finetune.beta * ratios
        if objective == "orpo":  # TRL reports means over an answer's tokens
            policy = ratios / pairs.lengths.clamp(min=1)
            rewards = self.finetune.beta * policy
        if pairs.desirable is None:
            chosen, rejected = rewards.unflatten(1, (-1, 2)).unbind(2)
            margins = chosen - rejected
            metrics = [chosen, rejected, margins > 0, margins, *policy.unflatten(1, (-1, 2)).unbind(2)]
        else:
            ones, labels = torch.ones_like(rewards), (pairs.desirable, ~pairs.desirable)
            assert pairs.kl is not None
            metrics = [*(value * label for value in (rewards, policy, ones) for label in labels), ones * pairs.kl]
        return torch.stack([losses, *metrics]), derivatives

    def _orpo(self, ratios: Tensor, pairs: Pairs) -> Tensor:
        """Return the loss of each pair, Eq. 6, from the mean log probabilities of chosen and rejected answers."""
        means = (ratios / pairs.lengths.clamp(min=1)[..., None]).unflatten(1, (-1, 2)).unbind(2)
        # Probabilities below 1, also of missing pairs.
        chosen, rejected = (each - (-each.clamp(max=-1e-6).expm1()).log() for each in means)
        return -means[0] - self.finetune.beta * F.logsigmoid(chosen - rejected)

    def _dpo(self, ratios: Tensor, pairs: Pairs) -> Tensor:
        """Return the loss of each pair, as TRL's DPOTrainer."""
        beta, smoothing, kind = self.finetune.beta, self.finetune.label_smoothing, self.finetune.loss_type
        # IPO compares means over an answer's tokens, as TRL does with its authors' consent.
        scores = ratios / pairs.lengths.clamp(min=1)[..., None] if kind == "ipo" else ratios
        chosen, rejected = scores.unflatten(1, (-1, 2)).unbind(2)
        margins = chosen - rejected
        if kind == "hinge":
            return F.relu(1 - beta * margins)
        if kind == "ipo":
            return (margins - 1 / (2 * beta)).square()
        return -(1 - smoothing) * F.logsigmoid(beta * margins) - smoothing * F.logsigmoid(-beta * margins)

    def _kto(self, ratios: Tensor, pairs: Pairs) -> Tensor:
        """Return the loss of each answer, Eq. 7 and 8, as TRL's KTOTrainer."""
        assert pairs.desirable is not None and pairs.kl is not None
        margins, desirable = self.finetune.beta * (ratios - pairs.kl), pairs.desirable[..., None]
        weights = torch.where(desirable, self.finetune.desirable_weight, self.finetune.undesirable_weight)
        return weights * (1 - torch.sigmoid(torch.where(desirable, margins, -margins)))


def reported_metrics(finetune: FinetuneConfig) -> tuple[str, ...]:
    """Return the names of ``named_metrics``, in order."""
    if finetune.objective != "kto":
        return finetune.metrics
    return (*PREFERENCE_METRICS[:2], "rewards/margins", *PREFERENCE_METRICS[-2:], "kl")


def named_metrics(finetune: FinetuneConfig, means: Sequence[float]) -> dict[str, float]:
    """Return the metrics of a step by TRL's names, from the means over its examples of ``FinetuneConfig.metrics``.

    KTO's means are divided by the shares of the labels; a batch without a label lacks its metrics.
    """
    metrics = dict(zip(finetune.metrics, means, strict=True))
    if finetune.objective != "kto":
        return metrics
    for label in ("chosen", "rejected"):
        if share := metrics.pop(f"share/{label}"):
            metrics |= {name: metrics[name] / share for name in (f"rewards/{label}", f"logps/{label}")}
        else:
            del metrics[f"rewards/{label}"], metrics[f"logps/{label}"]
    if metrics.keys() >= {"rewards/chosen", "rewards/rejected"}:
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return metrics
