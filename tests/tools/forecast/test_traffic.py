"""Predicted traffic against manual calculations; tests/tools/traffic/test_count_steps.py counts real collectives."""

from __future__ import annotations

import pytest

from megatron_llama.config import load_config
from megatron_llama.plan import Plan, resolve
from megatron_llama.tools.forecast.traffic import Amount, TrafficKey, between_nodes, totals, wire_bytes
from megatron_llama.tools.traffic.cli import format_ranks, groups_of_ranks, operations_of_rank
from tests.oracle import make_plan
from tests.paths import CONF
from tests.rows import overrides as words

# 7 billion parameters, tp8, sequence 4096, micro batch 1, bf16: s b h in bytes.
ACTIVATIONS = 4096 * 4096 * 2
SOFTMAX = 16 * 8 * 3 * 4096 * 4
RECIPE = "model=llama7b data=mock data.seq_length=4096 tp=8 precision=bf16 recompute=full"
HELD = (6_738_415_616 - 65 * 4096) // 8 + 65 * 4096
"""Parameters of a tensor-parallel rank: its share of 6,738,415,616, and the replicated norms."""


def recipe(nodes: int, *overrides: str) -> Plan:
    """Return the plan of the Trainium recipe's 7B on ``nodes`` nodes of 32 devices, 64 sequences per node."""
    work = words(f"{RECIPE} dp={4 * nodes} global_batch_size={64 * nodes}")
    return resolve(load_config([*work, *overrides], CONF), 32 * nodes)


def of_axis(plan: Plan, axis: str, rank: int = 0) -> dict[TrafficKey, Amount]:
    return {key: amount for key, amount in totals(operations_of_rank(plan, rank)).items() if key.axis == axis}


def test_llama7b_by_hand() -> None:
    # 16 micro batches, 32 layers. Gathers per layer: 2 forward, 4 backward, 2 recomputed; embedding 1, head 1; and for
    # each of 2 chunks of the loss 3 fp32 numbers per token. Scatters per layer: 2, 2 and 1; embedding 1, head 1.
    traffic = totals(operations_of_rank(recipe(1), 0))
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


def test_tensor_parallel_without_sp_has_4_all_reduces_per_layer() -> None:
    # Megatron-LM's count (arXiv:1909.08053): 2 in the forward and 2 in the backward pass. Gathers and scatters with sp
    # send the same bytes, plus the inputs that the backward pass gathers a second time.
    plan = recipe(1, "trainer.sp=false", "trainer.recompute=none")
    with_sp = recipe(1, "trainer.recompute=none")
    softmax, sums = TrafficKey("tp", "all_gather", 8), TrafficKey("tp", "all_reduce", 8)
    calls = 16 * (4 * 32 + 2)
    assert of_axis(plan, "tp") == {sums: (calls, calls * ACTIVATIONS), softmax: (16 * 2, SOFTMAX)}
    second_gathers = 16 * 2 * 32 * ACTIVATIONS * 7 / 8
    norms = wire_bytes(TrafficKey("tp", "all_reduce", 8), 65 * 1024 * 4)
    sent = sum(wire_bytes(key, amount.payload) for key, amount in of_axis(with_sp, "tp").items())
    assert sent == wire_bytes(sums, calls * ACTIVATIONS) + wire_bytes(softmax, SOFTMAX) + second_gathers + norms


@pytest.mark.parametrize(("zero", "reduced"), [(1, 1), (2, 16), (3, 16)])
def test_zero_stages(zero: int, reduced: int) -> None:
    # Parameters in bf16, gradients in fp32: once per step, or at each of 16 micro batches. Stage 3 gathers each block
    # for forward and backward, except the last block, the embedding, norm and head, which it gathers once.
    embedding = 32000 * 4096 // 8
    block = (HELD - 2 * embedding - 4096) // 32
    gathers, gathered = (
        (34, HELD) if zero < 3 else (16 * (32 + 31 + 2), 16 * (2 * 31 * block + block + HELD - 32 * block))
    )
    assert of_axis(recipe(1, f"trainer.zero={zero}"), "dp") == {
        TrafficKey("dp", "all_gather", 4): (gathers, 2 * gathered),
        TrafficKey("dp", "reduce_scatter", 4): (34 * reduced, reduced * 4 * HELD),
    }


def test_zero_0_all_reduces_gradients() -> None:
    assert of_axis(recipe(1, "trainer.zero=0"), "dp") == {TrafficKey("dp", "all_reduce", 4): (34, 4 * HELD)}


