"""Predicted traffic against manual calculations; tests/tools/traffic/test_count_steps.py counts real collectives."""

from __future__ import annotations

import pytest

from megatron_llama.config import load_config
from megatron_llama.plan import resolve
from megatron_llama.system.tables import format_ranges
from megatron_llama.tools.forecast.traffic import TrafficKey, between_nodes, totals
from megatron_llama.tools.traffic.cli import groups_of_ranks, operations_of_rank
from tests.oracle import make_plan
from tests.paths import CONF
from tests.rows import overrides

# 7 billion parameters, tp8, sequence 4096, micro batch 1, bf16: s b h in bytes.
ACTIVATIONS = 4096 * 4096 * 2
SOFTMAX = 16 * 8 * 3 * 4096 * 4
RECIPE = "model=llama7b data=mock data.seq_length=4096 tp=8 precision=bf16 recompute=full"
HELD = (6_738_415_616 - 65 * 4096) // 8 + 65 * 4096
"""Parameters of a tensor-parallel rank: its share of 6,738,415,616, and the replicated norms."""


def test_llama7b_by_hand() -> None:
    # 16 micro batches, 32 layers. Gathers per layer: 2 forward, 4 backward, 2 recomputed; embedding 1, head 1; and for
    # each of 2 chunks of the loss 3 fp32 numbers per token. Scatters per layer: 2, 2 and 1; embedding 1, head 1.
    plan = resolve(load_config(overrides(f"{RECIPE} dp=4 global_batch_size=64"), CONF), 32)
    traffic = totals(operations_of_rank(plan, 0))
    gathered = 16 * (8 * 32 + 2)
    assert traffic[TrafficKey("tp", "all_gather", 8)] == (gathered + 16 * 2, gathered * ACTIVATIONS + SOFTMAX)
    assert traffic[TrafficKey("tp", "reduce_scatter", 8)] == (16 * (5 * 32 + 2), 16 * (5 * 32 + 2) * ACTIVATIONS)
    # One all-reduce of 65 norms' shards of 4096 / 4 values.
    assert traffic[TrafficKey("tp", "all_reduce", 8)] == (1, 65 * 4096 // 4 * 4)
    # 32 blocks, the embedding, norm and head.
    assert traffic[TrafficKey("dp", "all_gather", 4)] == (34, 2 * HELD)
    assert traffic[TrafficKey("dp", "reduce_scatter", 4)] == (34, 4 * HELD)
    assert traffic[TrafficKey("world", "all_reduce", 32)] == (4, 24 + 4 + 4 + 16)
    assert len(traffic) == 6


# 7 billion parameters on 4 nodes of 8 ranks, one micro batch. Bytes per parameter and rank that leave a node: in a ring
# one rank of 8 sends 31/32 of the payload, in an all_to_all each rank sends 3/4 of it.
ZERO3 = "model=llama7b data=mock data.seq_length=4096 dp=32 zero=3 precision=bf16 global_batch_size=32"
RING, ALL_TO_ALL = 31 / 32 / 8, 3 / 4


@pytest.mark.parametrize(
    ("changes", "kind", "bytes_per_parameter"),
    [
        ("", "all_gather", RING * (2 + 2)),  # forward and backward
        ("", "reduce_scatter", RING * 4),
        ("secondary_group=8", "all_gather", RING * 2),  # the backward pass sends nothing
        ("secondary_group=8 param_gather=int8", "all_gather", RING * 260 / 256),
        ("grad_reduce=bf16", "all_to_all", ALL_TO_ALL * 2),
        ("grad_reduce=int8", "all_to_all", ALL_TO_ALL * 260 / 256),
        ("grad_reduce=int8", "reduce_scatter", 0),
        ("grad_reduce=int8 reduce_group=8", "all_to_all", ALL_TO_ALL * 260 / 256 / 8),
        ("shard_group=8", "all_gather", 0),
        ("shard_group=8", "all_reduce", 3 / 4 * 2 * 4 / 8),
        ("shard_group=8 grad_reduce=int8", "all_to_all", ALL_TO_ALL * 260 / 256 / 8),
    ],
)
def test_bytes_leaving_a_node(changes: str, kind: str, bytes_per_parameter: float) -> None:
    """Check the mean over a node's ranks."""
    plan = resolve(load_config(overrides(f"{ZERO3} {changes}"), CONF), 32)
    of_node = [between_nodes(operations_of_rank(plan, rank), rank, 32, per_node=8) for rank in range(8, 16)]
    left = sum(amount.payload for rank in of_node for key, amount in rank.items() if key[:2] == ("dp", kind))
    # The last block, the embedding and the head are gathered once.
    assert left / 8 / plan.parameters == pytest.approx(bytes_per_parameter, rel=0.035)


def test_ranks_are_grouped_by_operations() -> None:
    """One process sends nothing."""
    # 61 rows over 3 ranks: the shards of 21, 21 and 19 rows matter only for tied embeddings.
    layout = ("trainer.pp=2", "trainer.global_batch_size=12", "model.vocab_size=61")
    assert [ranks for ranks, _ in groups_of_ranks(make_plan(6, *layout))] == [[0, 1, 2], [3, 4, 5]]
    tied = make_plan(6, *layout, "model.tie_word_embeddings=true")
    assert [ranks for ranks, _ in groups_of_ranks(tied)] == [[0, 1], [2], [3, 4], [5]]
    for ranks, operations in groups_of_ranks(tied):
        assert all(operations_of_rank(tied, rank) == operations for rank in ranks)
    assert operations_of_rank(make_plan(1), 0) == []
    assert format_ranges([8, 0, 1, 2, 9, 4]) == "0-2, 4, 8-9"
