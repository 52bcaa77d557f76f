"""All collectives that torch and the project use, in two ranks of NCCL. Raises if a result is wrong.

The ranks run this module. Values come from the host and are compared on the host, because kernels compute nothing.
"""

from __future__ import annotations

import os
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group, _coalescing_manager, _get_default_store

LENGTH = 700_001  # several chunks of the shared memory, the last one short
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
MISMATCH = "MISMATCH"
"""Variable that makes rank 1 call a different collective."""


def numbers(rank: int, dtype: torch.dtype = torch.float32, length: int = LENGTH) -> torch.Tensor:
    """Return a rank's numbers, small enough for each dtype."""
    return (torch.arange(length) % 100 + 10 * rank).to(dtype)


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0)


def empty(length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(length, dtype=dtype, device="cuda")


def reductions(rank: int, size: int) -> None:
    for dtype in DTYPES:
        inputs = [numbers(number, dtype) for number in range(size)]
        total = inputs[rank].cuda()
        dist.all_reduce(total)
        check(total, sum(inputs[1:], inputs[0]))
    inputs = [numbers(number) for number in range(size)]
    for operation, expected in (
        (dist.ReduceOp.MAX, torch.stack(inputs).amax(0)),
        (dist.ReduceOp.MIN, torch.stack(inputs).amin(0)),
        (dist.ReduceOp.AVG, torch.stack(inputs).mean(0)),
        (dist.ReduceOp.PRODUCT, torch.stack(inputs).prod(0)),
        (dist._make_nccl_premul_sum(0.5), torch.stack(inputs).sum(0) / 2),  # type: ignore[attr-defined]
    ):
        total = inputs[rank].cuda()
        dist.all_reduce(total, op=operation)
        check(total, expected)
    total = inputs[rank].cuda()
    dist.reduce(total, dst=1)
    check(total, sum(inputs) if rank == 1 else inputs[rank])
    part = empty(LENGTH)
    dist.reduce_scatter_tensor(part, torch.cat([numbers(rank) + 3 * number for number in range(size)]).cuda())
    check(part, sum(numbers(number) + 3 * rank for number in range(size)))  # type: ignore[arg-type]


def movements(rank: int, size: int) -> None:
    inputs = [numbers(number) for number in range(size)]
    received = inputs[rank].cuda() if rank == 1 else empty(LENGTH)
    dist.broadcast(received, src=1)
    check(received, inputs[1])
    gathered = empty(size * LENGTH)
    dist.all_gather_into_tensor(gathered, inputs[rank].cuda())
    check(gathered, torch.cat(inputs))
    exchanged = empty(2 * size)
    dist.all_to_all_single(exchanged, (torch.arange(2 * size, dtype=torch.float32) + 100 * rank).cuda())
    check(exchanged, torch.cat([torch.tensor([2.0 * rank, 2.0 * rank + 1]) + 100 * n for n in range(size)]))
    uneven = empty(size * (rank + 1))
    sent = torch.arange(float(sum(range(1, size + 1)))) + 100 * rank
    dist.all_to_all_single(uneven, sent.cuda(), [rank + 1] * size, list(range(1, size + 1)))
    start = sum(range(1, rank + 1))
    check(uneven, torch.cat([torch.arange(start, start + rank + 1.0) + 100 * number for number in range(size)]))


def messages(rank: int, size: int) -> None:
    """Both ranks send first, alone and in groups, which must not block either."""
    peer = 1 - rank
    received = empty(LENGTH)
    calls = [dist.P2POp(dist.isend, numbers(rank).cuda(), peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    check(received, numbers(peer))
    if rank == 0:
        dist.send(numbers(7).cuda(), 1)
    else:
        dist.recv(received, 0)
        check(received, numbers(7))


def coalesced(rank: int, size: int) -> None:
    totals = [numbers(rank, length=length).cuda() for length in (3, 5, LENGTH)]
    with _coalescing_manager(device=torch.device("cuda", rank)):
        for total in totals:
            dist.all_reduce(total)
    for total in totals:
        check(total, sum(numbers(number, length=len(total)) for number in range(size)))  # type: ignore[arg-type]


def objects(rank: int, size: int) -> None:
    values: list[Any] = [{"text": "x" * 10}, ["longer " * 1000]]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, values[rank])
    assert gathered == values
    shared = [values[0], values[1]] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, src=0)
    assert shared == values
    at_root: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(values[rank], at_root, dst=1)
    assert at_root == (values if rank == 1 else None)


def abort(rank: int) -> None:
    """A rank that waits for its peer is released by an abort."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(1).cuda(), group=group)
    torch.cuda.synchronize()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1).cuda(), group=group, async_op=True)
        assert not work.is_completed()
    _abort_process_group(group)  # type: ignore[arg-type]
    torch.cuda.synchronize()


def finalize(rank: int) -> None:
    """The end of a group waits for all of its ranks."""
    store = _get_default_store()
    if rank == 0:
        thread = Thread(target=dist.destroy_process_group)
        thread.start()
        store.set("waiting", "")
        thread.join()
        store.set("ended", "")
    else:
        store.wait(["waiting"])
        assert not store.check(["ended"])
        dist.destroy_process_group()


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    if os.environ.get(MISMATCH):
        value = torch.ones(4).cuda()
        dist.broadcast(value, 0) if rank == 1 else dist.all_reduce(value)
        torch.cuda.synchronize()
        return
    for part in (reductions, movements, messages, coalesced, objects):
        part(rank, size)
    abort(rank)
    finalize(rank)
    print(f"rank {rank} done", flush=True)


if __name__ == "__main__":
    main()
