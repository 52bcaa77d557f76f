"""Profile some steps of a small model on real ranks, and count their FLOPs with torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_llama.data.prefetch import Prefetcher
from megatron_llama.devices import get_device
from megatron_llama.devices.cpu import attention as cpu_attention
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from megatron_llama.tools.profile.modules import Profile, RankProfile
from megatron_llama.tools.profile.profiler import StepProfiler
from megatron_llama.train.loop import training_step
from megatron_llama.train.step_checks import StepGuard
from tests.oracle import rank_data, rank_groups, rank_model
from tests.ranks import run_ranks

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


def run_dir(folder: Path) -> str:
    """Return the override of the run folder."""
    return f"run.dir={folder / 'run'}"
