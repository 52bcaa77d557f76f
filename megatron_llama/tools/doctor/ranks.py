"""What each rank measures for the doctor: a product on its own device, the collectives of its groups, and the links
between the nodes."""
from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, median_high
from typing import Any

import torch
import torch.distributed as dist

from megatron_llama.devices import Device, get_device
from megatron_llama.devices.processor import product_rate
from megatron_llama.parallel import process_groups
from megatron_llama.parallel.groups import current_groups
from megatron_llama.plan import Plan
from megatron_llama.system import phase
from megatron_llama.system.files import write_atomically
from megatron_llama.tools.doctor.finding import WARNS, Finding

RESULT = "ranks.json"
SIZES = (4 << 10, 1 << 20, 16 << 20)
"""Bytes: latency, a layer's gradients, bandwidth."""
SECONDS = 0.3
PRODUCT, LARGE_PRODUCT = 384, 4096
"""Rows and columns of the matrices, on a CPU small enough for many products within a core's turn."""
LINK_BYTES, LARGE_LINK_BYTES = 2 << 20, 64 << 20
LINK_CALLS = 6
MOST_ROUNDS = 31
"""Each round every node has one partner, so up to 32 nodes try all others."""


def measure_ranks(folder: str, plan: Plan) -> None:
    """What each rank does. Rank 0 writes RESULT into ``folder``."""
    device, rank = get_device(plan.config.device.name), int(os.environ["RANK"])
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    with process_groups(plan, plan.topology(rank), device, torch_device):

        def begins(what: str) -> None:
            phase.enter(f"measuring {what}", phase.PATIENT)
            if rank == 0 and sys.stderr.isatty():
                sys.stderr.write(f"\r\x1b[Kmeasuring {what} ...")
                sys.stderr.flush()

        begins("products")
        everybody: list[Any] = [None] * plan.world_size
        dist.all_gather_object(everybody, (socket.gethostname(), _product_rate(plan, device, torch_device)))
        found: dict[str, Any] = {"hosts": [host for host, _ in everybody], "products": [rate for _, rate in everybody]}
        found["collectives"] = [
            asdict(rate) for rate in rates_of_groups(SIZES, device.synchronize, torch_device, SECONDS, begins)
        ]
        begins("links between nodes")
        found["links"] = _links(first_ranks(found["hosts"]), device, torch_device)
        if rank == 0:
            write_atomically(Path(folder) / RESULT, json.dumps(found))


def first_ranks(hosts: Sequence[str]) -> list[int]:
    """The first rank of each machine, by the machines' names."""
    return [hosts.index(host) for host in dict.fromkeys(hosts)]


