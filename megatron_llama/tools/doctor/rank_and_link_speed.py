"""Measurements by the ranks: matmuls per device, collectives per process group, links between nodes."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, median_high
from typing import Any

import torch
import torch.distributed as dist

from megatron_llama.devices import Device, get_device
from megatron_llama.devices.processor import matmul_rate
from megatron_llama.parallel import process_groups
from megatron_llama.parallel.groups import current_groups, gather_objects
from megatron_llama.plan import Plan
from megatron_llama.system import phase
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import plural, text_table
from megatron_llama.tools.common import show_line
from megatron_llama.tools.doctor.finding import WARNS, Finding

RESULT = "ranks.json"
SIZES = (4 << 10, 1 << 20, 16 << 20)  # bytes: latency, a layer's gradients, bandwidth
SECONDS = 0.3
MATMUL_SIZE, LARGE_MATMUL_SIZE = 384, 4096
"""Rows and columns of the matrices; on CPU small enough for many matmuls within a scheduler time slice."""
LINK_BYTES, LARGE_LINK_BYTES = 2 << 20, 64 << 20
LINK_CALLS = 6
MAX_ROUNDS = 31  # in each round a node has one partner, so up to 32 nodes measure all pairs


def measure_ranks(folder: str, plan: Plan) -> None:
    """Measure on each rank; rank 0 writes RESULT to ``folder``."""
    device, rank = get_device(plan.config.device.name), int(os.environ["RANK"])
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    with process_groups(plan, plan.topology(rank), device, torch_device):

        def on_start(activity: str) -> None:
            phase.enter(f"measuring {activity}", phase.PATIENT)
            if rank == 0 and sys.stderr.isatty():
                show_line(f"measuring {activity} ...")

        on_start("matmuls")
        size = LARGE_MATMUL_SIZE if device.is_accelerator else MATMUL_SIZE
        dtype = getattr(torch, plan.precision.compute_dtype.removeprefix("torch."))
        dist.barrier()  # all ranks compute at once
        rate = matmul_rate(size, dtype, SECONDS, torch_device, device.synchronize)
        rank_results = gather_objects((socket.gethostname(), rate))
        results: dict[str, Any] = {
            "hosts": [host for host, _ in rank_results],
            "products": [rate for _, rate in rank_results],
        }
        results["collectives"] = [asdict(rate) for rate in rates_of_groups(device.synchronize, torch_device, on_start)]
        on_start("links between nodes")
        results["links"] = _links(first_ranks(results["hosts"]), device, torch_device)
        if rank == 0:
            write_atomically(Path(folder) / RESULT, json.dumps(results))


def first_ranks(hosts: Sequence[str]) -> list[int]:
    """Return the first rank of each host, given the host name of each rank."""
    return [hosts.index(host) for host in dict.fromkeys(hosts)]


def pairing_rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield disjoint pairs of ``count`` nodes for each round, by the circle method of round-robin tournaments.

    Ends after MAX_ROUNDS rounds or when all pairs were yielded.
    """
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(min(len(seats) - 1, MAX_ROUNDS)):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _links(leaders: Sequence[int], device: Device, torch_device: torch.device) -> list[tuple[int, int, float]]:
    """Return (sender node, receiver node, bytes per second) between the first ranks of the nodes."""
    size = LARGE_LINK_BYTES if device.is_accelerator else LINK_BYTES
    buffer = torch.ones(size // 4, device=torch_device)
    rank, local_rates = dist.get_rank(), []
    for pairs in pairing_rounds(len(leaders)) if len(leaders) > 1 else ():
        dist.barrier()
        for one, other in pairs:
            ranks = leaders[one], leaders[other]
            if rank in ranks:
                for sender, receiver, direction in ((*ranks, (one, other)), (ranks[1], ranks[0], (other, one))):
                    seconds = min(_send(buffer, sender, receiver, device) for _ in range(LINK_CALLS))
                    if rank == sender:
                        local_rates.append((*direction, size / seconds))
    return [link for links in gather_objects(local_rates) for link in links]


def _send(buffer: torch.Tensor, sender: int, receiver: int, device: Device) -> float:
    """Return the seconds of a transfer and a one-element reply: a send may return before the data has left."""
    word = buffer[:1]
    start = time.perf_counter()
    if dist.get_rank() == sender:
        dist.send(buffer, receiver)
        dist.recv(word, receiver)
    else:
        dist.recv(buffer, sender)
        dist.send(word, sender)
    device.synchronize()
    return time.perf_counter() - start


def speed_table(measured: Mapping[str, Any]) -> list[str]:
    """Format the slowest group of each axis, with bandwidths as in the NCCL tests."""
    slowest = slowest_groups(Rate(**fields) for fields in measured["collectives"])
    rates = [rate / 1e9 for rate in measured["products"]]
    lines = [f"Matmuls: {min(rates):,.1f} to {max(rates):,.1f} GFLOP/s on {len(rates)} {plural(len(rates), 'rank')}."]
    if links := [rate / 1e6 for _, _, rate in measured["links"]]:
        lines.append(f"Links between nodes: {min(links):,.0f} to {max(links):,.0f} MB/s.")
    if not slowest:
        return lines
    rows: list[tuple[str, ...]] = [("axis", "collective", "ranks", "size", "time", "algorithm", "bus")]
    for rate in slowest:
        size = f"{rate.size >> 20} MiB" if rate.size >= 1 << 20 else f"{rate.size >> 10} KiB"
        bandwidths = [f"{each / 1e9:.3f} GB/s" for each in (rate.algorithm_bandwidth, rate.bus_bandwidth)]
        rows.append((rate.axis, rate.kind, str(rate.ranks), size, f"{1e6 * rate.seconds:,.0f} us", *bandwidths))
    return [*lines, "", *text_table(rows, left=2)]


# Slow ranks, links and groups: measurements far below the median.
RANKS, LINKS, GROUPS = "ranks", "links", "collectives"
SLOW_RANK, SLOW_LINK, SLOW_GROUP = 0.7, 0.25, 0.25
"""Fractions of the median speed below which a rank, a link or a group is reported."""


def judge(measured: Mapping[str, Any]) -> Iterator[Finding]:
    """Judge the results of ``measure_ranks``."""
    yield from _slow_ranks(measured["products"], measured["hosts"])
    yield from _slow_links(measured["links"], list(dict.fromkeys(measured["hosts"])))
    yield from _slow_groups(measured["collectives"], measured["hosts"])


def _slow_ranks(rates: Sequence[float], hosts: Sequence[str]) -> Iterator[Finding]:
    usual = median_high(rates)
    for rank, rate in enumerate(rates):
        if rate < SLOW_RANK * usual:
            message = f"matmuls reach {rate / 1e9:,.1f} GFLOP/s; the median rank reaches {usual / 1e9:,.1f}"
            remedy = "check that device for other jobs, its temperature and clock"
            remedy += f"; or exclude the node (sbatch --exclude={hosts[rank]})"
            yield Finding(RANKS, WARNS, f"rank {rank} on {hosts[rank]}", message, remedy)


def _slow_links(links: Sequence[tuple[int, int, float]], nodes: Sequence[str]) -> Iterator[Finding]:
    """Report slow pairs, and nodes all of whose links are slow."""
    if len(links) < 3:  # nothing to compare one pair with
        return
    usual = median(rate for _, _, rate in links)
    slow = [(one, other, rate) for one, other, rate in links if rate < SLOW_LINK * usual]
    slow_pairs = {pair for one, other, _ in slow for pair in ((one, other), (other, one))}
    partners, slow_partners = (Counter(one for one, *_ in pairs) for pairs in (links, slow_pairs))
    bad = {node for node, count in slow_partners.items() if count == partners[node] > 1}
    remedy = "check the cable, switch port or bandwidth limit of the virtual machine (ethtool, iperf3)"
    for node in sorted(bad):
        worst = min(rate for one, other, rate in slow if node in (one, other))
        message = f"all links are slow: {_megabytes(worst)} at worst; the median link carries {_megabytes(usual)}"
        yield Finding(LINKS, WARNS, nodes[node], message, f"{remedy}; or exclude the node (--exclude={nodes[node]})")
    for one, other, rate in slow:
        if one not in bad and other not in bad:
            message = f"carries {_megabytes(rate)}; the median link carries {_megabytes(usual)}"
            yield Finding(LINKS, WARNS, f"{nodes[one]} → {nodes[other]}", message, remedy)


def _slow_groups(rates: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Iterator[Finding]:
    """Report slow groups of an axis by the largest message, each once, with its slowest collective."""
    largest = max((rate["size"] for rate in rates), default=0)
    rates_of_axis: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for rate in rates:
        if rate["size"] == largest:
            rates_of_axis[rate["axis"], rate["kind"]].append(rate)
    worst: dict[tuple[str, tuple[int, ...]], tuple[float, str]] = {}
    for (axis, kind), groups in rates_of_axis.items():
        usual = median_high(largest / rate["seconds"] for rate in groups)
        for rate in groups:
            rate_bytes, members = largest / rate["seconds"], tuple(rate["group"])
            message = f"{kind} reaches {_megabytes(rate_bytes)}; the median group reaches {_megabytes(usual)}"
            if rate_bytes / usual < worst.get((axis, members), (SLOW_GROUP, ""))[0]:
                worst[axis, members] = rate_bytes / usual, message
    for (axis, members), (_, message) in worst.items():
        nodes = ", ".join(dict.fromkeys(hosts[rank] for rank in members))
        where = f"{axis} group of ranks {', '.join(map(str, members))} ({nodes})"
        yield Finding(GROUPS, WARNS, where, message, "check the slow ranks and links of its nodes first")


def _megabytes(rate: float) -> str:
    return f"{rate / 1e6:,.1f} MB/s"


# Latency and bandwidth of the collectives that a step uses, over the process groups of each parallel axis.
#
# scripts/doctor.py compares the rates between groups. `scripts/plan.py --calibrate` measures how much a collective
# slows down ranks that compute (tools/plan/measure_machine.py).

# Collectives of a step along each axis (docs/guides/tools/traffic.md).
KINDS = {
    "tp": ("all_reduce", "all_gather", "reduce_scatter"),
    "cp": ("all_gather", "reduce_scatter"),
    "dp": ("all_reduce", "all_gather", "reduce_scatter"),
    "pp": ("send_recv",),
}
WARM_UP, MIN_CALLS, MAX_CALLS = 2, 3, 1000


def slowest_groups(rates: Iterable[Rate]) -> list[Rate]:
    """Return the rate of the slowest group for each axis, collective and size."""
    slowest: dict[tuple[str, str, int], Rate] = {}
    for rate in rates:
        key = rate.axis, rate.kind, rate.size
        if key not in slowest or rate.seconds > slowest[key].seconds:
            slowest[key] = rate
    return list(slowest.values())


def rates_of_groups(
    synchronize: Callable[[], object], device: torch.device, on_start: Callable[[str], None]
) -> list[Rate]:
    """Return the rates of every group of each axis with more than one rank, on all ranks.

    Collective over the world: the groups of an axis are measured concurrently, as in a step.

    Args:
        on_start: Called with the name of each measurement.
    """
    local_rates = []
    for axis, kinds in KINDS.items():
        group = current_groups()[axis]
        members = tuple(dist.get_process_group_ranks(group))
        if len(members) < 2:
            continue
        for kind in kinds:
            for size in SIZES:
                on_start(f"{axis} {kind} of {size >> 10:,} KiB")
                dist.barrier()
                times = times_of_calls(collective(kind, size, group, device), group, synchronize, device)
                local_rates.append(Rate(axis, kind, len(members), size, times[len(times) // 2], members))
    return [rate for rank, rates in enumerate(gather_objects(local_rates)) for rate in rates if rate.group[0] == rank]


def collective(kind: str, size: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """Return a function that runs one collective of ``size`` bytes; all ranks of the group call it.

    In ``send_recv`` each even rank of the group sends to the next one.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.zeros(max(ranks, size // 4 // ranks * ranks), device=device)
    part = torch.zeros(whole.numel() // ranks, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)  # the zeros stay zero
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
    call: Callable[[], object], group: dist.ProcessGroup, synchronize: Callable[[], object], device: torch.device
) -> list[float]:
    """Call for about SECONDS and return the seconds of each call on the slowest rank, sorted.

    Collective over the group.
    """
    took = 0.0
    for _ in range(WARM_UP):
        start = time.perf_counter()
        call()
        synchronize()
        took = time.perf_counter() - start
    count = min(max(MIN_CALLS, SECONDS / max(took, 1e-6)), MAX_CALLS)
    calls = torch.tensor([count], dtype=torch.float32, device=device)  # explicit: an int would make it int64
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


@dataclass(frozen=True)
class Rate:
    """One collective of one size in one group."""

    axis: str
    kind: str
    ranks: int
    size: int
    """Bytes, as in the NCCL tests: inputs of all_reduce and reduce_scatter, outputs of all_gather, messages."""
    seconds: float
    """Median time of a call on the slowest rank."""
    group: tuple[int, ...] = ()
    """Ranks of the group; empty for the slowest of all groups."""

    @property
    def algorithm_bandwidth(self) -> float:
        """Payload bytes per second."""
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second over a link with an optimal algorithm, independent of the number of ranks.

        The factors are from doc/PERFORMANCE.md of the NCCL tests.
        """
        once = (self.ranks - 1) / self.ranks
        factors = {"all_reduce": 2 * once, "all_gather": once, "reduce_scatter": once, "send_recv": 1.0}
        return self.algorithm_bandwidth * factors[self.kind]
