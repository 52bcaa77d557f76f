"""torch.compile with a record of each graph: whether it came out of the cache, and if not, why it is new.

One folder holds the compilers' own caches and a note on each graph: the settings that it was compiled for. Of the ranks
that need the same graph, one compiles it; the others wait and take it from the cache.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config as dynamo
import torch._functorch.config as functorch
import torch._inductor.config as inductor

from megatron_llama.arch.pattern import pattern_of
from megatron_llama.config import ConfigError, Problem
from megatron_llama.devices import Device
from megatron_llama.parallel.tensor import NotOverlapped, Overlap, nothing_overlaps, overlap_products
from megatron_llama.plan import Plan
from megatron_llama.plan.schedules import lengths
from megatron_llama.system.files import wait_for_lock, write_atomically

WARM_UP_BATCHES = 2
"""Global batches of a mode (training, validation) after which no new graph of that mode is expected."""


class Recompiled(RuntimeError):
    """A graph was compiled after warm-up, which trainer.compile_strict forbids."""


@dataclass
class Graph:
    """One compilation on one rank."""

    what: str
    """What was compiled, such as "block"."""
    mode: str
    """training or validation."""
    key: str
    """Digest of code, shapes and dtypes: equal for equal graphs, whatever the rank."""
    shapes: str
    """Shapes and dtypes of the inputs, without the weights."""
    cached: bool
    """Whether it came out of the cache."""
    seconds: float
    late: bool = False
    """Whether it was compiled after warm-up."""
    why: str | None = None
    """Why it was not in the cache."""
    failure: str | None = None
    """The compiler's error, if it failed."""
    overlap: Overlap | None = None
    """With trainer.async_tp, what became of its gathers and scatters; None if its note does not say."""


