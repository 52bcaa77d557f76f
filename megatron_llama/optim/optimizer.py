"""torch's optimizers over this rank's shards, with learning-rate schedule and clipping."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from megatron_llama.arch.names import whole_shape
from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.precision import has_8bit_states
from megatron_llama.model.mcore_config import torch_dtype
from megatron_llama.optim.blockwise import BlockwiseState
from megatron_llama.optim.host import to_host
from megatron_llama.optim.low_precision import STATES, LowPrecisionOptimizer
from megatron_llama.optim.norm import clip_factor, gradient_norm, scale_gradients
from megatron_llama.optim.onebit_adam import OneBitAdam
from megatron_llama.optim.piecewise_adam import PiecewiseAdam
from megatron_llama.parallel import ParallelModel, Shard
from megatron_llama.plan import Plan


@dataclass
class Optimizer:
    """Updates this rank's shards. Adam and SGD are elementwise, so they give the same result on shards."""

    model: ParallelModel
    inner: torch.optim.Optimizer
    """Its parameters are views of the shards' local tensors: no DTensor dispatch, and fused kernels work."""
    scheduler: Any
    clip: float | None
    on_host: bool = False
    """Whether these are copies in the host's memory instead, like the states, and the step is done there."""

    def gradient_norm(self) -> torch.Tensor:
        """2-norm of the gradients before clipping, fp32 scalar, the same on all ranks."""
        if not isinstance(self.inner, OneBitAdam):
            return gradient_norm(self.model.shards, self.model.device)
        self._lend_gradients()
        self.inner.reduce_gradients()
        return gradient_norm(self.model.shards, self.model.device, own_shares=self.inner.is_frozen)

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
        # The norm of a sum of gradients that nobody has made is not known.
        unknown = isinstance(self.inner, OneBitAdam) and self.inner.is_frozen
        clips_itself = isinstance(self.inner, LowPrecisionOptimizer | PiecewiseAdam)
        if factor is not None and not unknown and not clips_itself:
            scale_gradients(self.model.shards, factor)
        if self.on_host:
            self._step_on_host(factor, skip)
            return
        self._lend_gradients()
        if isinstance(self.inner, LowPrecisionOptimizer | PiecewiseAdam):  # scaled above, bf16 would be rounded twice
            self.inner.step(gradient_factor=factor, skip=skip)
        elif isinstance(self.inner, OneBitAdam):
            self.inner.step(skip=skip)
        else:  # found_inf is how torch.amp.GradScaler tells torch's fused optimizers
            self.inner.found_inf = None if skip is None else skip.float()  # type: ignore[attr-defined]
            self.inner.step()

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
        if isinstance(self.inner, LowPrecisionOptimizer):
            self.inner.step(gradient_factor=None if factor is None else host_factor)
        else:
            self.inner.step()
        for view, shard, _ in updated:
            shard.local.copy_(view.data, non_blocking=True)
            view.grad = None

    @property
    def skips_on_device(self) -> bool:
        """Whether the device leaves out an update by itself, so that the host need not wait for its reason.

        torch's fused Adam does so everywhere, the other optimizers where reading a value means waiting. A step on the
        host needs the gradients there, so it waits anyway.
        """
        if self.on_host:
            return False
        return isinstance(self.inner, torch.optim.Adam) or self.model.plan.config.device.name != "cpu"

    def advance(self, updated: bool = True) -> None:
        """Frees the gradients and advances the schedule. ``updated``: whether ``update`` has changed anything, which
        the host knows by now."""
        if not updated and self.skips_on_device and isinstance(self.inner, LowPrecisionOptimizer | OneBitAdam):
            self.inner.take_back_count()
        self.inner.zero_grad(set_to_none=True)
        self.model.zero_grad()
        self.scheduler.step()

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
            for kind in STATES[self.model.plan.config.optim.name]:
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
            at = view.device if isinstance(self.inner, torch.optim.Adam) else "cpu"
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
    """The configured optimizer and schedule."""
    optim = plan.config.optim
    trained = model.trained
    on_host = "optimizer" in plan.config.trainer.offload
    values = [s.local for s in trained]
    values = to_host(values, model.device) if on_host else values
    views = {id(s): nn.Parameter(value) for s, value in zip(trained, values, strict=True)}
    if plan.narrow_gradients:
        for view in views.values():
            view.grad_dtype = None  # any  # type: ignore[attr-defined]
    groups = [
        {"params": [views[id(s)] for s in trained if decays(s.name)], "weight_decay": optim.weight_decay},
        {"params": [views[id(s)] for s in trained if not decays(s.name)], "weight_decay": 0.0},
    ]
    beta1, beta2 = optim.betas
    inner: torch.optim.Optimizer
    # torch's SGD too can leave out an update on a device, but only its fused one, whose bits depend on the layout.
    if plan.precision.param_dtype != "float32" or optim.state_bits == 8 or optim.name == "sgd":
        numbers = {"lr": optim.lr, "betas": (beta1, beta2), "eps": optim.eps, "momentum": beta1}
        inner = LowPrecisionOptimizer(
            [{**numbers, **group} for group in groups],
            optim.name,
            {views[id(s)]: s.pieces for s in trained},
            state_dtype=torch_dtype(plan.precision.optimizer_state_dtype),
            stochastic=plan.precision.stochastic,
            seed=plan.config.trainer.seed,
            in_blocks={views[id(s)] for s in trained if optim.state_bits == 8 and _has_8bit_states(s, plan)},
            compiled=bool(plan.config.trainer.compile),
        )
    elif optim.name == "onebit_adam":
        assert optim.freeze_step is not None, "a plan has one"
        inner = OneBitAdam(
            groups,
            model.groups["dp"],
            lr=optim.lr,
            betas=(beta1, beta2),
            eps=optim.eps,
            freeze_step=optim.freeze_step,
        )
    elif plan.narrow_gradients:
        inner = PiecewiseAdam(groups, optim.name, lr=optim.lr, betas=(beta1, beta2), eps=optim.eps)
    else:
        kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optim.name]
        inner = kind(groups, lr=optim.lr, betas=(beta1, beta2), eps=optim.eps, fused=True)
    return Optimizer(model, inner, build_schedule(plan, inner), optim.clip, on_host)


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
