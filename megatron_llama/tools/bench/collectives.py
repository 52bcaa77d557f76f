"""Latency and bandwidth of the collectives that a step uses, over the process groups of each parallel axis."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_llama.devices import get_device
from megatron_llama.parallel import process_groups
from megatron_llama.plan import Plan
from megatron_llama.system.files import write_atomically
from megatron_llama.topology import build_topology

# What a step sends along each axis (docs/traffic.md).
KINDS = {
    "tp": ("all_reduce", "all_gather", "reduce_scatter"),
    "dp": ("all_reduce", "all_gather", "reduce_scatter"),
    "pp": ("send_recv",),
}
RESULT = "collectives.json"
WARM_UP, LEAST_CALLS, SECONDS = 3, 5, 0.5


@dataclass(frozen=True)
class Rate:
    """One collective of one size."""

    axis: str
    kind: str
    ranks: int
    size: int
    """Bytes, as the NCCL tests count: inputs of all_reduce and reduce_scatter, outputs of all_gather, messages."""
    seconds: float
    """Of a call, on the slowest rank; a median."""

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second of what is asked for."""
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that a link carries where the algorithm is optimal, so that it does not depend on the ranks:
        the factors of the NCCL tests (doc/PERFORMANCE.md there)."""
        return self.algorithm_bandwidth * bus_factor(self.kind, self.ranks)


def bus_factor(kind: str, ranks: int) -> float:
    """Bytes that a link carries for each byte of the algorithm's."""
    once = (ranks - 1) / ranks
    return {"all_reduce": 2 * once, "all_gather": once, "reduce_scatter": once, "send_recv": 1.0}[kind]


def measure_collectives(sizes: Sequence[int], folder: str, plan: Plan) -> None:
    """What each rank does: all sizes over each axis with more than one rank. Rank 0 writes RESULT into ``folder``."""
    device, topology = get_device(plan.config.device.name), build_topology(plan, int(os.environ["RANK"]))
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    with process_groups(plan, topology, device, torch_device):
        groups = {
            "tp": parallel_state.get_tensor_model_parallel_group(),
            "dp": parallel_state.get_data_parallel_group(),
            "pp": parallel_state.get_pipeline_model_parallel_group(),
        }
        rates = []
        for axis, group in groups.items():
            if (ranks := dist.get_world_size(group)) < 2:
                continue
            for kind in KINDS[axis]:
                for size in sizes:
                    call = _call(kind, size, group, torch_device)
                    rates.append(Rate(axis, kind, ranks, size, _seconds(call, device.synchronize, torch_device)))
        if topology.rank == 0:
            write_atomically(Path(folder) / RESULT, json.dumps([asdict(rate) for rate in rates]))


def read_rates(folder: Path) -> Iterator[Rate]:
    """What ``measure_collectives`` wrote."""
    for fields in json.loads((folder / RESULT).read_text(encoding="utf-8")):
        yield Rate(**fields)


def _call(kind: str, size: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """One collective of ``size`` bytes in fp32, ready to be called on all ranks."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.ones(max(ranks, size // 4 // ranks * ranks), device=device)
    part = torch.ones(whole.numel() // ranks, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)  # stays 1, however often
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if rank == 0:
        return lambda: dist.send(whole, group=group, group_dst=1)
    if rank == 1:
        return lambda: dist.recv(whole, group=group, group_src=0)
    return lambda: None


def _seconds(call: Callable[[], object], synchronize: Callable[[], object], device: torch.device) -> float:
    """The median of calls that last half a second, each that of the slowest rank. All ranks call it together."""
    for _ in range(WARM_UP):
        start = time.perf_counter()
        call()
        synchronize()
        took = time.perf_counter() - start
    calls = torch.tensor([max(LEAST_CALLS, SECONDS / max(took, 1e-6))], device=device).clamp(max=1000)
    dist.all_reduce(calls, op=dist.ReduceOp.MIN)
    times = []
    for _ in range(int(calls.item())):
        dist.barrier()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.median().item()