def test_hybrid_scatters_within_and_reduces_across_groups() -> None:
    assert of_axis(recipe(4, "trainer.shard_group=4"), "dp") == {
        TrafficKey("dp", "all_gather", 4): (34, 2 * HELD),
        TrafficKey("dp", "reduce_scatter", 4): (34, 4 * HELD),
        TrafficKey("dp", "all_reduce", 4): (34, HELD),
    }


# 7 billion parameters on 4 nodes of 8 ranks, one micro batch. Bytes per parameter and rank that leave a node: in a ring
# one rank of 8 sends 31/32 of the payload, in an all_to_all each rank sends 3/4 of it.
ZERO3 = "model=llama7b data=mock data.seq_length=4096 dp=32 zero=3 precision=bf16 global_batch_size=32"
RING, ALL_TO_ALL = 31 / 32 / 8, 3 / 4


@pytest.mark.parametrize(
    ("overrides", "kind", "bytes_per_parameter"),
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
def test_bytes_leaving_a_node(overrides: str, kind: str, bytes_per_parameter: float) -> None:
    """Check the mean over a node's ranks."""
    plan = resolve(load_config(words(f"{ZERO3} {overrides}"), CONF), 32)
    of_node = [between_nodes(operations_of_rank(plan, rank), rank, 32, per_node=8) for rank in range(8, 16)]
    left = sum(amount.payload for rank in of_node for key, amount in rank.items() if key[:2] == ("dp", kind))
    # The last block, the embedding and the head are gathered once.
    assert left / 8 / plan.parameters == pytest.approx(bytes_per_parameter, rel=0.035)


@pytest.mark.parametrize(
    "layout",
    [[], ["trainer.pp=4"], ["trainer.pp=4", "trainer.vpp=2"], ["trainer.zero=3"], ["trainer.sp=false"]],
    ids=["tp8", "tp8·pp4", "tp8·pp4·vpp2", "zero 3", "no sp"],
)
def test_weak_scaling(layout: list[str]) -> None:
    pp = 4 if "trainer.pp=4" in layout else 1
    plans = {n: recipe(n, *layout, f"trainer.dp={4 * n // pp}") for n in (1, 2, 4)}
    one = plans[1]
    for nodes, plan in plans.items():
        assert plan.num_microbatches == one.num_microbatches
        for rank in range(0, plan.world_size, 8):
            stage = rank // (plan.world_size // pp)
            twin = stage * (one.world_size // pp)
            # tp and pp are unchanged, except that a rank's shard of the norms gets shorter.
            norms = {TrafficKey("tp", "all_reduce", 8)} if plan.sp else set()
            for axis in ("tp", "pp"):
                traffic, expected = of_axis(plan, axis, rank), of_axis(one, axis, twin)
                assert traffic.keys() == expected.keys()
                assert all(traffic[key] == expected[key] for key in traffic.keys() - norms)
            traffic, expected = of_axis(plan, "dp", rank), of_axis(one, "dp", twin)
            if plan.dp == 1:
                assert traffic == {}
                continue
            # dp gathers each weight and scatters each gradient in full for any number of ranks. Only the ring's
            # (p-1)/p grows.
            assert {key.ranks for key in traffic} == {plan.dp}
            assert [*traffic.values()] == ([*expected.values()] or [*of_axis(plans[2], "dp", 2 * twin).values()])
        assert plan.dp == nodes * one.dp


def test_ranks_are_grouped_by_operations() -> None:
    # 61 rows over 3 ranks: the shards of 21, 21 and 19 rows matter only for tied embeddings.
    layout = ("trainer.pp=2", "trainer.global_batch_size=12", "model.vocab_size=61")
    plan = make_plan(6, *layout)
    assert [ranks for ranks, _ in groups_of_ranks(plan)] == [[0, 1, 2], [3, 4, 5]]
    tied = make_plan(6, *layout, "model.tie_word_embeddings=true")
    assert [ranks for ranks, _ in groups_of_ranks(tied)] == [[0, 1], [2], [3, 4], [5]]
    for ranks, operations in groups_of_ranks(tied):
        assert all(operations_of_rank(tied, rank) == operations for rank in ranks)


def test_one_process_sends_nothing() -> None:
    assert operations_of_rank(make_plan(1), 0) == []


def test_format_ranks() -> None:
    assert format_ranks([8, 0, 1, 2, 9, 4]) == "0-2, 4, 8-9"
