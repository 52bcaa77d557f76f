"""A trial optimizer: Lion (Chen et al. 2023, arXiv:2302.06675), as the one file that a new optimizer needs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_llama.config.optimizers import OptimizerRow
from megatron_llama.optim.base import Group, OptimizerInputs, ShardOptimizer
from megatron_llama.optim.low_precision import build_elementwise

ROW = OptimizerRow(factory="tests.optim.lion.build_lion", states=("exp_avg",))


def build_lion(inputs: OptimizerInputs) -> ShardOptimizer:
    """Build ``lion``."""
    return build_elementwise(inputs, lion_update, **inputs.hyperparameters)


def lion_update(tensors: Sequence[Tensor], gradient: Tensor, step: Tensor, group: Group) -> None:
    """Lion's update of fp32 weight and exp_avg, in place."""
    weight, exp_avg = tensors
    beta1, beta2 = group["betas"]
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.sub_(exp_avg.lerp(gradient, 1 - beta1).sign_(), alpha=group["lr"])
    exp_avg.lerp_(gradient, 1 - beta2)
