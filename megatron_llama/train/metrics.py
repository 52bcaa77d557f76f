"""Metrics of a run, with equal names in metrics.jsonl, TensorBoard and on the console."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from megatron_llama.arch.flops import mfu, with_random_ltd
from megatron_llama.config.data_settings import curriculum_metrics, validation_sets
from megatron_llama.devices import Peak
from megatron_llama.devices.base import FAULT_METRICS
from megatron_llama.model.preference import named_metrics, reported_metrics
from megatron_llama.parallel.compiling import may_compile
from megatron_llama.plan import Plan
from megatron_llama.plan.data_schedules import BatchSchedule, difficulties_at
from megatron_llama.train.console import StepPrinter, Value, format_losses
from megatron_llama.train.loss_curve import PICTURE_FILE, draw_run
from megatron_llama.train.metrics_file import METRICS_FILE, MetricsFile, note_loaded_step, read_run_records
from megatron_llama.train.sinks import open_sinks, write_samples
from megatron_llama.train.waits import WAIT_METRICS

# Order of the keys in a line of metrics.jsonl. Optional keys come last.
EVERY_STEP = (
    *("step", "consumed_samples", "consumed_tokens", "global_batch_size", "reduced_train_loss", "lr", "gradient_norm"),
    *("throughput", "tokens_per_second", "tflops_per_device", "mfu", "mfu_full", "step_time_s", "data_time_s"),
    *("peak_memory_bytes", "global_step", "train_step_timing", "throughput_peak"),
)
VALIDATION_METRICS = ("val_loss", "val_token_accuracy")
SOME_STEPS = (
    *("train_samples_per_second", "padded_tokens_per_second", *VALIDATION_METRICS, "parameter_norm"),
    *("random_ltd_reserved_length", "consumed_layer_tokens", *WAIT_METRICS, "slowest_rank", "slowest_rank_ratio"),
    *FAULT_METRICS,
    "max_attention_logit",
    *("spike_skipped_steps", "spike_rewinds", "spike_skipped_samples", "failed_saves"),
)
THROUGHPUT_STEPS = 10
WARM_UP_STEPS = 3
"""Steps after a start that train_samples_per_second omits: --throughput_warmup_steps of published recipes."""


CURRICULUM = "curriculum_"
"""Prefix of difficulty metrics, before the name of a data.curriculum metric."""


def validation_metrics(plan: Plan) -> tuple[str, ...]:
    """Return the metrics of a validation set, in order."""
    metrics = reported_metrics(plan.config.finetune)
    return ("val_loss", *(f"val_{name}" for name in metrics)) if metrics else VALIDATION_METRICS


def named_validation(plan: Plan, means: Sequence[float]) -> dict[str, float]:
    """Return a validation set's means by the names of ``validation_metrics``."""
    finetune = plan.config.finetune
    if not finetune.metrics:
        return dict(zip(VALIDATION_METRICS, means, strict=True))
    loss, *others = means
    return {"val_loss": loss, **{f"val_{name}": value for name, value in named_metrics(finetune, others).items()}}


def metric_names(plan: Plan) -> list[str]:
    """Return all metrics that a step of the plan may have, in order."""
    difficulties = [f"{CURRICULUM}{metric.metric}" for metric in curriculum_metrics(plan.config.data.curriculum)]
    measured = validation_metrics(plan)
    sets = [f"{metric}/{name}" for metric in measured for name in validation_sets(plan.config.data) if name]
    others = [name for name in SOME_STEPS if name in measured or name not in VALIDATION_METRICS]
    names = [*EVERY_STEP, *reported_metrics(plan.config.finetune), *others, *measured, *sets, *difficulties]
    return [*dict.fromkeys(names)]


class StepRate:
    """Seconds per step for the time left, without the first step and steps that may compile."""

    def __init__(self, plan: Plan, first: int) -> None:
        self._plan, self._first = plan, first
        self._step_times: deque[float] = deque(maxlen=THROUGHPUT_STEPS)
        self._ended_at, self._steps, self._between_steps = 0.0, 0, 0.0

    def seconds_per_step(self, metrics: Mapping[str, Value]) -> float | None:
        """Add a step that ends now. Return a recent mean plus the mean time between steps; None if too early.

        Validation, logging and saving are between steps.
        """
        step, now, seconds = int(metrics["step"] or 0), time.monotonic(), float(metrics["step_time_s"] or 0.0)
        compiles = bool(self._plan.config.trainer.compile) and may_compile(self._plan, step, self._first)
        if step > self._first and not compiles:
            self._step_times.append(seconds)
            self._steps += 1
            self._between_steps += max(0.0, now - self._ended_at - seconds)
        self._ended_at = now
        if not self._steps:
            return None
        return sum(self._step_times) / len(self._step_times) + self._between_steps / self._steps


