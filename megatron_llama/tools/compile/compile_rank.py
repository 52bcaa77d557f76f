"""Compilation ahead of time: two steps and a validation on made-up data, to have every graph of a run in the cache.

Nothing is trained, logged or saved. The graphs are those of the run: layout, micro batch, sequence and precision are
its own; only the number of micro batches is cut to what the pipeline needs to get steady.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from megatron_llama.data import build_data
from megatron_llama.devices import get_device
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.parallel.compiling import Compiler, Graph
from megatron_llama.plan import Plan
from megatron_llama.topology import build_topology
from megatron_llama.train.compile_report import Compilations, gather, write_report

STEPS = 2


class NotCompiled(RuntimeError):
    """Some graphs could not be compiled; the report says which."""


def compile_rank(plan: Plan) -> None:
    """This process's part of compiling for ``plan``, as one of all its ranks.

    RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which. Rank 0 prints the totals and writes
    ``compile.json`` to its folder. Raises NotCompiled, on all ranks, where a compilation failed.
    """
    start = time.perf_counter()
    _finish(_compile(plan, int(os.environ["RANK"]), gather), plan, start)


def compile_representative(plan: Plan) -> None:
    """Compiles for a whole world as one of the ``representatives`` of its stages; the others are not there.

    RANK says which one, MASTER_ADDR and MASTER_PORT where they meet. The world's collectives go nowhere (torch's fake
    process group), so the numbers are nonsense and the graphs are right.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start = time.perf_counter()
    rank = representatives(plan)[int(os.environ["RANK"])]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    _finish(_compile(plan, rank, lambda graphs: _meet(graphs, plan)), plan, start)


def representatives(plan: Plan) -> list[int]:
    """One rank for each kind of pipeline stage: the first, one in the middle, the last."""
    per_stage = plan.world_size // plan.config.trainer.pp
    stages = sorted({0, min(1, plan.config.trainer.pp - 1), plan.config.trainer.pp - 1})
    return [stage * per_stage for stage in stages]


def _compile(plan: Plan, rank: int, meet: Callable[[Sequence[Graph]], Compilations]) -> Compilations:
    """Has every graph of ``rank`` compiled; returns those of all ranks, which ``meet`` brings together."""
    device = get_device(plan.config.device.name)
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    topology = build_topology(plan, rank)
    with process_groups(plan, topology, device, torch_device):
        compiler = Compiler(plan, device, keep_going=True)
        model = build_model(plan, topology, device, torch_device, compiler)
        optimizer = build_optimizer(plan, model)
        data = build_data(plan, topology, torch_device)
        count = steady_microbatches(plan)
        for step in range(STEPS):
            model.forward_backward(data.train.at(step * plan.config.trainer.global_batch_size)[:count])
            optimizer.step(optimizer.gradient_norm())
        if data.validation is not None:
            model.forward_backward(data.validation.at(0)[:count], train=False)
        return meet(compiler.graphs)


def steady_microbatches(plan: Plan) -> int:
    """Micro batches after which nothing new comes: a first, a steady and a last one, in whole pipeline rounds."""
    pp = plan.config.trainer.pp
    rounds = -(-3 // pp)
    return min(plan.num_microbatches, rounds * pp)


def _meet(graphs: Sequence[Graph], plan: Plan) -> Compilations:
    """The graphs of all representatives, through the store of the process that started them."""
    number, everyone = int(os.environ["RANK"]), representatives(plan)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"graphs/{number}", json.dumps([asdict(graph) for graph in graphs]))
    found = [json.loads(store.get(f"graphs/{other}")) for other in range(len(everyone))]
    store.set(f"read/{number}", "")
    store.wait([f"read/{other}" for other in range(len(everyone))])
    return Compilations(
        {rank: [Graph(**graph) for graph in theirs] for rank, theirs in zip(everyone, found, strict=True)}
    )


def _finish(compilations: Compilations, plan: Plan, start: float) -> None:
    """Says what was compiled, on the first rank, and fails where something was not."""
    if int(os.environ["RANK"]) == 0:
        path = write_report(compilations, plan)
        sys.stdout.write("\n".join(_lines(compilations, plan, time.perf_counter() - start, path)) + "\n")
        sys.stdout.flush()
    if compilations.failed:
        raise NotCompiled(f"{compilations.failed} of {len(compilations.distinct)} graphs could not be compiled")


def _lines(compilations: Compilations, plan: Plan, seconds: float, path: Path) -> list[str]:
    """The end of a compilation, as the Trainium recipe's compile job prints it, with each graph above."""
    lines = []
    for graph in compilations.distinct.values():
        state = f"FAILED: {graph.failure}" if graph.failure else "in the cache" if graph.cached else "compiled"
        lines.append(f"  {graph.what}, {graph.mode}, {graph.shapes}: {state}, {graph.seconds:.1f} s")
    total = len(compilations.distinct)
    return [
        *lines,
        f"Total graphs: {total}",
        f"Total successful compilations: {total - compilations.failed}",
        f"Total failed compilations: {compilations.failed}",
        f"{seconds:.0f} s; cache {plan.config.trainer.compile_cache}; report {path}",
    ]
