"""The table of parallel axes, and the position of a rank on them.

Ranks are numbered in Megatron's order: tp varies fastest, then cp, dp and pp. Tensor-parallel ranks, which communicate
most, are neighbors on one host; pipeline stages, which communicate least, are on different hosts. Sizes, ranks, groups
and shares of the layout come from this table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Divided = Literal["matrices", "samples", "layers", "tokens", "activations"]
"""Work that an axis divides. ``tokens`` are the positions of a sequence. ``activations`` are the positions outside the
matmuls with sequence parallelism: axes that divide the matrices divide them too."""


@dataclass(frozen=True)
class Axis:
    """One way to divide a training step over ranks. Its size is the setting ``trainer.<name>``."""

    name: str
    cuts: Divided
    same_weights: bool
    """Whether ranks along the axis have the same weights. Their gradients are summed, and ZeRO shards over them."""
    same_tokens: bool
    """Whether ranks along the axis process the same tokens. A sum over all ranks counts each token once per rank."""
    mcore: str
    """megatron-core's name: the argument is ``<mcore>_size``, the group ``get_<mcore>_group``."""
    is_derived: bool = False
    """Whether its size is derived: world size / product of the other axes. One axis of a table."""

    def divides(self, work: Divided) -> bool:
        """Return whether each rank along the axis does a part of ``work``."""
        return self.cuts == work or (work == "activations" and self.cuts in ("matrices", "tokens"))


TP = Axis("tp", cuts="matrices", same_weights=False, same_tokens=True, mcore="tensor_model_parallel")
CP = Axis("cp", cuts="tokens", same_weights=True, same_tokens=False, mcore="context_parallel")
DP = Axis("dp", cuts="samples", same_weights=True, same_tokens=False, mcore="data_parallel", is_derived=True)
PP = Axis("pp", cuts="layers", same_weights=False, same_tokens=True, mcore="pipeline_model_parallel")
AXES = (TP, CP, DP, PP)
"""Axes, fastest first. Axes with the same weights are adjacent: the ranks of a shard group are equally spaced."""
AXIS_NAMES = tuple(axis.name for axis in sorted(AXES, key=lambda axis: axis.same_weights))
"""Names in the order of tables: axes that divide the model, then axes that divide the data."""


