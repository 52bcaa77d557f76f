"""Latency and bandwidth of the collectives that a step uses, over the process groups of each parallel axis.

`python -m benchmarks collectives` prints the rates, and scripts/doctor.py compares them between groups.
`scripts/plan.py --calibrate` measures how much a collective slows down ranks that compute
(tools/plan/measure_machine.py).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_llama.devices import get_device
from megatron_llama.parallel import process_groups
from megatron_llama.parallel.groups import current_groups
from megatron_llama.plan import Plan
from megatron_llama.system.files import write_atomically
from megatron_llama.tools.doctor.rate import Rate

# What a step sends along each axis (docs/traffic.md).
KINDS = {
    "tp": ("all_reduce", "all_gather", "reduce_scatter"),
    "dp": ("all_reduce", "all_gather", "reduce_scatter"),
    "pp": ("send_recv",),
}
RESULT = "collectives.json"
WARM_UP, LEAST_CALLS, MOST_CALLS, SECONDS = 2, 3, 1000, 0.5


def measure_collectives(sizes: Sequence[int], folder: str, plan: Plan) -> None:
    """What each rank does: all sizes over each axis with more than one rank. Rank 0 writes RESULT into ``folder``, of
    each collective its time in the slowest group."""
    device, topology = get_device(plan.config.device.name), plan.topology(int(os.environ["RANK"]))
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    with process_groups(plan, topology, device, torch_device):
        rates = rates_of_groups(sizes, device.synchronize, torch_device)
        if topology.rank == 0:
            slowest: dict[tuple[str, str, int], Rate] = {}
            for rate in rates:
                key = (rate.axis, rate.kind, rate.size)
                if key not in slowest or rate.seconds > slowest[key].seconds:
                    slowest[key] = rate
            write_atomically(Path(folder) / RESULT, json.dumps([asdict(rate) for rate in slowest.values()]))


def read_rates(folder: Path) -> Iterator[Rate]:
    """What ``measure_collectives`` wrote."""
    for fields in json.loads((folder / RESULT).read_text(encoding="utf-8")):
        yield Rate(**fields | {"group": ()})


def rates_of_groups(
    sizes: Sequence[int],
    synchronize: Callable[[], object],
    device: torch.device,
    seconds: float = SECONDS,
    begins: Callable[[str], None] = lambda what: None,
) -> list[Rate]:
    """The rates of every group of each axis that has more than one rank, on all ranks; each lasts so many ``seconds``.
    ``begins`` is told what is measured next.

    A collective of the whole world: the groups of an axis are measured at once, as they are used.
    """
    mine = []
    for axis, kinds in KINDS.items():
        group = current_groups()[axis]
        members = tuple(dist.get_process_group_ranks(group))
        if len(members) < 2:
            continue
        for kind in kinds:
            for size in sizes:
                begins(f"{axis} {kind} of {size >> 10:,} KiB")
                dist.barrier()
                call = collective(kind, size, group, device)
                times = times_of_calls(call, group, synchronize, device, seconds)
                mine.append(Rate(axis, kind, len(members), size, times[len(times) // 2], members))
    world: list[list[Rate]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(world, mine)
    return [rate for rank, rates in enumerate(world) for rate in rates if rate.group[0] == rank]


def collective(
    kind: str, size: int, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype = torch.float32
) -> Callable[[], object]:
    """One collective of ``size`` bytes, ready to be called on all ranks of the group. In ``send_recv`` each rank with
    an even number in the group sends to the next one."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.zeros(max(ranks, size // dtype.itemsize // ranks * ranks), device=device, dtype=dtype)
    part = torch.zeros(whole.numel() // ranks, device=device, dtype=dtype)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)  # stays 0, however often
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if rank % 2:
        return lambda: dist.recv(whole, group=group, group_src=rank - 1)
    if rank + 1 < ranks:
        return lambda: dist.send(whole, group=group, group_dst=rank + 1)
    return lambda: None


def times_of_calls(
    call: Callable[[], object],
    group: dist.ProcessGroup,
    synchronize: Callable[[], object],
    device: torch.device,
    seconds: float = SECONDS,
) -> list[float]:
    """Seconds of each of the calls that are made for so long, that of the group's slowest rank, the shortest first. All
    ranks of the group call it together."""
    took = 0.0
    for _ in range(WARM_UP):
        start = time.perf_counter()
        call()
        synchronize()
        took = time.perf_counter() - start
    wanted = min(max(LEAST_CALLS, seconds / max(took, 1e-6)), MOST_CALLS)
    calls = torch.tensor([wanted], dtype=torch.float32, device=device)  # named: a whole number would make it int64
    dist.all_reduce(calls, op=dist.ReduceOp.MIN, group=group)
    times = []
    for _ in range(int(calls.item())):
        dist.barrier(group)
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return sorted(slowest.tolist())
