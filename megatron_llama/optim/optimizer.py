"""The optimizer over a rank's shards, with learning-rate schedule and clipping."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from megatron_llama import devices
from megatron_llama.arch.names import whole_shape
from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.optimizers import OptimizerRow
from megatron_llama.config.precision import has_8bit_states
from megatron_llama.optim.base import OptimizerInputs, ShardOptimizer
from megatron_llama.optim.blockwise import BlockwiseState
from megatron_llama.optim.norm import clip_factor, gradient_norm, scale_gradients
from megatron_llama.parallel import ParallelModel, Shard
from megatron_llama.plan import Plan


@dataclass
class Optimizer:
    """Updates this rank's shards. Adam and SGD are elementwise, so they give the same result on shards."""

    model: ParallelModel
    inner: ShardOptimizer
    """Its parameters are views of the shards' local tensors: no DTensor dispatch, and fused kernels work."""
    scheduler: Any
    clip: float | None
    on_host: bool = False
    """Whether these are copies in the host's memory instead, like the states, and the step is done there."""

    def gradient_norm(self) -> torch.Tensor:
        """2-norm of the gradients before clipping, fp32 scalar, the same on all ranks."""
        if self.row.sums_gradients:
            self._lend_gradients()
            self.inner.reduce_gradients()
        return gradient_norm(self.model.shards, self.model.device, own_shares=not self.inner.gradients_summed)

    def step(self, norm: torch.Tensor) -> None:
        """Clips by ``norm``, updates the weights, frees the gradients and advances the schedule."""
        self.update(norm)
        self.advance()

    def update(self, norm: torch.Tensor, skip: torch.Tensor | None = None) -> None:
        """Clips by ``norm`` and updates the weights. ``skip``, a bool scalar on the device: where it is true, weights,
        states and gradients stay as they are, and ``advance`` must be told.

        Where ``skips_on_device`` the host waits for nothing; otherwise it reads ``skip``, for which it waits once if
        the step is its own, with the gradients, and never on a CPU.
        """
        if skip is not None and not self.skips_on_device and not self.on_host:
            if skip:
                return
            skip = None
        factor = None if self.clip is None else clip_factor(norm, self.clip)
        if factor is not None and skip is not None:
            factor = torch.where(skip, 1.0, factor)
        if factor is not None and not self.inner.takes_factor:
            if self.inner.gradients_summed:  # else ``norm`` is not the norm of the sum, which no rank has
                scale_gradients(self.model.shards, factor)
            factor = None
        if self.on_host:
            self._step_on_host(factor, skip)
            return
        self._lend_gradients()
        self.inner.step(factor=factor, skip=skip)

    def _step_on_host(self, factor: torch.Tensor | None, skip: torch.Tensor | None) -> None:
        """Updates the copies, and from them the shards. The host waits once, for the gradients, as it computes with
        them; the numbers come along, and the new weights leave without waiting."""
        pairs = zip(self._views(), self._shards_in_order(), strict=True)
        updated = [(view, shard, shard.grad) for view, shard in pairs if shard.grad is not None]
        for view, shard, _ in updated:
            view.data.copy_(shard.local, non_blocking=True)  # a checkpoint may have been loaded
        device = self.model.device
        numbers = [torch.ones((), device=device) if factor is None else factor]
        numbers += [torch.zeros((), dtype=torch.bool, device=device) if skip is None else skip]
        *gradients, host_factor, host_skip = to_host([*(grad for *_, grad in updated), *numbers], device)
        if host_skip:
            return
        for (view, *_), gradient in zip(updated, gradients, strict=True):
            view.grad = gradient
        self.inner.step(factor=None if factor is None else host_factor)
        for view, shard, _ in updated:
            shard.local.copy_(view.data, non_blocking=True)
            view.grad = None

    @property
    def skips_on_device(self) -> bool:
        """Whether the device skips an update by itself, so that the host does not wait for the reason. A step on the
        host waits for the gradients in any case."""
        return self.inner.skips_on_device and not self.on_host

    def advance(self, updated: bool = True) -> None:
        """Frees the gradients and advances the schedule. ``updated``: whether ``update`` has changed anything, which
        the host knows by now."""
        if not updated and self.skips_on_device:
            self.inner.revert_step_count()
        self.inner.zero_grad(set_to_none=True)
        self.model.zero_grad()
        self.scheduler.step()

    @property
    def row(self) -> OptimizerRow:
        """The properties of the configured optimizer."""
        return self.model.plan.config.optim.row

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self.scheduler.get_last_lr()[0])

    @property
    def updates(self) -> int:
        """Updates so far, as counted for Adam's bias correction and for the noise of rounding."""
        states = (self.inner.state[view] for view in self._views())
        return max((int(state["step"]) for state in states if "step" in state), default=0)

    def states(self) -> Iterator[tuple[str, Shard, torch.Tensor | BlockwiseState]]:
        """(torch's name, shard, values shaped like ``shard.local``) of all optimizer states, e.g. exp_avg.

        torch creates them at the first step; before that they are created here, as zeros.
        """
        for view, shard in zip(self._views(), self._shards_in_order(), strict=True):
            state = self.inner.state[view]
            for kind in self.row.states:
                if state.get(kind) is None:
                    state[kind] = torch.zeros_like(view, requires_grad=False)
                    state.setdefault("step", torch.zeros((), device=view.device))
                yield kind, shard, state[kind]

    def restore(self, updates: int, steps: int) -> None:
        """Sets the count of updates, and advances a new schedule to step ``steps``.

        It is called once for each step, as before the save, because a schedule may keep any state.
        """
        for _ in self.states():  # creates them
            pass
        for view in self._views():
            at = view.device if self.inner.counts_on_device else devices.HOST
            self.inner.state[view]["step"] = torch.tensor(float(updates), device=at)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(steps):
                self.scheduler.step()

    def _lend_gradients(self) -> None:
        for view, shard in zip(self._views(), self._shards_in_order(), strict=True):
            view.grad = shard.grad

    def _views(self) -> list[torch.Tensor]:
        """The local tensors that ``inner`` updates, in the order of its parameter groups."""
        return [view for group in self.inner.param_groups for view in group["params"]]

    def _shards_in_order(self) -> list[Shard]:
        """The trained shards in the order of the parameter groups: with weight decay, then without."""
        trained = self.model.trained
        return [s for s in trained if decays(s.name)] + [s for s in trained if not decays(s.name)]


