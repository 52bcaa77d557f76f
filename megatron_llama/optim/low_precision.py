"""Elementwise optimizers for bf16 weights without fp32 master weights, and for 8-bit states. SGD.

Weights and states are cast to fp32 a few rows at a time, the optimizer's formula updates them, and low-precision
tensors get the rounded result. Before rounding, the result is bit-identical to the formula's. The class also works in
fp32, to skip an update on the device.

Stochastic rounding to bf16: let d be the distance of two bf16 neighbours. A value at p * d above the lower neighbour
becomes the upper one with probability p. So the rounding is unbiased (Gupta et al. 2015, arXiv:1502.02551; for training
in bf16, Zamirai et al. 2020, arXiv:2010.06192). The noise is a hash of (seed, tensor, step, row, column), not the
output of a stateful generator. So all ranks that hold a value use the same noise, in any layout and after a resume.

The rounding operates on int32 tensors, which wrap around. No value is read on the host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from megatron_llama import devices
from megatron_llama.arch.hf_tp_mapping import Rectangle, keep_rows
from megatron_llama.model.init import torch_dtype
from megatron_llama.model.noise import mix
from megatron_llama.optim.base import Group, OptimizerInputs, ShardOptimizer
from megatron_llama.optim.eight_bit_states import BlockwiseState, levels_on

WEIGHT = "weight"
"""Name of the weights' noise stream. The streams of states have the states' names."""
SINGLE_TENSOR: dict[str, Any] = {"foreach": False, "fused": False, "maximize": False}
"""Options of torch's functions. A fused kernel's rounding depends on a value's position in its tensor, and so on the
layout."""

Formula = Callable[[Sequence[Tensor], Tensor, Tensor, Group], None]
"""Arguments: (weight, *states), fp32, updated in place; gradient, fp32; number of earlier updates; parameter group."""
Keys = tuple[int, int]
_LOW_16, _EXPONENT = 0xFFFF, 0x7F800000


class ElementwiseOptimizer(ShardOptimizer):
    """Optimizer of an elementwise ``formula``.

    Rounds bf16 to nearest, or stochastically with noise from the run's seed (``Precision.stochastic``).

    Args:
        hyperparameters: values of each parameter group (``lr`` and others).
    """

    takes_factor = True

    def __init__(self, inputs: OptimizerInputs, formula: Formula, **hyperparameters: Any) -> None:
        super().__init__([{**hyperparameters, **group} for group in inputs.groups], {})
        precision, row, in_blocks = inputs.plan.precision, inputs.row, inputs.in_blocks
        self.rectangles, self.seed = inputs.rectangles, inputs.plan.config.trainer.seed
        self.stochastic = precision.stochastic
        self._states, self._formula, self._kernels = row.states, formula, inputs.kernels
        self._fused = self._kernels.fuse(round_with_noise) if self.stochastic else None
        self.skips_on_device = inputs.asynchronous
        state_dtype = torch_dtype(precision.optimizer_state_dtype)
        holders = {matrix.device for matrix in in_blocks}
        levels = {
            (name, at): levels_on(at, signed=name not in row.unsigned_states) for at in holders for name in row.states
        }
        for weight in self.rectangles:
            state = self.state[weight]
            state["step"] = torch.tensor(0.0)  # on the host as in torch: reading it does not synchronize
            for name in row.states_of(is_matrix=weight in inputs.matrices):
                if weight in in_blocks:
                    state[name] = BlockwiseState(weight, levels[name, weight.device], self._kernels)
                else:
                    state[name] = torch.zeros_like(weight, dtype=state_dtype, requires_grad=False)

    @torch.no_grad()
    def step(self, *, factor: Tensor | None = None, skip: Tensor | None = None) -> None:  # type: ignore[override]
        # Gradients are scaled in fp32, so that clipping does not round them to bf16 a second time.
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, group, factor, skip)
                    self.state[weight]["step"] += 1

    def update(self, weight: Tensor, group: Group, factor: Tensor | None, skip: Tensor | None) -> None:
        """Update a weight and its states by the formula."""
        tensors = {WEIGHT: weight, **{kind: self.state[weight][kind] for kind in self._states}}
        gradient, step = weight.grad, self.state[weight]["step"]
        assert gradient is not None
        self.apply(self._formula, tensors, self.rectangles[weight], gradient, step, group, factor=factor, skip=skip)

    def apply(
        self,
        formula: Formula,
        tensors: Mapping[str, Any],
        rectangles: Sequence[Rectangle],
        gradient: Tensor,
        step: Tensor,
        group: Group,
        *,
        factor: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Apply a formula to ``tensors``, which have the gradient's shape, in place and with rounding.

        Args:
            formula: its first argument has the tensors in fp32, in their order.
            tensors: weight and states by kind, which selects the noise of rounding.
            rectangles: rectangles of Hugging Face tensors that each of the tensors consists of.
            gradient: any floating dtype.
            step: number of earlier updates, on the host.
            group: the parameter group.
            factor: fp32 scalar for the gradient.
            skip: bool scalar. Where it is true, the tensors keep their values.
        """
        rows = self._kernels.rows_at_once(gradient[:1].numel())
        for start in range(0, gradient.shape[0], rows):
            part = slice(start, min(start + rows, gradient.shape[0]))
            # fp32 values are updated in place; with ``skip`` in a copy.
            values_fp32 = [tensor[part].to(torch.float32, copy=skip is not None) for tensor in tensors.values()]
            gradient_fp32 = gradient[part].float()
            gradient_fp32 = gradient_fp32 if factor is None else gradient_fp32 * factor
            formula(values_fp32, gradient_fp32, step.clone(), group)
            held = keep_rows(list(rectangles), part.start, part.stop)
            for (kind, tensor), values in zip(tensors.items(), values_fp32, strict=True):
                if isinstance(tensor, BlockwiseState):
                    tensor.assign(part, values, unless=skip)
                    continue
                new = values if tensor.dtype == torch.float32 else self._rounded(values, kind, held, step)
                if skip is not None:
                    tensor[part] = torch.where(skip, tensor[part], new)
                elif new is not values:
                    tensor[part] = new

    def _rounded(self, values: Tensor, kind: str, rectangles: Sequence[Rectangle], step: Tensor) -> Tensor:
        if not self.stochastic:
            return values.to(torch.bfloat16)
        if self._fused is not None:
            return self._rounded_by_kernel(values, kind, rectangles, step)
        noises = torch.zeros(values.shape, dtype=torch.int32, device=values.device)  # 0 for vocabulary padding
        for rectangle in rectangles:
            keys = stream(self.seed, kind, rectangle.name)
            noises[rectangle.local_slices] = noise(keys, step.int(), rectangle.offset, rectangle.size, values.device)
        return round_stochastically(values, noises)

    def _rounded_by_kernel(self, values: Tensor, kind: str, rectangles: Sequence[Rectangle], step: Tensor) -> Tensor:
        """Round with one launch per rectangle, to the bits of ``round_stochastically``."""
        assert self._fused is not None
        number = int(step)  # the step is on the host
        rounded = torch.empty(0)
        for rectangle in rectangles:
            keys = start_of_noise(stream(self.seed, kind, rectangle.name), number, rectangle.offset)
            starts = devices.pinned(torch.tensor(keys, dtype=torch.int32), values.device)
            starts = starts.to(values.device, non_blocking=True)
            inputs = (starts, *(_kept_numbers(count, values.device) for count in rectangle.size))
            if tuple(rectangle.size) == tuple(values.shape):
                return self._fused(values, *inputs)
            if not rounded.numel():
                rounded = values.to(torch.bfloat16)  # vocabulary padding, which is 0, is in no rectangle
            rounded[rectangle.local_slices] = self._fused(values[rectangle.local_slices], *inputs)
        return rounded if rounded.numel() else values.to(torch.bfloat16)


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """Round ``values`` (fp32) to bf16: add ``noise`` (int32, 0 to 65535, same shape) to the bits and truncate.

    A value at k/65536 of the way to its neighbour is rounded up for exactly k noise values. Infinities, NaNs and values
    that bf16 can represent are unchanged. Above bf16's largest value the neighbour is infinity.
    """
    bits = values.view(torch.int32)
    # All ones for finite values (exponent bits not all ones). torch.where takes 10 times as long on a CPU.
    finite = ((bits & _EXPONENT) - _EXPONENT) >> 31
    rounded = (bits + (noise & finite)) & ~(finite & _LOW_16)
    return rounded.view(torch.float32).to(torch.bfloat16)


