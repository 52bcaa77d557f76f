"""The predicted operations of each rank, and which ranks have the same."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_llama.plan import Plan
from megatron_llama.plan.traffic import Operation, operations
from megatron_llama.topology import build_topology


def operations_of_rank(plan: Plan, rank: int) -> list[Operation]:
    """All that ``rank`` takes part in during a training step."""
    topology = build_topology(plan, rank)
    return operations(plan, topology.pp_rank, topology.shard_rank)


def groups_of_ranks(plan: Plan) -> list[tuple[list[int], list[Operation]]]:
    """Every rank, together with those that communicate as much: (ranks, operations of each)."""
    groups: list[tuple[list[int], list[Operation]]] = []
    seen: dict[tuple[int, int], list[int]] = {}  # nothing else of a rank's position matters
    for rank in range(plan.world_size):
        topology = build_topology(plan, rank)
        seen.setdefault((topology.pp_rank, topology.shard_rank), []).append(rank)
    for (pp_rank, shard_rank), ranks in seen.items():
        found = operations(plan, pp_rank, shard_rank)
        same = next((group for group, others in groups if others == found), None)
        if same is None:
            groups.append((ranks, found))
        else:
            same.extend(ranks)
    return [(sorted(ranks), found) for ranks, found in groups]


def compact(ranks: Sequence[int]) -> str:
    """0-3, 8-11 for the ranks 0 1 2 3 8 9 10 11."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
