"""Format a forecast as text and as JSON; read tables of published runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megatron_llama.plan import batch_line
from megatron_llama.plan.memory import USABLE
from megatron_llama.system.tables import GIB, gib, plural, short_count, text_table
from megatron_llama.system.wrapping import wrap_lines
from megatron_llama.tools.forecast import this_machine
from megatron_llama.tools.forecast.step_time import load_constants_file
from megatron_llama.tools.plan.forecast_run import Forecast

MOST_STAGES = 16
PARTS = {
    "matmul": "GEMMs of the blocks",
    "head": "output head and loss",
    "attention": "attention",
    "memory_bound": "memory-bound operations",
    "launch": "kernel launches and host",
    "tensor": "tensor parallelism",
    "context": "context parallelism",
    "pipeline": "messages between stages",
    "bubble": "pipeline bubble",
    "data_parallel": "data parallelism",
    "offload": "offloading",
    "optimizer": "optimizer",
    "waiting": "waiting for the slowest node",
}
"""Labels of the fields of ``StepTime``."""


def report_lines(forecast: Forecast) -> Iterator[str]:
    """Yield the lines of the report."""
    job, plan, cluster = forecast.job, forecast.plan, forecast.cluster
    nodes = f"{cluster.nodes} {plural(cluster.nodes or 1, 'node')}"
    ranks = f"{job.ranks} {plural(job.ranks, 'rank')}"
    if forecast.note is not None:
        yield from (forecast.note, "")
    yield f"{plan.model.name} on {forecast.devices} x {cluster.device} ({nodes}), {ranks}"
    virtual, context = f" (x {job.vpp} virtual)" if job.vpp > 1 else "", f" x cp {job.cp}" if job.cp > 1 else ""
    grid = f"tp {job.tp} x pp {job.pp}{virtual}{context} x dp {job.dp}, zero {job.zero}"
    batches = "batch" if job.num_microbatches == 1 else "batches"
    micro = f"{job.num_microbatches:,} micro {batches} of {job.micro_batch}"
    text = f"{grid}{', sp' if job.sp else ''}, recompute {job.recompute}, {micro}"
    yield from wrap_lines(text, rest="  ")
    yield batch_line(plan.config, forecast.hardware)
    yield ""
    yield from _memory(forecast)
    yield ""
    yield from _time(forecast)
    yield ""
    yield from _run(forecast)
    yield ""
    yield from _scaling(forecast)
    yield ""
    yield "assumptions"
    for line in (*assumptions(forecast), *plan.notes):
        yield from wrap_lines(line, "  ", "    ")


def _memory(forecast: Forecast) -> Iterator[str]:
    """Yield one row per stage, then the activations of the stage with the highest peak."""
    usable, stages = USABLE * forecast.device.memory_bytes, forecast.stages
    head = ("", "weights", "grads", "optimizer", "activations", "logits", "buffers", "peak", "fits")
    rows: list[tuple[str, ...]] = [head]
    order = list(range(len(stages)))
    shown = order if len(order) <= MOST_STAGES else [*order[: MOST_STAGES - 1], order[-1]]
    for stage in shown:
        each = stages[stage]
        states = (each.weights, each.gradients, each.optimizer)
        sizes = (*states, each.activation_bytes, each.logits, each.buffers, each.total)
        fits = "yes" if each.total <= usable else "NO"
        rows.append((f"stage {stage}", *(f"{size / GIB:.2f}" for size in sizes), fits))
    yield "memory per rank, GiB"
    yield from text_table(rows, left=1)
    heaviest = max(stages, key=lambda each: each.total)
    kinds = ", ".join(f"{kind} {gib(size)}" for kind, size in heaviest.activations.items() if size)
    activations = f"activations of stage {stages.index(heaviest)}: {kinds or 'none'}"
    yield from wrap_lines(activations, "  ", "    ")
    yield f"  device memory per rank: {gib(forecast.device.memory_bytes)}, {USABLE:.0%} usable"
    if heaviest.total > usable:
        yield f"  DOES NOT FIT: stage {stages.index(heaviest)} needs {gib(heaviest.total)}"


def _time(forecast: Forecast) -> Iterator[str]:
    """Yield one row per component, largest first."""
    total = forecast.time.total
    parts = sorted(forecast.time.parts().items(), key=lambda part: -part[1])
    rows = [("time of a step", "s", "share")]
    rows += [(PARTS[name], f"{part:.4g}", f"{part / total:.1%}") for name, part in parts if part]
    rows.append(("data loading", "0", "prefetched"))
    rows.append(("total", f"{total:.4g}", ""))
    yield from text_table(rows, left=1)


def _run(forecast: Forecast) -> Iterator[str]:
    rate, goodput = forecast.tokens_per_second, forecast.goodput
    peak = f"{forecast.job.ranks} x {forecast.device.peak(forecast.job.format) / 1e12:,.0f} TFLOP/s"
    rows = [
        ("tokens/s", f"{rate:,.0f}; {rate / forecast.devices:,.0f} per device"),
        ("MFU", f"{forecast.utilization(forecast.flops.causal):.2%} with causal attention"),
        (
            "",
            f"{forecast.utilization(forecast.flops.full):.2%} with full attention, of {peak} in {forecast.job.format}",
        ),
        ("goodput", f"{goodput.useful:.2%}"),
        ("", f"{goodput.lost:.2%} lost to {goodput.failures_a_day:.3g} failures per day"),
        ("", f"{goodput.waiting:.2%} lost to a checkpoint every {goodput.interval / 60:,.0f} min"),
        ("run", f"{short_count(forecast.tokens)} tokens in {forecast.days:,.3g} days"),
    ]
    if forecast.cost is not None:
        rows.append(("cost", f"{forecast.cost:,.0f} at {forecast.cluster.price:g} per device and hour"))
    yield from text_table(rows)


def _scaling(forecast: Forecast) -> Iterator[str]:
    """Yield one row per number of devices, with the same work per rank and more data-parallel ranks."""
    first = forecast.scaling[0]
    rows = [("devices", "batch", "s/step", "tokens/s", "MFU", "scaling", "goodput", "net tokens/s")]
    for each in forecast.scaling:
        scaling = each.tokens_per_second / first.tokens_per_second / (each.devices / first.devices)
        counts = (f"{each.devices:,}", f"{each.global_batch:,}", f"{each.seconds:.4g}")
        shares = (f"{each.mfu:.1%}", f"{scaling:.1%}", f"{each.goodput.useful:.1%}")
        net = each.tokens_per_second * each.goodput.useful
        rows.append((*counts, f"{each.tokens_per_second:,.0f}", *shares, f"{net:,.0f}"))
    yield from text_table(rows, left=0)


def assumptions(forecast: Forecast) -> Iterator[str]:
    """Yield the sources and assumptions of the numbers."""
    device, cluster, constants = forecast.device, forecast.cluster, load_constants_file()
    yield f"device: {device.source}"
    if device.name == this_machine.NAME:
        yield "nothing overlaps: ranks share the cores, and collectives are blocking"
        return
    yield (
        f"network: {device.per_node} ranks per node on links of {device.link / 1e9:,.0f} GB/s; "
        f"{device.network / 1e9:,.4g} GB/s per rank between nodes"
    )
    if f"matmul.{device.family}.{forecast.job.format}" in constants["constants"]:
        yield f"speed: constants of {constants['date']}, fitted to {constants['data']}"
    else:
        yield f"speed: GEMM benchmarks; no published runs for {device.name} in {forecast.job.format}"
    yield "attention: as fast as torch's FlashAttention 2"
    yield (
        f"failures: one per device and {cluster.failure_hours:,.0f} h; a restart takes {cluster.restart_minutes:g} min"
    )
    yield f"checkpoints: {cluster.storage_gbps:g} GB/s per node, written during training, at the optimal interval"
    yield "no other jobs on the network; data loading is not a bottleneck"


def report_json(forecast: Forecast) -> dict[str, Any]:
    """Return the forecast as JSON."""
    return {
        "hardware": forecast.cluster.device,
        "device": forecast.plan.config.device.name,
        "global_batch_size": forecast.plan.config.trainer.global_batch_size,
        "seq_length": forecast.plan.config.data.length,
        "precision": forecast.plan.config.trainer.precision,
        "fits": forecast.fits,
        "devices": forecast.devices,
        "ranks": forecast.job.ranks,
        "memory_bytes": {
            "device": forecast.device.memory_bytes,
            "usable_share": USABLE,
            "stages": [
                {**each.parts(), "activations_by_kind": dict(each.activations), "peak": each.total}
                for each in forecast.stages
            ],
        },
        "step_time_s": {**forecast.time.parts(), "total": forecast.time.total},
        "tokens_per_second": forecast.tokens_per_second,
        "mfu": {
            "causal": forecast.utilization(forecast.flops.causal),
            "full": forecast.utilization(forecast.flops.full),
        },
        "goodput": asdict(forecast.goodput),
        "tokens": forecast.tokens,
        "days": forecast.days,
        "cost": forecast.cost,
        "scaling": [asdict(each) for each in forecast.scaling],
        "assumed": list(assumptions(forecast)),
    }
