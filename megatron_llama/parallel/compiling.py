"""torch.compile with a record of each graph: whether it was in the cache, and if not, why it is new.

One folder holds the compilers' caches and a note on each graph: the settings that it was compiled for. Of the ranks
that need the same graph, one compiles it. The others wait and load it from the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config as dynamo
import torch._functorch.config as functorch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor

from megatron_llama.arch.attention_pattern import pattern_of
from megatron_llama.config import ConfigError, Problem
from megatron_llama.devices import Device
from megatron_llama.devices.compile_cache import check_private, compile_folder, confine_inductor
from megatron_llama.devices.private_folder import make_private
from megatron_llama.parallel.async_tp import NotOverlapped, Overlap, enable_async_overlap, no_overlap_error
from megatron_llama.parallel.groups import gather_objects
from megatron_llama.plan import Plan
from megatron_llama.plan.data_schedules import curriculum_lengths
from megatron_llama.system.files import file_lock, write_atomically
from megatron_llama.system.tables import plural

REPORT_FILE = "compile.json"
WARM_UP_BATCHES = 2
"""Global batches of a mode (training, validation) after which no new graph of that mode is expected."""


class Recompiled(RuntimeError):
    """A graph was compiled after warm-up, which trainer.compile_strict forbids."""


@dataclass
class Graph:
    """One compilation on one rank."""

    function: str
    """Name of the compiled function, such as "block"."""
    mode: str
    """``training`` or ``validation``."""
    key: str
    """Digest of code, shapes and dtypes. Equal graphs have equal digests on all ranks."""
    shapes: str
    """Shapes and dtypes of the inputs, without the weights."""
    cached: bool
    """Whether it was in the cache."""
    seconds: float
    """Time to compile or load it."""
    late: bool = False
    """Whether it was compiled after warm-up."""
    why: str | None = None
    """Reason that it was not in the cache."""
    failure: str | None = None
    """The compiler's error, if it failed."""
    overlap: Overlap | None = None
    """With trainer.async_tp, the counts of fused collectives; None if the note has no counts."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry of compile.json, where the function's name is "what"."""
        fields = asdict(self)
        return {"what": fields.pop("function"), **fields}


def use_compile_folder(plan: Plan, device: Device) -> Path:
    """Make this process compile into the folder of compiled code; create and return it.

    Raises:
        ConfigError: another user could change it.
    """
    assert plan.config.trainer.compile_cache is not None, "resolve derives it"
    folder = compile_folder(plan.config)
    make_private(folder)
    check_private(device, folder)  # after its creation, which another user could have anticipated in /tmp
    for variable, value in device.compile_environment(folder).items():
        os.environ.setdefault(variable, value)
    confine_inductor()
    return folder


