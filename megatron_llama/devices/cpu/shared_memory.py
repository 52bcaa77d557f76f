"""Collectives between ranks of one machine through memory that they share; gloo copies the same bytes through sockets.

``SharedMemoryGroup`` is a gloo process group whose all-reduce, all-gather and reduce-scatter go through shared memory
where all its ranks can map it. Everything else, and every group that reaches another machine, is gloo's.

A rank writes its part into its own slot, tells the others, and reads theirs. Results are gloo's to the bit, so that a
run on one machine and one on several agree: sums of floats of more than two ranks, whose order gloo chooses, stay with
it.
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
"""Of the memory, in /proc."""
_MOST_RANKS = 256
"""A rank's number is a byte. There are hardly more cores."""
_MOST_SLOT, _MOST_MEMORY = 2 << 20, 64 << 20
"""Bytes that a rank shows the others at a time, which cores' common cache can hold; and of all slots of a group."""


def _slot(size: int) -> int:
    """Bytes of a slot in a group of ``size`` ranks."""
    return min(_MOST_SLOT, _MOST_MEMORY // (2 * size))


def register(name: str) -> None:
    """Makes the groups known to torch.distributed as a backend of this name."""
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, SharedMemoryGroup, devices=["cpu"])


class PeerLost(RuntimeError):
    """A rank ended while this one waited for it. Worded as gloo words it, which launch/rank_process.py looks for."""


class _Opened(NamedTuple):
    """What the ranks of a group share. None of it has a name in a file system: rank 0 makes it, and the others open it
    through /proc/PID/fd. So nothing is left behind however a rank ends, and a small /dev/shm does not matter."""

    memory: FileIO
    """Two halves of a slot for each rank."""
    inboxes: list[FileIO]
    """A pipe for each rank, into which the others write their number."""