def noise(keys: Keys, step: Tensor, offset: tuple[int, ...], size: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the noise (int32, 0 to 65535) of the rectangle at ``offset`` of extent ``size`` in a 1-D or 2-D tensor.

    ``step`` is an int32 scalar tensor, so that a compiled graph does not depend on its value.
    """
    row, column = (mix(step ^ key) + first for key, first in zip(keys, (*offset, 0)[:2], strict=True))
    return _noise_from(row, column, *(_numbers(count, device) for count in size))


def _noise_from(row: Tensor, column: Tensor, rows: Tensor, columns: Tensor | None = None) -> Tensor:
    """Return ``noise`` from the numbers at which rows and columns begin, int32 scalars (``start_of_noise``).

    ``rows``, ``columns`` (of a matrix): 0, 1, ..., int32.
    """
    rows = mix(rows + row)
    if columns is None:
        return mix(rows ^ mix(column)) & _LOW_16
    return mix(rows[:, None] ^ mix(columns + column)) & _LOW_16


def round_with_noise(values: Tensor, starts: Tensor, *numbers: Tensor) -> Tensor:
    """Round a rectangle by ``round_stochastically`` with its ``noise``, as one function for a compiler.

    ``starts``: ``start_of_noise``, int32 [2]. ``numbers``: 0, 1, ..., int32, for each dimension. All are on the device
    of ``values``.
    """
    return round_stochastically(values, _noise_from(starts[0], starts[1], *numbers))


def start_of_noise(keys: Keys, step: int, offset: tuple[int, ...]) -> tuple[int, int]:
    """Return the numbers, as int32, at which the rows and columns of a rectangle at ``offset`` begin."""
    first, second = (_mixed(step ^ key) for key in keys)
    return _signed(first + offset[0]), _signed(second + (offset[1] if len(offset) > 1 else 0))


def _mixed(x: int) -> int:
    """Return ``mix`` of a host number, unsigned."""
    x &= 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def _signed(x: int) -> int:
    return ((x & 0xFFFFFFFF) ^ (1 << 31)) - (1 << 31)


@cache
def stream(seed: int, kind: str, name: str) -> Keys:
    """Return the keys of a noise stream for a seed, a kind (weight, exp_avg, ...) and a Hugging Face name."""
    digest = hashlib.blake2b(f"{seed}/{kind}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "big", signed=True), int.from_bytes(digest[4:], "big", signed=True)


def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


_kept_numbers = cache(_numbers)
"""Ranges in memory: Inductor of torch 2.11 makes int64 of a range whose size is dynamic."""
# SGD with momentum = ``optim.betas[0]``. torch's SGD skips an update on the device only in its fused kernel, whose
# rounding depends on the layout. So the update is by rows in every precision.


def build_sgd(inputs: OptimizerInputs) -> ShardOptimizer:
    """Build ``sgd``."""
    optim = inputs.plan.config.optim
    return ElementwiseOptimizer(inputs, sgd_update, lr=optim.peak_lr, momentum=optim.betas[0])


def sgd_update(tensors: Sequence[Tensor], gradient: Tensor, step: Tensor, group: Group) -> None:
    """Apply SGD's update to fp32 weight and momentum_buffer, in place."""
    weight, momentum_buffer = tensors
    rates = {"lr": group["lr"], "weight_decay": group["weight_decay"], "momentum": group["momentum"]}
    sgd([weight], [gradient], [momentum_buffer], dampening=0.0, nesterov=False, **rates, **SINGLE_TENSOR)
