"""torch.compile of blocks: one graph for all of them, compiled once however many ranks need it, then cached;
late compilations and graph breaks are reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_llama.data.batches import Batches
from megatron_llama.devices import get_device
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.parallel.compiling import WARM_UP_BATCHES, Compiler, Graph
from megatron_llama.plan import Plan
from tests.compiled import SECONDS, needs_compiler
from tests.finetuning.runner import LORA, tune
from tests.layouts.table import DROPPING, PIECES
from tests.oracle import RaggedSamples, distance, make_plan, oracle, run_layout, worst
from tests.ranks import RankFailed, run_ranks

pytestmark = pytest.mark.usefixtures("compiled_here")
COMPILE = ("trainer.compile=true", "trainer.compile_strict=true")


def compiled(cache: Path, *overrides: str, world: int = 4, batches: int = 3) -> list[list[Graph]]:
    """Each rank's graphs of a few training batches and a validation."""
    plan = make_plan(world, *COMPILE, f"trainer.compile_cache={cache}", *overrides)
    return run_ranks(_work, world, plan, batches, timeout=SECONDS)


def _work(rank: int, plan: Plan, batches: int) -> list[Graph]:
    device, cpu, topology = get_device("cpu"), torch.device("cpu"), plan.topology(rank)
    with process_groups(plan, topology, device, cpu):
        model = build_model(plan, topology, device, cpu)
        samples = RaggedSamples(plan.config.data.seq_length, plan.model.vocab_size)
        data = Batches(samples, plan, topology, cpu)
        for batch in range(batches):
            model.forward_backward(data.at(8 * batch))
        model.forward_backward(data.at(0), train=False)
        assert model.compiler is not None
        return model.compiler.graphs


@pytest.mark.long
@pytest.mark.slow
@needs_compiler
def test_one_graph_for_all_blocks_compiled_by_one_rank(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks in two tensor-parallel groups, two blocks on each: one graph to train, one to validate; and on the
    last stage two for the loss, which validation has in common."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))  # not the cache that other files share
    layout = ("trainer.tp=2", "trainer.pp=2")
    first = compiled(cache, *layout)
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
    second = compiled(cache, *layout)
    assert all(graph.cached for graphs in second for graph in graphs), "not found again"
    assert {graph.key for graphs in second for graph in graphs} == distinct


@pytest.mark.long
@pytest.mark.slow
@needs_compiler
def test_lora_is_one_graph_too(cache: Path, tmp_path: Path) -> None:
    layout = ("trainer.tp=2", *LORA)
    first = compiled(cache, *layout, "model.num_hidden_layers=2", world=2)
    assert all(len(graphs) == 4 and not any(g.late or g.failure for g in graphs) for graphs in first)
    # With the embedding frozen, the first block's input would ask for no gradient and be another graph.
    assert len({graph.key for graphs in first for graph in graphs}) == 4
    fused = tune(2, tmp_path / "fused", *layout, *COMPILE, f"trainer.compile_cache={cache}", steps=3)
    eager = tune(2, tmp_path / "eager", *layout, steps=3)
    assert fused.losses == pytest.approx(eager.losses, rel=1e-5)
    assert all(distance(tensor, eager.trained[name]) <= 1e-5 for name, tensor in fused.trained.items())


@pytest.mark.long
@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("recompute", ["elementwise", "selective", "full"])
def test_blocks_that_recompute_share_a_graph(cache: Path, recompute: str) -> None:
    (graphs,) = compiled(cache, f"trainer.recompute={recompute}", world=1, batches=1)
    loss = [("loss", "training"), ("gradient of the loss", "training")]
    assert [(graph.function, graph.mode) for graph in graphs] == [("block", "training"), *loss, ("block", "validation")]


@pytest.mark.slow
@needs_compiler
def test_what_is_new_says_why(tmp_path: Path) -> None:
    """A stand-in compiles nothing: Inductor's cache is shared with other tests, which may have equal graphs."""
    cache = ("trainer.compile=true", f"trainer.compile_cache={tmp_path}")
    run_ranks(_misses, 2, make_plan(2, *cache, "trainer.tp=2"))
    (graphs,) = run_ranks(_misses, 1, make_plan(1, *cache))
    assert [graph.why for graph in graphs] == ["trainer.tp: 2 → 1, trainer.sp: True → False"] * 4


def _misses(rank: int, plan: Plan) -> list[Graph]:
    device, cpu, topology = get_device("cpu"), torch.device("cpu"), plan.topology(rank)
    with process_groups(plan, topology, device, cpu):
        compiler = Compiler(plan, device)
        compiler._compile = _uncompiled
        model = build_model(plan, topology, device, cpu, compiler)
        data = Batches(RaggedSamples(plan.config.data.seq_length, plan.model.vocab_size), plan, topology, cpu)
        for train in (True, False):
            model.forward_backward(data.at(0), train=train)
        return compiler.graphs


def _uncompiled(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"] += 1
    return graph.forward


@needs_compiler
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("sp", "recompute"), [("true", "none"), ("false", "none"), ("true", "elementwise")])
def test_compiled_equals_eager(cache: Path, sp: str, recompute: str) -> None:
    layout = ("trainer.tp=2", "trainer.pp=2", f"trainer.sp={sp}", f"trainer.recompute={recompute}")
    differences = worst(
        run_layout(4, *layout, *COMPILE, f"trainer.compile_cache={cache}", steps=2), run_layout(4, *layout, steps=2)
    )
    assert all(difference <= 1e-5 for difference in differences.values()), differences
    assert any(difference > 0 for difference in differences.values()), (
        "fused kernels round differently: did it compile?"
    )


@pytest.mark.long
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "model"),
    [([], PIECES), (["trainer.tp=2"], DROPPING)],
    ids=["curriculum", "tp2+sp, random-LTD"],
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


