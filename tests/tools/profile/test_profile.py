"""Module trees and waits of real ranks: FLOPs against torch's counter, times against sleeps."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_llama.arch.flops import flops_per_token
from megatron_llama.data.prefetch import Prefetcher
from megatron_llama.devices import get_device
from megatron_llama.devices.cpu import DEVICE
from megatron_llama.devices.cpu import attention as cpu_attention
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from megatron_llama.tools.common import read_help
from megatron_llama.tools.measured_steps import BACKWARD, FORWARD
from megatron_llama.tools.profile import cli
from megatron_llama.tools.profile.modules import Profile, RankProfile
from megatron_llama.tools.profile.profiler import StepProfiler
from megatron_llama.tools.profile.trace import BEFORE, MODULES, WAITS, Zone, memory_of, renumber
from megatron_llama.train.loop import training_step
from megatron_llama.train.metrics_file import read_metrics
from megatron_llama.train.step_checks import StepGuard
from megatron_llama.train.waits import AXES, DATA, WAIT_METRICS, trace_waits
from tests.oracle import SHAPE, make_plan, rank_data, rank_groups, rank_model
from tests.paths import ROOT, SCRIPTS
from tests.processes import Launcher
from tests.ranks import run_ranks
from tests.rows import rows

Tamper = Callable[[int, ParallelModel, Any], None]


@dataclass
class Rank:
    """Results of one rank."""

    profile: RankProfile | None
    counted: int
    """FLOPs of a step by torch's counter, with attention as matmuls."""
    parameters: int
    """Parameters that this rank counts in norms, each on one rank only."""
    losses: list[float]
    metrics: dict[str, float]
    """Metrics of the last profiled step."""
    tokens: int
    """Tokens of a step on all ranks."""
    document_length: float
    """Mean over tokens of the length of their document."""
    graphs: int = 0
    """Compiled graphs; ``late`` of them after the profile started."""
    late: int = 0


def profile_layout(plan: Plan, tamper: Tamper | None = None, *, steps: int = 2, count: bool = True) -> list[Rank]:
    """Run ``steps`` steps on every rank, profiling the steps of trainer.profile.

    ``tamper`` is called with the rank, model and batches before the first step.
    """
    return run_ranks(_profile_rank, plan.world_size, plan, tamper, steps, count)


def merged(plan: Plan, ranks: list[Rank]) -> Profile:
    """Merge the profiles as the first rank does."""
    return Profile(plan, [rank.profile for rank in ranks if rank.profile is not None])


