"""The optimizer over a rank's shards, with learning-rate schedule and clipping."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from hydra.utils import instantiate
from torch import nn

from megatron_llama import devices
from megatron_llama.arch.hf_tp_mapping import is_block_matrix, whole_shape
from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.optimizers import OptimizerRow
from megatron_llama.config.precision import has_8bit_states
from megatron_llama.optim.base import OptimizerInputs, ShardOptimizer
from megatron_llama.optim.eight_bit_states import BlockwiseState
from megatron_llama.optim.gradient_norm import clip_factor, gradient_norm, scale_gradients
from megatron_llama.optim.qk_clip import QKClip
from megatron_llama.parallel import ParallelModel, Shard
from megatron_llama.plan import Plan


@dataclass
class Optimizer:
    """Optimizer of this rank's shards, with clipping and schedule."""

    model: ParallelModel
    inner: ShardOptimizer
    """The torch optimizer. Its parameters are views of the shards' local tensors, or with ``on_host`` host copies."""
    scheduler: Any
    clip: float | None
    on_host: bool = False
    """Whether parameters and states are in host memory and the step runs there (``trainer.offload``)."""
    qk_clip: QKClip | None = None
    """Scales weights of q and k after each step (``optim.qk_clip``)."""

    def gradient_norm(self) -> torch.Tensor:
        """Return the 2-norm of the gradients before clipping, fp32 scalar, the same on all ranks."""
        if self.row.sums_gradients:
            self._set_gradients()
            self.inner.reduce_gradients()
        unreduced, exact = not self.inner.gradients_summed, self.model.plan.config.trainer.exact
        return gradient_norm(self.model.shards, self.model.device, unreduced=unreduced, exact=exact)

    def step(self, norm: torch.Tensor) -> None:
        """Clip by ``norm``, update the weights, free the gradients and advance the schedule."""
        self.update(norm)
        self.advance()

    def update(self, norm: torch.Tensor, skip: torch.Tensor | None = None) -> None:
        """Clip by ``norm`` and update the weights. ``inner`` clips if it ``takes_factor``, else this method, in place.

        Args:
            norm: fp32 scalar, global gradient norm.
            skip: bool scalar on the device. Where it is true, weights, states and gradients keep their values. Kernels
                read it if ``skips_on_device``. Otherwise the host reads it, with a sync: in ``_step_on_host`` if
                ``on_host``, else here. ``advance`` needs to know whether the step was skipped.
        """
        if skip is not None and not self.skips_on_device and not self.on_host:
            if skip:
                return
            skip = None
        factor = None if self.clip is None else clip_factor(norm, self.clip)
        if factor is not None and skip is not None:
            factor = torch.where(skip, 1.0, factor)
        if factor is not None and not self.inner.takes_factor:
            if self.inner.gradients_summed:  # 1-bit Adam never forms the summed gradient
                scale_gradients(self.model.shards, factor)
            factor = None
        if self.on_host:
            self._step_on_host(factor, skip)
            return
        self._set_gradients()
        self._step(factor, skip)

    def _step(self, factor: torch.Tensor | None, skip: torch.Tensor | None = None) -> None:
        self.inner.step(factor=factor, skip=skip)
        if self.qk_clip is not None:
            self.qk_clip.clip(skip)

    def _step_on_host(self, factor: torch.Tensor | None, skip: torch.Tensor | None) -> None:
        """Update the host copies, then the shards. One sync, for gradients, factor and skip; weights are copied back
        asynchronously."""
        updated = [(view, shard, shard.grad) for view, shard in self._pairs() if shard.grad is not None]
        for view, shard, _ in updated:
            view.data.copy_(shard.local, non_blocking=True)  # the shard may have been loaded from a checkpoint
        device = self.model.device
        numbers = [torch.ones((), device=device) if factor is None else factor]
        numbers += [torch.zeros((), dtype=torch.bool, device=device) if skip is None else skip]
        *gradients, host_factor, host_skip = to_host([*(grad for *_, grad in updated), *numbers], device)
        if host_skip:
            return
        for (view, *_), gradient in zip(updated, gradients, strict=True):
            view.grad = gradient
        self._step(None if factor is None else host_factor)
        for view, shard, _ in updated:
            shard.local.copy_(view.data, non_blocking=True)
            view.grad = None

    @property
    def skips_on_device(self) -> bool:
        """Whether the device applies ``skip``, so that the host does not read it. A step on the host reads it with the
        gradients."""
        return self.inner.skips_on_device and not self.on_host

    def advance(self, updated: bool = True) -> None:
        """Free the gradients and advance the schedule. ``updated``: whether ``update`` was not skipped."""
        if not updated and self.skips_on_device:
            self.inner.revert_step_count()
        self.inner.zero_grad(set_to_none=True)
        self.model.zero_grad()
        self.scheduler.step()

    def metrics(self) -> dict[str, float]:
        """Return the optimizer's metrics of the last step. A collective."""
        return self.inner.metrics() | ({} if self.qk_clip is None else self.qk_clip.metrics())

    @property
    def row(self) -> OptimizerRow:
        """Declared properties of the configured optimizer."""
        return self.model.plan.config.optim.row

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.scheduler.get_last_lr()[0])

    @property
    def updates(self) -> int:
        """Number of updates so far, as used for Adam's bias correction and for the noise of rounding."""
        counts: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
        for view, _ in self._pairs():
            if "step" in self.inner.state[view]:
                counts[self.inner.state[view]["step"].device].append(self.inner.state[view]["step"])
        return max((int(torch.stack(of_device).max()) for of_device in counts.values()), default=0)  # one sync

    def states(self) -> Iterator[tuple[str, Shard, torch.Tensor | BlockwiseState]]:
        """Yield (torch's name, shard, values shaped like ``shard.local``) of all optimizer states, such as exp_avg.

        Creates missing states as zeros, because torch creates them at the first step.
        """
        for view, shard in self._pairs():
            state = self.inner.state[view]
            for kind in self.row.states_of(is_matrix=is_block_matrix(shard.name)):
                if state.get(kind) is None:
                    state[kind] = torch.zeros_like(view, requires_grad=False)
                    state.setdefault("step", torch.zeros((), device=view.device))
                yield kind, shard, state[kind]

    def tensors(self) -> Iterator[tuple[str, Shard, torch.Tensor]]:
        """Yield (kind, shard, tensor) of all tensors of the states: 8-bit codes and scales apart, then the numbers of
        updates, which are scalars. Creates missing states, as ``states`` does."""
        for kind, shard, state in self.states():
            if isinstance(state, BlockwiseState):
                yield f"{kind} (codes)", shard, state.codes
                yield f"{kind} (scales)", shard, state.scales
            else:
                yield kind, shard, state
        for view, shard in self._pairs():
            if "step" in self.inner.state[view]:
                yield "the number of updates", shard, self.inner.state[view]["step"]

    def restore(self, updates: int, steps: int) -> None:
        """Set the number of updates, and advance a new schedule to step ``steps``.

        Calls ``scheduler.step`` once per step, because a schedule may have any state.
        """
        for _ in self.states():  # creates them
            pass
        for view, _ in self._pairs():
            at = view.device if self.inner.counts_on_device else devices.HOST
            # Filled on the device: a copy of a host scalar would be a sync.
            self.inner.state[view]["step"] = torch.full((), float(updates), device=at)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(steps):
                self.scheduler.step()

    def _set_gradients(self) -> None:
        """Set the views' gradients to the shards' gradients."""
        for view, shard in self._pairs():
            view.grad = shard.grad

    def _pairs(self) -> Iterator[tuple[torch.Tensor, Shard]]:
        """Yield the tensors that ``inner`` updates with their shards: first the group with weight decay."""
        views = [view for group in self.inner.param_groups for view in group["params"]]
        return zip(views, sorted(self.model.trained, key=lambda s: not decays(s.name)), strict=True)


