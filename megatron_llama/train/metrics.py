"""A run's metrics, under the same names in metrics.jsonl, in TensorBoard and on the console."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_llama.devices import Device, Peak
from megatron_llama.plan import Plan
from megatron_llama.plan.flops import flops_per_token, mfu
from megatron_llama.train.console import Progress, Value
from megatron_llama.train.loss_curve import draw_run
from megatron_llama.train.metrics_file import METRICS_FILE, MetricsFile, own_records
from megatron_llama.train.tensorboard_file import TensorBoardFile

# The order of the keys in a line of metrics.jsonl. The optional ones come last, on the steps that have them.
EVERY_STEP = (
    "step",
    "consumed_samples",
    "consumed_tokens",
    "global_batch_size",
    "reduced_train_loss",
    "lr",
    "gradient_norm",
    "throughput",
    "tokens_per_second",
    "tflops_per_device",
    "mfu",
    "mfu_full",
    "step_time_s",
    "data_time_s",
    "peak_memory_bytes",
)
SOME_STEPS = ("padded_tokens_per_second", "val_loss", "parameter_norm")
THROUGHPUT_STEPS = 10


def measure_peak(plan: Plan, device: Device, torch_device: torch.device) -> Peak:
    """Peak FLOP/s of one device of this run, which MFU is a share of.

    A collective: CPU ranks share cores and memory bandwidth, so they measure at the same time, and the mean counts.
    """
    if plan.config.device.peak_tflops is not None:
        return Peak(plan.config.device.peak_tflops * 1e12, "device.peak_tflops")
    dist.barrier()
    flops, source = device.peak_flops(plan.precision.compute_format)
    mean = torch.tensor(flops, device=torch_device)
    dist.all_reduce(mean)
    return Peak(mean.item() / plan.world_size, source)


class MetricsLogger:
    """Writes each step's metrics; used on the one rank that logs, in a ``with`` block."""

    def __init__(self, plan: Plan, peak: Peak, start_step: int = 0) -> None:
        """Opens the files of a run that resumes after ``start_step``; what was logged later is removed."""
        self.plan, self.peak = plan, peak
        self._step_times: deque[float] = deque(maxlen=THROUGHPUT_STEPS)
        self._sizes: deque[int] = deque(maxlen=THROUGHPUT_STEPS)
        self._last_lines: Sequence[str] = ()
        self._path = plan.run_dir / METRICS_FILE
        self._file = MetricsFile(self._path, start_step)
        folder = plan.run_dir / "tensorboard"
        self._tensorboard = TensorBoardFile(folder, start_step) if plan.config.logging.tensorboard else None
        self._progress = Progress(plan.config.trainer.steps, start_step, plan.config.logging.every_steps)

    def __enter__(self) -> MetricsLogger:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def log_step(self, measured: Mapping[str, Value]) -> dict[str, Value]:
        """Derives speed and utilisation from a step's measurements, writes all metrics, and returns them."""
        metrics = self._with_derived(measured)
        self._file.append(metrics)
        if self._tensorboard is not None:
            self._tensorboard.append(metrics)
        self._progress.step(metrics, sum(self._step_times) / len(self._step_times))
        return metrics

    def print_lines(self, lines: Sequence[str]) -> None:
        """Prints lines above the progress line, unless they are the ones printed last."""
        if lines != self._last_lines:
            self._last_lines = lines
            self._progress.print_lines(lines)

    def finish(self, samples: Sequence[str] = ()) -> None:
        """Draws the loss curve and prints the summary of the run."""
        self._progress.stop()
        picture = draw_run(self.plan)
        self._progress.summary(self.plan, self.peak, own_records(self._path), samples, picture)

    def _with_derived(self, measured: Mapping[str, Value]) -> dict[str, Value]:
        """All metrics of a step, in their order."""
        seconds = float(measured["step_time_s"] or math.nan)
        size, tokens = int(measured["global_batch_size"] or 0), int(measured["tokens"] or 0)
        self._step_times.append(seconds)
        self._sizes.append(size)
        plan, world, padded = self.plan, self.plan.world_size, size * self.plan.config.data.seq_length
        tokens_per_second = tokens / seconds
        document_length = float(measured["attended"] or 0) / max(1, tokens)
        flops = flops_per_token(plan.model, document_length, plan.config.finetune)
        known = self.peak.flops > 0
        # Both conventions of MFU: causal attention counted once (Megatron-LM), or as a full square (PaLM, torchtitan).
        derived: dict[str, Value] = {
            "throughput": sum(self._sizes) / sum(self._step_times),
            "tokens_per_second": tokens_per_second,
            "tflops_per_device": flops.causal * tokens_per_second / world / 1e12,
            "mfu": mfu(flops.causal, tokens_per_second, self.peak.flops, world) if known else None,
            "mfu_full": mfu(flops.full, tokens_per_second, self.peak.flops, world) if known else None,
        }
        if tokens != padded:
            derived["padded_tokens_per_second"] = padded / seconds
        metrics = {**measured, **derived}
        names = [*EVERY_STEP, *(name for name in SOME_STEPS if name in metrics)]
        return {name: _finite(metrics[name]) for name in names}


def _finite(value: Value) -> Value:
    """JSON has no NaN or infinity; null stands for them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