def _profile_rank(rank: int, plan: Plan, tamper: Tamper | None, steps: int, count: bool) -> Rank:
    with ExitStack() as stack:
        stack.enter_context(rank_groups(plan, rank))
        model = rank_model(plan, rank)
        optimizer = build_optimizer(plan, model)
        batches = stack.enter_context(Prefetcher(rank_data(plan).train, 10**6))
        if tamper is not None:
            tamper(rank, model, batches)
        profiler = StepProfiler(plan, plan.topology(rank), get_device("cpu"), model, optimizer)
        guard, losses, metrics = StepGuard(0), list[float](), dict[str, float]()
        graphs = tokens = attended = 0
        for step in range(1, steps + 1):
            with profiler.step(step, batches) as waited:
                step_metrics = training_step(step, plan, model, optimizer, batches, guard)
            losses.append(step_metrics["reduced_train_loss"])
            tokens, attended = tokens + int(step_metrics["tokens"]), attended + int(step_metrics["attended"])
            metrics = dict(waited) or metrics
            graphs = graphs if model.compiler is None else len(model.compiler.graphs)
        profile = profiler.rank_profile() if plan.config.trainer.profile else None
        counter = FlopCounterMode(display=False)
        if count:
            # Kernels that recompute scores in backward would count one more matmul.
            by_torch = patch.object(cpu_attention, "is_faster", lambda _: False)
            with by_torch, sdpa_kernel(SDPBackend.MATH), counter:
                training_step(steps + 1, plan, model, optimizer, batches, guard)
        parameters = sum(part.numel() for shard in model.shards for part in shard.owned(shard.values))
        late = 0 if model.compiler is None else sum(graph.late for graph in model.compiler.graphs)
        counted = counter.get_total_flops()
        return Rank(profile, counted, parameters, losses, metrics, tokens // steps, attended / tokens, graphs, late)


WINDOW = "trainer.profile=[1,3]"  # step 3 would be traced; it is not run here
LORA = ("finetune.method=lora", "finetune.lora_target_modules=all-linear")
# Ranks, settings, axes whose ranks wait for each other, whether no rank computes more than its share.
LAYOUTS = {
    "tp2-sp-lora": (2, ("trainer.tp=2", *LORA), {"tp", "world"}, True),
    "pp2-vpp2": (2, ("trainer.pp=2", "trainer.vpp=2"), {"pp", "world"}, True),
    "dp2-zero3-packed": (2, ("trainer.zero=3", "data.document_mask=true"), {"dp", "world"}, True),
    "one": (1, (), set(), True),
    "bf16": (1, ("trainer.precision=bf16",), set(), True),
    "tp2-sp": (2, ("trainer.tp=2",), {"tp", "world"}, True),
    "tp2-lora": (2, ("trainer.tp=2", "trainer.sp=false", *LORA), {"tp", "world"}, False),
    "dp2-zero0-tied": (2, ("trainer.zero=0", "model.tie_word_embeddings=true"), {"dp", "world"}, True),
    "tp2-pp2": (4, ("trainer.tp=2", "trainer.pp=2"), {"tp", "pp", "world"}, True),
    "tp4-copied-heads-padded": (4, ("trainer.tp=4", "model.vocab_size=63"), {"tp", "world"}, False),
}


@pytest.mark.parametrize(("world", "settings", "axes", "plain"), rows(LAYOUTS.items(), {"tp2-sp-lora"}))
def test_layouts(world: int, settings: tuple[str, ...], axes: set[str], plain: bool) -> None:
    plan = make_plan(world, WINDOW, *settings)
    ranks = profile_layout(plan)
    profile = merged(plan, ranks)
    nodes = profile.nodes(folded=False)
    root = nodes[0]
    if not plan.config.data.document_mask:  # its kernel computes parts of the squares
        assert root.flops == sum(rank.counted for rank in ranks), "torch's counter"
    formula = flops_per_token(plan.model, ranks[0].document_length, plan.config.finetune).full
    if plain:
        assert root.flops == pytest.approx(formula * ranks[0].tokens, rel=1e-12), "our formula"
    assert root.parameters == plan.whole.held == sum(rank.parameters for rank in ranks)

    # The times of all modules add up to the total.
    assert sum(node.own for node in nodes) == pytest.approx(root.busy)
    assert sum(rank.spent(phase, None) for rank in profile.ranks for phase in (FORWARD, BACKWARD)) == pytest.approx(
        root.busy
    )
    for node in nodes:
        inside = [
            n for n in nodes if n.depth == node.depth + 1 and (node is root or n.name.startswith(node.name + "."))
        ]
        assert node.own + sum(n.busy for n in inside) == pytest.approx(node.busy)
        assert node.flops >= sum(n.flops for n in inside)
        assert node.parameters >= sum(n.parameters for n in inside)
        if node.flops and not inside:
            assert node.forward > 0 and node.backward > 0, f"{node.name} computes in no time"
    folded = profile.nodes(folded=True)
    assert sum(node.own for node in folded) == pytest.approx(root.busy)
    assert next(n for n in folded if n.name == "layers.*").instances == plan.model.num_hidden_layers

    waited = {zone.wait.partition(" ")[0] for rank in profile.ranks for zone in rank.seconds if zone.wait}
    assert waited == axes
    assert {axis for axis in AXES if ranks[0].metrics[f"waited_{axis}_s"] > 0} == axes
    assert all(rank.metrics == ranks[0].metrics for rank in ranks), "the metrics are of all ranks"


SLEEP = 1.0


class _SlowBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP)
        return grad


