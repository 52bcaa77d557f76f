"""trainer.async_tp: gathers and scatters of a compiled block are fused into matmuls, and the results do not change.

Inductor's pass transforms the graphs of real gloo ranks; symmetric_memory.py lists the replacements."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_llama.data.batches import Batches
from megatron_llama.devices import get_device
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.parallel.compiling import Compiler, Graph
from megatron_llama.parallel.tensor import Overlap
from megatron_llama.plan import Plan
from tests.compiled import SECONDS, needs_compiler, prepare_rank
from tests.finetuning.runner import LORA
from tests.layouts.table import DROPPING
from tests.oracle import (
    TOLERANCE,
    RaggedSamples,
    Tensors,
    assemble,
    distance,
    make_plan,
    oracle,
    rectangles,
)
from tests.parallel.symmetric_memory import wrong_pieces
from tests.ranks import RankFailed, run_ranks

pytestmark = pytest.mark.usefixtures("compiled_here")
MODEL = "model.num_hidden_layers=3"
LAYOUT = (MODEL, "trainer.tp=2", "trainer.compile=true", "trainer.compile_strict=true")
WIDE = ("model.hidden_size=256", "model.intermediate_size=256")  # nf4's blocks are of 64 values of a rank's row
STEPS = 2


class Trained(NamedTuple):
    """Results of one rank."""

    graphs: list[Graph]
    losses: list[float]
    """Losses of two steps and a validation."""
    gradients: list[Tensors]
    """This rank's, by step."""
    first: list[tuple]
    """The first step's as rectangles of Hugging Face's tensors; none with LoRA."""


def trained(cache: Path, *overrides: str, overlapped: bool, broken: str = "", world: int = 2) -> list[Trained]:
    """Each rank's answer. ``broken`` is what wrong_pieces takes, or pass: the compiler's."""
    plan = make_plan(world, *LAYOUT, f"trainer.compile_cache={cache}", f"trainer.async_tp={overlapped}", *overrides)
    return run_ranks(_train, world, plan, broken, timeout=SECONDS)


def _train(rank: int, plan: Plan, broken: str) -> Trained:
    device, cpu, topology = get_device("cpu"), torch.device("cpu"), plan.topology(rank)
    prepare_rank(plan)
    if broken == "pass":
        dist.is_nccl_available = lambda: False  # then Inductor's pass finds all and replaces nothing
    elif broken:
        wrong_pieces(broken)
    with process_groups(plan, topology, device, cpu):
        model = build_model(plan, topology, device, cpu)
        optimizer = build_optimizer(plan, model)
        samples = RaggedSamples(plan.config.data.length, plan.model.vocab_size)
        data = Batches(samples, plan, topology, cpu, random_ltd=plan.random_ltd)
        losses: list[float] = []
        gradients: list[Tensors] = []
        first: list[tuple] = []
        for step in range(STEPS):
            losses.append(model.forward_backward(data.at(8 * step)).item())
            gradients.append({shard.name: shard.grad.clone() for shard in model.trained if shard.grad is not None})
            if step == 0 and plan.config.finetune.method == "none":
                first = rectangles(model, lambda shard: shard.grad)
            optimizer.step(optimizer.gradient_norm())
        losses.append(model.forward_backward(data.at(0), train=False).item())
        assert model.compiler is not None
        return Trained(model.compiler.graphs, losses, gradients, first)


def worst(one: list[Trained], other: list[Trained]) -> float:
    """The largest relative difference of a loss or a gradient, of all ranks."""
    actual = []
    for left, right in zip(one, other, strict=True):
        actual += [abs(a - b) / abs(b) for a, b in zip(left.losses, right.losses, strict=True)]
        for ours, expected in zip(left.gradients, right.gradients, strict=True):
            assert ours.keys() == expected.keys() and ours
            actual += [distance(ours[name], expected[name]) for name in expected]
    return max(actual)


def overlaps(answers: list[Trained]) -> dict[str, set[Overlap | None]]:
    """By mode, what became of the gathers and scatters of a block's graph."""
    actual: dict[str, set[Overlap | None]] = {}
    for graph in (graph for answer in answers for graph in answer.graphs if graph.function == "block"):
        actual.setdefault(graph.mode, set()).add(graph.overlap)
    return actual


