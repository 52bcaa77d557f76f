"""torch's optimizers for bf16 weights without fp32 master weights, for states in 8 bits, and SGD in any precision.

Weights and optimizer states are cast to fp32 a few rows at a time, torch's own single-tensor function updates these,
and what is kept in fewer bits gets the rounded result. Up to that rounding the result is torch's, bit for bit. SGD in
fp32 is here because a device can leave an update out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron_llama.arch.names import Piece, keep_rows
from megatron_llama.optim.blockwise import BlockwiseState, Levels
from megatron_llama.optim.rounding import noise, round_stochastically, stream

WEIGHT = "weight"
"""The name of the weights' stream of noise; those of the optimizer states have torch's names of the states."""
STATES: Mapping[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "onebit_adam": ("exp_avg", "exp_avg_sq"),
}
"""torch's names of the states that each optimizer keeps for a weight, besides the number of updates."""
# Values per block: few enough for a CPU's cache; on accelerators, where each operation is a launch, as many as are
# small compared with the model.
_CPU_BLOCK, _BLOCK = 1 << 18, 1 << 24

Group = dict[str, Any]
Update = Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor, Group], None]


class LowPrecisionOptimizer(torch.optim.Optimizer):
    """``adamw``, ``adam`` or ``sgd`` over tensors which consist of the ``pieces`` of Hugging Face tensors.

    ``state_dtype`` is the dtype of the optimizer states, but those of the matrices ``in_blocks`` are in 8 bits. With
    ``stochastic`` bf16 is rounded stochastically, by noise from ``seed``, else to nearest. ``compiled`` is
    ``BlockwiseState``'s.
    """

    def __init__(
        self,
        groups: list[Group],
        name: str,
        pieces: Mapping[torch.Tensor, Sequence[Piece]],
        *,
        state_dtype: torch.dtype,
        stochastic: bool,
        seed: int,
        in_blocks: AbstractSet[torch.Tensor] = frozenset(),
        compiled: bool = False,
    ) -> None:
        super().__init__(groups, {})
        self.pieces, self.stochastic, self.seed = pieces, stochastic, seed
        self._kinds, self._function = STATES[name], _UPDATES[name]
        devices = {matrix.device for matrix in in_blocks}
        levels = {kind: Levels.on(at, signed=kind != "exp_avg_sq") for at in devices for kind in self._kinds}
        for weight in pieces:
            state = self.state[weight]
            state["step"] = torch.tensor(0.0)  # on the host as in torch: reading it does not synchronize
            for kind in self._kinds:
                if weight in in_blocks:
                    state[kind] = BlockwiseState(weight, levels[kind], compiled=compiled)
                else:
                    state[kind] = torch.zeros_like(weight, dtype=state_dtype, requires_grad=False)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Any = None, *, gradient_factor: torch.Tensor | None = None, skip: torch.Tensor | None = None
    ) -> None:
        """Updates all weights that have a gradient. Gradients are multiplied by ``gradient_factor`` (fp32 scalar) in
        fp32, so that clipping does not round them to bf16 a second time.

        Where ``skip`` (bool scalar on the weights' device) is true, weights and states stay as they are. The host does
        not look at it and counts the update all the same: see ``take_back_count``.
        """
        assert closure is None, "gradients are computed before the step"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group, gradient_factor, skip)

    def take_back_count(self) -> None:
        """The last ``step`` was skipped on the device, as the host has learnt since: it is no update."""
        for weight in self.pieces:
            self.state[weight]["step"] -= 1

    def _update(
        self, weight: torch.Tensor, group: Group, factor: torch.Tensor | None, skip: torch.Tensor | None
    ) -> None:
        state = self.state[weight]
        kept = {WEIGHT: weight, **{kind: state[kind] for kind in self._kinds}}
        block = _CPU_BLOCK if weight.device.type == "cpu" else _BLOCK
        rows = max(1, block // max(1, weight[:1].numel()))
        for start in range(0, weight.shape[0], rows):
            part = slice(start, min(start + rows, weight.shape[0]))
            # what is fp32 is not copied where the update is sure: it happens in place
            wide = [tensor[part].to(torch.float32, copy=skip is not None) for tensor in kept.values()]
            gradient = weight.grad[part].float()  # type: ignore[index]
            gradient = gradient if factor is None else gradient * factor
            self._function(wide, gradient, state["step"].clone(), group)
            pieces = keep_rows(list(self.pieces[weight]), part.start, part.stop)
            for (kind, tensor), values in zip(kept.items(), wide, strict=True):
                if isinstance(tensor, BlockwiseState):
                    tensor.assign(part, values, unless=skip)
                    continue
                new = values if tensor.dtype == torch.float32 else self._rounded(values, kind, pieces, state["step"])
                if skip is not None:
                    tensor[part] = torch.where(skip, tensor[part], new)
                elif new is not values:
                    tensor[part] = new
        state["step"] += 1

    def _rounded(self, values: torch.Tensor, kind: str, pieces: Sequence[Piece], step: torch.Tensor) -> torch.Tensor:
        if not self.stochastic:
            return values.to(torch.bfloat16)
        noises = torch.zeros(values.shape, dtype=torch.int32, device=values.device)  # 0 for vocabulary padding
        for piece in pieces:
            keys = stream(self.seed, kind, piece.name)
            noises[piece.local_slices] = noise(keys, step.int(), piece.offset, piece.size, values.device)
        return round_stochastically(values, noises)


# Single-tensor, not fused: the last bits of the fused kernel depend on a value's position in its tensor, and so on the
# layout.
_PLAIN: dict[str, Any] = {"foreach": False, "fused": False, "maximize": False}


def _adam(function: Callable[..., None]) -> Update:
    def update(wide: list[torch.Tensor], gradient: torch.Tensor, step: torch.Tensor, group: Group) -> None:
        weight, exp_avg, exp_avg_sq = wide
        beta1, beta2 = group["betas"]
        rates = {"lr": group["lr"], "weight_decay": group["weight_decay"], "eps": group["eps"]}
        state: tuple[list[torch.Tensor], ...] = ([exp_avg], [exp_avg_sq], [], [step])
        function([weight], [gradient], *state, amsgrad=False, beta1=beta1, beta2=beta2, **rates, **_PLAIN)

    return update


def _sgd(wide: list[torch.Tensor], gradient: torch.Tensor, step: torch.Tensor, group: Group) -> None:
    weight, momentum_buffer = wide
    rates = {"lr": group["lr"], "weight_decay": group["weight_decay"], "momentum": group["momentum"]}
    sgd([weight], [gradient], [momentum_buffer], dampening=0.0, nesterov=False, **rates, **_PLAIN)


_UPDATES: Mapping[str, Update] = {"adamw": _adam(adamw), "adam": _adam(adam), "sgd": _sgd}
