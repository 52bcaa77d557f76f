"""The interface of an optimizer.

A new optimizer is a file in this folder and a row in ``config/optimizers.py``. The file has a subclass of
``ShardOptimizer`` and the function that the row names as its factory, which takes ``OptimizerInputs``. An elementwise
optimizer needs no subclass: ``low_precision.ElementwiseOptimizer`` takes its formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_llama.arch.hf_tp_mapping import Rectangle
from megatron_llama.config.optimizers import OptimizerRow
from megatron_llama.devices.kernels import UpdateKernels
from megatron_llama.plan import Plan

Group = dict[str, Any]
"""A parameter group of torch: ``params`` and the numbers for them, such as ``lr``."""


class ShardOptimizer(torch.optim.Optimizer):
    """Optimizer over the local tensors of a rank's shards.

    ``state[weight]`` has the states that the optimizer's row names, and ``step``, the number of updates as a scalar
    tensor. The gradient of an fp32 weight may be bf16. Subclasses set the class attributes.
    """

    takes_factor: bool = False
    """Whether ``step`` scales the gradients by ``factor``. Otherwise the caller scales them in place."""
    skips_on_device: bool = False
    """Whether ``step`` applies ``skip`` on the device. Otherwise the caller reads ``skip`` on the host."""
    counts_on_device: bool = False
    """Whether the numbers of updates are on the weights' device, and exclude skipped updates."""
    extra_states_label: str = "the extra states of the optimizer"
    """Name of ``extra_states`` for messages, in the plural."""

    @property
    def gradients_summed(self) -> bool:
        """Whether gradients are summed over data-parallel ranks after ``reduce_gradients``."""
        return True

    def reduce_gradients(self) -> None:
        """Sum the gradients over data-parallel ranks, in place. Called if the row has ``sums_gradients``."""

    def step(self, *, factor: Tensor | None = None, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient.

        Args:
            factor: fp32 scalar for the gradients, given if ``takes_factor``. The gradients keep their values.
            skip: bool scalar on the weights' device, given if ``skips_on_device``. Where it is true, weights and
                states keep their values. The host does not read it.
        """
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last step. A collective. Attached features add theirs (optim/qk_clip.py)."""
        return {}

    def revert_step_count(self) -> None:
        """Remove the last, skipped ``step`` from the step counts. Call it before the gradients are freed."""
        if not self.counts_on_device:
            for weight, state in self.state.items():
                if weight.grad is not None:  # others were not counted
                    state["step"] -= 1

    def extra_states(self) -> dict[str, Tensor]:
        """Return copies of the tensors that belong to this rank, not to a weight, by name (without dots)."""
        return {}

    def load_extra_states(self, states: Mapping[str, Tensor]) -> None:
        """Restore the result of ``extra_states`` on this rank."""


@dataclass(frozen=True)
class OptimizerInputs:
    """Arguments of an optimizer's factory."""

    plan: Plan
    groups: Sequence[Group]
    """Parameter groups with ``params`` and ``weight_decay``. Each parameter is the local tensor of a shard."""
    rectangles: Mapping[Tensor, Sequence[Rectangle]]
    """Rectangles of Hugging Face tensors that each parameter consists of."""
    in_blocks: AbstractSet[Tensor]
    """Matrices with 8-bit states, by blocks."""
    matrices: AbstractSet[Tensor]
    """Matrices of the blocks, or parts of their rows."""
    kernels: UpdateKernels
    """Kernels of the device that holds the parameters."""
    asynchronous: bool
    """Whether the host runs ahead of this device: reading a value is a sync."""

    @property
    def row(self) -> OptimizerRow:
        """The optimizer's declared properties."""
        return self.plan.config.optim.row

    @property
    def rounds(self) -> bool:
        """Whether some weights or states have fewer bits than fp32."""
        return self.plan.precision.param_dtype != "float32" or self.plan.config.optim.state_bits == 8

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """``lr``, ``betas`` and ``eps``, as torch's Adam takes them."""
        optim = self.plan.config.optim
        beta1, beta2 = optim.betas
        return {"lr": optim.peak_lr, "betas": (beta1, beta2), "eps": optim.eps}
