"""Updates with gradients that depend on names and steps only, so that no layout sums them in another order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from megatron_llama.arch.hf_tp_mapping import Rectangle
from megatron_llama.checkpoint import state
from megatron_llama.config.optimizers import OPTIMIZERS
from megatron_llama.devices.kernels import EAGER, Kernels
from megatron_llama.optim import Optimizer, build_optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from tests.oracle import Tensors, assemble, make_plan, on_ranks_by_plan

STEPS = 3
NORM = 4.0
"""Norm by which gradients are clipped. The norm of each layout would differ in the last bit."""


def elementwise_inputs(
    weight: torch.nn.Parameter, name: str, rectangles: Sequence[Rectangle], *, state_dtype: torch.dtype,
    stochastic: bool, seed: int, kernels: Kernels = EAGER, in_blocks: bool = False, **group: Any,
) -> Any:  # fmt: skip
    """Return the inputs of the optimizer ``name`` of one weight."""
    dtype = str(state_dtype).removeprefix("torch.")
    return SimpleNamespace(
        plan=SimpleNamespace(
            precision=SimpleNamespace(optimizer_state_dtype=dtype, stochastic=stochastic),
            config=SimpleNamespace(trainer=SimpleNamespace(seed=seed)),
        ),
        row=OPTIMIZERS[name],
        groups=[{"params": [weight], **group}],
        rectangles={weight: rectangles},
        in_blocks={weight} if in_blocks else set(),
        matrices=set(),
        kernels=kernels,
        asynchronous=False,
    )


class Updated(NamedTuple):
    """Tensors before and after updates."""

    initial: Tensors
    """Weights, and states of zeros."""
    final: Tensors
    """Weights and states, as a checkpoint names them: ``optimizer.exp_avg.NAME``; 8-bit codes and scales apart."""


def gradient(step: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a whole tensor's gradient."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(10_000 * step + sum(name.encode())))


def give_gradients(model: ParallelModel, step: int) -> None:
    """Set the gradients of a rank's shards."""
    for shard in model.trained:
        shard.parameter.grad = torch.zeros_like(shard.parameter)
        for part in shard.rectangles:
            where = tuple(slice(o, o + n) for o, n in zip(part.offset, part.size, strict=True))
            assert shard.grad is not None
            shard.grad[part.local_slices] = gradient(step, part.name, part.global_shape)[where].to(shard.grad.dtype)


def updated(plans: list[Plan]) -> list[Updated]:
    """Update the models of plans that share a layout, one after another. Checks that copies are bit-identical."""
    answers = on_ranks_by_plan(_update, plans)
    return [Updated(*(assemble([answer[i][j] for answer in answers])[0] for j in (0, 1))) for i in range(len(plans))]


@cache
def updated_alone(*settings: str) -> Updated:
    """Return the updates of one process."""
    return updated([make_plan(1, *settings)])[0]


def _update(plan: Plan, model: ParallelModel) -> tuple[list, list]:
    optimizer = build_optimizer(plan, model)
    initial = _tensors(optimizer)
    for step in range(STEPS):
        give_gradients(model, step)
        optimizer.step(torch.tensor(NORM))
    return initial, _tensors(optimizer)


def _tensors(optimizer: Optimizer) -> list[tuple]:
    """Return (name, global shape, offset, values) of a rank's parts of weights and states."""
    tensors = state.weights(optimizer.model.shards) | state.optimizer_states(optimizer)
    return [
        (name, whole.shape, offset, part.float().clone())
        for name, whole in tensors.items()
        for offset, part in whole.parts
    ]