# Gathers and scatters of a block (fused, separate), in training and in validation. A block gathers twice and scatters
# twice in the forward pass, and again in the backward pass.
ROWS: dict[str, tuple[list[str], Overlap, Overlap]] = {
    "plain": ([], Overlap(8, 0), Overlap(4, 0)),
    # Recomputation repeats all except the last scatter, on which no gradient depends.
    "full recompute": (["trainer.recompute=full"], Overlap(11, 0), Overlap(4, 0)),
    "elementwise recompute, bf16, random-LTD": (
        ["trainer.recompute=elementwise", "trainer.precision=bf16", "trainer.micro_batch_size=1", DROPPING],
        Overlap(8, 0),
        Overlap(4, 0),
    ),
    # Collectives of LoRA's small matmuls: A's columns and B's rows have no adjacent collective.
    "LoRA": ([*LORA], Overlap(12, 4), Overlap(6, 2)),
    "LoRA, 4 bits": ([*LORA, *WIDE, "finetune.frozen_dtype=nf4"], Overlap(12, 4), Overlap(6, 2)),
    "tp4, copied kv heads": (["trainer.tp=4"], Overlap(8, 0), Overlap(4, 0)),
}


@pytest.mark.long
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_collectives_are_inside_products_and_change_nothing(name: str, tmp_path: Path) -> None:
    # A separate cache: collectives of a cached graph of another row are not counted.
    cache = tmp_path
    overrides, training, validation = ROWS[name]
    world = 4 if "trainer.tp=4" in overrides else 2
    plain = trained(cache, *overrides, overlapped=False, world=world)
    assert overlaps(plain) == {"training": {None}, "validation": {None}}
    overlapped = trained(cache, *overrides, overlapped=True, world=world)
    assert overlaps(overlapped) == {"training": {training}, "validation": {validation}}
    if name == "plain":  # later rows are as near to earlier overlapped ones
        assert {g.why for rank in overlapped for g in rank.graphs if g.why} == {"trainer.async_tp: False → True"}
    difference = worst(overlapped, plain)
    # Two ranks: equal matmuls, and sums of two terms.
    assert difference <= (TOLERANCE if world > 2 else 0.0)


@pytest.mark.long
@needs_compiler
@pytest.mark.slow
def test_it_equals_one_process(cache: Path) -> None:
    ranks, expected = trained(cache, overlapped=True), oracle(MODEL)
    for rank in ranks:
        assert rank.losses[:STEPS] == pytest.approx(expected.losses[:STEPS], rel=TOLERANCE)
    whole, _ = assemble([rank.first for rank in ranks])
    assert whole.keys() == expected.first_grads.keys()
    assert max(distance(tensor, expected.first_grads[name]) for name, tensor in whole.items()) <= TOLERANCE


@needs_compiler
@pytest.mark.slow
def test_a_graph_out_of_the_cache_says_what_overlaps(cache: Path) -> None:
    trained(cache, overlapped=True)
    repeated = trained(cache, overlapped=True)
    assert all(graph.cached for rank in repeated for graph in rank.graphs)
    assert overlaps(repeated) == {"training": {Overlap(8, 0)}, "validation": {Overlap(4, 0)}}


@pytest.mark.long
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("broken", ["gather", "scatter"])
def test_pieces_of_the_wrong_rank_are_seen(broken: str, cache: Path) -> None:
    expected = oracle(MODEL)
    actual = trained(cache, overlapped=True, broken=broken)
    assert abs(actual[0].losses[0] / expected.losses[0] - 1) > 5 * TOLERANCE


@pytest.mark.long
@needs_compiler
@pytest.mark.slow
def test_a_compiler_that_recognises_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    for actual in ("compiled", "cached"):
        with pytest.raises(RankFailed, match="NotOverlapped: trainer.async_tp: .* none of the 8 .* of block, training"):
            trained(tmp_path, overlapped=True, broken="pass")
        assert len(list(tmp_path.glob("graphs/*.json"))) == 1, actual


def _compiler_of_a_cpu(rank: int, plan: Plan) -> None:
    device = get_device("cpu")
    with process_groups(plan, plan.topology(rank), device, torch.device("cpu")):
        Compiler(plan, device)


@needs_compiler
def test_a_device_that_can_not_is_refused(cache: Path) -> None:
    plan = make_plan(2, *LAYOUT, f"trainer.compile_cache={cache}", "trainer.async_tp=true")
    with pytest.raises(RankFailed, match="device=cpu has no matmuls that overlap with gathers and scatters"):
        run_ranks(_compiler_of_a_cpu, 2, plan)
