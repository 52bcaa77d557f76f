"""Loss-spike guard (trainer.spike_guard): finds spikes of loss or gradient norm, then skips or rewinds.

The rule is OLMo-core's ``SkipStepOptimizer`` (github.com/allenai/OLMo-core, src/olmo_core/optim), upward only: a loss
or norm above mean + factor · standard deviation of the last ``window`` steps. Rewinding is PaLM's remedy (Chowdhery et
al. 2022, arXiv:2204.02311, section 5.1): an earlier checkpoint, and other data. docs/guides/training/spikes.md
"""

from __future__ import annotations

import math
import struct
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama import event_hook
from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.folder import saved_steps
from megatron_llama.checkpoint.manifest import State
from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.settings import TrainerConfig
from megatron_llama.data.resume_record import Record
from megatron_llama.parallel import Shard
from megatron_llama.parallel.groups import broadcast_from_rank_0
from megatron_llama.plan.data_schedules import RunPosition
from megatron_llama.system import phase
from megatron_llama.system.errors import TrainingFault
from megatron_llama.system.wrapping import wrap
from megatron_llama.train.step_checks import StepGuard
from megatron_llama.train.stop_signals import RunStopped

REWIND = "rewind"
REPEATED = 3
"""Spikes within ``trainer.spike_window`` steps that are reported as repeated."""
LARGEST = torch.finfo(torch.float32).max


class Rewind(Exception):
    """The run must load its newest checkpoint. Raised on all ranks, after all checkpoints are on disk."""


class SpikeLimit:
    """Limit of a number, from its values in the last steps."""

    def __init__(self, name: str, factor: float, window: int, values: Sequence[float] = ()) -> None:
        self.name, self.factor, self.window = name, factor, window
        self.values = deque(values, maxlen=window)

    @property
    def value(self) -> float:
        """Mean + factor · standard deviation, rounded to fp32, which host and device compare alike.

        Infinite until the window is half full.
        """
        if len(self.values) < self.window // 2:
            return math.inf
        limit = fmean(self.values) + self.factor * stdev(self.values)
        return float(struct.unpack("f", struct.pack("f", limit))[0]) if limit < LARGEST else math.inf

    def describe(self, value: float) -> str:
        """Describe a value above the limit."""
        mean, deviation, count = fmean(self.values), stdev(self.values), len(self.values)
        terms = f"mean {mean:.4g} + {self.factor:g} * {deviation:.4g} of {count} steps"
        return f"{self.name} {value:.4g} above {self.value:.4g} ({terms})"


@dataclass
class GuardCounts:
    """Actions of a guard so far, and the skipped data."""

    skipped_steps: int = 0
    """Steps without an update."""
    rewinds: int = 0
    skipped_samples: list[list[int]] = field(default_factory=list)
    """[first, end) of the samples that each rewind skipped."""


