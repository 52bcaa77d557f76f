"""torch's optimizers over this rank's shards, with schedule and clipping."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from megatron_llama.config import ConfigError, Problem
from megatron_llama.model.mcore_config import torch_dtype
from megatron_llama.model.names import Piece
from megatron_llama.optim.low_precision import STATES, LowPrecisionOptimizer
from megatron_llama.optim.norm import clip_factor, gradient_norm, scale_gradients
from megatron_llama.parallel import ParallelModel, Shard
from megatron_llama.plan import Plan


@dataclass
class Optimizer:
    """Updates this rank's shards. Adam and SGD work on each value alone, so sharding does not change them."""

    model: ParallelModel
    inner: torch.optim.Optimizer
    """Works on plain local tensors, views of the shards: no DTensor dispatch, fused kernels everywhere."""
    scheduler: Any
    clip: float | None

    def gradient_norm(self) -> torch.Tensor:
        """2-norm of the gradients before clipping, fp32 scalar, the same on all ranks."""
        return gradient_norm(self.model.shards, self.model.device)

    def step(self, norm: torch.Tensor) -> None:
        """Clip by ``norm``, update the weights, forget the gradients, move the schedule on."""
        factor = None if self.clip is None else clip_factor(norm, self.clip)
        for view, shard in zip(self._views(), self._shards_in_order(), strict=True):
            view.grad = shard.grad
        if isinstance(self.inner, LowPrecisionOptimizer):
            self.inner.step(gradient_factor=factor)  # scaled gradients in bf16 would be rounded twice
        else:
            if factor is not None:
                scale_gradients(self.model.shards, factor)
            self.inner.step()
        self.inner.zero_grad(set_to_none=True)
        self.model.zero_grad()
        self.scheduler.step()

    def skip(self) -> None:
        """Forget the gradients and move the schedule on, leaving the weights alone."""
        self.model.zero_grad()
        self.scheduler.step()

    @property
    def lr(self) -> float:
        """The learning rate of the coming step."""
        return float(self.scheduler.get_last_lr()[0])

    @property
    def updates(self) -> int:
        """Updates made so far, as the optimizer counts them for its bias correction; 0 where it does not count."""
        states = (self.inner.state[view] for view in self._views())
        return max((int(state["step"]) for state in states if "step" in state), default=0)

    def states(self) -> Iterator[tuple[str, Shard, torch.Tensor]]:
        """(kind, shard, tensor like ``shard.local``) of all that the optimizer remembers, made as zeros before its
        first step."""
        for view, shard in zip(self._views(), self._shards_in_order(), strict=True):
            state = self.inner.state[view]
            for kind in STATES[self.model.plan.config.optim.name]:
                if state.get(kind) is None:
                    state[kind] = torch.zeros_like(view, requires_grad=False)
                    if isinstance(self.inner, torch.optim.Adam):  # it makes its count with the moments, or not at all
                        state.setdefault("step", torch.zeros((), device=view.device))
                yield kind, shard, state[kind]

    def restore(self, updates: int, steps: int) -> None:
        """Count updates from ``updates`` on, and move a new schedule to step ``steps`` by the calls that led there
        before."""
        for _ in self.states():
            pass
        if isinstance(self.inner, LowPrecisionOptimizer | torch.optim.Adam):
            for view in self._views():
                at = "cpu" if isinstance(self.inner, LowPrecisionOptimizer) else view.device
                self.inner.state[view]["step"] = torch.tensor(float(updates), device=at)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(steps):
                self.scheduler.step()

    def _views(self) -> list[torch.Tensor]:
        """The local tensors that ``inner`` updates, in the order of its parameter groups."""
        return [view for group in self.inner.param_groups for view in group["params"]]

    def _shards_in_order(self) -> list[Shard]:
        """The shards in the order of the parameter groups: with weight decay, without."""
        trained = self.model.trained
        return [s for s in trained if decays(s.name)] + [s for s in trained if not decays(s.name)]


def decays(name: str) -> bool:
    """Whether weight decay applies to a parameter: to all but the norms' vectors."""
    return not name.endswith("norm.weight")


def build_optimizer(plan: Plan, model: ParallelModel) -> Optimizer:
    """The optimizer and schedule that the config names."""
    optim = plan.config.optim
    trained = model.trained
    views = {id(s): nn.Parameter(s.local, requires_grad=True) for s in trained}
    groups = [
        {"params": [views[id(s)] for s in trained if decays(s.name)], "weight_decay": optim.weight_decay},
        {"params": [views[id(s)] for s in trained if not decays(s.name)], "weight_decay": 0.0},
    ]
    if plan.precision.param_dtype == "float32":
        inner = _INNER[optim.name](groups, plan)
    else:
        pieces: dict[torch.Tensor, list[Piece]] = {views[id(s)]: s.pieces for s in trained}
        inner = _low_precision(groups, plan, pieces)
    return Optimizer(model, inner, build_schedule(plan, inner), optim.clip)


def build_schedule(plan: Plan, inner: torch.optim.Optimizer) -> Any:
    """Instantiate ``optim.schedule``; its ``${...}`` see the settings with all derived values filled in."""
    settings = OmegaConf.create(asdict(plan.config))
    try:
        return instantiate(settings.optim.schedule, optimizer=inner)
    except Exception as error:  # whatever a user's scheduler raises, the setting is what to look at
        cause = error.__cause__ or error
        target = plan.config.optim.schedule.get("_target_")
        instead = (
            f"write it whole, with the arguments that it takes: 'optim.schedule={{_target_: {target}, ...}}'; or take "
            "one out: ~optim.schedule.max_steps"
        )
        raise ConfigError([Problem("optim.schedule", target, f"could not be made: {cause}", instead)]) from error


def _adam(kind: type[torch.optim.Optimizer]) -> Callable[[list[dict[str, Any]], Plan], torch.optim.Optimizer]:
    def build(groups: list[dict[str, Any]], plan: Plan) -> torch.optim.Optimizer:
        optim = plan.config.optim
        beta1, beta2 = optim.betas
        return kind(groups, lr=optim.lr, betas=(beta1, beta2), eps=optim.eps, fused=True)  # type: ignore[call-arg]

    return build


def _sgd(groups: list[dict[str, Any]], plan: Plan) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=plan.config.optim.lr, momentum=plan.config.optim.betas[0])


def _low_precision(
    groups: list[dict[str, Any]], plan: Plan, pieces: dict[torch.Tensor, list[Piece]]
) -> torch.optim.Optimizer:
    optim = plan.config.optim
    # What torch's optimizers take as arguments stands in the groups here.
    numbers = {"lr": optim.lr, "betas": tuple(optim.betas), "eps": optim.eps, "momentum": optim.betas[0]}
    return LowPrecisionOptimizer(
        [{**numbers, **group} for group in groups],
        optim.name,
        pieces,
        moments=torch_dtype(plan.precision.optimizer_state_dtype),
        stochastic=plan.precision.stochastic,
        seed=plan.config.trainer.seed,
    )


_INNER: dict[str, Callable[[list[dict[str, Any]], Plan], torch.optim.Optimizer]] = {
    "adamw": _adam(torch.optim.AdamW),
    "adam": _adam(torch.optim.Adam),
    "sgd": _sgd,
}
