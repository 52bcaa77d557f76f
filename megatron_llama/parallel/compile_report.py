"""Report of torch.compile on all ranks: graphs, cache hits and misses, on the console and in compile.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_llama.devices.compile_cache import compile_folder
from megatron_llama.parallel.compiling import Compiler, Graph, graph_settings
from megatron_llama.plan import Plan
from megatron_llama.system.files import write_atomically

REPORT_FILE = "compile.json"


@dataclass(frozen=True)
class Compilations:
    """Compiled graphs by rank."""

    by_rank: Mapping[int, Sequence[Graph]]
    """Rank to its graphs, in order of compilation."""

    @property
    def all(self) -> list[Graph]:
        """All compilations: a graph once per rank that compiled it."""
        return [graph for graphs in self.by_rank.values() for graph in graphs]

    @property
    def distinct(self) -> dict[str, Graph]:
        """Graphs by key. Among equal graphs: a failed one, otherwise a cache miss, otherwise a hit."""
        ordered = sorted(self.all, key=lambda graph: (graph.failure is None, graph.cached))
        return {graph.key: graph for graph in reversed(ordered)}

    @property
    def hits(self) -> int:
        """Compilations read from the cache."""
        return sum(graph.cached for graph in self.all)

    @property
    def misses(self) -> int:
        """Compilations that were not in the cache."""
        return len(self.all) - self.hits

    @property
    def failed(self) -> int:
        """Distinct graphs that failed to compile on a rank."""
        return sum(graph.failure is not None for graph in self.distinct.values())

    def lines(self, cache: str) -> list[str]:
        """Return lines for the console; ``cache`` is the cache folder."""
        late = sum(graph.late for graph in self.all)
        first = (
            f"compiled {_count(len(self.distinct), 'graph')} on {_count(len(self.by_rank), 'rank')}: "
            f"cache hits {self.hits}, misses {self.misses}{f', {late} after warm-up' * bool(late)} ({cache})"
        )
        new = {f"  new: {g.function}, {g.mode}, {g.shapes}: {g.why}": None for g in self.all if g.why}
        return [first, *new, *self.overlap_lines()]

    def overlap_lines(self) -> list[str]:
        """Return a line per graph in which trainer.async_tp fused gathers or scatters."""
        return [
            f"  async_tp: {graph.function}, {graph.mode}, {graph.shapes}: {graph.overlap.fused} gathers and scatters "
            f"fused into matmuls, {graph.overlap.separate} separate"
            for graph in self.distinct.values()
            if graph.overlap is not None and any(graph.overlap)
        ]

    def to_json(self, plan: Plan) -> dict[str, Any]:
        """Return the content of compile.json."""
        ranks: dict[str, list[int]] = {}
        for rank, graphs in self.by_rank.items():
            for graph in graphs:
                ranks.setdefault(graph.key, []).append(rank)
        return {
            "total_graphs": len(self.distinct),
            "total_successful_compilations": len(self.distinct) - self.failed,
            "total_failed_compilations": self.failed,
            "cache_hits": self.hits,
            "cache_misses": self.misses,
            "cache": str(compile_folder(plan.config)),
            "settings": graph_settings(plan),
            "world_size": plan.world_size,
            "graphs": [{**graph.to_json(), "ranks": ranks[key]} for key, graph in self.distinct.items()],
        }


def gather(graphs: Sequence[Graph]) -> Compilations:
    """Gather the graphs of all ranks. A collective."""
    by_rank: list[list[Graph]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, list(graphs))
    return Compilations(dict(enumerate(by_rank)))


def write_report(compilations: Compilations, plan: Plan) -> Path:
    """Write ``<run.dir>/compile.json``; return its path."""
    path = plan.run_dir / REPORT_FILE
    write_atomically(path, json.dumps(compilations.to_json(plan), indent=1) + "\n")
    return path


def report_graphs(plan: Plan, compiler: Compiler | None, logger: Any) -> None:
    """Print by ``logger``, on the rank that has one, the compilations; write compile.json. A collective."""
    if compiler is None:
        return
    compilations = gather(compiler.graphs)
    if logger is not None:
        logger.print_lines(compilations.lines(str(compile_folder(plan.config))))
        write_report(compilations, plan)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
