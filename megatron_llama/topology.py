"""The rank grid. Megatron's order: tp varies fastest, then dp, then pp, so that tensor-parallel ranks are
neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_llama.plan import Plan


@dataclass(frozen=True)
class Topology:
    """Where this rank stands in the (pp, dp, tp) grid."""

    rank: int
    tp: int
    dp: int
    pp: int
    vpp: int
    shard_size: int
    """Data-parallel ranks that share one copy of what is sharded."""

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.tp * self.dp * self.pp

    @property
    def tp_rank(self) -> int:
        """Position among the ranks that share each matrix."""
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        """Position among the ranks that hold the same weights and see other data."""
        return self.rank // self.tp % self.dp

    @property
    def pp_rank(self) -> int:
        """Pipeline stage."""
        return self.rank // (self.tp * self.dp)

    @property
    def shard_rank(self) -> int:
        """Position inside the group that shares one copy."""
        return self.dp_rank % self.shard_size

    @property
    def replica_rank(self) -> int:
        """Which of the copies this rank's group holds; 0 is the one that counts for norms and checkpoints."""
        return self.dp_rank // self.shard_size

    @property
    def is_logger(self) -> bool:
        """The one rank that writes metrics. Rank 0: every rank knows the reduced values."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} (pp {self.pp_rank}, dp {self.dp_rank}, tp {self.tp_rank})"


def build_topology(plan: Plan, rank: int) -> Topology:
    """This rank's place in the plan's grid."""
    trainer = plan.config.trainer
    if not 0 <= rank < plan.world_size:
        raise ValueError(f"rank {rank} is not in a world of {plan.world_size}")
    return Topology(rank=rank, tp=trainer.tp, dp=plan.dp, pp=trainer.pp, vpp=trainer.vpp, shard_size=plan.shard_size)
