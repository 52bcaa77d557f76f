"""Ahead-of-time compilation: two steps and a validation on random data compile every graph of a run.

With random-LTD, a forward and backward pass for each of its later lengths follows. Nothing is logged or saved. Layout,
micro batch size, sequence length and precision equal the run. The number of micro batches is reduced to the
steady state of the pipeline.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from megatron_llama.data.batches import build_data
from megatron_llama.devices.compile_cache import compile_folder
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import build_model, open_device, process_groups
from megatron_llama.parallel.compiling import Compilations, Compiler, Graph, gather, write_report
from megatron_llama.plan import Plan

STEPS = 2
LONGEST_WAIT = timedelta(days=30)


class NotCompiled(RuntimeError):
    """Failed compilations, listed in the report."""


def compile_rank(plan: Plan, representatives: Sequence[int] | None = None) -> None:
    """Compile the graphs of this process: rank RANK, or ``representatives[RANK]`` of a fake world.

    The launcher sets RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. RANK 0 prints the totals and
    writes ``compile.json`` to the run folder. Raises NotCompiled on all ranks if a compilation failed.
    """
    start = time.perf_counter()
    if representatives is None:
        compilations = _compile(plan, int(os.environ["RANK"]), gather)
    else:
        # torch's fake process group moves no data: values are meaningless, but the graphs are correct.
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rank = representatives[int(os.environ["RANK"])]
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
        compilations = _compile(plan, rank, partial(_gather_through_store, representatives))
    _report(compilations, plan, start)


def _compile(plan: Plan, rank: int, gather_graphs: Callable[[Sequence[Graph]], Compilations]) -> Compilations:
    """Compile every graph of ``rank``; return the graphs of all ranks, collected by ``gather_graphs``."""
    device, torch_device = open_device(plan)
    topology = plan.topology(rank)
    with process_groups(plan, topology, device, torch_device):
        compiler = Compiler(plan, device, keep_going=True)
        model = build_model(plan, topology, device, torch_device, compiler)
        optimizer = build_optimizer(plan, model)
        data = build_data(plan, topology, torch_device)
        # A first, a steady and a last micro batch compile all graphs; round up to a multiple of pp.
        pp = plan.config.trainer.pp
        count = -(-3 // pp) * pp
        lengths = plan.random_ltd.lengths(plan.config.trainer.steps).values() if plan.random_ltd else ()
        for train, steps in [(data.train, STEPS), *((data.train.with_length(length), 1) for length in lengths)]:
            for position in data.train.positions_by_shape().values():
                for _ in range(steps):
                    model.forward_backward(train.at(position)[:count])
                    optimizer.step(optimizer.gradient_norm())
        for batches in data.validation.values():
            model.forward_backward(batches.at(0)[:count], train=False)
        return gather_graphs(compiler.graphs)


def _gather_through_store(ranks: Sequence[int], graphs: Sequence[Graph]) -> Compilations:
    """Gather the graphs of all representative ranks through the store of the launcher."""
    # A rank may compile for hours longer than another: the watchdog limits the wait.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=LONGEST_WAIT)
    store.set(f"graphs/{os.environ['RANK']}", json.dumps([asdict(graph) for graph in graphs]))
    graphs_of_ranks = {
        rank: [Graph(**graph) for graph in json.loads(store.get(f"graphs/{number}"))]
        for number, rank in enumerate(ranks)
    }
    # A failing process gets the others killed, so wait until all have read.
    store.set(f"read/{os.environ['RANK']}", "")
    store.wait([f"read/{number}" for number in range(len(ranks))])
    return Compilations(graphs_of_ranks)


def _report(compilations: Compilations, plan: Plan, start: float) -> None:
    """Print the graphs on the first rank; raise NotCompiled on all ranks if a compilation failed."""
    total = len(compilations.distinct)
    if int(os.environ["RANK"]) == 0:
        path = write_report(compilations, plan)
        for graph in compilations.distinct.values():
            state = f"FAILED: {graph.failure}" if graph.failure else "in the cache" if graph.cached else "compiled"
            sys.stdout.write(f"  {graph.function}, {graph.mode}, {graph.shapes}: {state}, {graph.seconds:.1f} s\n")
        sys.stdout.write("".join(f"{line}\n" for line in compilations.overlap_lines()))
        # The Trainium recipe's compile job prints the same three totals.
        sys.stdout.write(
            f"Total graphs: {total}\n"
            f"Total successful compilations: {total - compilations.failed}\n"
            f"Total failed compilations: {compilations.failed}\n"
            f"{time.perf_counter() - start:.0f} s; cache {compile_folder(plan.config)}; report {path}\n"
        )
        sys.stdout.flush()
    if compilations.failed:
        raise NotCompiled(f"{compilations.failed} of {total} graphs could not be compiled")
