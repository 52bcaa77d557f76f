"""Collectives and pair transfers through shared memory, in chunks, bitwise equal to gloo's; others use gloo."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.profiler import ProfilerActivity, profile

import tests.oracle
from megatron_llama.devices import hpu
from megatron_llama.devices.cpu import device as cpu
from megatron_llama.devices.cpu import shared_memory
from megatron_llama.devices.cpu.shared_memory import SharedMemoryGroup
from megatron_llama.devices.cuda import device as cuda
from megatron_llama.devices.neuron.pair_transfers import PairTransfers, point_to_point_works, transfers_context
from megatron_llama.launch.failure_cause import PEER_LOST
from megatron_llama.topology import Grid, Topology
from tests.devices.helpers import FAKES
from tests.oracle import CPU, TOLERANCE, oracle, run_layout, worst
from tests.ranks import RankFailed, run_ranks
from tests.rows import each_layout

SLOT = 240
"""Bytes: divisible by the sizes of all dtypes and by 3 ranks, so that a test's tensors need several messages."""


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's tensor, of integers whose sum is exact in any dtype and order."""
    return torch.randint(-40, 40, (size,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).double().sum(0).to(tensors[0].dtype)


def _every_collective(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert isinstance(group, SharedMemoryGroup)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        for size in (1, 7, 400):
            each = [values(other, size * world, dtype) for other in range(world)]
            local = each[rank].clone()
            dist.all_reduce(local)
            assert torch.equal(local, total(each)), (dtype, size)
            part = torch.empty(size, dtype=dtype)
            dist.reduce_scatter_tensor(part, each[rank].clone())
            assert torch.equal(part, total(each)[rank * size : (rank + 1) * size]), (dtype, size)
            whole = torch.empty(size * world, dtype=dtype)
            dist.all_gather_into_tensor(whole, each[rank][:size], async_op=True).wait()
            assert torch.equal(whole, torch.cat([other[:size] for other in each])), (dtype, size)
    largest = values(rank, 50, torch.float32)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert torch.equal(largest, torch.stack([values(other, 50, torch.float32) for other in range(world)]).amax(0))
    # Some ranks' tensors may be strided where others' are not.
    strided = torch.arange(6).view(3, 2).t() if rank else torch.arange(6).view(3, 2).t().contiguous()
    dist.all_reduce(strided)
    assert torch.equal(strided, torch.arange(6).view(3, 2).t() * world)
    assert group._channel is not None


@pytest.mark.parametrize("world", [2, 3])
def test_every_collective(world: int) -> None:
    with patch.object(shared_memory, "_MOST_SLOT", SLOT):
        run_ranks(_every_collective, world, world)


def _compiled_blocks(rank: int) -> None:
    """torch hands each gather and scatter of a graph to the collectives for several tensors."""
    group, alone = dist.group.WORLD, torch.arange(6.0).view(2, 3)
    local = alone + rank
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        summed = functional.wait_tensor(functional.all_reduce(local, "sum", group))
        whole = functional.wait_tensor(functional.all_gather_tensor(local, 0, group))
        part = functional.wait_tensor(functional.reduce_scatter_tensor(local, "sum", 0, group))
        both = functional.all_gather_into_tensor_coalesced([local, local[:1]], group)
        gathered, first_rows = (functional.wait_tensor(each) for each in both)
    assert torch.equal(summed, 2 * alone + 1) and torch.equal(part, summed[rank : rank + 1])
    assert torch.equal(whole, torch.cat([alone, alone + 1])) and torch.equal(gathered, whole)
    assert torch.equal(first_rows, torch.stack([alone[0], alone[0] + 1]))
    names = Counter(event.name for event in seen.events())
    assert not any("gloo" in name for name in names), names
    assert [names[f"shared_memory::{name}_"] for name in ("all_reduce", "all_gather", "reduce_scatter")] == [1, 3, 1]


def _same_bits(rank: int, world: int) -> None:
    """Results of sums through shared memory and through gloo, as between machines."""
    gloo = dist.new_group(backend="gloo")
    for dtype in (torch.float32, torch.bfloat16):
        local = torch.randn(5000, generator=torch.Generator().manual_seed(rank)).to(dtype)
        both = [local.clone(), local.clone()]
        for group, tensor in zip((None, gloo), both, strict=True):
            dist.all_reduce(tensor, group=group)
        assert torch.equal(*both)
        parts = [torch.empty(5000 // world, dtype=dtype) for _ in range(2)]
        for group, part in zip((None, gloo), parts, strict=True):
            dist.reduce_scatter_tensor(part, local[: 5000 // world * world].clone(), group=group)
        assert torch.equal(*parts)


@pytest.mark.parametrize("world", [2, 3])
def test_sums_are_gloos_to_the_bit(world: int) -> None:
    run_ranks(_same_bits, world, world)


def _other_collectives_by_gloo(rank: int) -> None:
    product = torch.tensor([rank + 2.0])
    dist.all_reduce(product, op=dist.ReduceOp.PRODUCT)
    assert product.item() == 6
    flags = torch.tensor([rank == 0])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    assert flags.item()
    received = torch.zeros(3)
    work = dist.isend(torch.ones(3), 1) if rank == 0 else dist.irecv(received, 0)
    work.wait()
    assert rank == 0 or received.sum() == 3
    shared: list[Any] = [rank * 11]
    dist.broadcast_object_list(shared, 1)
    assert shared == [11]
    assert getattr(dist.group.WORLD, "_channel", None) is None


def _memory_out_of_reach(rank: int) -> None:
    def refused(*_: int) -> FileIO:
        raise PermissionError

    _sums_by_gloo(rank, refused)


def _memory_of_a_stranger(rank: int) -> None:
    """The address of rank 0 has another run's memory, as on another machine."""
    _sums_by_gloo(rank, lambda *_: FileIO("/dev/zero", "r+"))


def _file_of_a_stranger(rank: int) -> None:
    """A file that is no memory is not even opened."""

    def opened(*_: int) -> FileIO:
        raise AssertionError

    with patch.object(os, "readlink", lambda path: "pipe:[4711]"):
        _sums_by_gloo(rank, opened)


def _sums_by_gloo(rank: int, reopen: Callable[..., FileIO]) -> None:
    total = torch.ones(2)
    with patch.object(shared_memory, "_reopen", reopen if rank == 1 else shared_memory._reopen):
        dist.all_reduce(total)
    assert total.tolist() == [2, 2]
    assert dist.group.WORLD._channel is None  # type: ignore[union-attr]


def _slow_reader(rank: int) -> None:
    """A message waits for its readers."""
    dist.all_reduce(torch.ones(1))
    channel = dist.group.WORLD._channel  # type: ignore[union-attr]
    barrier = channel.barrier

    def late() -> None:
        barrier()
        time.sleep(0.05 * rank)  # rank 0 writes its next message meanwhile

    actual = torch.empty(3, 2)
    with patch.object(channel, "barrier", late):
        for number, row in enumerate(actual):
            dist.all_gather_into_tensor(row, torch.tensor([float(number)]))
    assert actual.tolist() == [[0, 0], [1, 1], [2, 2]]


def _dies(rank: int) -> None:
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os._exit(9)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        assert PEER_LOST.search(str(error)), error
        raise


def test_a_rank_that_died_is_reported_at_once() -> None:
    with pytest.raises(RankFailed, match="rank 1 of a group of 2 has ended"):
        run_ranks(_dies, 2, timeout=60)


def _end_after_the_last_collective(rank: int) -> None:
    dist.all_reduce(torch.ones(1))  # the last message is not lost
    if rank == 0:
        time.sleep(0.2)


def _traced_by_dynamo(rank: int) -> None:
    """One graph has all collectives: Dynamo traces methods of torch's groups and Python methods of other groups."""
    group = dist.group.WORLD

    @torch.compile(backend="eager", fullgraph=True)
    def all_of(x: torch.Tensor) -> torch.Tensor:
        whole = x.new_empty(group.size() * x.numel())
        dist.all_gather_into_tensor(whole, x, group=group)
        return whole - group.rank()

    assert all_of(torch.full((1,), float(rank))).tolist() == [-rank, 1 - rank]


def _wait_for_a_rank(rank: int) -> None:
    dist.all_reduce(torch.ones(1))
    channel = dist.group.WORLD._channel  # type: ignore[union-attr]
    if rank == 0:
        channel._timeout = 0.1
        with pytest.raises(RuntimeError, match="wait timeout .* rank 1 of a group of 2"):
            dist.all_reduce(torch.ones(1))
    dist.barrier()  # gloo's: the other rank lives as long


def _many_by_gloo(_: int) -> None:
    """Gloo and the interpreter do not wait for each other."""
    for number in range(1000):
        shared: list[Any] = [number]
        dist.broadcast_object_list(shared, 0)


@pytest.mark.parametrize(
    "work",
    [
        *(_compiled_blocks, _other_collectives_by_gloo, _memory_out_of_reach, _memory_of_a_stranger),
        *(_file_of_a_stranger, _slow_reader, _end_after_the_last_collective, _traced_by_dynamo, _wait_for_a_rank),
        _many_by_gloo,
    ],
)
def test_two_ranks(work: Callable[[int], None]) -> None:
    run_ranks(work, 2, timeout=60)


train_rank = tests.oracle.train_rank


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which the stand-ins record their calls; they are made importable."""
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log.jsonl"))
    monkeypatch.syspath_prepend(FAKES)
    return tmp_path / "log.jsonl"


def join_without_point_to_point(rank: int, folder: str) -> None:
    """Replaces gloo by a process group without send and recv."""
    from stand_in.collectives import register

    world = dist.get_world_size()
    dist.barrier()  # who leaves while others still connect breaks their connections
    dist.destroy_process_group()
    register("neuron")
    dist.init_process_group("neuron", store=dist.FileStore(f"{folder}/again", world), rank=rank, world_size=world)


@each_layout(__file__, names="ranks, settings")
def test_the_same_bits(ranks: int, settings: list[str], log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_MOST_RANKS", 1)  # the stand-in's sums are gloo's
    sent = run_layout(ranks, *settings)
    assert not log.exists()
    with tempfile.TemporaryDirectory() as folder:

        def train_without(rank: int, *arguments: object) -> tuple:
            join_without_point_to_point(rank, folder)
            return train_rank(rank, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(cpu.Cpu, "pipeline_transfers", lambda self, topology: transfers_context(topology, CPU))
        monkeypatch.setattr(tests.oracle, "train_rank", train_without)
        reduced = run_layout(ranks, *settings)
        monkeypatch.setattr(tests.oracle, "train_rank", train_rank)
    events = Counter(log.read_text().splitlines())
    assert any("by all-reduce" in event for event in events), "nothing went through the pairs"
    assert sum(n for event, n in events.items() if "send refused" in event) == ranks // 2, "only the probe may try"
    assert set(worst(reduced, sent).values()) == {0.0}
    for name, weight in sent.weights.items():
        assert torch.equal(weight.view(torch.int32), reduced.weights[name].view(torch.int32)), name
    differences = worst(reduced, oracle(*(setting for setting in settings if setting.startswith("model."))))
    assert all(difference <= TOLERANCE for difference in differences.values()), differences


AWKWARD = [0.0, -0.0, 1e-45, -3.0, float("inf"), float("-inf"), 3.4e38, 1 / 3]


def _pass_awkward_numbers(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank 0 sends to rank 1, which sends something else back, both in one exchange."""
    transfers = PairTransfers(Topology(Grid({"tp": 1, "cp": 1, "dp": 1, "pp": 2}), rank))
    local = torch.tensor(AWKWARD, dtype=dtype).flip(0) if rank else torch.tensor(AWKWARD, dtype=dtype)
    local.requires_grad_()
    before = local.detach().clone()
    got = torch.empty(len(AWKWARD), dtype=dtype, requires_grad=True)
    to, back = ("next", "next") if rank == 0 else ("prev", "prev")
    tensors = {f"tensor_{way}_{side}": None for way in ("send", "recv") for side in ("next", "prev")}
    tensors |= {f"tensor_send_{to}": local, f"tensor_recv_{back}": got}  # type: ignore[dict-item]
    reduced: list[int] = []
    all_reduce = dist.all_reduce

    def record(tensor: torch.Tensor, **named: object) -> object:
        reduced.append(tensor.data_ptr())
        return all_reduce(tensor, **named)  # type: ignore[arg-type]

    dist.all_reduce = record  # type: ignore[assignment]
    works = transfers.exchange(
        **tensors,  # type: ignore[arg-type]
        group=dist.group.WORLD,  # type: ignore[arg-type]
        prev_pipeline_rank=1 - rank,
        next_pipeline_rank=1 - rank,
    )
    assert set(works) == {f"send_{to}", f"recv_{back}"}
    for work in works.values():
        work.wait()
    assert torch.equal(local, before) and got.is_leaf
    # The sum is written into what is reduced; autograd must not see that happen to the tensor it will need.
    assert local.data_ptr() not in reduced and got.data_ptr() in reduced
    return before, got.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_arrives(dtype: torch.dtype) -> None:
    (sent, back), (answered, arrived) = run_ranks(_pass_awkward_numbers, 2, dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(arrived.view(bits), sent.view(bits)) and torch.equal(back.view(bits), answered.view(bits))


def _probe(rank: int, folder: str | None, half: bool) -> bool:
    if folder is not None:
        join_without_point_to_point(rank, folder)
    if half and rank == 0:  # a group that receives but does not send must not leave the receiver waiting

        def refuse(*_: object) -> None:
            raise NotImplementedError

        dist.isend = refuse  # type: ignore[assignment]
    return point_to_point_works(CPU)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_probe(ranks: int, log: Path, tmp_path: Path) -> None:
    assert run_ranks(_probe, ranks, None, False) == [True] * ranks
    if ranks > 1:
        assert run_ranks(_probe, ranks, str(tmp_path), False) == [False] * ranks
        assert run_ranks(_probe, ranks, None, True) == [False] * ranks


def test_devices_that_know_are_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "isend", lambda *_: pytest.fail("it was tried"))
    for module in (cpu, cuda, hpu):
        with module.DEVICE.pipeline_transfers(Topology(Grid({"tp": 1, "cp": 1, "dp": 1, "pp": 2}), 0)):
            pass
