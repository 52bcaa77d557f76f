"""Adam and AdamW: torch's fused kernels for fp32 weights and states, otherwise by rows cast to fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megatron_llama.devices.kernels import AdamHyperparameters
from megatron_llama.optim.base import Group, OptimizerInputs, ShardOptimizer
from megatron_llama.optim.low_precision import SINGLE_TENSOR, ElementwiseOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdam(ShardOptimizer, torch.optim.Adam):
    """torch's fused Adam, or AdamW if weight decay is ``decoupled``."""

    skips_on_device = True
    counts_on_device = True

    def __init__(self, inputs: OptimizerInputs, *, decoupled: bool) -> None:
        super().__init__(inputs.groups, **inputs.hyperparameters, decoupled_weight_decay=decoupled, fused=True)

    def step(self, *, factor: Tensor | None = None, skip: Tensor | None = None) -> None:  # type: ignore[override]
        # torch.amp.GradScaler passes found_inf to fused kernels in the same way.
        self.found_inf = None if skip is None else skip.float()
        torch.optim.Adam.step(self)


class KernelAdam(ShardOptimizer, torch.optim.Adam):
    """Adam, or AdamW if weight decay is ``decoupled``, one weight at a time. Subclasses update a weight."""

    counts_on_device = True

    def __init__(self, inputs: OptimizerInputs, *, decoupled: bool) -> None:
        super().__init__(inputs.groups, **inputs.hyperparameters, decoupled_weight_decay=decoupled)
        self._decoupled, self._kernels = decoupled, inputs.kernels

    @torch.no_grad()
    def step(self, *, factor: Tensor | None = None, skip: Tensor | None = None) -> None:  # type: ignore[override]
        assert skip is None, "the caller reads skip"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "step" not in state:
                    state["step"] = torch.zeros((), device=weight.device)
                for kind in MOMENTS:
                    if kind not in state:
                        state[kind] = torch.zeros_like(weight, requires_grad=False)
                state["step"] += 1
                self._update(weight, weight.grad, state, group, factor)

    def _update(self, weight: Tensor, grad: Tensor, state: Group, group: Group, factor: Tensor | None) -> None:
        raise NotImplementedError


class Bf16GradientAdam(KernelAdam):
    """torch's fused Adam or AdamW for bf16 gradients, bit-identical to the step with fp32 copies of the gradients.

    torch's step takes gradients in the weights' dtype only. fp32 copies of all gradients would take twice their memory,
    and clipping would read them once more.
    """

    takes_factor = True

    def _update(self, weight: Tensor, grad: Tensor, state: Group, group: Group, factor: Tensor | None) -> None:
        numbers = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        numbers["beta1"], numbers["beta2"] = group["betas"]
        tensors = weight, grad, state["exp_avg"], state["exp_avg_sq"]
        self._kernels.adam_(tensors, state["step"], factor, decoupled=self._decoupled, **numbers)


class ElementwiseAdam(KernelAdam):
    """Adam or AdamW by IEEE's basic operations, whose results do not depend on an element's place (``trainer.exact``).

    torch's fused kernel rounds otherwise at the end of a tensor, where other layouts have other elements.
    """

    def _update(self, weight: Tensor, grad: Tensor, state: Group, group: Group, factor: Tensor | None) -> None:
        assert factor is None, "the caller scales the gradients"
        (beta1, beta2), decay, step = group["betas"], group["weight_decay"], state["step"]
        corrections = [1 - torch.pow(torch.full_like(step, beta, dtype=torch.float64), step) for beta in (beta1, beta2)]
        numbers = AdamHyperparameters(
            keep=1 - group["lr"] * decay if self._decoupled else 1.0,
            decay=0.0 if self._decoupled else decay,
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            root=corrections[1].sqrt().float(),
            rate=(group["lr"] / corrections[0]).float(),
        )
        self._kernels.elementwise_adam_(weight.detach(), grad, state["exp_avg"], state["exp_avg_sq"], numbers)


def _build(inputs: OptimizerInputs, *, decoupled: bool) -> ShardOptimizer:
    if inputs.rounds:
        return ElementwiseOptimizer(inputs, adamw_update if decoupled else adam_update, **inputs.hyperparameters)
    if inputs.plan.config.trainer.exact:
        return ElementwiseAdam(inputs, decoupled=decoupled)
    if inputs.plan.storage.keeps_bf16_grads:
        return Bf16GradientAdam(inputs, decoupled=decoupled)
    return FusedAdam(inputs, decoupled=decoupled)


build_adam = partial(_build, decoupled=False)
"""Adam with weight decay added to the gradient (Kingma & Ba 2015, arXiv:1412.6980)."""
build_adamw = partial(_build, decoupled=True)
"""AdamW with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101)."""


def _update(
    function: Callable[..., None], tensors: Sequence[Tensor], gradient: Tensor, step: Tensor, group: Group
) -> None:
    """Update fp32 weight, exp_avg and exp_avg_sq in place by a function of torch."""
    weight, exp_avg, exp_avg_sq = tensors
    beta1, beta2 = group["betas"]
    rates = {"lr": group["lr"], "weight_decay": group["weight_decay"], "eps": group["eps"]}
    state: tuple[list[Tensor], ...] = ([exp_avg], [exp_avg_sq], [], [step])
    function([weight], [gradient], *state, amsgrad=False, beta1=beta1, beta2=beta2, **rates, **SINGLE_TENSOR)


adam_update, adamw_update = partial(_update, adam), partial(_update, adamw)
"""Formulas of ``ElementwiseOptimizer``."""
