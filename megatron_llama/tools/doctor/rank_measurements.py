"""What each rank measures for the doctor: a product on its own device, the collectives of its groups, and the links
between the nodes."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_llama.devices import Device, get_device
from megatron_llama.devices.products import product_rate
from megatron_llama.parallel import process_groups
from megatron_llama.plan import Plan
from megatron_llama.system import phase
from megatron_llama.system.files import write_atomically
from megatron_llama.tools.doctor.collectives import rates_of_groups
from megatron_llama.topology import build_topology

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
    with process_groups(plan, build_topology(plan, rank), device, torch_device):

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
