"""The rank grid, in Megatron's order: tp varies fastest, then dp, then pp. So tensor-parallel ranks, which communicate
most, are neighbours on one machine, and pipeline stages, which communicate least, are on different machines."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_llama.plan import Plan


@dataclass(frozen=True)
class Topology:
    """This rank's position in the (pp, dp, tp) grid."""

    rank: int
    tp: int
    dp: int
    pp: int
    vpp: int
    shard_size: int
    """Data-parallel ranks that together hold one replica of what is sharded."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp * self.pp

    @property
    def tp_rank(self) -> int:
        """Position among the ranks that share each matrix."""
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        """Position among the ranks that hold the same weights and process different data."""
        return self.rank // self.tp % self.dp

    @property
    def pp_rank(self) -> int:
        """Pipeline stage."""
        return self.rank // (self.tp * self.dp)

    @property
    def shard_rank(self) -> int:
        """Position in the group that shares one replica."""
        return self.dp_rank % self.shard_size

    @property
    def replica_rank(self) -> int:
        """Number of the replica that this rank's group holds; norms and checkpoints count replica 0."""
        return self.dp_rank // self.shard_size

    @property
    def is_logger(self) -> bool:
        """Whether this rank writes the metrics. It is rank 0, as all ranks have the reduced values."""
        return self.rank == 0


def build_topology(plan: Plan, rank: int) -> Topology:
    """This rank's position in the plan's grid. Raises ValueError for a rank outside the world."""
    trainer = plan.config.trainer
    if not 0 <= rank < plan.world_size:
        raise ValueError(f"rank {rank} is not in a world of {plan.world_size}")
    return Topology(rank=rank, tp=trainer.tp, dp=plan.dp, pp=trainer.pp, vpp=trainer.vpp, shard_size=plan.shard_size)
