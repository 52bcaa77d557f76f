"""Learning-rate schedules, as torch schedulers with NeMo's argument names.

The config selects a schedule by ``_target_``, so schedulers of NeMo, torch or the user need no code here. Steps count
from 0: after n calls of ``step``, ``get_last_lr`` is the rate of optimizer step n.
"""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class WarmupSchedule(LRScheduler):
    """Linear warm-up, then ``_decayed``, then ``min_lr`` for the last ``constant_steps``.

    As in NeMo's WarmupPolicy the warm-up is (step + 1) / (warmup_steps + 1), so the first step's rate is not 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        max_steps: int,
        warmup_steps: int = 0,
        constant_steps: int = 0,
        min_lr: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if warmup_steps + constant_steps > max_steps:
            raise ValueError(
                f"warm-up ({warmup_steps}) and constant ({constant_steps}) steps exceed max_steps={max_steps}"
            )
        self.max_steps = max_steps
        self.warmup_steps = warmup_steps
        self.constant_steps = constant_steps
        self.min_lr = min_lr
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Return the rate of each parameter group at this step."""
        step = self.last_epoch
        if step < self.warmup_steps:
            return [float(lr) * self._warmed_up(step) for lr in self.base_lrs]
        return [self._decayed(float(lr), step - self.warmup_steps) for lr in self.base_lrs]

    @property
    def decay_steps(self) -> int:
        """Steps between the warm-up and the constant part."""
        return max(1, self.max_steps - self.warmup_steps - self.constant_steps)

    def _warmed_up(self, step: int) -> float:
        """Return the rate at a step of the warm-up, as a fraction of lr."""
        return (step + 1) / (self.warmup_steps + 1)

    def _decayed(self, lr: float, step: int) -> float:
        """Return the rate ``step`` steps after the warm-up."""
        raise NotImplementedError


class CosineAnnealing(WarmupSchedule):
    """Half a cosine from lr down to min_lr (Loshchilov & Hutter 2017, arXiv:1608.03983).

    Equal to ``nemo.core.optim.lr_scheduler.CosineAnnealing`` at each step, including its two kinds of warm-up: with
    constant steps it follows Megatron-LM and starts at 0.
    """

    def _warmed_up(self, step: int) -> float:
        return step / self.warmup_steps if self.constant_steps else super()._warmed_up(step)

    def _decayed(self, lr: float, step: int) -> float:
        return self.min_lr + (lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.decay_steps)))


class LinearDecay(WarmupSchedule):
    """Linear decay from lr to min_lr."""

    def _decayed(self, lr: float, step: int) -> float:
        return lr + (self.min_lr - lr) * min(1.0, step / self.decay_steps)


class Constant(WarmupSchedule):
    """Constant rate after the warm-up. Ignores ``min_lr`` and ``constant_steps``."""

    def _decayed(self, lr: float, step: int) -> float:
        return lr


class WarmupStableDecay(WarmupSchedule):
    """lr until the last ``constant_steps``, then linear decay to min_lr (Hu et al. 2024, arXiv:2404.06395)."""

    def _decayed(self, lr: float, step: int) -> float:
        left = self.max_steps - self.warmup_steps - step
        if self.constant_steps == 0 or left > self.constant_steps:
            return lr
        return self.min_lr + (lr - self.min_lr) * max(0, left) / self.constant_steps
