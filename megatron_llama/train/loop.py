"""The training loop: ``train`` (all steps), ``training_step`` and ``validate``."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from megatron_llama import optional_tools
from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.config import ConfigError, Problem
from megatron_llama.data.batches import Batches, Data
from megatron_llama.data.prefetch import Prefetcher
from megatron_llama.devices import Device
from megatron_llama.model.preference import named_metrics
from megatron_llama.optim import Optimizer
from megatron_llama.optim.gradient_norm import parameter_norm
from megatron_llama.parallel import ParallelModel
from megatron_llama.parallel.compiling import WARM_UP_BATCHES, may_compile, report_graphs
from megatron_llama.parallel.groups import sync_errors
from megatron_llama.plan import Plan
from megatron_llama.plan.format_plan import write_config_and_plan
from megatron_llama.system import phase
from megatron_llama.topology import Topology
from megatron_llama.train.metrics import MetricsLogger, named_validation, validation_metrics
from megatron_llama.train.peak_flops import find_peak
from megatron_llama.train.reference_logps import add_reference
from megatron_llama.train.sample_text import continue_prompts
from megatron_llama.train.step_checks import LabelCheck, StepGuard, check_every_gradient
from megatron_llama.train.stop_signals import RunStopped, StopSignals, report_finished
from megatron_llama.train.stragglers import StragglerWatch

Logger = MetricsLogger | None
"""None except on the rank that logs."""


def train(
    plan: Plan, topology: Topology, device: Device, model: ParallelModel, optimizer: Optimizer, data: Data,
    guard: StepGuard,
) -> None:  # fmt: skip
    """Train from the newest checkpoint, or the initial weights, to the last step; then generate samples.

    ``guard`` decides which steps update the weights.

    Raises:
        SystemExit: Status 75, after a stop signal on any rank, once all ranks have saved.
        TrainingFault: A loss or gradient is not finite, no gradient reached a weight, or copies of a tensor differ.
        ConfigError: An epoch, the run or a validation has no label. On all ranks.
    """
    trainer = plan.config.trainer
    checkpointer = Checkpointer(plan, topology, model, optimizer, data, guard)
    plan = load(plan, topology, checkpointer, model, data)
    first, consumed_tokens = plan.start.step + 1, plan.start.tokens
    phase.enter("the first measurements", phase.PATIENT)
    checkpointer.compare_copies(first - 1)
    peak = find_peak(plan, device, model.device)
    labels = LabelCheck(plan.config.data, len(data.train.samples))
    profiler = build_profiler(plan, topology, device, model, optimizer)
    stragglers = StragglerWatch(plan, device, model)
    metrics_logger = MetricsLogger(plan, peak, first - 1) if topology.is_logger else nullcontext()
    prefetcher = Prefetcher(data.train, plan.batches.after(max(first - 1, trainer.steps)).samples)
    with (
        StopSignals(plan, reports=topology.is_logger) as signals,
        checkpointer.saver.finishing(),
        metrics_logger as logger,
        prefetcher as batches,
        stragglers.watching(),
    ):
        if first == 1 and trainer.val_at_start:
            validate_at_start(plan, model, data.validation, logger)
        for step in range(first, trainer.steps + 1):
            # PATIENT multiplies trainer.hang_timeout_seconds: a step that may compile takes minutes.
            patience = phase.PATIENT if model.compiler is not None and may_compile(plan, step, first) else 1.0
            phase.enter(f"step {step}", patience)
            # profiler.step: a context whose value has the step's wait metrics (empty if the step is not profiled).
            profiled = profiler.step(step, batches) if profiler else nullcontext({})
            with profiled as waited, stragglers.step():
                start = time.perf_counter()
                metrics = training_step(step, plan, model, optimizer, batches, guard)
                metrics["step_time_s"] = time.perf_counter() - start
            labels.check(step, metrics["tokens_with_loss"], int(metrics["global_batch_size"]))
            metrics.update(waited)
            stragglers.after_step(step, metrics, logger)
            consumed_tokens += int(metrics["tokens"])
            metrics |= {"consumed_tokens": consumed_tokens, "peak_memory_bytes": device.peak_memory_bytes()}
            metrics |= measure_after_step(step, plan, model, data, patience, logger) | checkpointer.saver.metrics()
            if logger is not None:
                logger.log_step(metrics)
            if step == first + WARM_UP_BATCHES - 1:
                report_graphs(plan, model.compiler, logger)
            guard.after_step(metrics, checkpointer, signals.received)
            if checkpointer.after_step(step, signals.received, metrics.get("val_loss"), consumed_tokens):
                raise RunStopped(step)
        labels.finish()
        finish(max(first - 1, trainer.steps), plan, model, checkpointer, logger)
    export(plan, topology, checkpointer)


def load(plan: Plan, topology: Topology, checkpointer: Checkpointer, model: ParallelModel, data: Data) -> Plan:
    """Load the checkpoint, which accepts or rejects the start, then write config.yaml and plan.txt. A collective.

    Preference training then gets its reference (train/reference_logps.py).

    Returns the plan with ``start`` set.
    """
    phase.enter("loading", phase.PATIENT)
    loaded = checkpointer.resume()
    with sync_errors(ConfigError):
        if topology.is_logger:
            write_config_and_plan(plan)
    add_reference(loaded, model, data)
    return loaded


def build_profiler(plan: Plan, topology: Topology, device: Device, model: ParallelModel, optimizer: Optimizer) -> Any:
    """Build the profiler of trainer.profile; None without it."""
    build = optional_tools.load(optional_tools.PROFILER) if plan.config.trainer.profile else None
    return build(plan, topology, device, model, optimizer) if build else None


def export(plan: Plan, topology: Topology, checkpointer: Checkpointer) -> None:
    """Export the checkpoint if the settings ask for it, then report the end of the run. A collective."""
    phase.enter("exporting", phase.PATIENT)
    checkpointer.export()
    if topology.is_logger:
        report_finished(plan)


def measure_after_step(
    step: int, plan: Plan, model: ParallelModel, data: Data, patience: float, logger: Logger
) -> dict[str, float]:
    """Return the parameter norm, if it is logged, and the result of a validation that is due."""
    metrics = validate_if_due(step, plan, model, data.validation, patience, logger)
    if plan.config.logging.parameter_norm:
        metrics["parameter_norm"] = parameter_norm(model.shards, model.device, exact=plan.config.trainer.exact).item()
    return metrics


def finish(step: int, plan: Plan, model: ParallelModel, checkpointer: Checkpointer, logger: Logger) -> None:
    """Save the last step, compare copies, generate samples and log the summary. A collective."""
    checkpointer.finish(step)
    phase.enter("the last checks and samples", phase.PATIENT)
    checkpointer.compare_copies(step)
    samples = continue_prompts(plan, model)
    report_graphs(plan, model.compiler, logger)
    if logger is not None:
        logger.finish(samples)


def training_step(
    step: int, plan: Plan, model: ParallelModel, optimizer: Optimizer, batches: Batches | Prefetcher, guard: StepGuard
) -> dict[str, float]:
    """Run one optimizer step, counted from 1; return its metrics, equal on all ranks.

    If loss or gradient norm is rejected by ``guard``, the device skips the update. The host reads both at the end of
    the step.

    Raises:
        TrainingFault: Loss or norm is not finite and ``guard`` has no skips left. The weights are unchanged.
    """
    # plan.batches.after(n): samples and tokens consumed by n steps. The data position follows from the step.
    before, after = plan.batches.after(step - 1), plan.batches.after(step)
    start = time.perf_counter()
    microbatches = batches.at(before.samples)
    data_time = time.perf_counter() - start
    counts = model.count(microbatches)
    loss, *values = model.forward_backward(microbatches, counts).view(-1)
    if step == 1:
        check_every_gradient(model.shards)
    norm = optimizer.gradient_norm()
    optimizer.update(norm, skip=guard.rejects(loss, norm))
    # The only sync with the device in this function, if the optimizer can skip on the device and without QK-Clip.
    (mean_loss, gradient_norm, *means), (with_loss, tokens, attended) = read_scalars((loss, norm, *values), counts)
    metrics = {
        "step": step,
        "consumed_samples": after.samples,
        "global_batch_size": after.samples - before.samples,
        "reduced_train_loss": mean_loss,
        "lr": optimizer.lr,
        "gradient_norm": gradient_norm,
        "data_time_s": data_time,
        "tokens": tokens,
        "attended": attended,
        "tokens_with_loss": with_loss,
    }
    # guard.check: True if the device did not skip the update; otherwise counts a skip or raises.
    optimizer.advance(updated=guard.check(step, mean_loss, gradient_norm, model.shards))
    metrics |= named_metrics(plan.config.finetune, means)
    return metrics | optimizer.metrics() | guard.metrics()


def read_scalars(floats: Sequence[torch.Tensor], integers: Sequence[torch.Tensor]) -> tuple[list[float], list[int]]:
    """Return the values of fp32 and int64 scalars on the device, exactly, in one transfer: one sync."""
    bits = torch.stack([*floats]).view(torch.int32)  # not fp64, which some devices lack
    numbers: list[int] = torch.cat((bits.long(), torch.stack([*integers]))).tolist()
    size = len(floats)
    words = [number & 0xFFFFFFFF for number in numbers[:size]]
    return list(struct.unpack(f"{size}f", struct.pack(f"{size}I", *words))), numbers[size:]


def validate_if_due(
    step: int, plan: Plan, model: ParallelModel, sets: Mapping[str, Batches], patience: float, logger: Logger
) -> dict[str, float]:
    """Return the metrics of ``validate`` every ``trainer.val_every_steps`` steps; otherwise no metrics."""
    every = plan.config.trainer.val_every_steps
    if not sets or not every or step % every:
        return {}
    phase.enter(f"validation after step {step}", patience)
    return validate(plan, model, sets, logger)


def validate_at_start(plan: Plan, model: ParallelModel, sets: Mapping[str, Batches], logger: Logger) -> None:
    """Validate before step 1 and log the metrics as step 0. A collective."""
    metrics = validate_if_due(0, plan, model, sets, phase.PATIENT, logger)
    if logger is not None and metrics:
        logger.log_validation(metrics)


def validate(plan: Plan, model: ParallelModel, sets: Mapping[str, Batches], logger: Logger = None) -> dict[str, float]:
    """Return val_loss and val_token_accuracy: the unweighted means over sets, and NAME/SET of each named set.

    Raises:
        ConfigError: No token of a set has loss. On all ranks.
    """
    results = {name: validate_set(plan, model, batches, logger) for name, batches in sets.items()}
    listed = {name: [each[name] for each in results.values() if name in each] for name in validation_metrics(plan)}
    metrics = {name: math.fsum(values) / len(values) for name, values in listed.items() if values}
    for name in filter(None, results):
        metrics |= {f"{metric}/{name}": value for metric, value in results[name].items()}
    return metrics


def validate_set(plan: Plan, model: ParallelModel, batches: Batches, logger: Logger) -> dict[str, float]:
    """Return val_loss and val_token_accuracy over the first ``val_steps`` batches of a set, or over the whole set.

    val_loss is the mean loss per token with loss; val_token_accuracy is the share of these tokens whose label has the
    highest logit. With preferences, the values are means over examples: val_loss and ``named_metrics``. Batches are
    weighted by tokens with loss or by examples: an unweighted mean would overweight short answers.

    Raises:
        ConfigError: No token has loss. On all ranks.
    """
    trainer = plan.config.trainer
    size = trainer.global_batch_size
    whole = -(-len(batches.samples) // size)
    end = size * (trainer.val_steps or whole)
    if batches.samples.once:
        end = min(end, size * whole)
    results, counts = [], []
    show = logger.progress.validation if logger is not None else lambda done, total: None
    with Prefetcher(batches, end) as ahead:
        for position in range(0, end, size):
            phase.advance(f"sequence {position} of {end}")
            show(position // size, end // size)
            microbatches = ahead.at(position)
            batch = model.count(microbatches)
            counts.append(batch.with_loss)
            results.append(model.evaluate(microbatches, batch))
    show(end // size, end // size)
    weights = torch.stack(counts).cpu().double()
    if not weights.sum():
        rule = f"no token of the {end:,} validation samples has loss, so the validation loss is undefined"
        field = "data.validation_prefixes" if plan.config.data.validation_prefixes else "data.split"
        instead = "write trainer.val_steps=null to validate on the whole set, or prepare it with answers that have loss"
        raise ConfigError([Problem(field, getattr(plan.config.data, field.removeprefix("data.")), rule, instead)])
    means = (torch.stack(results).cpu().double() * weights[:, None]).sum(dim=0) / weights.sum()
    return named_validation(plan, means.tolist())
