"""Peak FLOP/s of a run, the denominator of MFU. A measured peak is saved in the run folder and kept on resume."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_llama.devices import Device, Peak
from megatron_llama.parallel.groups import broadcast_from_rank_0, gather_objects
from megatron_llama.plan import Plan
from megatron_llama.system.files import read_json, write_atomically
from megatron_llama.system.ulimits import usable_cores
from megatron_llama.train.metrics_file import METRICS_FILE, stream_run_records

PEAK_FILE = "peak.json"


def find_peak(plan: Plan, device: Device, torch_device: torch.device) -> Peak:
    """Return the peak FLOP/s of one device: device.peak_tflops, a data sheet's, the run's saved one, or a measured one.

    A collective. The saved value is used if it was measured under equal ``conditions`` and no step was faster. CPU
    ranks share cores, so all ranks measure at the same time; the result is the mean.
    """
    if plan.config.device.peak_tflops is not None:
        return Peak(plan.config.device.peak_tflops * 1e12, "device.peak_tflops")
    if not device.measures_peak:
        return _mean(plan, device, torch_device)
    current = conditions(plan, device)
    saved = broadcast_from_rank_0(lambda: _read(plan.run_dir, current))
    if saved is not None:
        return saved
    peak = _mean(plan, device, torch_device)
    if dist.get_rank() == 0:
        _write(plan.run_dir, current, peak)
    return peak


def conditions(plan: Plan, device: Device) -> dict[str, Any]:
    """Return the properties of host and run on which a measured peak depends."""
    return {
        "device": device.name,
        **device.hardware(),
        "cores": len(usable_cores()),
        "threads": torch.get_num_threads(),
        "ranks": plan.world_size,
        "dtype": plan.precision.compute_format,
    }


def _mean(plan: Plan, device: Device, torch_device: torch.device) -> Peak:
    """Return the mean of all ranks' peaks. Threads that share a core share its FLOP/s."""
    dist.barrier()
    flops, source = device.peak_flops(plan.precision.compute_format)
    if device.measures_peak:
        cores, threads = _local_cores_and_threads()
        if threads > cores:  # a short matmul does not wait for its core and measures all of it
            flops, source = flops * cores / threads, f"{source}, {threads} threads on {cores} cores"
    mean = torch.tensor(flops, device=torch_device)
    dist.all_reduce(mean)
    return Peak(mean.item() / plan.world_size, source)


def _local_cores_and_threads() -> tuple[int, int]:
    """Return the cores that the ranks of this host may use, and the number of their threads."""
    ranks = gather_objects((platform.node(), usable_cores(), torch.get_num_threads()))
    local = [(cores, threads) for host, cores, threads in ranks if host == platform.node()]
    return len(set[int]().union(*(cores for cores, _ in local))), sum(threads for _, threads in local)


def _read(run_dir: Path, current: dict[str, Any]) -> Peak | None:
    """Return the saved peak; None if there is none, it is invalid, or it has to be measured again (reported)."""
    try:
        saved = read_json(run_dir / PEAK_FILE)
        peak = Peak(float(saved["flops"]), str(saved["source"]))
        then = dict(saved["conditions"])
        if not 0 < peak.flops < float("inf"):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    changed = [f"{name} {then.get(name)} -> {value}" for name, value in current.items() if then.get(name) != value]
    if changed:
        sys.stderr.write(f"MFU: measuring the peak again: {', '.join(changed)}\n")
        return None
    if (fastest := _fastest_step(run_dir)) > peak.flops:
        rates = f"{peak.flops / 1e9:,.0f} GFLOP/s was saved, {fastest / 1e9:,.0f} in a step"
        sys.stderr.write(f"MFU: measuring the peak again: {rates}\n")
        return None
    return peak


def _fastest_step(run_dir: Path) -> float:
    """Return the highest FLOP/s per device of the run's steps; 0 without steps."""
    try:
        records = stream_run_records(run_dir / METRICS_FILE)
        return max((float(record.get("tflops_per_device") or 0) * 1e12 for record in records), default=0.0)
    except OSError:
        return 0.0


def _write(run_dir: Path, current: dict[str, Any], peak: Peak) -> None:
    text = json.dumps({"flops": peak.flops, "source": peak.source, "conditions": current}, indent=2) + "\n"
    try:
        write_atomically(run_dir / PEAK_FILE, text)
    except OSError as error:  # a resumed run measures again
        sys.stderr.write(f"{run_dir / PEAK_FILE}: not written: {error.strerror or error}\n")