def slow_first_stage(rank: int, model: ParallelModel, batches: Any) -> None:
    """Slow down a module of the first stage in the first micro batch, and the data of the first step."""
    if rank != 0:
        return
    module, at = model.chunks[0].layers["1"].mlp, batches.at
    forward, calls = module.forward, []

    def slow(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return forward(_SlowBothWays.apply(x) if len(calls) == 1 else x)

    def late(position: int) -> Any:
        time.sleep(SLEEP if position == 0 else 0)
        return at(position)

    module.forward, batches.at = slow, late


def test_time_and_waits_are_attributed_to_their_cause() -> None:
    plan = make_plan(2, WINDOW, "trainer.pp=2")
    ranks = profile_layout(plan, slow_first_stage, steps=1, count=False)
    profile: Profile = merged(plan, ranks)
    nodes = {node.name: node for node in profile.nodes(folded=False)}
    slow = nodes["layers.1.mlp"]
    assert slow.forward >= SLEEP and slow.backward >= SLEEP
    assert slow.own >= 2 * SLEEP > slow.busy - slow.own, "in the module itself, not in its matrices"
    for part in ("forward", "backward"):
        others = sum(getattr(nodes[name], part) for name in ("layers.0", "layers.1.self_attn", "embed_tokens"))
        assert getattr(slow, part) > others, f"{part} sleep attributed to another module"
    first, second = profile.ranks
    # Loose bound: under load the other stage may start its wait late.
    assert second.spent(None, "pp") > SLEEP / 2
    assert second.spent(None, "pp") > first.spent(None, "pp")
    assert first.spent(DATA) >= SLEEP > second.spent(DATA)
    assert second.spent(None, "world") > SLEEP / 2, "it waits for the other rank's data when tokens are summed"
    assert ranks[0].metrics["waited_data_s"] == pytest.approx((first.spent(DATA) + second.spent(DATA)) / 2)


def test_profiling_writes_all_files_and_keeps_the_losses(tmp_path: Path) -> None:
    """Trace a full window; losses are bit-identical to a run without profiling."""
    plan = make_plan(2, "trainer.profile=[2,3]", "trainer.pp=2", "trainer.recompute=full", f"run.dir={tmp_path}")
    ranks = profile_layout(plan, steps=4, count=False)
    without = profile_layout(make_plan(2, "trainer.pp=2", "trainer.recompute=full"), steps=4, count=False)
    assert [rank.losses for rank in ranks] == [rank.losses for rank in without]
    assert len(set(ranks[0].losses)) == 4 and set(ranks[0].metrics) == set(WAIT_METRICS) and not without[0].metrics

    folder = tmp_path / "profile"
    traces = [f"trace.rank{rank}.json.gz" for rank in range(2)]
    assert {path.name for path in folder.iterdir()} == {
        *traces,
        "profile.txt",
        "modules.txt",
        "profile.json",
        "memory.png",
    }
    for rank in range(2):
        events = json.loads(gzip.decompress((folder / traces[rank]).read_bytes()))["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in spans)
        ours = [event for event in spans if event["tid"] in (MODULES, WAITS)]
        assert {event["pid"] for event in ours} == {rank}, "one process per rank"
        step = next(event for event in spans if event["name"] == "step 3")
        end = step["ts"] + step["dur"]
        assert all(step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= end for event in ours), "within the step"
        layer = 2 * rank
        assert {f"forward layers.{layer}.mlp.down_proj", f"backward layers.{layer}.self_attn", "pp recv"} <= {
            event["name"] for event in ours
        }
        operators = {event["name"] for event in spans if event["pid"] == rank}
        assert {"aten::mm", "aten::silu"} <= operators, "torch's events are in the same process"
        # One after the other: the clock is in one zone at a time.
        ours.sort(key=lambda event: event["ts"])
        assert all(one["ts"] + one["dur"] <= two["ts"] + 1e-3 for one, two in itertools.pairwise(ours))
    text = (folder / "profile.txt").read_text()
    assert "profile of step 2; step 3 is traced" in text and max(map(len, text.splitlines())) < 96
    assert json.loads((folder / "profile.json").read_text())["modules"][0]["parameters"] == plan.parameters


def test_processes_of_ranks_and_gpus_have_different_numbers() -> None:
    """torch's trace of a rank: its process, and GPU 0 and 1 as processes 0 and 1."""
    numbers: set[Any] = set()
    for rank in range(2):
        events = [{"pid": 4711 + rank}, {"pid": 0}, {"pid": 1}, {"pid": "Spans"}, {"name": "without a process"}]
        renumber(events, 4711 + rank, rank)
        assert events[0]["pid"] == rank and events[3] == {"pid": "Spans"} and "pid" not in events[4]
        numbers |= {event["pid"] for event in events[:3]}
    assert len(numbers) == 6


def test_memory_by_kind_of_a_written_trace() -> None:
    """Compare with a handwritten trace."""
    spans = [(0.0, 10.0, Zone(FORWARD, "layers.0.mlp")), (10.0, 10.0, Zone(BACKWARD, "layers.0"))]

    def change(at: float, address: int, size: int, device: int = 0) -> dict[str, Any]:
        args = {"Bytes": size, "Addr": address, "Device Type": device, "Total Allocated": max(size, 0)}
        return {"name": "[memory]", "ts": at, "args": args}

    events = [change(1, 7, 100), change(2, 8, 50), change(12, 7, -100), change(13, 9, 30), change(14, 5, -20)]
    memory = memory_of([*events, {"name": "aten::mm", "ts": 3}], spans)
    assert memory is not None
    by_kind = dict(zip(memory.kinds, memory.bytes.T.tolist(), strict=True))
    assert by_kind["forward: mlp"] == [100, 150, 50, 50, 50]
    assert by_kind["backward pass"] == [0, 0, 0, 30, 30]
    assert by_kind[BEFORE] == [20, 20, 20, 20, 0], "frees of unknown tensors were allocated before"
    assert memory.peak == 170
    assert memory.passes == ((0.0, "F0"), (pytest.approx(0.01), "B0"))
    on_a_device = memory_of([*events, change(5, 1, 1000, device=1)], spans)
    assert on_a_device is not None and on_a_device.peak == 1000, "memory of the accelerator, if there is one"


# --- waits -----------------------------------------------------------------------------------------------------------


def _recorded_waits(rank: int, world: int) -> list[str]:
    names: list[str] = []
    inside = False

    @contextmanager
    def waiting(name: str) -> Iterator[None]:
        nonlocal inside
        assert not inside, f"{name} begins while the rank waits"
        inside = True
        names.append(name)
        yield
        inside = False

    assert dist.group.WORLD is not None and dist.get_backend() == DEVICE.backend
    with trace_waits(waiting, compiled=False):
        dist.all_reduce(torch.ones(3))
        dist.all_gather_into_tensor(torch.empty(world), torch.ones(1))
        dist.broadcast(torch.ones(3), 0)
    return list(dict.fromkeys(names))


def test_each_wait_is_recorded_once() -> None:
    for world in (2, 3):  # gloo runs the all-reduce of three ranks
        expected = ["world all_reduce", "world all_gather", "world broadcast"]
        assert run_ranks(_recorded_waits, world, world) == [expected] * world


# --- scripts/profile.py ----------------------------------------------------------------------------------------------

SMALL = [word for word in SHAPE if not word.startswith(("data=", "trainer.steps"))]


def test_the_script_runs_and_prints_a_profile(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("a run's own\n")
    words = [*SMALL, "optim.warmup_steps=100", "trainer.profile=[2,3]", f"run.dir={tmp_path / 'run'}"]
    started = Launcher(lambda: cli.main(words), tmp_path)
    assert started.wait() == 0, started.errors
    assert "profile of step 2; step 3 is traced" in started.out.read_text()
    assert started.out.read_text().endswith((tmp_path / "run/profiling/profile/profile.txt").read_text())
    records = read_metrics(tmp_path / "run/profiling/metrics.jsonl")
    assert [record["step"] for record in records if set(WAIT_METRICS) <= record.keys()] == [2, 3], "profiled steps only"
    assert records[1]["waited_data_s"] <= records[1]["step_time_s"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "a run's own\n"
    assert not (tmp_path / "run/profiling/checkpoints").exists()
    modules = json.loads((tmp_path / "run/profiling/profile/profile.json").read_text())["modules"]
    assert {"layers.0.self_attn.qkv_proj", "lm_head"} <= {module["name"] for module in modules}
    assert "default: [{},{}]".format(*cli.WINDOW) in read_help("profile")


def test_the_script_does_not_shadow_the_profile_module() -> None:
    """Scripts of scripts/ that import cProfile, as torch does, get the standard library's profile module."""
    program = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); path = list(sys.path); import cProfile, profile; "
    program += "assert sys.path == path; cProfile.run('1')"  # live_bytes.py runs other commits of the project
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "function calls" in done.stdout
