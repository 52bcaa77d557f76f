"""What a run measures, under the same names on the console, in metrics.jsonl and in TensorBoard."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_llama.plan import Plan
from megatron_llama.plan.flops import flops_per_token, mfu
from megatron_llama.train.console import Progress
from megatron_llama.train.loss_curve import draw_run
from megatron_llama.train.metrics_file import METRICS_FILE, cut_back, read_metrics

# The order in which they stand in a line of metrics.jsonl. The optional ones come last, on the steps that have them.
EVERY_STEP = (
    "step",
    "consumed_samples",
    "consumed_tokens",
    "reduced_train_loss",
    "lr",
    "gradient_norm",
    "throughput",
    "tokens_per_second",
    "tflops_per_device",
    "mfu",
    "mfu_full",
    "step_time_s",
    "peak_memory_bytes",
)
SOME_STEPS = ("val_loss", "parameter_norm")
THROUGHPUT_STEPS = 10
TENSORBOARD_FLUSH_SECONDS = 10

Value = float | int | None


@dataclass(frozen=True)
class Peak:
    """What one device could do at best."""

    flops: float
    """Dense FLOP/s at the run's precision; 0 where unknown."""
    source: str
    """Where the figure comes from."""


class MetricsLogger:
    """Writes each step's metrics. For the one rank that logs; use it in a ``with`` block."""

    def __init__(self, plan: Plan, run_dir: Path, peak: Peak, start_step: int = 0) -> None:
        """``start_step`` is the step of the checkpoint that the run goes on from; what was logged later is cut off."""
        self.plan, self.run_dir, self.peak = plan, run_dir, peak
        self._per_token = flops_per_token(plan.model, plan.config.data.seq_length, plan.config.finetune)
        self._step_times: deque[float] = deque(maxlen=THROUGHPUT_STEPS)
        self._said: Sequence[str] = ()
        self._path = run_dir / METRICS_FILE
        cut_back(self._path, start_step)
        self._file = open(self._path, "a", encoding="utf-8")
        self._tensorboard = _tensorboard(run_dir, start_step) if plan.config.logging.tensorboard else None
        self._progress = Progress(plan.config.trainer.steps, start_step, plan.config.logging.every_steps)

    def __enter__(self) -> MetricsLogger:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def log_step(self, measured: Mapping[str, Value]) -> dict[str, Value]:
        """Adds what follows from a step's measurements, writes all of it, and returns it."""
        metrics = self._completed(measured)
        # One write of one line: whoever reads along, or finds the file after a kill, sees whole lines but for the last.
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            step = int(measured["step"] or 0)
            for name, value in metrics.items():
                if value is not None:
                    self._tensorboard.add_scalar(name, value, step)
        self._progress.step(metrics, sum(self._step_times) / len(self._step_times))
        return metrics

    def say(self, lines: Sequence[str]) -> None:
        """Puts lines above the progress line, unless they are those that were put there last."""
        if lines != self._said:
            self._said = lines
            self._progress.say(lines)

    def finish(self, samples: Sequence[str] = ()) -> None:
        """Draws the loss curve and says what came out and where it is."""
        self._progress.stop()
        picture = draw_run(self.plan, self.run_dir)
        self._progress.summary(self.plan, self.run_dir, self.peak, read_metrics(self._path), samples, picture)

    def _completed(self, measured: Mapping[str, Value]) -> dict[str, Value]:
        """All metrics of a step in their order."""
        seconds = float(measured["step_time_s"] or math.nan)
        self._step_times.append(seconds)
        plan, world = self.plan, self.plan.world_size
        speed = plan.tokens_per_step / seconds
        known = self.peak.flops > 0
        batches_per_second = len(self._step_times) / sum(self._step_times)
        derived: dict[str, Value] = {
            "throughput": plan.config.trainer.global_batch_size * batches_per_second,
            "tokens_per_second": speed,
            "tflops_per_device": self._per_token.causal * speed / world / 1e12,
            "mfu": mfu(self._per_token.causal, speed, self.peak.flops, world) if known else None,
            "mfu_full": mfu(self._per_token.full, speed, self.peak.flops, world) if known else None,
        }
        together = {**measured, **derived}
        names = [*EVERY_STEP, *(name for name in SOME_STEPS if name in together)]
        return {name: _finite(together[name]) for name in names}


def _finite(value: Value) -> Value:
    """JSON has no word for NaN and infinity; null says that there is no number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tensorboard(run_dir: Path, start_step: int) -> Any:
    """TensorBoard's writer; steps that an earlier attempt logged after ``start_step`` are marked as void."""
    from torch.utils.tensorboard import SummaryWriter

    purge = start_step + 1 if (run_dir / "tensorboard").exists() else None
    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge, flush_secs=TENSORBOARD_FLUSH_SECONDS)