@dataclass
class Compiler:
    """Compiler of one rank. Records each graph."""

    plan: Plan
    device: Device
    keep_going: bool = False
    """Record a failed compilation and run that graph uncompiled, instead of raising."""
    graphs: list[Graph] = field(default_factory=list)
    _lengths: tuple[int | None, int | None] = (None, None)
    """(sequence length of the curriculum, tokens of random-LTD's layers) of the batch. New lengths need a new graph."""
    _mode: str = "training"
    _batches: dict[tuple[str, int | None, int | None], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if reason := self.device.compiler_missing():
            problem = Problem("trainer.compile", True, reason, "install it, or write trainer.compile=false")
            raise ConfigError([problem])
        self._notes = use_compile_folder(self.plan, self.device) / "graphs"
        self._backends: dict[str, Callable[..., Any]] = {}
        self._compile = torch._dynamo.lookup_backend(self.device.compiler)
        self._overlap = enable_async_overlap(self.device) if self.plan.config.trainer.async_tp else None
        # Compile the backward graph with the forward graph, not at the first backward pass: both are ready after one
        # forward. Also cache graphs with a custom backward (``traceable_matmul``).
        functorch.force_non_lazy_backward_lowering = True
        functorch.autograd_cache_allow_custom_autograd_functions = True
        # CPU kernels read the number of threads at run time. By default Inductor makes it part of the kernel and of the
        # cache key, and it differs between ranks and machines.
        inductor.cpp.dynamic_threads = True
        # A block is compiled for training and validation, for each sequence length of a curriculum and of random-LTD.
        # Beyond its limit Dynamo runs a new shape uncompiled.
        steps, ltd = self.plan.config.trainer.steps, self.plan.random_ltd
        self._cuts = {cut.length for _, cut in curriculum_lengths(self.plan.config.data, steps)}
        shapes = 2 * (1 + len(self._cuts) + (0 if ltd is None else len(ltd.lengths(steps))))
        dynamo.recompile_limit = max(dynamo.recompile_limit, shapes)
        dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, shapes)

    def compile(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return ``function``, compiled at its first call for static shapes. ``name`` is for the record.

        Under trainer.compile_strict a graph break raises torch's Unsupported, which names the line.
        """
        # Dynamo reuses the graph of one block for the next only if the backend is the same object.
        backend = self._backends.setdefault(name, lambda graph, inputs: self._backend(name, graph, inputs))
        strict = self.plan.config.trainer.compile_strict
        compiled: Callable[..., Any] = torch.compile(function, backend=backend, dynamic=False, fullgraph=strict)
        return compiled

    def begin_batch(self, length: int, ltd_length: int | None, *, train: bool) -> None:
        """Announce sequences of ``length`` tokens; random-LTD's layers process ``ltd_length`` of them, None for all."""
        self._lengths = (length if length in self._cuts else None, ltd_length)
        self._mode = "training" if train else "validation"

    def end_batch(self) -> None:
        """Count a global batch. Raises Recompiled if it needed a graph that trainer.compile_strict forbids."""
        late = [graph for graph in self.graphs if graph.late]
        if late and self.plan.config.trainer.compile_strict:
            raise Recompiled(
                f"trainer.compile_strict: {late[0].function} was recompiled after {WARM_UP_BATCHES} batches of "
                f"{late[0].mode}, for {late[0].shapes}"
            )
        key = self._mode, *self._lengths
        self._batches[key] = self._batches.get(key, 0) + 1

    def _backend(self, name: str, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a new graph, or load it from the cache. Dynamo calls this."""
        mode = self._mode
        key, shapes = _key(graph, inputs, mode, self._overlap is not None), _shapes(graph, inputs)
        late = self._batches.get((mode, *self._lengths), 0) >= WARM_UP_BATCHES
        with file_lock(self._notes.parent / "locks" / key):  # one rank compiles the graph
            before, start = self._cache_state(), time.perf_counter()
            failure, compiled = None, graph.forward
            try:
                compiled = self._compile(graph, inputs)
            except Exception as error:
                if not self.keep_going:
                    raise
                failure = f"{type(error).__name__}: {error}"
            now = self._cache_state()
            # A compiler may cache nothing, so an unchanged number of files is no hit: the note must exist too.
            cached = failure is None and now == before and (now[1] == 0 or self._note_of(key).exists())
            seconds = time.perf_counter() - start
            why = None if cached or failure else self._explain_miss(key, name, mode)
            overlap = self._overlap_of(key, cached)
            if failure is None and not self._note_of(key).exists():
                note = {"what": name, "mode": mode, "settings": self._settings, "overlap": overlap}
                write_atomically(self._note_of(key), json.dumps(note, indent=1))
            if failure is None and (error_text := no_overlap_error(overlap, name, mode)):
                if not self.keep_going:
                    raise NotOverlapped(error_text)
                failure = error_text
            self.graphs.append(Graph(name, mode, key, shapes, cached, seconds, late, why, failure, overlap))
        if late:
            sys.stderr.write(f"compiled after warm-up: {name}, {mode}, for {shapes}\n")
        return compiled

    def _overlap_of(self, key: str, cached: bool) -> Overlap | None:
        """Return the fused collectives of a graph: counted at compilation, or from its note if it was cached."""
        if self._overlap is None:
            return None
        counted = self._overlap.take()
        if not cached:
            return counted
        noted = _read(self._note_of(key)).get("overlap")
        return None if noted is None else Overlap(*noted)

    def _cache_state(self) -> tuple[int, int]:
        """Return (count, kind). The count grows with each new graph; kind is 0 for Inductor's cache misses in this
        process, 1 for files in the cache."""
        on_disk = self.device.count_compiled_graphs(self._notes.parent)
        if on_disk is not None:
            return on_disk, 1
        counters = torch._dynamo.utils.counters["inductor"]
        return int(counters["fxgraph_cache_miss"] + counters["fxgraph_cache_bypass"]), 0

    @property
    def _settings(self) -> dict[str, Any]:
        """The settings and lengths that the graphs of this batch depend on."""
        cut, ltd_length = self._lengths
        return {**graph_settings(self.plan), "the curriculum's length": cut, "random-LTD's length": ltd_length}

    def _note_of(self, key: str) -> Path:
        """Return the path of the note on a graph."""
        return self._notes / f"{key}.json"

    def _explain_miss(self, key: str, name: str, mode: str) -> str:
        """Return the settings that differ from the most similar graph in the cache, as text."""
        if self._note_of(key).exists():
            return "compiled before, but no longer in the compiler's cache, or for another kind of processor"
        notes = [note for path in self._notes.glob("*.json") if (note := _read(path))]
        known = [note["settings"] for note in notes if (note.get("what"), note.get("mode")) == (name, mode)]
        if not known:
            return f"the cache has no graph of {name}, {mode} yet"
        nearest = min((_changes(settings, self._settings) for settings in known), key=len)
        return ", ".join(nearest) or "the code has changed"


def graph_settings(plan: Plan) -> dict[str, Any]:
    """Return the settings and package versions that a graph depends on, by name."""
    names = {
        "model": "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim "
        "rms_norm_eps model_type attention_bias mlp_bias",
        "trainer": "tp cp cp_comm sp micro_batch_size precision float8 recompute recompute_every deterministic "
        "async_tp",
        "data": "seq_length pack document_mask",
        "finetune": "method lora_rank lora_alpha use_rslora use_dora lora_dropout lora_target_modules "
        "exclude_modules layers_to_transform rank_pattern alpha_pattern bias modules_to_save frozen_dtype",
        "device": "name",
    }
    settings = {
        f"{section}.{name}": getattr(getattr(plan.config, section), name)
        for section, words in names.items()
        for name in words.split()
    }
    settings["model.attention"] = str(pattern_of(plan.model))
    return {**settings, "torch": torch.__version__, "megatron-core": version("megatron-core")}


def may_compile(plan: Plan, step: int, first: int) -> bool:
    """Whether ``step`` of a run that started with step ``first`` may compile new graphs, in training or validation.

    The watchdog allows such steps more time (``phase.PATIENT``): a large model has compiled on Trainium for longer than
    trainer.hang_timeout_seconds.
    """
    begins = [since for since, _ in curriculum_lengths(plan.config.data, plan.config.trainer.steps)]
    if plan.random_ltd is not None:
        begins += plan.random_ltd.lengths(plan.config.trainer.steps)
    if any(since <= step < since + WARM_UP_BATCHES for since in (first, *begins)):
        return True
    every = plan.config.trainer.val_every_steps
    if not every or step % every:
        return False
    return step // every - (first - 1) // every <= WARM_UP_BATCHES


def _key(graph: torch.fx.GraphModule, inputs: list[Any], mode: str, overlapped: bool) -> str:
    """Return the digest of a graph and of whether async_tp fuses it.

    Dynamo numbers variables from zero in each graph, so equal graphs have equal code.
    """
    code = [module.code for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    forms = [_form(value) for value in inputs]
    parts = (code, forms, mode, "async_tp") if overlapped else (code, forms, mode)
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _form(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return tuple(value.shape), value.stride(), str(value.dtype), value.device.type, value.requires_grad


def _shapes(graph: torch.fx.GraphModule, inputs: list[Any]) -> str:
    """Format shapes and dtypes of the inputs, without the weights."""
    plain = (v for v in inputs if isinstance(v, torch.Tensor) and not isinstance(v, torch.nn.Parameter))
    return ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in plain)


def _read(path: Path) -> dict[str, Any]:
    """Return the note on a graph, empty if it cannot be read."""
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) and isinstance(note.get("settings"), dict) else {}


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [f"{name}: {before.get(name)} → {value}" for name, value in now.items() if before.get(name) != value]


# The report of all ranks: graphs, cache hits and misses, on the console and in compile.json.


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
        graphs, ranks = len(self.distinct), len(self.by_rank)
        first = (
            f"compiled {graphs} {plural(graphs, 'graph')} on {ranks} {plural(ranks, 'rank')}: "
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
    return Compilations(dict(enumerate(gather_objects(list(graphs)))))


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


def traceable_matmul(input: torch.Tensor, weight: torch.Tensor, bias: None, **how: Any) -> torch.Tensor:
    """Multiply input [s(/t), b, in] by weight [out, in] to [s, b, out]. megatron-core calls it as ``_forward_impl``.

    megatron-core's version waits for its collectives explicitly, which are graph breaks. This one uses functional
    collectives, so torch.compile traces it into one graph. The backward pass gathers the input once more, unless the
    compiler saves the gathered input, as Inductor does (docs/guides/tools/traffic.md).
    """
    assert bias is None, "biases are added outside"
    if not how["allreduce_dgrad"] and not how["sequence_parallel"]:
        return torch.matmul(input, weight.t())
    output: torch.Tensor = _ParallelLinear.apply(input, weight, how["tp_group"], how["sequence_parallel"])
    return output


class _ParallelLinear(torch.autograd.Function):
    """x Wᵀ whose gradient of x is summed over the tensor-parallel ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, split: bool) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)  # a frozen weight needs no x
        ctx.group, ctx.split = group, split
        return torch.matmul(all_gather_tensor(x, 0, group) if split else x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        partial = torch.matmul(grad, weight)
        if ctx.split:
            grad_x = reduce_scatter_tensor(partial, "sum", 0, ctx.group)
        else:
            grad_x = all_reduce(partial, "sum", ctx.group)
        if x is None:
            return grad_x, None, None, None
        whole = all_gather_tensor(x, 0, ctx.group) if ctx.split else x
        return grad_x, torch.matmul(grad.flatten(0, 1).t(), whole.flatten(0, 1)), None, None