class SpikeGuard(StepGuard):
    """``StepGuard`` that also rejects spikes. All ranks have the same numbers, so all take the same decision."""

    def __init__(self, trainer: TrainerConfig) -> None:
        super().__init__(trainer.skip_nonfinite_steps)
        self.trainer, self.counts = trainer, GuardCounts()
        self._limits = [
            SpikeLimit(name, trainer.spike_factor, trainer.spike_window) for name in ("loss", "gradient norm")
        ]
        self._recent: list[int] = []  # steps of spikes since the last report of repeated ones
        self._spike: str | None = None  # description of the step's spike, if a rewind follows
        # Position of run and data after the spike, from which the next ``restore`` continues.
        self._resumes_at: tuple[RunPosition, Record] | None = None

    def rejects(self, loss: Tensor, norm: Tensor) -> Tensor:
        of_loss, of_norm = (limit.value for limit in self._limits)
        return super().rejects(loss, norm) | (loss > of_loss) | (norm > of_norm)

    def check(self, step: int, loss: float, norm: float, shards: Sequence[Shard]) -> bool:
        """Return whether the step is finite and no spike. As ``StepGuard.check``."""
        if not super().check(step, loss, norm, shards):
            return False  # the means exclude it
        pairs = [*zip(self._limits, (loss, norm), strict=True)]
        above = [limit.describe(value) for limit, value in pairs if value > limit.value]
        for limit, value in pairs:
            limit.values.append(value)
        if not above:
            return True
        text = f"step {step}: spike, {' and '.join(above)}"
        self._note_spike(step)
        if self.trainer.spike_guard == REWIND:
            self._spike = text
        else:
            self.counts.skipped_steps += 1
            _report(f"{text}; skipped the update ({self.counts.skipped_steps} so far)")
        return False

    def _note_spike(self, step: int) -> None:
        """Report repeated spikes. A rewind goes back, so an earlier spike may be of a later step."""
        window = self.trainer.spike_window
        self._recent = [*(each for each in self._recent if each > step - window), step]
        if len(self._recent) == REPEATED:
            self._recent = []
            advice = "the learning rate may be too high, or the data damaged"
            _report(f"step {step}: {REPEATED} spikes within {window} steps: {advice}")
            event_hook.send("spikes", step=step, count=REPEATED, within_steps=window)

    def after_step(self, metrics: Mapping[str, float], checkpointer: Checkpointer, stop: bool) -> None:
        """Rewind if the step was a spike.

        Raises:
            Rewind: On all ranks.
            RunStopped: Instead of a rewind, on all ranks, if ``stop`` is true on one. The next start rewinds.
            TrainingFault: On all ranks, if no rewinds are left, or without a checkpoint.
        """
        text, self._spike = self._spike, None
        if text is None:
            return
        position = RunPosition(*(int(metrics[name]) for name in ("step", "consumed_samples", "consumed_tokens")))
        if self.counts.rewinds >= self.trainer.spike_rewinds:
            rule = f"{text}; no rewinds are left after trainer.spike_rewinds={self.trainer.spike_rewinds}"
            raise TrainingFault(f"{rule}. Lower optim.lr, or write a larger trainer.spike_factor or spike_rewinds")
        phase.enter(f"rewinding from step {position.step}", phase.PATIENT)
        stop, _ = checkpointer.saver.advance(stop)
        checkpointer.saver.wait()
        saved = broadcast_from_rank_0(lambda: saved_steps(checkpointer.checkpoints))
        if not saved:
            advice = f"Write checkpoint.every_steps below {position.step}, or trainer.spike_guard=skip"
            raise TrainingFault(f"{text}; no checkpoint to rewind to. {advice}")
        if stop:
            raise RunStopped(saved[0])
        self.counts.rewinds += 1
        count = f"rewind {self.counts.rewinds} of {self.trainer.spike_rewinds}"
        _report(f"{text}; back to step {saved[0]}, without the samples up to {position.samples:,} ({count})")
        self._resumes_at = position, checkpointer.data.record(position.samples)
        checkpointer.forget_copies()
        raise Rewind

    def metrics(self) -> dict[str, float]:
        skipped = sum(end - first for first, end in self.counts.skipped_samples)
        counts = {"spike_skipped_steps": self.counts.skipped_steps, "spike_rewinds": self.counts.rewinds}
        return {**counts, "spike_skipped_samples": skipped}

    def state(self) -> dict[str, Any]:
        loss, norm = ([*limit.values] for limit in self._limits)
        return {**asdict(self.counts), "losses": loss, "norms": norm}

    def restore(self, state: State) -> State:
        """Restore limits and counts. After a rewind, move the run past the skipped data."""
        stored, rewinds = state.spikes or {}, self.counts.rewinds
        try:
            self._restore(stored)
        except (TypeError, ValueError) as error:
            rule = f"its state of trainer.spike_guard is damaged: {error}"
            problem = Problem("checkpoint.resume", f"step {state.step}", rule, "resume from another checkpoint")
            raise ConfigError([problem]) from None
        resumes_at, self._resumes_at = self._resumes_at, None
        if resumes_at is None:
            return state
        position, record = resumes_at
        self.counts.rewinds = rewinds
        self.counts.skipped_samples.append([state.consumed_samples, position.samples])
        return replace(state, consumed_samples=position.samples, consumed_tokens=position.tokens, data=record)

    def _restore(self, stored: dict[str, Any]) -> None:
        ranges = [[int(first), int(end)] for first, end in stored.get("skipped_samples", ())]
        self.counts = GuardCounts(int(stored.get("skipped_steps", 0)), int(stored.get("rewinds", 0)), ranges)
        for limit, name in zip(self._limits, ("losses", "norms"), strict=True):
            limit.values = deque(map(float, stored.get(name, ())), maxlen=limit.window)


def _report(text: str) -> None:
    if dist.get_rank() == 0:
        sys.stderr.write(wrap(text) + "\n")