def _late(rank: int, plan: Plan) -> list[Graph]:
    device, cpu, topology = get_device("cpu"), torch.device("cpu"), plan.topology(rank)
    longer = replace(plan, config=replace(plan.config, data=replace(plan.config.data, seq_length=12)))
    with process_groups(plan, topology, device, cpu):
        model = build_model(plan, topology, device, cpu)
        for batch in range(WARM_UP_BATCHES):
            model.forward_backward(Batches(RaggedSamples(16, 64), plan, topology, cpu).at(8 * batch))
        model.forward_backward(Batches(RaggedSamples(12, 64), longer, topology, cpu).at(0))
        assert model.compiler is not None
        return model.compiler.graphs


@pytest.mark.slow
@pytest.mark.long
@needs_compiler
def test_a_graph_after_warm_up_is_told_or_forbidden(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = (f"trainer.compile_cache={cache}", "trainer.compile=true")
    (graphs,) = run_ranks(_late, 1, make_plan(1, *one))
    assert [(graph.function, graph.late) for graph in graphs] == [
        *(("block", False), ("loss", False), ("gradient of the loss", False)),
        *(("block", True), ("loss", True), ("gradient of the loss", True)),
    ]
    assert "compiled after warm-up: block, training, for (12, 2, 32) float32" in capfd.readouterr().err
    with pytest.raises(
        RankFailed, match="Recompiled: trainer.compile_strict: block was recompiled after 2 batches"
    ):
        run_ranks(_late, 1, make_plan(1, *one, "trainer.compile_strict=true"))


def _broken(rank: int, plan: Plan) -> None:
    device, cpu, topology = get_device("cpu"), torch.device("cpu"), plan.topology(rank)
    with process_groups(plan, topology, device, cpu):
        model = build_model(plan, topology, device, cpu, Compiler(plan, device))
        attention = next(iter(model.chunks[0].layers.values())).self_attn
        whole = attention.forward

        def breaks(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            torch._dynamo.graph_break()
            return whole(x, rotary)

        attention.forward = breaks
        model.forward_backward(Batches(RaggedSamples(16, 64), plan, topology, cpu).at(0))


@needs_compiler
def test_a_graph_break_is_forbidden(cache: Path) -> None:
    with pytest.raises(RankFailed, match="Unsupported"):
        run_ranks(_broken, 1, make_plan(1, *COMPILE, f"trainer.compile_cache={cache}"))


def _failing(rank: int, plan: Plan, keep_going: bool) -> list[Graph]:
    device, cpu, topology = get_device("cpu"), torch.device("cpu"), plan.topology(rank)
    with process_groups(plan, topology, device, cpu):
        compiler = Compiler(plan, device, keep_going)
        compiler._compile = _fails
        model = build_model(plan, topology, device, cpu, compiler)
        model.forward_backward(Batches(RaggedSamples(16, 64), plan, topology, cpu).at(0))
        return compiler.graphs


def _fails(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
    raise RuntimeError("too many partitions")


@needs_compiler
def test_a_failure_stops_a_run_and_is_counted_ahead_of_it(tmp_path: Path) -> None:
    plan = make_plan(1, f"trainer.compile_cache={tmp_path}", "trainer.compile=true")
    (graphs,) = run_ranks(_failing, 1, plan, True)
    assert [graph.failure for graph in graphs] == ["RuntimeError: too many partitions"] * 3
    assert not (tmp_path / "graphs").exists(), "a graph that failed is not in the cache"
    with pytest.raises(RankFailed, match="too many partitions"):
        run_ranks(_failing, 1, plan, False)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("shutil.which", lambda name: None)
    rule = r"needs\s+a\s+C\+\+\s+compiler,\s+and\s+no-such-compiler\s+is\s+not\s+installed"
    with pytest.raises(RankFailed, match=rule):
        run_layout(1, "trainer.compile=true", steps=1)