class _Channel:
    """Memory and messages between the ranks of a group."""

    def __init__(self, opened: _Opened, processes: list[int], rank: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, len(processes)
        self.slot = _slot(self.size)
        # Two halves in turn: while some ranks still read one, others may write their next message into the other.
        self._memory = mmap.mmap(opened.memory.fileno(), 2 * self.size * self.slot)
        self._turn = 0
        self._inbox = opened.inboxes[rank]
        self._others = [inbox for peer, inbox in enumerate(opened.inboxes) if peer != rank]
        self._arrived: Counter[int] = Counter()  # messages of each rank that nobody has waited for yet
        self._timeout = timeout.total_seconds()
        self._poll = select.poll()
        self._poll.register(self._inbox, select.POLLIN)
        # Readable when the process has ended.
        self._ends = {peer: FileIO(os.pidfd_open(pid)) for peer, pid in enumerate(processes) if peer != rank}
        for end in self._ends.values():
            self._poll.register(end, select.POLLIN)

    def next_slots(self, dtype: torch.dtype) -> Tensor:
        """All ranks' slots [ranks, elements] for the next message."""
        self._turn = 1 - self._turn
        half = self.size * self.slot
        slots = torch.frombuffer(self._memory, dtype=dtype, count=half // dtype.itemsize, offset=self._turn * half)
        return slots.view(self.size, -1)

    def meet(self) -> None:
        """Returns when all ranks have called it: what they wrote into their slots before can be read.

        Raises PeerLost if a rank has ended instead, and RuntimeError after the group's timeout.
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
            self._sleep(missing, deadline)

    def _sleep(self, missing: set[int], deadline: float) -> None:
        """Until there is a message."""
        left = deadline - time.monotonic()
        if left <= 0:
            waited = f"wait timeout of {self._timeout:.0f} s"
            raise RuntimeError(f"{waited}: rank {min(missing)} of a group of {self.size} did not come to a collective")
        ready = {descriptor for descriptor, _ in self._poll.poll(min(left, 3600) * 1000)}
        if self._inbox.fileno() in ready:
            return
        for peer, end in self._ends.items():
            if end.fileno() in ready and peer in missing:
                raise PeerLost(f"Connection closed by peer: rank {peer} of a group of {self.size} has ended")
            if end.fileno() in ready:  # after its last message
                self._poll.unregister(end)


def _open_channel(store: dist.Store, rank: int, size: int, timeout: timedelta) -> _Channel | None:
    """The channel of a group, or None where its ranks can't share memory: on other machines, in other containers, on
    another system than Linux. A collective: all ranks get one, or none does."""
    # The store may remember groups of the same name that these processes have ended since.
    earlier = (store.add("joined", 1) - 1) // size
    store = dist.PrefixStore(str(earlier), store)
    if rank == 0:
        token = secrets.token_hex(16)
        opened = _make(size, token)
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
    channel.meet()  # now all have mapped it
    return channel


def _make(size: int, token: str) -> _Opened | None:
    """New memory that begins with ``token``, and inboxes; None where the system has none of that to give."""
    try:
        memory = FileIO(os.memfd_create(_NAME), "r+")
        os.posix_fallocate(
            memory.fileno(), 0, 2 * size * _slot(size)
        )  # a lack of memory shows here, not as a bus error
        memory.write(token.encode())
        pipes = [[FileIO(end, mode) for end, mode in zip(os.pipe(), "rw", strict=True)] for _ in range(size)]
        # An end of a pipe that is opened anew reads and writes.
        return _Opened(memory, [_reopen(os.getpid(), write.fileno()) for _, write in pipes])
    except (OSError, AttributeError):
        return None


def _open(where: list[int], token: str) -> _Opened | None:
    """The same, opened by another rank; None if it is not within reach."""
    if not where:
        return None
    process, first, *others = where
    try:
        # On another machine, or in another container, the process is a stranger, whose files nobody may read.
        if not os.readlink(f"/proc/{process}/fd/{first}").startswith(f"/memfd:{_NAME}"):
            return None
        memory = _reopen(process, first)
        if memory.read(len(token)) != token.encode():
            return None
        return _Opened(memory, [_reopen(process, inbox) for inbox in others])
    except OSError:
        return None


def _reopen(process: int, descriptor: int) -> FileIO:
    path = f"/proc/{process}/fd/{descriptor}"
    return FileIO(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC), "r+")


class SharedMemoryGroup(dist.ProcessGroup):
    """See above. The memory is set up by the first collective that can use it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the only constructor for classes in Python
        # A group that torch made itself. Methods that a class in Python inherits keep the interpreter's lock while they
        # wait for gloo's thread, which wants it too.
        self._gloo: Any = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        backend._set_sequence_number_for_group()
        for group in (self, self._gloo):
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._rendezvous = dist.PrefixStore("shared_memory", store), timeout
        self._channel: _Channel | None = None
        self._asked = False
        self._numbers = rank, size

    # As torch's, in Python: before 2.13 torch's compiler can't read its own methods in a class that inherits them.
    def rank(self) -> int:
        return self._numbers[0]

    def size(self) -> int:
        return self._numbers[1]

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)  # type: ignore[arg-type]
        self._gloo._set_group_name(name)

    def _channel_for(self, *tensors: Tensor) -> _Channel | None:
        """The channel, if there is one. Strides don't matter, as they may differ between ranks, which must agree."""
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return None
        if not self._asked and 1 < self.size() <= _MOST_RANKS:
            store, timeout = self._rendezvous
            self._channel = _open_channel(store, self.rank(), self.size(), timeout)
        self._asked = True
        return self._channel

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """In place: the sum, or another combination, of all ranks' tensors."""
        opts = opts or AllreduceOptions()
        combine = _combination(opts, tensors[0], self.size())
        channel = self._channel_for(*tensors) if combine else None
        if channel is None or combine is None:
            work: dist.Work = self._gloo.allreduce(tensors, opts)
            return work
        for tensor in tensors:
            _all_reduce(tensor.detach(), self.group_name, combine)
        return _done(tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """[n] of each rank to [ranks * n]."""
        channel = self._channel_for(output, input)
        if channel is None:
            work: dist.Work = self._gloo._allgather_base(output, input, opts or AllgatherOptions())
            return work
        _all_gather(output.detach(), input.detach(), self.group_name)
        return _done([output])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """The sum of all ranks' [ranks * n], of which each gets its [n]."""
        opts = opts or ReduceScatterOptions()
        combine = _combination(opts, input, self.size())
        channel = self._channel_for(output, input) if combine else None
        if channel is None or combine is None:
            work: dist.Work = self._gloo._reduce_scatter_base(output, input, opts)
            return work
        _reduce_scatter(output.detach(), input.detach(), self.group_name, combine)
        return _done([output])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """As ``all_gather_single``, for several tensors. In compiled graphs each of them comes this way."""
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input, opts).wait()
        return _done(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """As ``reduce_scatter_single``, for several tensors. In compiled graphs each of them comes this way."""
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, opts).wait()
        return _done(outputs)

    # What torch before 2.13 calls them.
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
    """The name of torch's function that combines two ranks' values; None where gloo has to."""
    if tensor.dtype == torch.bool or tensor.is_complex():
        return None
    if ranks > 2 and tensor.is_floating_point() and opts.reduceOp == dist.ReduceOp.SUM:
        return None  # the order of the sum matters
    return next((name for operation, name in _COMBINE if opts.reduceOp == operation), None)


def _combine(parts: list[Tensor], combine: str, out: Tensor) -> None:
    """The ranks' values as one in ``out``, which may be the first of them."""
    getattr(torch, combine)(*parts[:2], out=out)
    for part in parts[2:]:
        getattr(torch, combine)(out, part, out=out)


def _channel_of(group: str) -> _Channel:
    found = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    assert isinstance(found, SharedMemoryGroup) and found._channel is not None
    return found._channel


def _pieces(total: int, most: int) -> Iterator[slice]:
    return (slice(start, min(start + most, total)) for start in range(0, total, most))


# Operators, as torch's own collectives are: profilers and whoever counts traffic see them, with their group's name.


@torch.library.custom_op("shared_memory::all_reduce_", mutates_args=("tensor",))
def _all_reduce(tensor: Tensor, group: str, combine: str) -> None:
    """Each rank combines its part of a piece for all."""
    channel, flat = _channel_of(group), tensor.reshape(-1)
    size, rank = channel.size, channel.rank
    for piece in _pieces(flat.numel(), channel.slot // flat.element_size()):
        own = flat[piece]
        count = own.numel()
        slots = channel.next_slots(flat.dtype)[:, :count]
        slots[rank].copy_(own)
        channel.meet()
        parts = [slice(count * each // size, count * (each + 1) // size) for each in range(size)]
        mine = parts[rank]
        # Into its own slot: until they meet again, nobody else reads this part of it.
        own_slot, others = slots[rank, mine], [slot[mine] for each, slot in enumerate(slots) if each != rank]
        _combine([own_slot, *others], combine, own_slot)
        channel.meet()
        for slot, part in zip(slots, parts, strict=True):
            own[part].copy_(slot[part])
    if not tensor.is_contiguous():  # ``flat`` is a copy then
        tensor.copy_(flat.view(tensor.shape))


@torch.library.custom_op("shared_memory::all_gather_", mutates_args=("output",))
def _all_gather(output: Tensor, input: Tensor, group: str) -> None:
    channel, own = _channel_of(group), input.reshape(-1)
    whole = output.view(channel.size, -1)
    for piece in _pieces(own.numel(), channel.slot // own.element_size()):
        slots = channel.next_slots(own.dtype)[:, : piece.stop - piece.start]
        slots[channel.rank].copy_(own[piece])
        channel.meet()
        whole[:, piece].copy_(slots)


@torch.library.custom_op("shared_memory::reduce_scatter_", mutates_args=("output",))
def _reduce_scatter(output: Tensor, input: Tensor, group: str, combine: str) -> None:
    channel, flat = _channel_of(group), output.view(-1)
    size, rank = channel.size, channel.rank
    by_rank = input.reshape(size, -1)
    for piece in _pieces(flat.numel(), channel.slot // flat.element_size() // size):
        count = piece.stop - piece.start
        slots = channel.next_slots(flat.dtype)[:, : size * count].view(size, size, count)  # from, to, elements
        for peer in range(size):
            if peer != rank:
                slots[rank, peer].copy_(by_rank[peer, piece])
        channel.meet()
        parts = [by_rank[rank, piece] if each == rank else slots[each, rank] for each in range(size)]
        _combine(parts, combine, flat[piece])
