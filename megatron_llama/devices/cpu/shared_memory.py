"""Collectives through shared memory between ranks of one machine. gloo copies the same bytes through sockets.

``SharedMemoryGroup`` is a gloo process group whose all-reduce, all-gather and reduce-scatter use shared memory if all
ranks can map it. Other collectives, and groups over several machines, use gloo.

A rank writes its part into its slot, notifies the other ranks and reads their slots. Results are bitwise equal to
gloo's, so that runs on one and on several machines agree. Floating-point sums over more than two ranks depend on gloo's
order, so they use gloo.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import FileIO
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    ReduceScatterOptions,
    _create_work_from_future,
)
from torch.futures import Future

_NAME = "megatron_llama"
"""Name of the memory in /proc."""
_MOST_RANKS = 256
"""Most ranks of a group: a rank's number is a byte."""
_MOST_SLOT, _MOST_MEMORY = 2 << 20, 64 << 20
"""Most bytes of a slot, which a shared cache can hold, and of all slots of a group."""


def _slot(size: int) -> int:
    """Return the bytes of a slot in a group of ``size`` ranks."""
    return min(_MOST_SLOT, _MOST_MEMORY // (2 * size))


def register(name: str) -> None:
    """Register the groups with torch.distributed as a backend of this name."""
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, SharedMemoryGroup, devices=["cpu"])


class PeerLost(RuntimeError):
    """A rank ended while another rank waited for it. launch/failure_cause.py matches the message, in gloo's words."""


class _Opened(NamedTuple):
    """Shared files of a group, without names in a file system: rank 0 creates them, others open them by /proc/PID/fd.

    So nothing is left behind when a rank ends, and a small /dev/shm does not matter.
    """

    memory: FileIO
    """Two halves, each with a slot per rank."""
    inboxes: list[FileIO]
    """A pipe per rank, into which the other ranks write their numbers."""


