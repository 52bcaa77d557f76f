"""SGD with momentum, for which ``optim.betas`` has the first of its two numbers.

torch's SGD skips an update on the device in its fused kernel only, whose last bits depend on the layout. So the update
is by rows in every precision.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim.sgd import sgd

from megatron_llama.optim.base import Group, OptimizerInputs, ShardOptimizer
from megatron_llama.optim.low_precision import SINGLE_TENSOR, build_elementwise


def build_sgd(inputs: OptimizerInputs) -> ShardOptimizer:
    """Build ``sgd``."""
    optim = inputs.plan.config.optim
    return build_elementwise(inputs, sgd_update, lr=optim.lr, momentum=optim.betas[0])


def sgd_update(tensors: Sequence[Tensor], gradient: Tensor, step: Tensor, group: Group) -> None:
    """SGD's update of fp32 weight and momentum_buffer, in place."""
    weight, momentum_buffer = tensors
    rates = {"lr": group["lr"], "weight_decay": group["weight_decay"], "momentum": group["momentum"]}
    sgd([weight], [gradient], [momentum_buffer], dampening=0.0, nesterov=False, **rates, **SINGLE_TENSOR)
