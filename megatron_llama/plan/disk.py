"""Size of the files that a run writes to its folder."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_llama.config.precision import BYTES
from megatron_llama.config.settings import KEPT_BY_TIME
from megatron_llama.plan.memory import optimizer_bytes
from megatron_llama.plan.plan import Plan
from megatron_llama.system.tables import gib, plural

LOG_BYTES, LOG_BYTES_PER_STEP = 1 << 20, 1 << 10
"""Margin for metrics, events, loss.png and the plan."""


@dataclass(frozen=True)
class DiskUse:
    """Bytes that a run adds to its folder."""

    checkpoint: int
    """Size of a checkpoint."""
    sure: int
    """New checkpoints that exist at the same time in any case, with the one in progress."""
    most: int | None
    """Checkpoints if the run lasts long enough for each save by time; None: unlimited."""
    export: int
    """Size of the exported weights."""
    logs: int

    @property
    def sure_bytes(self) -> int:
        """Bytes that the run needs in any case."""
        return self.sure * self.checkpoint + self.export + self.logs

    def describe(self) -> str:
        """Return the sizes in words."""
        if self.most == 0:
            return f"{gib(self.logs)} of logs"
        parts = [f"{self.most} {plural(self.most, 'checkpoint')} of {gib(self.checkpoint)}"] if self.most else []
        parts = parts or [f"{gib(self.checkpoint)} per checkpoint"]
        parts += [f"exported weights {gib(self.export)}"] if self.export else []
        total = f" = {gib(self.most * self.checkpoint + self.export + self.logs)}" if self.most else ""
        return " + ".join([*parts, f"logs {gib(self.logs)}"]) + total


def disk_use(plan: Plan, first: int, saved: int) -> DiskUse:
    """Return the bytes that a run adds to its folder.

    Args:
        first: Step from which the run starts.
        saved: Checkpoints in the folder, which later ones replace if a limit is set.
    """
    saves, steps = plan.config.checkpoint, plan.config.trainer.steps
    every, trains = saves.every_steps, steps > first
    periodic = steps // every - first // every if every and trains else 0
    last = saves.save_last and (trains or steps == 0) and not (periodic and every and steps % every == 0)
    sure, most = periodic + last, None if saves.every_minutes and trains else periodic + last
    limit = saves.keep or (KEPT_BY_TIME if plan.replaces_checkpoints and not every else None)
    if limit is not None:
        distance = math.lcm(every or 1, saves.keep_every or 0)
        permanent = steps // distance - first // distance if distance else 0
        # The one in progress is complete before the oldest is deleted.
        peak = max(1, limit + 1 + max(0, permanent - limit) - saved)
        sure = min(sure, peak)
        most = peak + saves.keep_best if most is None else min(most, peak + saves.keep_best)
    export = BYTES[plan.precision.compute_dtype] * plan.whole.held if saves.export_hf else 0
    logs = LOG_BYTES + LOG_BYTES_PER_STEP * max(0, steps - first)
    weights = BYTES[plan.precision.param_dtype] * plan.whole.trained
    return DiskUse(weights + optimizer_bytes(plan, plan.whole), sure, most, export, logs)
