"""Ahead-of-time compilation: two steps and a validation on random data bring every graph of a run into the cache, and
with random-LTD a forward and backward pass for each of its later lengths.

Nothing is trained, logged or saved. Layout, micro batch size, sequence length and precision are the run's, and so are
the graphs; only the number of micro batches is reduced to what the pipeline needs to reach its steady state.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import torch.distributed as dist

from megatron_llama.data.batches import build_data
from megatron_llama.devices import get_device
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.parallel.compiling import Compiler, Graph
from megatron_llama.plan import Plan
from megatron_llama.train.compile_report import Compilations, gather, write_report

STEPS = 2


class NotCompiled(RuntimeError):
    """Some graphs could not be compiled; the report lists them."""


def compile_rank(plan: Plan, representatives: Sequence[int] | None = None) -> None:
    """This process's part of compiling for ``plan``: as rank RANK, or with ``representatives`` as
    ``representatives[RANK]`` of a world whose other ranks are not there.

    The launcher has set RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. RANK 0 prints the totals and
    writes ``compile.json`` to the run's folder.

    Raises:
        NotCompiled: on all ranks, where a compilation failed.
    """
    start = time.perf_counter()
    if representatives is None:
        compilations = _compile(plan, int(os.environ["RANK"]), gather)
    else:
        # Collectives of torch's fake process group go nowhere: the numbers are meaningless, the graphs are the run's.
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rank = representatives[int(os.environ["RANK"])]
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
        compilations = _compile(plan, rank, partial(_gather_through_store, representatives))
    _report(compilations, plan, start)


def _compile(plan: Plan, rank: int, gathered: Callable[[Sequence[Graph]], Compilations]) -> Compilations:
    """Compiles every graph of ``rank``; returns the graphs of all ranks, as ``gathered`` collects them."""
    device = get_device(plan.config.device.name)
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    topology = plan.topology(rank)
    with process_groups(plan, topology, device, torch_device):
        compiler = Compiler(plan, device, keep_going=True)
        model = build_model(plan, topology, device, torch_device, compiler)
        optimizer = build_optimizer(plan, model)
        data = build_data(plan, topology, torch_device)
        # No new graph after a first, a steady and a last micro batch, in whole pipeline rounds.
        pp = plan.config.trainer.pp
        count = -(-3 // pp) * pp
        for position in data.train.positions_by_shape().values():
            for _ in range(STEPS):
                model.forward_backward(data.train.at(position)[:count])
                optimizer.step(optimizer.gradient_norm())
        for length in plan.random_ltd.lengths(plan.config.trainer.steps).values() if plan.random_ltd else ():
            for position in data.train.positions_by_shape().values():
                model.forward_backward(data.train.with_length(length).at(position)[:count])
                optimizer.step(optimizer.gradient_norm())
        if data.validation is not None:
            model.forward_backward(data.validation.at(0)[:count], train=False)
        return gathered(compiler.graphs)


def _gather_through_store(ranks: Sequence[int], graphs: Sequence[Graph]) -> Compilations:
    """The graphs of all representatives, through the store of the process that started them."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"graphs/{os.environ['RANK']}", json.dumps([asdict(graph) for graph in graphs]))
    found = {
        rank: [Graph(**graph) for graph in json.loads(store.get(f"graphs/{number}"))]
        for number, rank in enumerate(ranks)
    }
    # A process that fails has the others killed soon after: by then all must have read.
    store.set(f"read/{os.environ['RANK']}", "")
    store.wait([f"read/{number}" for number in range(len(ranks))])
    return Compilations(found)


def _report(compilations: Compilations, plan: Plan, start: float) -> None:
    """Prints what was compiled, on the first rank; raises NotCompiled on all."""
    total = len(compilations.distinct)
    if int(os.environ["RANK"]) == 0:
        path = write_report(compilations, plan)
        for graph in compilations.distinct.values():
            state = f"FAILED: {graph.failure}" if graph.failure else "in the cache" if graph.cached else "compiled"
            sys.stdout.write(f"  {graph.function}, {graph.mode}, {graph.shapes}: {state}, {graph.seconds:.1f} s\n")
        sys.stdout.write("".join(f"{line}\n" for line in compilations.overlap_lines()))
        # The three totals are those that the Trainium recipe's compile job prints.
        sys.stdout.write(
            f"Total graphs: {total}\n"
            f"Total successful compilations: {total - compilations.failed}\n"
            f"Total failed compilations: {compilations.failed}\n"
            f"{time.perf_counter() - start:.0f} s; cache {plan.config.trainer.compile_cache}; report {path}\n"
        )
        sys.stdout.flush()
    if compilations.failed:
        raise NotCompiled(f"{compilations.failed} of {total} graphs could not be compiled")