class MetricsLogger:
    """Writes the metrics of each step. A context manager, used on the rank that logs."""

    def __init__(self, plan: Plan, peak: Peak, start_step: int = 0) -> None:
        """Open the files of a run that resumes after ``start_step``; remove later steps from them."""
        self.plan, self.peak = plan, peak
        self._finished = False
        self._step_times: deque[float] = deque(maxlen=THROUGHPUT_STEPS)
        self._sizes: deque[int] = deque(maxlen=THROUGHPUT_STEPS)
        self._last_lines: Sequence[str] = ()
        self._warm_samples, self._warm_seconds = 0, 0.0
        self._rate = StepRate(plan, start_step + 1)
        self._exceeded = False
        self._path = plan.run_dir / METRICS_FILE
        self._file = MetricsFile(self._path, start_step)
        self._throughput_peak = self._file.throughput_peak
        note_loaded_step(plan.run_dir, start_step)
        self._sinks = open_sinks(plan, start_step, metric_names(plan), self._file.repeated)
        self._first_warm_step = start_step + WARM_UP_STEPS + 1
        self.progress = StepPrinter(plan.config.trainer.steps, start_step, plan.config.logging.every_steps)

    def __enter__(self) -> MetricsLogger:
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()
        if not self._finished:
            with suppress(Exception):  # the picture must not hide the cause of the end
                draw_run(self.plan)
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def log_step(self, measured: Mapping[str, Value]) -> None:
        """Derive speed and MFU from a step's measurements, and write all metrics."""
        metrics = self._with_derived(measured)
        self._write(metrics)
        self.progress.step(metrics, self._rate.seconds_per_step(metrics))
        self._check_peak(metrics)

    def log_validation(self, measured: Mapping[str, Value]) -> None:
        """Write the metrics of a validation before the first step, as step 0."""
        values = {name: _finite(value) for name, value in measured.items()}
        self._write({"step": 0, "consumed_samples": 0, "consumed_tokens": 0, **values})
        self.progress.print_lines([f"before step 1: {format_losses(values)}"])

    def _write(self, metrics: Mapping[str, Value]) -> None:
        self._file.append(metrics)
        for sink in self._sinks:
            sink.append(metrics)

    def print_lines(self, lines: Sequence[str]) -> None:
        """Print lines above the progress bar, unless equal to the last printed lines."""
        if lines != self._last_lines:
            self._last_lines = lines
            self.progress.print_lines(lines)

    def finish(self, samples: Sequence[str] = ()) -> None:
        """Draw the loss curve, write the samples and print the summary of the run."""
        self._finished = True
        self.progress.stop()
        if samples:
            write_samples(self.plan, samples)
        picture = None
        try:
            picture = draw_run(self.plan)
        except Exception as error:  # the run is saved; a picture must not change its status
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            self.print_lines((f"WARNING: {PICTURE_FILE} was not written: {reason}.",))
        self.progress.summary(self.plan, self.peak, read_run_records(self._path), samples, picture)

    def _check_peak(self, metrics: Mapping[str, Value]) -> None:
        """Report once that a step was faster than the peak, which is then too low."""
        if not self._exceeded and (metrics["mfu"] or 0.0) > 1:
            self._exceeded = True
            low = f"MFU above 100 %: the peak is too low: {self.peak.flops / 1e9:,.0f} GFLOP/s\n  ({self.peak.source})"
            self.progress.print_lines((low, "MFU values are unreliable; device.peak_tflops=N sets the peak."))

    def _with_derived(self, measured: Mapping[str, Value]) -> dict[str, Value]:
        """Return all metrics of a step, in order."""
        seconds = float(measured["step_time_s"] or math.nan)
        size, tokens = int(measured["global_batch_size"] or 0), int(measured["tokens"] or 0)
        self._step_times.append(seconds)
        self._sizes.append(size)
        plan, world, step = self.plan, self.plan.world_size, int(measured["step"] or 0)
        padded = size * plan.batches.tokens_at(step)
        tokens_per_second = tokens / seconds
        document_length = float(measured["attended"] or 0) / max(1, tokens)
        ltd = plan.random_ltd
        flops = with_random_ltd(
            plan.model, document_length, plan.config.finetune, None if ltd is None else ltd.retained(step)
        )
        known = self.peak.flops > 0
        # Two conventions of MFU: causal attention FLOPs (Megatron-LM) or full attention FLOPs (PaLM, torchtitan).
        throughput = sum(self._sizes) / sum(self._step_times)
        self._throughput_peak = max(self._throughput_peak, throughput)
        derived: dict[str, Value] = {
            "throughput": throughput,
            "tokens_per_second": tokens_per_second,
            "tflops_per_device": flops.causal * tokens_per_second / world / 1e12,
            "mfu": mfu(flops.causal, tokens_per_second, self.peak.flops, world) if known else None,
            "mfu_full": mfu(flops.full, tokens_per_second, self.peak.flops, world) if known else None,
        }
        # Names used by NeMo, transformers and their recipes (docs/reference/metrics.md).
        derived |= {"global_step": step, "train_step_timing": seconds}
        derived["throughput_peak"] = self._throughput_peak
        if step >= self._first_warm_step:
            self._warm_samples, self._warm_seconds = self._warm_samples + size, self._warm_seconds + seconds
            derived["train_samples_per_second"] = self._warm_samples / self._warm_seconds
        if ltd is not None:
            derived["random_ltd_reserved_length"] = ltd.length(step)
            derived["consumed_layer_tokens"] = ltd.layer_tokens(step, BatchSchedule.of(plan.config))
        if tokens != padded:
            derived["padded_tokens_per_second"] = padded / seconds
        derived |= {f"{CURRICULUM}{name}": value for name, value in difficulties_at(plan.config.data, step).items()}
        metrics = {**measured, **derived}
        names = [name for name in metric_names(plan) if name in EVERY_STEP or name in metrics]
        return {name: _finite(metrics[name]) for name in names}


def _finite(value: Value) -> Value:
    """Return None for NaN and Inf, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
