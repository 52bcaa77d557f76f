"""Pipelines over process groups without send and recv are bit-identical to pipelines with them."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tests.oracle
from megatron_llama.devices import hpu
from megatron_llama.devices.cpu import device as cpu
from megatron_llama.devices.cpu import shared_memory
from megatron_llama.devices.cuda import device as cuda
from megatron_llama.devices.neuron.pair_transfers import PairTransfers, point_to_point_works, transfers_context
from megatron_llama.topology import Grid, Topology
from tests.devices.helpers import FAKES
from tests.oracle import TOLERANCE, oracle, run_layout, worst
from tests.ranks import RankFailed, run_ranks
from tests.rows import rows

CPU = torch.device("cpu")
SIX, EIGHT = "model.num_hidden_layers=6", "model.num_hidden_layers=8"
LAYOUTS = [
    ("pp2", 2, ["trainer.pp=2"], []),
    ("pp2, uneven", 2, ["trainer.pp=2", "trainer.pipeline_layers=[3,1]"], []),
    ("pp3, uneven", 3, ["trainer.pp=3", "trainer.pipeline_layers=[2,1,3]"], [SIX]),
    ("pp4", 4, ["trainer.pp=4"], []),
    ("pp4, uneven", 4, ["trainer.pp=4", "trainer.pipeline_layers=[2,1,2,1]"], [SIX]),
    ("pp2·dp2, zero 3, tied", 4, ["trainer.pp=2", "trainer.zero=3"], ["model.tie_word_embeddings=true"]),
    ("tp2·pp2+sp", 4, ["trainer.tp=2", "trainer.pp=2"], []),
    ("pp2·vpp2", 2, ["trainer.pp=2", "trainer.vpp=2"], []),
    ("pp4·vpp2", 4, ["trainer.pp=4", "trainer.vpp=2"], [EIGHT]),
]
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
    store = dist.FileStore(f"{folder}/again", world)
    dist.init_process_group("neuron", store=store, rank=rank, world_size=world)


@pytest.mark.parametrize(
    ("ranks", "layout", "model"),
    rows(((case[0], case[1:]) for case in LAYOUTS), {"pp2·dp2, zero 3, tied", "pp3, uneven", "pp2·vpp2"}),
)
def test_the_same_bits(
    ranks: int, layout: list[str], model: list[str], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_MOST_RANKS", 1)  # the stand-in's sums are gloo's
    sent = run_layout(ranks, *layout, *model)
    assert not log.exists()
    with tempfile.TemporaryDirectory() as folder:

        def train_without(rank: int, *arguments: object) -> tuple:
            join_without_point_to_point(rank, folder)
            return train_rank(rank, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(cpu.Cpu, "pipeline_transfers", lambda self, topology: transfers_context(topology, CPU))
        monkeypatch.setattr(tests.oracle, "train_rank", train_without)
        reduced = run_layout(ranks, *layout, *model)
        monkeypatch.setattr(tests.oracle, "train_rank", train_rank)
    events = Counter(log.read_text().splitlines())
    assert any("by all-reduce" in event for event in events), "nothing went through the pairs"
    assert sum(n for event, n in events.items() if "send refused" in event) == ranks // 2, "only the probe may try"
    assert set(worst(reduced, sent).values()) == {0.0}
    for name, weight in sent.weights.items():
        assert torch.equal(weight.view(torch.int32), reduced.weights[name].view(torch.int32)), name
    differences = worst(reduced, oracle(*model))
    assert all(difference <= TOLERANCE for difference in differences.values()), differences


def test_without_the_pairs_it_fails(log: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def train_without(rank: int, *arguments: object) -> tuple:
        join_without_point_to_point(rank, str(tmp_path))
        return train_rank(rank, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tests.oracle, "train_rank", train_without)
    with pytest.raises(RankFailed, match="does not support (send|recv)"):
        run_layout(2, "trainer.pp=2", steps=1)


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
