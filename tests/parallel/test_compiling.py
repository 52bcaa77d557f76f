"""torch.compile of blocks: one graph for all of them, compiled once however many ranks need it, then cached; late
compilations and graph breaks are reported.

With trainer.async_tp gathers and scatters of a block are fused into matmuls, and the results do not change: Inductor's
pass transforms the graphs of real gloo ranks, and symmetric_memory.py lists the replacements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist

from megatron_llama.devices import get_device
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.parallel.async_tp import Overlap
from megatron_llama.parallel.compiling import WARM_UP_BATCHES, Compiler, Graph
from megatron_llama.plan import Plan
from tests.compiled import SECONDS, needs_compiler, prepare_rank
from tests.finetuning.runner import LORA, tune
from tests.layouts.table import DROPPING, PIECES
from tests.oracle import (
    TOLERANCE,
    RaggedSamples,
    Tensors,
    batches_of,
    distance,
    make_plan,
    on_ranks,
    oracle,
    rank_batches,
    rank_groups,
    rank_model,
    run_layout,
    worst,
)
from tests.ranks import RankFailed, run_ranks

pytestmark = pytest.mark.usefixtures("compiled_here")
COMPILE = ("trainer.compile=true", "trainer.compile_strict=true")
Test = TypeVar("Test", bound=Callable[..., None])


def takes_minutes(test: Test) -> Test:
    """Mark a test that compiles for minutes."""
    return pytest.mark.long(pytest.mark.slow(needs_compiler(test)))


class Trained(NamedTuple):
    """Results of one rank."""

    graphs: list[Graph]
    losses: list[float]
    """Losses of the steps and a validation."""
    gradients: list[Tensors]
    """This rank's, by step."""


def trained(cache: Path, *overrides: str, world: int = 4, steps: int = 3, fuses: bool = True) -> list[Trained]:
    """Train on each rank. Unless ``fuses``, Inductor's pass matches all collectives and replaces none."""
    plan = make_plan(world, *COMPILE, f"trainer.compile_cache={cache}", *overrides)
    return run_ranks(_train, world, plan, steps, fuses, timeout=SECONDS)


def _train(rank: int, plan: Plan, steps: int, fuses: bool) -> Trained:
    prepare_rank(plan)
    if not fuses:
        dist.is_nccl_available = lambda: False
    with rank_groups(plan, rank):
        model = rank_model(plan, rank)
        optimizer, batches = build_optimizer(plan, model), rank_batches(plan)
        losses: list[float] = []
        gradients: list[Tensors] = []
        for step in range(steps):
            losses.append(model.forward_backward(batches.at(8 * step)).item())
            gradients.append({shard.name: shard.grad.clone() for shard in model.trained if shard.grad is not None})
            optimizer.step(optimizer.gradient_norm())
        losses.append(model.forward_backward(batches.at(0), train=False).item())
        assert model.compiler is not None
        return Trained(model.compiler.graphs, losses, gradients)


def graphs_of(ranks: list[Trained]) -> list[list[Graph]]:
    return [rank.graphs for rank in ranks]


