"""Adam and AdamW: torch's fused kernels for weights and states in fp32, else by rows in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megatron_llama.optim.base import Group, OptimizerInputs, ShardOptimizer
from megatron_llama.optim.low_precision import SINGLE_TENSOR, build_elementwise
from megatron_llama.optim.norm import PIECE

_KERNELS: dict[bool, Callable[..., None]] = {False: torch._fused_adam_, True: torch._fused_adamw_}


class FusedAdam(ShardOptimizer, torch.optim.Adam):
    """torch's fused Adam, or AdamW if weight decay is ``decoupled``."""

    skips_on_device = True
    counts_on_device = True

    def __init__(self, groups: Sequence[Group], numbers: dict[str, Any], *, decoupled: bool) -> None:
        super().__init__(groups, **numbers, decoupled_weight_decay=decoupled, fused=True)

    def step(self, *, factor: Tensor | None = None, skip: Tensor | None = None) -> None:  # type: ignore[override]
        # torch.amp.GradScaler passes found_inf to fused kernels in the same way.
        self.found_inf = None if skip is None else skip.float()
        torch.optim.Adam.step(self)


class Bf16GradientAdam(ShardOptimizer, torch.optim.Adam):
    """torch's fused Adam or AdamW on a CPU for gradients in bf16, with bitwise the results for their fp32 copies.

    torch's step takes gradients in the weights' dtype only. An fp32 copy of all gradients would take twice their
    memory, and clipping would read it once more. Here a chunk is copied and scaled in the cache, where torch's kernel
    then reads it.
    """

    takes_factor = True
    counts_on_device = True

    def __init__(self, groups: Sequence[Group], numbers: dict[str, Any], *, decoupled: bool) -> None:
        super().__init__(groups, **numbers, decoupled_weight_decay=decoupled)
        self._kernel = _KERNELS[decoupled]

    @torch.no_grad()
    def step(self, *, factor: Tensor | None = None, skip: Tensor | None = None) -> None:  # type: ignore[override]
        assert skip is None, "the caller reads it"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group, factor)

    def _update(self, weight: Tensor, grad: Tensor, group: Group, factor: Tensor | None) -> None:
        state = self.state[weight]
        if "step" not in state:
            state["step"] = torch.zeros(())
        for kind in ("exp_avg", "exp_avg_sq"):
            if kind not in state:
                state[kind] = torch.zeros_like(weight)
        state["step"] += 1
        numbers = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        numbers["beta1"], numbers["beta2"] = group["betas"]
        values = [x.view(-1).split(PIECE) for x in (weight, state["exp_avg"], state["exp_avg_sq"])]
        buffer = weight.new_empty(min(PIECE, weight.numel()))
        for part, mean, square, chunk in zip(*values, grad.reshape(-1).split(PIECE), strict=True):
            gradient = buffer[: chunk.numel()].copy_(chunk)
            if factor is not None:
                gradient.mul_(factor)
            self._kernel([part], [gradient], [mean], [square], [], [state["step"]], **numbers)


def build_adam(inputs: OptimizerInputs) -> ShardOptimizer:
    """Build ``adam`` or ``adamw``."""
    decoupled = inputs.plan.config.optim.name == "adamw"
    if inputs.rounds:
        return build_elementwise(inputs, adamw_update if decoupled else adam_update, **inputs.numbers)
    kind = Bf16GradientAdam if inputs.plan.narrow_gradients else FusedAdam
    return kind(inputs.groups, inputs.numbers, decoupled=decoupled)


def adam_update(tensors: Sequence[Tensor], gradient: Tensor, step: Tensor, group: Group) -> None:
    """Adam's update of fp32 weight, exp_avg and exp_avg_sq, in place."""
    _update(adam, tensors, gradient, step, group)


def adamw_update(tensors: Sequence[Tensor], gradient: Tensor, step: Tensor, group: Group) -> None:
    """AdamW's update of fp32 weight, exp_avg and exp_avg_sq, in place."""
    _update(adamw, tensors, gradient, step, group)


def _update(
    function: Callable[..., None], tensors: Sequence[Tensor], gradient: Tensor, step: Tensor, group: Group
) -> None:
    weight, exp_avg, exp_avg_sq = tensors
    beta1, beta2 = group["betas"]
    rates = {"lr": group["lr"], "weight_decay": group["weight_decay"], "eps": group["eps"]}
    state: tuple[list[Tensor], ...] = ([exp_avg], [exp_avg_sq], [], [step])
    function([weight], [gradient], *state, amsgrad=False, beta1=beta1, beta2=beta2, **rates, **SINGLE_TENSOR)