class _Channel:
    """Shared memory and messages between the ranks of a group."""

    def __init__(self, opened: _Opened, processes: list[int], rank: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, len(processes)
        self.slot = _slot(self.size)
        # Halves alternate: while some ranks still read one half, others may write the next message into the other.
        self._memory = mmap.mmap(opened.memory.fileno(), 2 * self.size * self.slot)
        self._turn = 0
        self._inbox = opened.inboxes[rank]
        self._others = [inbox for peer, inbox in enumerate(opened.inboxes) if peer != rank]
        self._arrived: Counter[int] = Counter()  # received messages of each rank, not yet waited for
        self._timeout = timeout.total_seconds()
        self._poll = select.poll()
        self._poll.register(self._inbox, select.POLLIN)
        # A pidfd is readable when the process has ended.
        self._ends = {peer: FileIO(os.pidfd_open(pid)) for peer, pid in enumerate(processes) if peer != rank}
        for end in self._ends.values():
            self._poll.register(end, select.POLLIN)

    def next_slots(self, dtype: torch.dtype) -> Tensor:
        """Return all ranks' slots [ranks, elements] for the next message."""
        self._turn = 1 - self._turn
        half = self.size * self.slot
        slots = torch.frombuffer(self._memory, dtype=dtype, count=half // dtype.itemsize, offset=self._turn * half)
        return slots.view(self.size, -1)

    def barrier(self) -> None:
        """Wait until all ranks have called it. Their earlier writes to slots are then visible.

        Raises:
            PeerLost: a rank has ended.
            RuntimeError: the group's timeout has passed.
        """
        for inbox in self._others:
            inbox.write(bytes([self.rank]))
        missing = set(self._ends)
        deadline = time.monotonic() + self._timeout
        while True:
            self._arrived.update(self._inbox.read(4096) or b"")
            for peer in [peer for peer in missing if self._arrived[peer]]:
                self._arrived[peer] -= 1
                missing.discard(peer)
            if not missing:
                return
            self._wait_for_message(missing, deadline)

    def _wait_for_message(self, missing: set[int], deadline: float) -> None:
        """Wait until there is a message."""
        left = deadline - time.monotonic()
        if left <= 0:
            waited = f"wait timeout of {self._timeout:.0f} s"
            raise RuntimeError(f"{waited}: rank {min(missing)} of a group of {self.size} did not join a collective")
        ready = {descriptor for descriptor, _ in self._poll.poll(min(left, 3600) * 1000)}
        if self._inbox.fileno() in ready:
            return
        for peer, end in self._ends.items():
            if end.fileno() in ready and peer in missing:
                raise PeerLost(f"Connection closed by peer: rank {peer} of a group of {self.size} has ended")
            if end.fileno() in ready:  # after its last message
                self._poll.unregister(end)


def _open_channel(store: dist.Store, rank: int, size: int, timeout: timedelta) -> _Channel | None:
    """Open the channel of a group. A collective.

    Returns None on all ranks if they cannot share memory: on several machines, in several containers, not on Linux.
    """
    # The store may hold keys of earlier groups of the same name.
    store = dist.PrefixStore(str((store.add("joined", 1) - 1) // size), store)
    if rank == 0:
        token = secrets.token_hex(16)
        opened = _create(size, token)
        where = [] if opened is None else [os.getpid(), *(file.fileno() for file in (opened.memory, *opened.inboxes))]
        store.set("where", " ".join(map(str, where)))
        store.set("token", token)
    else:
        opened = _open([int(number) for number in store.get("where").split()], store.get("token").decode())
    store.set(f"process{rank}", str(os.getpid() if opened else 0))
    processes = [int(store.get(f"process{each}")) for each in range(size)]
    if opened is None or not all(processes):
        return None
    channel = _Channel(opened, processes, rank, timeout)
    channel.barrier()  # all ranks have mapped the memory
    return channel


def _create(size: int, token: str) -> _Opened | None:
    """Create memory that begins with ``token``, and inboxes. Returns None if the system does not support them."""
    try:
        memory = FileIO(os.memfd_create(_NAME), "r+")
        os.posix_fallocate(
            memory.fileno(), 0, 2 * size * _slot(size)
        )  # reports lack of memory, which would be a bus error later
        memory.write(token.encode())
        pipes = [[FileIO(end, mode) for end, mode in zip(os.pipe(), "rw", strict=True)] for _ in range(size)]
        # A reopened end of a pipe can be read and written.
        return _Opened(memory, [_reopen(os.getpid(), write.fileno()) for _, write in pipes])
    except (OSError, AttributeError):
        return None


def _open(where: list[int], token: str) -> _Opened | None:
    """Open rank 0's files on another rank. Returns None if they are not accessible."""
    if not where:
        return None
    process, first, *others = where
    try:
        # On another machine or in another container, the number belongs to another process.
        if not os.readlink(f"/proc/{process}/fd/{first}").startswith(f"/memfd:{_NAME}"):
            return None
        memory = _reopen(process, first)
        if memory.read(len(token)) != token.encode():
            return None
        return _Opened(memory, [_reopen(process, inbox) for inbox in others])
    except OSError:
        return None


def _reopen(process: int, descriptor: int) -> FileIO:
    return FileIO(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC), "r+")


class SharedMemoryGroup(dist.ProcessGroup):
    """gloo process group with collectives in shared memory. The first collective that can use the memory creates it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the only constructor for Python subclasses
        # A separate group of torch's class: inherited methods of a Python subclass hold the GIL while they wait for
        # gloo's thread, which needs it too.
        self._gloo: Any = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        backend._set_sequence_number_for_group()
        for group in (self, self._gloo):
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._rendezvous = dist.PrefixStore("shared_memory", store), timeout
        self._channel: _Channel | None = None
        self._channel_opened = False
        self._numbers = rank, size

    # Overridden in Python, because before 2.13 Dynamo cannot trace inherited C++ methods.
    def rank(self) -> int:
        return self._numbers[0]

    def size(self) -> int:
        return self._numbers[1]

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)  # type: ignore[arg-type]
        self._gloo._set_group_name(name)

    def _shares_memory(self, *tensors: Tensor) -> bool:
        """Open the channel at the first call; return whether it can take the tensors.

        Ranks must agree, so strides, which may differ, are ignored.
        """
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return False
        if not self._channel_opened and 1 < self.size() <= _MOST_RANKS:
            store, timeout = self._rendezvous
            self._channel = _open_channel(store, self.rank(), self.size(), timeout)
        self._channel_opened = True
        return self._channel is not None

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Reduce all ranks' tensors in place."""
        opts = opts or AllreduceOptions()
        combine = _combination(opts, tensors[0], self.size())
        if combine is None or not self._shares_memory(*tensors):
            return self._gloo.allreduce(tensors, opts)  # type: ignore[no-any-return]
        for tensor in tensors:
            _all_reduce(tensor.detach(), self.group_name, combine)
        return _done(tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Gather [n] of each rank to [ranks * n]."""
        if not self._shares_memory(output, input):
            return self._gloo._allgather_base(output, input, opts or AllgatherOptions())  # type: ignore[no-any-return]
        _all_gather(output.detach(), input.detach(), self.group_name)
        return _done([output])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduce-scatter [ranks * n] to [n]."""
        opts = opts or ReduceScatterOptions()
        combine = _combination(opts, input, self.size())
        if combine is None or not self._shares_memory(output, input):
            return self._gloo._reduce_scatter_base(output, input, opts)  # type: ignore[no-any-return]
        _reduce_scatter(output.detach(), input.detach(), self.group_name, combine)
        return _done([output])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """``all_gather_single`` for several tensors. Compiled graphs call it, also for one tensor."""
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input, opts).wait()
        return _done(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """``reduce_scatter_single`` for several tensors. Compiled graphs call it, also for one tensor."""
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, opts).wait()
        return _done(outputs)

    # Names in torch before 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]


def _by_gloo(name: str) -> Callable[..., Any]:
    def method(group: SharedMemoryGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(group._gloo, name)(*args, **kwargs)

    return method


_OTHERS = (
    "all_to_all_single allgather allgather_coalesced allreduce_coalesced alltoall alltoall_base barrier broadcast "
    "gather monitored_barrier recv recv_anysource reduce reduce_scatter scatter send"
)
for _name in _OTHERS.split():
    if hasattr(dist.ProcessGroup, _name):  # some exist in newer versions of torch only
        setattr(SharedMemoryGroup, _name, _by_gloo(_name))


def _done(tensors: list[Tensor]) -> dist.Work:
    future: Future[list[Tensor]] = Future()
    future.set_result(tensors)
    work: dist.Work = _create_work_from_future(future)
    return work


_COMBINE = ((dist.ReduceOp.SUM, "add"), (dist.ReduceOp.MAX, "maximum"), (dist.ReduceOp.MIN, "minimum"))


def _combination(opts: Any, tensor: Tensor, ranks: int) -> str | None:
    """Return the name of torch's function that combines two ranks' values. None: use gloo."""
    if tensor.dtype == torch.bool or tensor.is_complex():
        return None
    if ranks > 2 and tensor.is_floating_point() and opts.reduceOp == dist.ReduceOp.SUM:
        return None  # the result depends on gloo's order
    return next((name for operation, name in _COMBINE if opts.reduceOp == operation), None)


def _combine(parts: list[Tensor], combine: str, out: Tensor) -> None:
    """Combine the ranks' values into ``out``, which may be the first of them."""
    getattr(torch, combine)(*parts[:2], out=out)
    for part in parts[2:]:
        getattr(torch, combine)(out, part, out=out)


def _channel_of(group: str) -> _Channel:
    resolved = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    assert isinstance(resolved, SharedMemoryGroup) and resolved._channel is not None
    return resolved._channel


def _chunks(total: int, most: int) -> Iterator[slice]:
    return (slice(start, min(start + most, total)) for start in range(0, total, most))


# Custom operators with the group's name, so that profilers and traffic counters record them like torch's collectives.


@torch.library.custom_op("shared_memory::all_reduce_", mutates_args=("tensor",))
def _all_reduce(tensor: Tensor, group: str, combine: str) -> None:
    """Reduce chunk by chunk. Each rank combines one part of a chunk for all ranks."""
    channel, flat = _channel_of(group), tensor.reshape(-1)
    size, rank = channel.size, channel.rank
    for span in _chunks(flat.numel(), channel.slot // flat.element_size()):
        chunk = flat[span]
        count = chunk.numel()
        slots = channel.next_slots(flat.dtype)[:, :count]
        slots[rank].copy_(chunk)
        channel.barrier()
        parts = [slice(count * each // size, count * (each + 1) // size) for each in range(size)]
        local = parts[rank]
        # The result goes to this rank's slot: no other rank reads this part of it before the next barrier.
        result, others = slots[rank, local], [slot[local] for each, slot in enumerate(slots) if each != rank]
        _combine([result, *others], combine, result)
        channel.barrier()
        for slot, part in zip(slots, parts, strict=True):
            chunk[part].copy_(slot[part])
    if not tensor.is_contiguous():  # ``flat`` is a copy then
        tensor.copy_(flat.view(tensor.shape))


@torch.library.custom_op("shared_memory::all_gather_", mutates_args=("output",))
def _all_gather(output: Tensor, input: Tensor, group: str) -> None:
    channel, flat = _channel_of(group), input.reshape(-1)
    by_rank = output.view(channel.size, -1)
    for span in _chunks(flat.numel(), channel.slot // flat.element_size()):
        slots = channel.next_slots(flat.dtype)[:, : span.stop - span.start]
        slots[channel.rank].copy_(flat[span])
        channel.barrier()
        by_rank[:, span].copy_(slots)


@torch.library.custom_op("shared_memory::reduce_scatter_", mutates_args=("output",))
def _reduce_scatter(output: Tensor, input: Tensor, group: str, combine: str) -> None:
    channel, flat = _channel_of(group), output.view(-1)
    size, rank = channel.size, channel.rank
    by_rank = input.reshape(size, -1)
    for span in _chunks(flat.numel(), channel.slot // flat.element_size() // size):
        count = span.stop - span.start
        slots = channel.next_slots(flat.dtype)[:, : size * count].view(size, size, count)  # from, to, elements
        for peer in range(size):
            if peer != rank:
                slots[rank, peer].copy_(by_rank[peer, span])
        channel.barrier()
        parts = [by_rank[rank, span] if each == rank else slots[each, rank] for each in range(size)]
        _combine(parts, combine, flat[span])
