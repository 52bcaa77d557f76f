"""torch's fused Adam and AdamW on a CPU for gradients that are narrower than their weights, a piece at a time.

torch's own step takes gradients in the weights' dtype only. Widened as a whole they would take twice their memory, and
clipping them would be one more pass over it. Here a piece is widened and scaled in the cache, where torch's kernel then
reads it. The results are those of torch's step on widened gradients, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_llama.optim.norm import PIECE

Group = dict[str, Any]
_KERNELS: dict[str, Callable[..., None]] = {"adam": torch._fused_adam_, "adamw": torch._fused_adamw_}


class PiecewiseAdam(torch.optim.Adam):
    """``adam`` or ``adamw``, with torch's states."""

    def __init__(self, groups: list[Group], name: str, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, decoupled_weight_decay=name == "adamw")
        self._kernel = _KERNELS[name]

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Any = None, *, gradient_factor: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """Updates all weights that have a gradient, which is multiplied by ``gradient_factor`` (fp32 scalar) and left
        as it is. Does nothing where ``skip`` (bool scalar) is true."""
        assert closure is None, "gradients are computed before the step"
        if skip is not None and skip:
            return
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group, gradient_factor)

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
        kept = [x.view(-1).split(PIECE) for x in (weight, state["exp_avg"], state["exp_avg_sq"])]
        wide = weight.new_empty(min(PIECE, weight.numel()))
        for part, mean, square, narrow in zip(*kept, grad.reshape(-1).split(PIECE), strict=True):
            gradient = wide[: narrow.numel()].copy_(narrow)
            if factor is not None:
                gradient.mul_(factor)
            self._kernel([part], [gradient], [mean], [square], [], [state["step"]], **numbers)