def _product_rate(plan: Plan, device: Device, torch_device: torch.device) -> float:
    """FLOP/s of the best product of some, while all ranks make theirs."""
    size = LARGE_PRODUCT if device.is_accelerator else PRODUCT
    dtype = getattr(torch, plan.precision.compute_dtype.removeprefix("torch."))
    dist.barrier()
    return product_rate(size, dtype, SECONDS, torch_device, device.synchronize)


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Pairs of ``count`` nodes, round by round, in which each has at most one partner: a tournament by the circle
    method. Over MOST_ROUNDS rounds or until all have met."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(min(len(seats) - 1, MOST_ROUNDS)):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _links(leaders: Sequence[int], device: Device, torch_device: torch.device) -> list[tuple[int, int, float]]:
    """Bytes per second from each node's first rank to that of each other node: (node, node, rate), on rank 0."""
    size = LARGE_LINK_BYTES if device.is_accelerator else LINK_BYTES
    buffer = torch.ones(size // 4, device=torch_device)
    rank, mine = dist.get_rank(), []
    for pairs in rounds(len(leaders)) if len(leaders) > 1 else ():
        dist.barrier()
        for one, other in pairs:
            ranks = leaders[one], leaders[other]
            if rank in ranks:
                for sender, receiver, way in ((*ranks, (one, other)), (ranks[1], ranks[0], (other, one))):
                    seconds = min(_send(buffer, sender, receiver, device) for _ in range(LINK_CALLS))
                    if rank == sender:
                        mine.append((*way, size / seconds))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return [link for links in everybody for link in links]


def _send(buffer: torch.Tensor, sender: int, receiver: int, device: Device) -> float:
    """Seconds of a transfer and a word back: a send may return before the data has left."""
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


# Slow ranks, slow links and slow groups, from what the ranks have measured: whoever is far behind the others.


RANKS, LINKS, GROUPS = "ranks", "links", "collectives"
SLOW_RANK, SLOW_LINK, SLOW_GROUP = 0.7, 0.25, 0.25
"""Shares of the middle one's speed below which a rank, a link or a group is named."""


def judge(measured: Mapping[str, Any]) -> Iterator[Finding]:
    """``measured``: what ``measure_ranks`` has written."""
    yield from _slow_ranks(measured["products"], measured["hosts"])
    yield from _slow_links(measured["links"], list(dict.fromkeys(measured["hosts"])))
    yield from _slow_groups(measured["collectives"], measured["hosts"])


def _slow_ranks(products: Sequence[float], hosts: Sequence[str]) -> Iterator[Finding]:
    usual = median_high(products)
    for rank, rate in enumerate(products):
        if rate < SLOW_RANK * usual:
            what = f"multiplies {rate / 1e9:,.1f} GFLOP/s, and the middle rank {usual / 1e9:,.1f}"
            remedy = "look for other work on that device, its temperature and clock"
            remedy += f"; or leave the node out (sbatch --exclude={hosts[rank]})"
            yield Finding(RANKS, WARNS, f"rank {rank} on {hosts[rank]}", what, remedy)


def _slow_links(links: Sequence[tuple[int, int, float]], nodes: Sequence[str]) -> Iterator[Finding]:
    """A pair by its name; a node whose every link is slow by its own."""
    if len(links) < 3:  # one pair has nothing beside it
        return
    usual = median(rate for _, _, rate in links)
    slow = [(one, other, rate) for one, other, rate in links if rate < SLOW_LINK * usual]
    of_node: dict[int, set[int]] = defaultdict(set)
    for one, other, _ in slow:
        of_node[one].add(other)
        of_node[other].add(one)
    partners: dict[int, set[int]] = defaultdict(set)
    for one, other, _ in links:
        partners[one].add(other)
    bad = {node for node, others in of_node.items() if len(others) == len(partners[node]) > 1}
    remedy = "look at that cable, switch port or virtual machine's limit (ethtool, iperf3)"
    for node in sorted(bad):
        worst = min(rate for one, other, rate in slow if node in (one, other))
        what = f"all its links are slow: {_mega(worst)} at worst, and most links carry {_mega(usual)}"
        yield Finding(LINKS, WARNS, nodes[node], what, f"{remedy}; or leave the node out (--exclude={nodes[node]})")
    for one, other, rate in slow:
        if one not in bad and other not in bad:
            what = f"carries {_mega(rate)}, and most links {_mega(usual)}"
            yield Finding(LINKS, WARNS, f"{nodes[one]} → {nodes[other]}", what, remedy)


def _slow_groups(rates: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Iterator[Finding]:
    """Among the groups of one axis, by the largest message; each group once, with its slowest collective."""
    largest = max((rate["size"] for rate in rates), default=0)
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for rate in rates:
        if rate["size"] == largest:
            alike[rate["axis"], rate["kind"]].append(rate)
    worst: dict[tuple[str, tuple[int, ...]], tuple[float, str, str]] = {}
    for (axis, kind), groups in alike.items():
        usual = median_high(largest / rate["seconds"] for rate in groups)
        for rate in groups:
            found, members = largest / rate["seconds"], tuple(rate["group"])
            if found < SLOW_GROUP * usual:
                what = f"its {kind} takes {_mega(found)}, and that of the middle group {_mega(usual)}"
                share, _, _ = worst.get((axis, members), (1.0, "", ""))
                if found / usual < share:
                    worst[axis, members] = found / usual, what, ", ".join(dict.fromkeys(hosts[r] for r in members))
    for (axis, members), (_, what, nodes) in worst.items():
        where = f"{axis} group of ranks {', '.join(map(str, members))} ({nodes})"
        yield Finding(GROUPS, WARNS, where, what, "look at the slow ranks and links of its nodes first")


def _mega(rate: float) -> str:
    return f"{rate / 1e6:,.1f} MB/s"


# Latency and bandwidth of the collectives that a step uses, over the process groups of each parallel axis.
#
# `python -m benchmarks collectives` prints the rates, and scripts/doctor.py compares them between groups.
# `scripts/plan.py --calibrate` measures how much a collective slows down ranks that compute
# (tools/plan/measure_machine.py).


# What a step sends along each axis (docs/guides/tools/traffic.md).
KINDS = {
    "tp": ("all_reduce", "all_gather", "reduce_scatter"),
    "dp": ("all_reduce", "all_gather", "reduce_scatter"),
    "pp": ("send_recv",),
}
RATES_FILE = "collectives.json"
WARM_UP, LEAST_CALLS, MOST_CALLS, SECONDS_PER_SIZE = 2, 3, 1000, 0.5


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
            write_atomically(Path(folder) / RATES_FILE, json.dumps([asdict(rate) for rate in slowest.values()]))


def read_rates(folder: Path) -> Iterator[Rate]:
    """What ``measure_collectives`` wrote."""
    for fields in json.loads((folder / RATES_FILE).read_text(encoding="utf-8")):
        yield Rate(**fields | {"group": ()})


def rates_of_groups(
    sizes: Sequence[int],
    synchronize: Callable[[], object],
    device: torch.device,
    seconds: float = SECONDS_PER_SIZE,
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
    seconds: float = SECONDS_PER_SIZE,
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


# How fast a collective is, counted as the NCCL tests do.


@dataclass(frozen=True)
class Rate:
    """One collective of one size in one group."""

    axis: str
    kind: str
    ranks: int
    size: int
    """Bytes, as the NCCL tests count: inputs of all_reduce and reduce_scatter, outputs of all_gather, messages."""
    seconds: float
    """Of a call, on the slowest rank; a median."""
    group: tuple[int, ...] = ()
    """The group's ranks; empty for the slowest of all groups."""

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
