"""The grid of ranks: every number that it computes, against an enumeration of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from itertools import combinations, product
from types import SimpleNamespace

import pytest

from megatron_llama.arch.attention_pattern import Lengths, Pattern
from megatron_llama.config.settings import TrainerConfig
from megatron_llama.parallel.context_division import chunk_work, divide, local_chunks, zigzag
from megatron_llama.plan import Plan, resolve
from megatron_llama.topology import AXES, AXIS_NAMES, DP, PP, TP, Axis, Grid, Topology
from tests.config.helpers import make

WITHOUT_CP = (TP, DP, PP)
TABLES = pytest.mark.parametrize("axes", [AXES, WITHOUT_CP], ids=["all", "without cp"])


def grids(axes: tuple[Axis, ...]) -> Iterator[Grid]:
    for sizes in product((1, 2, 3), repeat=len(axes)):
        yield Grid({axis.name: size for axis, size in zip(axes, sizes, strict=True)}, axes)


def places(grid: Grid) -> list[dict[str, int]]:
    """The positions of all ranks, in their order: the last axis of the table varies slowest."""
    slowest_first = [axis.name for axis in reversed(grid.axes)]
    return [
        dict(zip(slowest_first, at, strict=True))
        for at in product(*(range(grid.sizes[name]) for name in slowest_first))
    ]


@TABLES
def test_ranks_and_positions_are_inverses(axes: tuple[Axis, ...]) -> None:
    for grid in grids(axes):
        everyone = places(grid)
        assert grid.world_size == len(everyone)
        for rank, place in enumerate(everyone):
            assert grid.at(rank) == place
            assert grid.rank(**place) == rank
        for name in grid.sizes:
            neighbours = [rank for rank, place in enumerate(everyone) if place == {**everyone[0], name: 1}]
            assert [grid.stride(name)] == neighbours or grid.sizes[name] == 1
        assert grid.rank(pp=grid.sizes["pp"] - 1) == everyone.index({**everyone[0], "pp": grid.sizes["pp"] - 1})
        for outside in (-1, len(everyone)):
            with pytest.raises(ValueError, match=f"rank {outside} is not in a world of {len(everyone)}"):
                grid.at(outside)


@TABLES
def test_a_group_has_the_ranks_that_differ_along_its_axes_alone(axes: tuple[Axis, ...]) -> None:
    for grid in grids(axes):
        everyone = places(grid)
        for count in range(len(axes) + 1):
            for names in combinations(grid.sizes, count):
                assert grid.product(*names) == math.prod(grid.sizes[name] for name in names)
                others = grid.sizes.keys() - set(names)
                for rank, place in enumerate(everyone):
                    group = [r for r, at in enumerate(everyone) if all(at[name] == place[name] for name in others)]
                    assert grid.ranks(rank, *names) == group
                    assert grid.index(rank, *names) == group.index(rank)


def test_each_axis_has_its_place_in_groups_and_products() -> None:
    """Without cp only sequence parallelism divides a sequence."""
    grid = Grid({"tp": 2, "cp": 3, "dp": 5, "pp": 7})
    assert grid.ranks_per_replica == 42
    assert grid.same_weights == ("cp", "dp"), "gradients are summed over both, and ZeRO shards over both"
    assert grid.same_tokens == ("tp", "pp")
    assert grid.share("samples", 30) == 6 and grid.share("layers", 14) == 2 and grid.share("matrices", 8) == 4
    assert grid.share("tokens", 12) == 4, "each context-parallel rank has a part of the sequence"
    assert grid.share("activations", 12) == 2, "and under sequence parallelism tensor-parallel ranks divide that"
    grid = Grid({"tp": 2, "dp": 5, "pp": 7}, WITHOUT_CP)
    assert grid.share("tokens", 12) == 12 and grid.share("activations", 12) == 6
    assert grid.divisor("samples") == 5
    assert Grid({"tp": 3, "cp": 1, "dp": 1, "pp": 1}).sequence_unit(sp=False) == 1
    assert Grid({"tp": 3, "cp": 1, "dp": 1, "pp": 1}).sequence_unit(sp=True) == 3
    assert Grid({"tp": 3, "cp": 4, "dp": 1, "pp": 1}).sequence_unit(sp=False) == 8
    assert Grid({"tp": 3, "cp": 4, "dp": 1, "pp": 1}).sequence_unit(sp=True) == 24


def test_a_grid_of_settings() -> None:
    settings = SimpleNamespace(tp=4, dp=None, pp=0)
    sizes = {"tp": 4, "cp": 1, "dp": 1, "pp": 1}
    assert Grid.of(settings).sizes == sizes, "a size that is missing, or not legal, is 1"
    assert Grid.of(settings, WITHOUT_CP).sizes == {"tp": 4, "dp": 1, "pp": 1}
    grid = Grid.of(settings).resized(pp=2)
    assert (grid.ranks_per_replica, grid.world_size) == (8, 8)
    assert grid.with_world(24).sizes == {"tp": 4, "cp": 1, "dp": 3, "pp": 2}
    assert grid.with_world(3).sizes["dp"] == 1
    for sizes in ({"tp": 1}, {"tp": 1, "cp": 1, "dp": 0, "pp": 1}, {"tp": 1, "cp": 1, "dp": 1, "pp": 1, "ep": 1}):
        with pytest.raises(ValueError, match="one number from 1 for each of tp, cp, dp, pp"):
            Grid(sizes)


def test_each_axis_is_a_setting_and_one_of_them_is_derived() -> None:
    assert {axis.name for axis in AXES} <= {field.name for field in fields(TrainerConfig)}
    assert [axis.name for axis in AXES if axis.is_derived] == ["dp"]
    assert sorted(AXIS_NAMES) == sorted(axis.name for axis in AXES)
    weights = [axis.same_weights for axis in AXES]
    assert weights.count(True) == weights[weights.index(True) :].index(False), "they are neighbours"
    assert AXIS_NAMES == ("tp", "pp", "cp", "dp"), "the order of columns in files and pages"


def plan_of(**trainer: object) -> Plan:
    settings = {"global_batch_size": 24, "micro_batch_size": 1, **trainer}
    return resolve(make(**{f"trainer.{name}": value for name, value in settings.items()}), 24)


def test_the_place_of_a_rank_in_a_plan() -> None:
    plan = plan_of(tp=2, pp=2, vpp=2, zero=1, shard_group=3)
    for rank in range(24):
        topology = plan.topology(rank)
        tp, dp, pp = rank % 2, rank // 2 % 6, rank // 12
        assert topology.place == {"tp": tp, "cp": 0, "dp": dp, "pp": pp}
        assert (topology.shard_rank, topology.replica_rank) == (dp % 3, dp // 3)
        assert list(topology.virtual_stages()) == [pp, pp + 2]
        assert topology.is_logger == (rank == 0)
    with pytest.raises(ValueError, match="rank 24 is not in a world of 24"):
        plan.topology(24)
    plan = plan_of(tp=2, pp=2)
    assert plan.grid.sizes == {"tp": 2, "cp": 1, "dp": 6, "pp": 2} and plan.grid.world_size == plan.world_size
    assert plan.data_ranks == plan.dp == plan.shard_size == 6
    assert plan_of(zero=0).shard_size == 1
    assert plan.grid.share(plan.sequence_split, 64) == 32
    assert plan_of(tp=2, sp=False).sequence_split == "tokens"


def test_shards_are_spread_over_all_ranks_with_the_same_weights() -> None:
    everyone = [Topology(Grid({"tp": 2, "cp": 2, "dp": 4, "pp": 1}), rank, shard_size=4) for rank in range(16)]
    assert [topology.shard_rank for topology in everyone] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert [topology.replica_rank for topology in everyone] == [0] * 8 + [1] * 8


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_zigzag_order_gives_each_rank_equal_causal_work(cp: int) -> None:
    length = 24
    parts = [[position for chunk in zigzag(rank, cp, length) for position in chunk] for rank in range(cp)]
    assert sorted(position for part in parts for position in part) == list(range(length))
    assert all(part == sorted(part) and len(part) == length // cp for part in parts)
    assert len({sum(part) for part in parts}) == 1, "keys of a causal query are proportional to its position"
    grid = Grid({"tp": 2, "cp": cp, "dp": 1, "pp": 1})
    chunks = local_chunks(Topology(grid, grid.rank(cp=cp - 1)), length)
    assert [position for chunk in chunks for position in chunk] == parts[-1]


DOCUMENTS = {
    "one long": ((1024, *[64] * 16),),
    "long at the end": ((*[64] * 16, 1024),),
    "two rows": ((1000, 24, 1024), (8, 2000, 40)),
    "of one token": ((*[1] * 1024, 1024),),
}


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_documents_are_divided_by_attention_work(cp: int, lengths: Lengths) -> None:
    """Tokens are equal on all ranks, and attention work is closer to equal than in zig-zag order."""
    length = 2048
    division = divide(cp, length, lengths)
    parts = [[position for chunk in chunks for position in chunk] for chunks in division]
    assert sorted(position for part in parts for position in part) == list(range(length))
    assert all(part == sorted(part) and len(part) == length // cp for part in parts)
    keys = chunk_work(length, length, lengths, Pattern())

    def imbalance(parts: list[list[int]]) -> float:
        loads = [sum(keys[position] for position in part) for part in parts]
        return max(loads) * cp / sum(loads)

    order = [[position for chunk in zigzag(rank, cp, length) for position in chunk] for rank in range(cp)]
    assert imbalance(parts) < min(1.12, imbalance(order))


def test_sequences_of_one_document_are_in_zigzag_order() -> None:
    """Lengths with few divisors have larger chunks."""
    zigzags = tuple(zigzag(rank, 4, 64) for rank in range(4))
    assert divide(4, 64) == divide(4, 64, ((64,), (64,))) == zigzags != divide(4, 64, ((64,), (60, 4)))
    assert divide(1, 64, ((60, 4),)) == ((range(64),),)
    for length, chunks in ((48, 8), (40, 4), (20, 2)):
        assert [len(part) for part in divide(2, length, ((length - 3, 3),))] == [chunks, chunks]