def decays(name: str) -> bool:
    """Whether weight decay applies to a parameter: to all except norm weights."""
    return not name.endswith("norm.weight")


def build_optimizer(plan: Plan, model: ParallelModel) -> Optimizer:
    """Build the configured optimizer and schedule."""
    optim, trained, name = plan.config.optim, model.trained, plan.config.device.name
    on_host = "optimizer" in plan.config.trainer.offload
    values = [s.local for s in trained]
    values = to_host(values, model.device) if on_host else values
    # In tools/rehearse the tensors are not on the plan's device.
    kind = devices.device_named(name) if name in devices.NAMES else devices.of(model.device)
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
    in_8bit = [(s, view) for s, view in pairs if optim.state_bits == 8]
    shapes = {view: whole_shape(s.name, plan.model, plan.config.finetune) for s, view in in_8bit}
    inputs = OptimizerInputs(
        plan,
        groups,
        rectangles={view: s.rectangles for s, view in pairs},
        in_blocks={view for view, shape in shapes.items() if has_8bit_states(shape)},
        matrices={view for s, view in pairs if is_block_matrix(s.name)},
        kernels=holder.kernels(bool(plan.config.trainer.compile)),
        asynchronous=not on_host and kind.asynchronous,
    )
    # For adamw: build_adamw in optim/adam.py, by default a fused kernel that skips on the device.
    module, _, factory = inputs.row.factory.rpartition(".")
    inner: ShardOptimizer = getattr(import_module(module), factory)(inputs)
    qk_clip = None if optim.qk_clip is None else QKClip(inner, model, inputs)
    return Optimizer(model, inner, build_schedule(plan, inner), optim.clip, on_host, qk_clip)


def to_host(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy ``tensors`` from ``device`` to host memory (pinned, unless the device is the host). One sync."""
    on_device = devices.of(device).asynchronous
    copies = []
    for tensor in tensors:  # no comprehension: tools/rehearse attributes memory by function name
        copies.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device))
        copies[-1].copy_(tensor, non_blocking=True)
    if on_device:
        torch.get_device_module(device).synchronize()
    return copies


def build_schedule(plan: Plan, inner: torch.optim.Optimizer) -> Any:
    """Instantiate ``optim.schedule``.

    Raises:
        ConfigError: the schedule's constructor fails.
    """
    try:
        return instantiate(plan.config.optim.schedule, optimizer=inner)
    except Exception as error:  # a user's scheduler may raise anything
        cause = error.__cause__ or error
        target = plan.config.optim.schedule.get("_target_")
        instead = (
            f"write all its arguments: 'optim.schedule={{_target_: {target}, ...}}', or remove an argument: "
            "~optim.schedule.max_steps"
        )
        raise ConfigError([Problem("optim.schedule", target, f"cannot be instantiated: {cause}", instead)]) from error
