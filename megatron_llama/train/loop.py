"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.data import Batches, Data
from megatron_llama.devices import Device
from megatron_llama.optim import Optimizer
from megatron_llama.optim.norm import parameter_norm
from megatron_llama.parallel import ParallelModel
from megatron_llama.parallel.compiling import WARM_UP_BATCHES
from megatron_llama.plan import Plan
from megatron_llama.system.exit_status import EXIT_RESTART
from megatron_llama.topology import Topology
from megatron_llama.train.compile_report import gather, write_report
from megatron_llama.train.metrics import MetricsLogger, Peak
from megatron_llama.train.sample_text import continue_prompts
from megatron_llama.train.sanity import FiniteCheck, check_copies, check_every_gradient
from megatron_llama.train.stop import StopSignals
from megatron_llama.train.watchdog import Watchdog


def train(
    plan: Plan, topology: Topology, device: Device, model: ParallelModel, optimizer: Optimizer, data: Data
) -> None:
    """Train from where the run stands to the plan's last step, logging each; then continue the sample prompts.

    Leaves by SystemExit(75) when a signal asked any rank to stop, once all ranks have saved.
    """
    trainer, logging = plan.config.trainer, plan.config.logging
    checkpointer = Checkpointer(plan, topology, model, optimizer)
    first = checkpointer.resume() + 1
    check_copies(model.shards)
    peak = measured_peak(plan, device, model.device)
    finite = FiniteCheck(trainer.skip_nonfinite_steps)
    watchdog = _watchdog(plan, topology)
    with StopSignals() as signals, watchdog, _logger(plan, topology, peak, first - 1) as logger:
        for step in range(first, trainer.steps + 1):
            watchdog.beat(f"step {step}", patient=model.compiler is not None and meets_new_graphs(plan, step, first))
            start = time.perf_counter()
            metrics = training_step(step, plan, model, optimizer, data.train, finite)
            device.synchronize()
            metrics["step_time_s"] = time.perf_counter() - start
            metrics["peak_memory_bytes"] = device.peak_memory_bytes()
            if logging.parameter_norm:
                metrics["parameter_norm"] = parameter_norm(model.shards, model.device).item()
            if data.validation is not None and trainer.val_every_steps and step % trainer.val_every_steps == 0:
                metrics["val_loss"] = validate(plan, model, data.validation)
                checkpointer.note_validation(step, metrics["val_loss"])
            if logger is not None:
                logger.log_step(metrics)
            if step == first + WARM_UP_BATCHES - 1:
                report_graphs(plan, model, logger)
            if checkpointer.after_step(step, signals.asked):
                raise SystemExit(EXIT_RESTART)
        watchdog.beat("the last checkpoint and the samples")
        checkpointer.finish(max(first - 1, trainer.steps))
        check_copies(model.shards)
        samples = continue_prompts(plan, model)
        report_graphs(plan, model, logger)
        if logger is not None:
            logger.finish(samples)
    checkpointer.export()


def meets_new_graphs(plan: Plan, step: int, first: int) -> bool:
    """Whether a run that began with step ``first`` may have to compile in ``step``: on Trainium a large model has taken
    longer than any hang should."""
    every = plan.config.trainer.val_every_steps
    if step < first + WARM_UP_BATCHES or not every:
        return step < first + WARM_UP_BATCHES
    return step % every == 0 and step // every - (first - 1) // every <= WARM_UP_BATCHES


def training_step(
    step: int, plan: Plan, model: ParallelModel, optimizer: Optimizer, batches: Batches, finite: FiniteCheck
) -> dict[str, float]:
    """One optimizer step, counted from 1; returns its metrics, the same on all ranks.

    Raises TrainingFault, before the weights are touched, when loss or gradient norm is not finite and ``finite`` allows
    no skip.
    """
    size = plan.config.trainer.global_batch_size
    loss = model.forward_backward(batches.at((step - 1) * size))
    if step == 1:
        check_every_gradient(model.shards)
    norm = optimizer.gradient_norm()
    metrics = {
        "step": step,
        "consumed_samples": step * size,
        "consumed_tokens": step * plan.tokens_per_step,
        "reduced_train_loss": loss.item(),
        "lr": optimizer.lr,
        "gradient_norm": norm.item(),
    }
    if finite.passes(step, metrics["reduced_train_loss"], metrics["gradient_norm"], model.shards):
        optimizer.step(norm)
    else:
        optimizer.skip()
    return metrics


def validate(plan: Plan, model: ParallelModel, batches: Batches) -> float:
    """Mean loss over all tokens with loss in the validation samples, the same ones each time: ``val_steps`` batches,
    or the whole set once.

    A batch counts as much as it has such tokens: a mean of batches' means would weight short answers more.
    """
    trainer = plan.config.trainer
    losses, counts = [], []
    for batch in range(trainer.val_steps or -(-len(batches.samples) // trainer.global_batch_size)):
        microbatches = batches.at(batch * trainer.global_batch_size)
        counts.append(model.tokens_with_loss(microbatches))
        losses.append(model.forward_backward(microbatches, train=False))
    weights = torch.stack(counts).cpu().double()
    return ((torch.stack(losses).cpu().double() * weights).sum() / weights.sum().clamp(min=1)).item()


def report_graphs(plan: Plan, model: ParallelModel, logger: MetricsLogger | None) -> None:
    """Says what was compiled and what came out of the cache, and writes compile.json. All ranks must call it."""
    if model.compiler is None:
        return
    compilations = gather(model.compiler.graphs)
    if logger is not None:
        assert plan.config.run.dir is not None and plan.config.trainer.compile_cache is not None
        logger.say(compilations.lines(plan.config.trainer.compile_cache))
        write_report(compilations, plan, Path(plan.config.run.dir))


def measured_peak(plan: Plan, device: Device, torch_device: torch.device) -> Peak:
    """Peak FLOP/s of a device of this run. All ranks must call it: on the CPU they measure side by side."""
    if plan.config.device.peak_tflops is not None:
        return Peak(plan.config.device.peak_tflops * 1e12, "device.peak_tflops")
    dist.barrier()
    flops, source = device.peak_flops(plan.precision.compute_format)
    mean = torch.tensor(flops, device=torch_device)
    dist.all_reduce(mean)
    return Peak(mean.item() / plan.world_size, source)


def _watchdog(plan: Plan, topology: Topology) -> Watchdog:
    assert plan.config.run.dir is not None
    folder = Path(plan.config.run.dir) / "hang"
    return Watchdog(plan.config.trainer.hang_timeout_seconds, topology.rank, topology.world_size, folder)


@contextmanager
def _logger(plan: Plan, topology: Topology, peak: Peak, start_step: int) -> Iterator[MetricsLogger | None]:
    """The metrics writer on the one rank that writes, None on the others."""
    if not topology.is_logger:
        yield None
        return
    assert plan.config.run.dir is not None
    with MetricsLogger(plan, Path(plan.config.run.dir), peak, start_step) as logger:
        yield logger