@dataclass(frozen=True)
class Grid:
    """All ranks of a run, numbered along the axes."""

    sizes: dict[str, int]
    """Ranks along each axis, by its name."""
    axes: tuple[Axis, ...] = AXES

    def __post_init__(self) -> None:
        if self.sizes.keys() != {axis.name for axis in self.axes} or min(self.sizes.values()) < 1:
            raise ValueError(f"sizes must be one number from 1 for each of {', '.join(a.name for a in self.axes)}")

    @classmethod
    def of(cls, settings: Any, axes: tuple[Axis, ...] = AXES) -> Grid:
        """Return the grid whose sizes are attributes of ``settings``, such as a TrainerConfig.

        Missing sizes and sizes below 1 count as 1.
        """
        return cls({axis.name: max(1, getattr(settings, axis.name, None) or 1) for axis in axes}, axes)

    def resized(self, **sizes: int) -> Grid:
        """Return a grid with other sizes of some axes."""
        return Grid({**self.sizes, **sizes}, self.axes)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def ranks_per_replica(self) -> int:
        """Ranks along all axes except the derived one; the world size is a multiple of it."""
        return self.product(*(axis.name for axis in self.axes if not axis.is_derived))

    def with_world(self, world_size: int) -> Grid:
        """Return the grid of a world of ``world_size`` ranks: sets the derived axis."""
        (derived,) = (axis.name for axis in self.axes if axis.is_derived)
        return self.resized(**{derived: max(1, world_size // self.ranks_per_replica)})

    @property
    def listed(self) -> tuple[str, ...]:
        """Axes for pages and messages, fastest first: context parallelism only with more than one rank."""
        return tuple(name for name, size in self.sizes.items() if name != "cp" or size > 1)

    @property
    def same_weights(self) -> tuple[str, ...]:
        """Axes along which ranks have the same weights."""
        return tuple(axis.name for axis in self.axes if axis.same_weights)

    @property
    def same_tokens(self) -> tuple[str, ...]:
        """Axes along which ranks process the same tokens."""
        return tuple(axis.name for axis in self.axes if axis.same_tokens)

    def product(self, *names: str) -> int:
        """Return the number of ranks of a group along these axes."""
        return math.prod(self.sizes[name] for name in names)

    def stride(self, name: str) -> int:
        """Return the distance between neighbors along an axis."""
        names = [axis.name for axis in self.axes]
        return math.prod(self.sizes[faster] for faster in names[: names.index(name)])

    def at(self, rank: int) -> dict[str, int]:
        """Return the position of ``rank`` along each axis. Raises ValueError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size}")
        return {axis.name: rank // self.stride(axis.name) % self.sizes[axis.name] for axis in self.axes}

    def rank(self, **at: int) -> int:
        """Return the rank at these positions; 0 along the other axes."""
        return sum(self.stride(name) * position for name, position in at.items())

    def ranks(self, rank: int, *names: str) -> list[int]:
        """Return the group of ``rank`` along these axes: ranks with its position on all other axes, ascending."""
        group = [self.rank(**{name: position for name, position in self.at(rank).items() if name not in names})]
        for axis in reversed(self.axes):
            if axis.name in names:
                steps = range(self.sizes[axis.name])
                group = [first + step * self.stride(axis.name) for first in group for step in steps]
        return group

    def index(self, rank: int, *names: str) -> int:
        """Return the position of ``rank`` in its group along these axes."""
        index, step = 0, 1
        for name, position in self.at(rank).items():
            if name in names:
                index, step = index + position * step, step * self.sizes[name]
        return index

    def divisor(self, work: Divided) -> int:
        """Return the number of ranks that divide ``work``."""
        return math.prod(self.sizes[axis.name] for axis in self.axes if axis.divides(work))

    def sequence_unit(self, *, sp: bool) -> int:
        """Return the number that the length of a divided sequence is a multiple of.

        Each context-parallel rank has two chunks, and with sequence parallelism (``sp``) its part divides by tp.
        """
        unit = 2 * self.sizes["cp"] if self.sizes["cp"] > 1 else 1
        return math.lcm(unit, self.divisor("activations")) if sp else unit

    def share(self, work: Divided, count: int) -> int:
        """Return one rank's part of ``count`` samples, layers, tokens ..., rounded down."""
        return count // self.divisor(work)


@dataclass(frozen=True)
class Topology:
    """Position of this rank in the grid."""

    grid: Grid
    rank: int
    vpp: int = 1
    """Virtual stages per pipeline stage."""
    shard_size: int = 1
    """Ranks of a shard group, which together hold one replica of the sharded state."""

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis."""
        return self.grid.sizes

    @property
    def place(self) -> dict[str, int]:
        """This rank's position along each axis."""
        return self.grid.at(self.rank)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.grid.world_size

    @property
    def shard_rank(self) -> int:
        """Position in the shard group."""
        return self.grid.index(self.rank, *self.grid.same_weights) % self.shard_size

    @property
    def replica_rank(self) -> int:
        """Number of the shard group's replica; norms and checkpoints count replica 0."""
        return self.grid.index(self.rank, *self.grid.same_weights) // self.shard_size

    @property
    def is_logger(self) -> bool:
        """Whether this rank writes the metrics: rank 0, since all ranks have the reduced values."""
        return self.rank == 0

    def virtual_stages(self) -> range:
        """Return the virtual stages of this rank."""
        return virtual_stages_of(self.place["pp"], self.sizes["pp"], self.vpp)


def virtual_stages_of(pp_rank: int, pp: int, vpp: int) -> range:
    """Return the virtual stages of a pipeline stage: p, pp + p, 2 pp + p, ..."""
    return range(pp_rank, pp * vpp, pp)
