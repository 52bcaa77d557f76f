"""Promise 1: the layout never changes the result. docs/design/parity.md explains the method and shows the table."""

from __future__ import annotations

import pytest
import torch

from megatron_llama.devices import get_device
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan
from tests.compiled import needs_compiler, skip_without_compiler
from tests.layouts.table import ASYNC_TP, LAYOUTS, QUICK, TIED
from tests.layouts.tampers import chunks_of_12, passes_of_the_compiled_loss
from tests.oracle import TOLERANCE, Tamper, Tensors, make_plan, oracle, run_layout, worst
from tests.ranks import run_ranks
from tests.rows import rows

# Layouts whose sums have the same order as the oracle's: bit-identical.
BITWISE: list[tuple[str, int, list[str], list[str]]] = [
    ("selective recompute", 1, ["trainer.recompute=selective"], []),
    ("elementwise recompute", 1, ["trainer.recompute=elementwise"], []),
    ("full recompute", 1, ["trainer.recompute=full"], []),
    ("offloaded", 1, ["trainer.offload=[activations,optimizer]"], []),
]


@pytest.mark.parametrize(("ranks", "layout", "model"), rows(((case[0], case[1:]) for case in LAYOUTS), QUICK))
@pytest.mark.usefixtures("compiled_here")
def test_layout_equals_one_process(ranks: int, layout: list[str], model: list[str]) -> None:
    skip_without_compiler(layout)
    result, expected = run_layout(ranks, *layout, *model), oracle(*model)
    for name, tensor in expected.initial.items():
        assert torch.equal(result.initial[name], tensor), f"initial {name} depends on the layout"
    differences = worst(result, expected)
    assert all(difference <= TOLERANCE for difference in differences.values()), differences
    assert (result.fused > 0) == ("trainer.async_tp=true" in layout)


@pytest.mark.long
@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("compiled_here")
def test_the_overlapped_row_runs_products_with_collectives_inside() -> None:
    # 8 in a pass through a block, forward and backward; 4 blocks, 4 micro batches.
    assert run_layout(2, *ASYNC_TP, steps=2).fused == 8 * 4 * 4 * 2
    assert run_layout(2, *ASYNC_TP, "trainer.async_tp=false", steps=1).fused == 0


@pytest.mark.parametrize(
    ("ranks", "layout", "model"),
    [
        (1, [], []),
        (2, ["trainer.tp=2"], [TIED, "model.vocab_size=61"]),
        (2, ["trainer.tp=2", "trainer.sp=false"], []),
        (2, ["trainer.pp=2"], [TIED]),
    ],
    ids=["one process", "tp2+sp, tied, odd vocabulary", "tp2", "pp2, tied"],
)
@pytest.mark.parametrize("how", [chunks_of_12, passes_of_the_compiled_loss])
def test_chunks_of_the_loss_change_nothing(ranks: int, layout: list[str], model: list[str], how: Tamper) -> None:
    differences = worst(run_layout(ranks, *layout, *model, tamper=how), oracle(*model))
    assert all(difference <= TOLERANCE for difference in differences.values()), differences


@pytest.mark.parametrize(
    ("ranks", "layout", "model"), [case[1:] for case in BITWISE], ids=[case[0] for case in BITWISE]
)
def test_same_order_of_sums_gives_the_same_bits(ranks: int, layout: list[str], model: list[str]) -> None:
    assert set(worst(run_layout(ranks, *layout, *model), oracle(*model)).values()) == {0.0}


def test_first_loss_under_pp_is_bitwise_equal() -> None:
    for layout in (["trainer.pp=2"], ["trainer.pp=4"], ["trainer.pp=2", "trainer.vpp=2"]):
        assert run_layout(2 if "trainer.pp=2" in layout else 4, *layout, steps=1).losses == oracle().losses[:1]


def test_tensor_parallel_ranks_hold_different_shards() -> None:
    # The best-known small 3D trainer gives all tensor-parallel ranks the same random shard and trains a half-width
    # model.
    one, other = run_ranks(initial_shards, 2, make_plan(2, "trainer.tp=2"))
    split = [name for name, values in one.items() if values.dim() == 2]
    assert len(split) == 4 * 7 + 2
    for name in split:
        assert not torch.equal(one[name], other[name]), f"both ranks begin with the same half of {name}"
    assert len({tensor.sum().item() for tensor in oracle().initial.values() if tensor.dim() == 2}) == len(split)


def initial_shards(rank: int, plan: Plan) -> Tensors:
    """Return a rank's weights before the first step."""
    device, cpu = get_device("cpu"), torch.device("cpu")
    topology = plan.topology(rank)
    with process_groups(plan, topology, device, cpu):
        model = build_model(plan, topology, device, cpu)
        held = [(rectangle, shard) for shard in model.shards for rectangle in shard.rectangles]
        return {rectangle.name: shard.local[rectangle.local_slices].clone() for rectangle, shard in held}


def test_copies_were_compared() -> None:
    # The comparison needs replicas on several ranks: norms with tp, kv heads, ZeRO 0, tied embeddings.
    assert run_layout(2, "trainer.tp=2", steps=1).copies > 0
    assert run_layout(2, "trainer.zero=0", steps=1).copies > run_layout(2, "trainer.zero=1", steps=1).copies == 0


def test_every_weight_moves_in_a_step() -> None:
    for ranks, layout in ((1, ()), (4, ("trainer.tp=2", "trainer.pp=2"))):
        result = run_layout(ranks, *layout, steps=1)
        for name, before in result.initial.items():
            assert not torch.equal(before, result.weights[name]), f"{name} did not move"
