"""How fast a collective is, counted as the NCCL tests do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """One collective of one size in one group."""

    axis: str
    kind: str
    ranks: int
    size: int
    """Bytes, as the NCCL tests count: inputs of all_reduce and reduce_scatter, outputs of all_gather, messages."""
    seconds: float
    """Of a call, on the slowest rank; a median."""
    group: tuple[int, ...] = ()
    """The group's ranks; empty for the slowest of all groups."""

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second of what is asked for."""
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that a link carries where the algorithm is optimal, so that it does not depend on the ranks:
        the factors of the NCCL tests (doc/PERFORMANCE.md there)."""
        return self.algorithm_bandwidth * bus_factor(self.kind, self.ranks)


def bus_factor(kind: str, ranks: int) -> float:
    """Bytes that a link carries for each byte of the algorithm's."""
    once = (ranks - 1) / ranks
    return {"all_reduce": 2 * once, "all_gather": once, "reduce_scatter": once, "send_recv": 1.0}[kind]