@dataclass
class Compiler:
    """Compiles for one rank, and records each graph."""

    plan: Plan
    device: Device
    keep_going: bool = False
    """Record a failed compilation and run that graph uncompiled, instead of raising."""
    graphs: list[Graph] = field(default_factory=list)
    _lengths: tuple[int | None, int | None] = (None, None)
    """Of the batch: tokens of a sequence that a curriculum has cut, and those of it that random-LTD's layers see, each
    None for all. New ones need a new graph."""
    _mode: str = "training"
    _batches: dict[tuple[str, int | None, int | None], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if reason := self.device.compiler_missing():
            problem = Problem("trainer.compile", True, reason, "install it, or write trainer.compile=false")
            raise ConfigError([problem])
        assert self.plan.config.trainer.compile_cache is not None, "resolve derives it"
        self._notes = Path(self.plan.config.trainer.compile_cache) / "graphs"
        self._backends: dict[str, Callable[..., Any]] = {}
        self._compile = torch._dynamo.lookup_backend(self.device.compiler)
        self._overlap = overlap_products(self.device) if self.plan.config.trainer.async_tp else None
        # Compile the backward graph with the forward one, not at the first backward pass, so that both are ready after
        # one forward; and cache graphs with a custom backward (parallel/tensor.py).
        functorch.force_non_lazy_backward_lowering = True
        functorch.autograd_cache_allow_custom_autograd_functions = True
        # CPU kernels read the number of threads when they run. Otherwise Inductor makes the compiling process's number
        # part of the kernel and of the cache key, and it differs between ranks and machines.
        inductor.cpp.dynamic_threads = True
        # A block is compiled for each length of sequences that a curriculum has, to train and to validate, and for each
        # that random-LTD's layers see. Beyond its limit Dynamo runs a new shape uncompiled.
        steps, ltd = self.plan.config.trainer.steps, self.plan.random_ltd
        self._cuts = {cut.length for _, cut in lengths(self.plan.config.data, steps)}
        shapes = 2 * (1 + len(self._cuts) + (0 if ltd is None else len(ltd.lengths(steps))))
        dynamo.recompile_limit = max(dynamo.recompile_limit, shapes)
        dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, shapes)

    def compile(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        """``function``, compiled at its first call for static shapes.

        Under trainer.compile_strict a graph break raises torch's Unsupported, which names the line.
        """
        # Dynamo reuses the graph of one block for the next only if the backend is the same object.
        backend = self._backends.setdefault(what, lambda graph, inputs: self._backend(what, graph, inputs))
        strict = self.plan.config.trainer.compile_strict
        compiled: Callable[..., Any] = torch.compile(function, backend=backend, dynamic=False, fullgraph=strict)
        return compiled

    def batch_begins(self, length: int, kept: int | None, *, train: bool) -> None:
        """Says what comes: sequences of ``length`` tokens, of which random-LTD's layers see ``kept``, None for all."""
        self._lengths = (length if length in self._cuts else None, kept)
        self._mode = "training" if train else "validation"

    def batch_done(self) -> None:
        """Counts a global batch as done. Raises Recompiled if it needed a graph that trainer.compile_strict forbids."""
        late = [graph for graph in self.graphs if graph.late]
        if late and self.plan.config.trainer.compile_strict:
            raise Recompiled(
                f"trainer.compile_strict: {late[0].what} was compiled again after {WARM_UP_BATCHES} batches of "
                f"{late[0].mode}, for {late[0].shapes}"
            )
        key = self._mode, *self._lengths
        self._batches[key] = self._batches.get(key, 0) + 1

    def _backend(self, what: str, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Called by Dynamo for each new graph: compiles it, or takes it from the cache."""
        mode = self._mode
        key, shapes = _key(graph, inputs, mode, self._overlap is not None), _shapes(graph, inputs)
        late = self._batches.get((mode, *self._lengths), 0) >= WARM_UP_BATCHES
        with _lock(self._notes.parent / "locks" / key):
            before, start = self._cache_state(), time.perf_counter()
            failure, compiled = None, graph.forward
            try:
                compiled = self._compile(graph, inputs)
            except Exception as error:
                if not self.keep_going:
                    raise
                failure = f"{type(error).__name__}: {error}"
            now = self._cache_state()
            # An unchanged number of files proves no hit, as a compiler may cache nothing: the note must exist too.
            cached = failure is None and now == before and (now[1] == 0 or self._note_of(key).exists())
            seconds = time.perf_counter() - start
            why = None if cached or failure else self._why_new(key, what, mode)
            overlap = self._overlap_of(key, cached)
            if failure is None and not self._note_of(key).exists():
                note = {"what": what, "mode": mode, "settings": self._settings, "overlap": overlap}
                write_atomically(self._note_of(key), json.dumps(note, indent=1))
            if failure is None and (nothing := nothing_overlaps(overlap, what, mode)):
                if not self.keep_going:
                    raise NotOverlapped(nothing)
                failure = nothing
            self.graphs.append(Graph(what, mode, key, shapes, cached, seconds, late, why, failure, overlap))
        if late:
            sys.stderr.write(f"compiled after warm-up: {what}, {mode}, for {shapes}\n")
        return compiled

    def _overlap_of(self, key: str, cached: bool) -> Overlap | None:
        """What trainer.async_tp did to a graph: as counted just now, or out of the cache as its note says."""
        if self._overlap is None:
            return None
        counted = self._overlap.take()
        if not cached:
            return counted
        noted = _read(self._note_of(key)).get("overlap")
        return None if noted is None else Overlap(*noted)

    def _cache_state(self) -> tuple[int, int]:
        """A number that grows with each new graph, and how it was counted: 0 Inductor's cache misses in this process,
        1 files in the cache."""
        on_disk = self.device.compiled_artefacts(self._notes.parent)
        if on_disk is not None:
            return on_disk, 1
        counters = torch._dynamo.utils.counters["inductor"]
        return int(counters["fxgraph_cache_miss"] + counters["fxgraph_cache_bypass"]), 0

    @property
    def _settings(self) -> dict[str, Any]:
        """What the graphs of this batch depend on."""
        cut, kept = self._lengths
        return {**settings_of_graphs(self.plan), "the curriculum's length": cut, "random-LTD's length": kept}

    def _note_of(self, key: str) -> Path:
        """The file that says what a graph was compiled for."""
        return self._notes / f"{key}.json"

    def _why_new(self, key: str, what: str, mode: str) -> str:
        """The settings that differ from those of the most similar graph in the cache, as text."""
        if self._note_of(key).exists():
            return "it was compiled before, but the compiler's cache has lost it, or is of another kind of processor"
        mine = self._settings
        nearest: dict[str, Any] | None = None
        for path in self._notes.glob("*.json"):
            note = _read(path)
            if (note.get("what"), note.get("mode")) != (what, mode):
                continue
            if nearest is None or _differences(note["settings"], mine) < _differences(nearest, mine):
                nearest = note["settings"]
        if nearest is None:
            return f"the cache has no graph of {what}, {mode} yet"
        changes = [f"{name}: {nearest.get(name)} → {mine[name]}" for name in mine if nearest.get(name) != mine[name]]
        return ", ".join(changes) or "the code has changed"


def settings_of_graphs(plan: Plan) -> dict[str, Any]:
    """The settings that a graph depends on, by name, and the versions of what compiles it."""
    names = {
        "model": "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim "
        "rms_norm_eps",
        "trainer": "tp sp micro_batch_size precision recompute recompute_every deterministic async_tp",
        "data": "seq_length pack document_mask",
        "finetune": "method lora_rank lora_alpha lora_dropout lora_target_modules modules_to_save frozen_dtype",
        "device": "name",
    }
    found = {
        f"{section}.{name}": getattr(getattr(plan.config, section), name)
        for section, words in names.items()
        for name in words.split()
    }
    found["model.attention"] = str(pattern_of(plan.model))
    return {**found, "torch": torch.__version__, "megatron-core": version("megatron-core")}


def may_compile(plan: Plan, step: int, first: int) -> bool:
    """Whether ``step`` of a run that started with step ``first`` may compile new graphs, in training or validation.

    The watchdog is patient in such steps: a large model has compiled on Trainium for longer than a hang may last.
    """
    begins = [since for since, _ in lengths(plan.config.data, plan.config.trainer.steps)]
    if plan.random_ltd is not None:
        begins += plan.random_ltd.lengths(plan.config.trainer.steps)
    if any(since <= step < since + WARM_UP_BATCHES for since in (first, *begins)):
        return True
    every = plan.config.trainer.val_every_steps
    if not every or step % every:
        return False
    return step // every - (first - 1) // every <= WARM_UP_BATCHES


def _key(graph: torch.fx.GraphModule, inputs: list[Any], mode: str, overlapped: bool) -> str:
    """Digest of a graph, and of whether its products take collectives in. Dynamo numbers variables from zero in each
    graph, so equal graphs have equal code."""
    code = [module.code for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    forms = [_form(value) for value in inputs]
    parts = (code, forms, mode, "async_tp") if overlapped else (code, forms, mode)
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _form(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return tuple(value.shape), value.stride(), str(value.dtype), value.device.type, value.requires_grad


def _shapes(graph: torch.fx.GraphModule, inputs: list[Any]) -> str:
    """Shapes and dtypes of the inputs as text, without the weights."""
    plain = (v for v in inputs if isinstance(v, torch.Tensor) and not isinstance(v, torch.nn.Parameter))
    return ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in plain)


def _read(path: Path) -> dict[str, Any]:
    """The note on a graph; empty if it can't be read."""
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) and isinstance(note.get("settings"), dict) else {}


def _differences(one: dict[str, Any], other: dict[str, Any]) -> int:
    return sum(one.get(name) != value for name, value in other.items())


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Keeps out other ranks that want the same graph."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        with suppress(OSError):  # a file system without locks: some graphs are then compiled twice
            wait_for_lock(file)
        yield