def decays(name: str) -> bool:
    """Whether weight decay applies to a parameter: to all except norm weights."""
    return not name.endswith("norm.weight")


def build_optimizer(plan: Plan, model: ParallelModel) -> Optimizer:
    """Build the configured optimizer and schedule."""
    optim, trained = plan.config.optim, model.trained
    on_host = "optimizer" in plan.config.trainer.offload
    values = [s.local for s in trained]
    values = to_host(values, model.device) if on_host else values
    # A rehearsal has the plan's device on paper and its tensors elsewhere.
    kind = (
        devices.device_named(plan.config.device.name)
        if plan.config.device.name in devices.NAMES
        else devices.of(model.device)
    )
    holder = devices.device_named(devices.HOST) if on_host else devices.of(model.device)
    views = [nn.Parameter(value) for value in values]
    if plan.storage.keeps_bf16_grads:
        for view in views:
            view.grad_dtype = None  # any  # type: ignore[attr-defined]
    pairs = [*zip(trained, views, strict=True)]
    groups = [
        {"params": [view for s, view in pairs if decays(s.name)], "weight_decay": optim.weight_decay},
        {"params": [view for s, view in pairs if not decays(s.name)], "weight_decay": 0.0},
    ]
    inputs = OptimizerInputs(
        plan,
        groups,
        rectangles={view: s.rectangles for s, view in pairs},
        in_blocks={view for s, view in pairs if optim.state_bits == 8 and _has_8bit_states(s, plan)},
        kernels=holder.kernels(bool(plan.config.trainer.compile)),
        asynchronous=not on_host and kind.asynchronous,
    )
    inner = build_inner(inputs)
    return Optimizer(model, inner, build_schedule(plan, inner), optim.clip, on_host)


def build_inner(inputs: OptimizerInputs) -> ShardOptimizer:
    """Build the optimizer by the factory that its row names."""
    module, _, function = inputs.row.factory.rpartition(".")
    inner: ShardOptimizer = getattr(import_module(module), function)(inputs)
    return inner


def to_host(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies of ``tensors``, which are on ``device``, in the host's memory, pinned unless that is the device.

    The host waits once, until all are there, and with them what has been copied without waiting before.
    """
    on_device = devices.of(device).asynchronous
    copies = []
    for tensor in tensors:  # no comprehension: a rehearsal attributes memory by the name of the function
        copies.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device))
        copies[-1].copy_(tensor, non_blocking=True)
    if on_device:
        torch.get_device_module(device).synchronize()
    return copies


def _has_8bit_states(shard: Shard, plan: Plan) -> bool:
    return has_8bit_states(whole_shape(shard.name, plan.model, plan.config.finetune))


def build_schedule(plan: Plan, inner: torch.optim.Optimizer) -> Any:
    """Instantiates ``optim.schedule``; its ``${...}`` refer to the settings, derived ones included.

    Raises ConfigError if the schedule's constructor fails.
    """
    settings = OmegaConf.create(asdict(plan.config))
    try:
        return instantiate(settings.optim.schedule, optimizer=inner)
    except Exception as error:  # a user's scheduler may raise anything
        cause = error.__cause__ or error
        target = plan.config.optim.schedule.get("_target_")
        instead = (
            f"write it whole, with the arguments that it takes: 'optim.schedule={{_target_: {target}, ...}}'; or take "
            "one out: ~optim.schedule.max_steps"
        )
        raise ConfigError([Problem("optim.schedule", target, f"could not be made: {cause}", instead)]) from error