@takes_minutes
def test_one_graph_for_all_blocks_compiled_by_one_rank(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks in two tensor-parallel groups, two blocks on each: one graph to train, one to validate; and on the
    last stage two for the loss, which validation has in common."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))  # not the cache that other files share
    layout = ("trainer.tp=2", "trainer.pp=2")
    first = graphs_of(trained(cache, *layout))
    loss = [("loss", "training"), ("gradient of the loss", "training")]
    for rank, graphs in enumerate(first):
        expected = [("block", "training"), *(loss if rank >= 2 else []), ("block", "validation")]
        assert [(graph.function, graph.mode) for graph in graphs] == expected
        assert not any(graph.late or graph.failure for graph in graphs)
    distinct = {graph.key for graphs in first for graph in graphs}
    # The first stage's input has passed the embedding, the second's comes from another rank: the same to a block.
    assert len(distinct) == 4
    assert sum(not graph.cached for graphs in first for graph in graphs) == 4, "more than one rank compiled a graph"
    new = [graph for graphs in first for graph in graphs if not graph.cached]
    assert all(f"no graph of {graph.function}" in (graph.why or "") for graph in new)
    second = graphs_of(trained(cache, *layout))
    assert all(graph.cached for graphs in second for graph in graphs), "not found again"
    assert {graph.key for graphs in second for graph in graphs} == distinct


@takes_minutes
def test_lora_is_one_graph_too(cache: Path, tmp_path: Path) -> None:
    layout = ("trainer.tp=2", *LORA)
    first = graphs_of(trained(cache, *layout, "model.num_hidden_layers=2", world=2))
    assert all(len(graphs) == 4 and not any(g.late or g.failure for g in graphs) for graphs in first)
    # With the embedding frozen, the first block's input would ask for no gradient and be another graph.
    assert len({graph.key for graphs in first for graph in graphs}) == 4
    fused = tune(2, tmp_path / "fused", *layout, *COMPILE, f"trainer.compile_cache={cache}", steps=3)
    eager = tune(2, tmp_path / "eager", *layout, steps=3)
    assert fused.losses == pytest.approx(eager.losses, rel=1e-5)
    assert all(distance(tensor, eager.trained[name]) <= 1e-5 for name, tensor in fused.trained.items())


@takes_minutes
@pytest.mark.parametrize("recompute", ["elementwise", "selective", "full"])
def test_blocks_that_recompute_share_a_graph(cache: Path, recompute: str) -> None:
    ((graphs, *_),) = trained(cache, f"trainer.recompute={recompute}", world=1, steps=1)
    loss = [("loss", "training"), ("gradient of the loss", "training")]
    assert [(graph.function, graph.mode) for graph in graphs] == [("block", "training"), *loss, ("block", "validation")]


@pytest.mark.slow
@needs_compiler
def test_what_is_new_says_why(tmp_path: Path) -> None:
    """A stand-in compiles nothing: Inductor's cache is shared with other tests, which may have equal graphs."""
    cache = ("trainer.compile=true", f"trainer.compile_cache={tmp_path}")
    run_ranks(_compiled_by, 2, make_plan(2, *cache, "trainer.tp=2"), _uncompiled)
    (graphs,) = run_ranks(_compiled_by, 1, make_plan(1, *cache), _uncompiled)
    assert [graph.why for graph in graphs] == ["trainer.tp: 2 → 1, trainer.sp: True → False"] * 4


def _compiled_by(rank: int, plan: Plan, compile: Callable[..., Any], keep_going: bool = False) -> list[Graph]:
    """Return the graphs of a training step and a validation with a stand-in for Inductor."""
    with rank_groups(plan, rank):
        compiler = Compiler(plan, get_device("cpu"), keep_going)
        compiler._compile = compile
        model, batches = rank_model(plan, rank, compiler), rank_batches(plan).at(0)
        for train in (True, False):
            model.forward_backward(batches, train=train)
        return compiler.graphs


def _uncompiled(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"] += 1
    return graph.forward


@takes_minutes
@pytest.mark.parametrize(
    ("layout", "model"), [([], PIECES), (["trainer.tp=2"], DROPPING)], ids=["curriculum", "tp2+sp, random-LTD"]
)
def test_a_length_that_is_planned_is_compiled_when_it_comes(cache: Path, layout: list[str], model: str) -> None:
    """Strict mode: each of the three steps has a different length, the third one after WARM_UP_BATCHES."""
    ranks = 2 if layout == ["trainer.tp=2"] else 1
    strict = (*COMPILE, f"trainer.compile_cache={cache}")
    differences = worst(run_layout(ranks, *layout, model, *strict), oracle(model))
    assert all(difference <= 1e-5 for difference in differences.values()), differences
    assert any(difference > 0 for difference in differences.values()), "did it compile?"


def _by_threads(rank: int, plan: Plan) -> list[bool]:
    compiler = Compiler(plan, get_device("cpu"))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        torch._dynamo.reset()
        compiler.compile(lambda x: (x.sin() + 1).sum(), "block")(torch.ones(64, 64))
    return [graph.cached for graph in compiler.graphs]


@pytest.mark.slow
@needs_compiler
def test_a_graph_is_for_any_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead-of-time compilation has fewer ranks per machine than the run, with more threads each."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plan = make_plan(1, "trainer.compile=true", f"trainer.compile_cache={tmp_path}")
    assert run_ranks(_by_threads, 1, plan) == [[False, True, True]]


def _late(plan: Plan, model: ParallelModel) -> list[Graph]:
    shorter = replace(plan, config=replace(plan.config, data=replace(plan.config.data, seq_length=12)))
    batches = rank_batches(plan)
    for batch in range(WARM_UP_BATCHES):
        model.forward_backward(batches.at(8 * batch))
    model.forward_backward(batches_of(RaggedSamples(12, 64), shorter).at(0))
    assert model.compiler is not None
    return model.compiler.graphs


@takes_minutes
def test_a_graph_after_warm_up_is_told_or_forbidden(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = (f"trainer.compile_cache={cache}", "trainer.compile=true")
    (graphs,) = on_ranks(_late, make_plan(1, *one))
    assert [(graph.function, graph.late) for graph in graphs] == [
        *(("block", False), ("loss", False), ("gradient of the loss", False)),
        *(("block", True), ("loss", True), ("gradient of the loss", True)),
    ]
    assert "compiled after warm-up: block, training, for (12, 2, 32) float32" in capfd.readouterr().err
    with pytest.raises(RankFailed, match="Recompiled: trainer.compile_strict: block was recompiled after 2 batches"):
        on_ranks(_late, make_plan(1, *one, "trainer.compile_strict=true"))


def _broken(plan: Plan, model: ParallelModel) -> None:
    attention = next(iter(model.chunks[0].layers.values())).self_attn
    whole = attention.forward

    def breaks(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        torch._dynamo.graph_break()
        return whole(x, rotary)

    attention.forward = breaks
    model.forward_backward(rank_batches(plan).at(0))


@needs_compiler
def test_a_graph_break_is_forbidden(cache: Path) -> None:
    with pytest.raises(RankFailed, match="Unsupported"):
        on_ranks(_broken, make_plan(1, *COMPILE, f"trainer.compile_cache={cache}"))


def _fails(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
    raise RuntimeError("too many partitions")


@needs_compiler
def test_a_failure_stops_a_run_and_is_counted_ahead_of_it(tmp_path: Path) -> None:
    plan = make_plan(1, f"trainer.compile_cache={tmp_path}", "trainer.compile=true")
    (graphs,) = run_ranks(_compiled_by, 1, plan, _fails, True)
    assert [graph.failure for graph in graphs] == ["RuntimeError: too many partitions"] * 4
    assert not (tmp_path / "graphs").exists(), "a graph that failed is not in the cache"
    with pytest.raises(RankFailed, match="too many partitions"):
        run_ranks(_compiled_by, 1, plan, _fails)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("shutil.which", lambda name: None)
    rule = r"needs\s+a\s+C\+\+\s+compiler,\s+and\s+no-such-compiler\s+is\s+not\s+installed"
    with pytest.raises(RankFailed, match=rule):
        run_layout(1, "trainer.compile=true", steps=1)


MODEL = "model.num_hidden_layers=3"
ASYNC_TP = (MODEL, "trainer.tp=2", "trainer.async_tp=true")
WIDE = ("model.hidden_size=256", "model.intermediate_size=256")  # nf4's blocks are of 64 values of a rank's row
STEPS = 2


def worst_of_ranks(one: list[Trained], other: list[Trained]) -> float:
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


@takes_minutes
@pytest.mark.parametrize("name", ROWS)
def test_collectives_are_inside_products_and_change_nothing(name: str, tmp_path: Path) -> None:
    # A separate cache: collectives of a cached graph of another row are not counted.
    cache = tmp_path
    overrides, training, validation = ROWS[name]
    world = 4 if "trainer.tp=4" in overrides else 2
    plain = trained(cache, MODEL, "trainer.tp=2", *overrides, world=world, steps=STEPS)
    assert overlaps(plain) == {"training": {None}, "validation": {None}}
    overlapped = trained(cache, *ASYNC_TP, *overrides, world=world, steps=STEPS)
    assert overlaps(overlapped) == {"training": {training}, "validation": {validation}}
    if name == "plain":  # later rows are as near to earlier overlapped ones
        assert {g.why for rank in overlapped for g in rank.graphs if g.why} == {"trainer.async_tp: False → True"}
    difference = worst_of_ranks(overlapped, plain)
    # Two ranks: equal matmuls, and sums of two terms.
    assert difference <= (TOLERANCE if world > 2 else 0.0)


@needs_compiler
@pytest.mark.slow
def test_a_graph_out_of_the_cache_says_what_overlaps(cache: Path) -> None:
    trained(cache, *ASYNC_TP, world=2, steps=STEPS)
    repeated = trained(cache, *ASYNC_TP, world=2, steps=STEPS)
    assert all(graph.cached for rank in repeated for graph in rank.graphs)
    assert overlaps(repeated) == {"training": {Overlap(8, 0)}, "validation": {Overlap(4, 0)}}


@takes_minutes
def test_a_compiler_that_recognises_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    for actual in ("compiled", "cached"):
        with pytest.raises(RankFailed, match="NotOverlapped: trainer.async_tp: .* none of the 8 .* of block, training"):
            trained(tmp_path, *ASYNC_TP, world=2, steps=STEPS, fuses=False)
        assert len(list(tmp_path.glob("graphs/*.json"))) == 1, actual
