"""The predicted operations of each rank, and which ranks have the same."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from megatron_llama.plan import Plan
from megatron_llama.tools.forecast.traffic import Operation, operations


def operations_of_rank(plan: Plan, rank: int) -> list[Operation]:
    """All that ``rank`` takes part in during a training step."""
    topology = plan.topology(rank)
    return operations(plan, topology.place["pp"], topology.shard_rank)


def groups_of_ranks(plan: Plan) -> list[tuple[list[int], list[Operation]]]:
    """Every rank, together with those that have the same operations: (ranks, operations of each)."""
    # Of a rank's coordinates only these two matter: a few calls for thousands of ranks.
    found = functools.cache(lambda pp_rank, shard_rank: tuple(operations(plan, pp_rank, shard_rank)))
    groups: dict[tuple[Operation, ...], list[int]] = {}
    for rank in range(plan.world_size):
        topology = plan.topology(rank)
        groups.setdefault(found(topology.place["pp"], topology.shard_rank), []).append(rank)
    return [(ranks, list(shared)) for shared, ranks in groups.items()]


def compact(ranks: Sequence[int]) -> str:
    """0-3, 8-11 for the ranks 0 1 2 3 8 9 10 11."""
    # Within a span of successive ranks, rank minus position is constant.
    spans = itertools.groupby(enumerate(sorted(ranks)), lambda item: item[1] - item[0])
    ends = [(span[0][1], span[-1][1]) for span in (list(items) for _, items in spans)]
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ends)
