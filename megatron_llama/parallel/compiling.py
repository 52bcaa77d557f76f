"""torch.compile, watched: which graphs a rank made, which of them came out of the cache, which are new, and why.

One folder holds the compilers' own caches and, beside them, a note on each graph: the settings it was made for. Ranks
that need the same graph wait for the first of them to compile it and take it from the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor

from megatron_llama.config import ConfigError, Problem
from megatron_llama.devices import Device
from megatron_llama.plan import Plan

WARM_UP_BATCHES = 2
"""Global batches of a kind (training, validation) after which no new graph of that kind is expected."""


class Recompiled(RuntimeError):
    """A graph was compiled after warm-up, and trainer.compile_strict forbids it."""


@dataclass
class Graph:
    """One compilation on one rank."""

    what: str
    """What was compiled: a block."""
    mode: str
    """training or validation."""
    key: str
    """Digest of code, shapes and dtypes: equal for equal graphs, whatever the rank."""
    shapes: str
    """Shapes and dtypes of the inputs that are no weights."""
    cached: bool
    """It came out of the cache."""
    seconds: float
    late: bool = False
    """It was compiled after warm-up."""
    why: str | None = None
    """Why it was not in the cache."""
    failure: str | None = None
    """What the compiler said, where it failed."""


@dataclass
class Compiler:
    """Compiles for one rank, and remembers each graph."""

    plan: Plan
    device: Device
    keep_going: bool = False
    """Where a compilation fails, note it and go on uncompiled; else the error is the run's."""
    graphs: list[Graph] = field(default_factory=list)
    _batches: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if reason := self.device.compiler_missing():
            problem = Problem("trainer.compile", True, reason, "install it, or write trainer.compile=false")
            raise ConfigError([problem])
        assert self.plan.config.trainer.compile_cache is not None, "resolve derives it"
        self._notes = Path(self.plan.config.trainer.compile_cache) / "graphs"
        self._backends: dict[str, Callable[..., Any]] = {}
        self._compile = torch._dynamo.lookup_backend(self.device.compile_backend())
        # The backward graph is compiled with the forward one, not at the first backward pass; and products with a
        # backward of their own (parallel/traceable_linear.py) may be cached.
        functorch.force_non_lazy_backward_lowering = True
        functorch.autograd_cache_allow_custom_autograd_functions = True
        # A CPU kernel asks for the number of threads when it runs. Inductor would write the compiling process's into it
        # and into the cache's key, and a rank has as many as its machine and its neighbours leave it.
        inductor.cpp.dynamic_threads = True

    def compile(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        """``function``, compiled when it is first called, for static shapes, in one graph.

        A graph break is an error under trainer.compile_strict: it raises torch's Unsupported, which says where.
        """
        # Dynamo shares graphs between blocks only where the backend is the same object.
        backend = self._backends.setdefault(what, lambda graph, inputs: self._made(what, graph, inputs))
        strict = self.plan.config.trainer.compile_strict
        compiled: Callable[..., Any] = torch.compile(function, backend=backend, dynamic=False, fullgraph=strict)
        return compiled

    def batch_done(self, *, train: bool) -> None:
        """Tells that a global batch has been worked on. Raises Recompiled where strictness forbids what it took."""
        late = [graph for graph in self.graphs if graph.late]
        if late and self.plan.config.trainer.compile_strict:
            raise Recompiled(
                f"trainer.compile_strict: {late[0].what} was compiled again after {WARM_UP_BATCHES} batches of "
                f"{late[0].mode}, for {late[0].shapes}"
            )
        mode = _mode(train)
        self._batches[mode] = self._batches.get(mode, 0) + 1

    def _made(self, what: str, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """What Dynamo calls for each new graph: compiles it, or takes it from the cache."""
        mode = _mode(torch.is_grad_enabled())
        key, shapes = _key(graph, inputs, mode), _shapes(graph, inputs)
        late = self._batches.get(mode, 0) >= WARM_UP_BATCHES
        with _alone(self._notes.parent / "locks" / key):
            before, start = self._cache_state(), time.perf_counter()
            failure, compiled = None, graph.forward
            try:
                compiled = self._compile(graph, inputs)
            except Exception as error:
                if not self.keep_going:
                    raise
                failure = f"{type(error).__name__}: {error}"
            cached = failure is None and self._from_cache(before, key)
            seconds = time.perf_counter() - start
            why = None if cached or failure else self._why_new(key, what, mode)
            self.graphs.append(Graph(what, mode, key, shapes, cached, seconds, late, why, failure))
            if failure is None:
                self._note(self.graphs[-1])
        if late:
            sys.stderr.write(f"compiled after warm-up: {what}, {mode}, for {shapes}\n")
        return compiled

    def _cache_state(self) -> tuple[int, int]:
        """(graphs on disk, graphs that the compiler says it could not find there) so far."""
        on_disk = self.device.compiled_artefacts(self._notes.parent)
        return (inductor_misses(), 0) if on_disk is None else (on_disk, 1)

    def _from_cache(self, before: tuple[int, int], key: str) -> bool:
        """Whether what was compiled since ``before`` came out of the cache."""
        now = self._cache_state()
        # A compiler without counters: nothing was added on disk, and somebody has made this graph before.
        return now == before and (now[1] == 0 or self._note_of(key).exists())

    def _note_of(self, key: str) -> Path:
        return self._notes / f"{key}.json"

    def _note(self, graph: Graph) -> None:
        """Writes down what a graph was made for, the first time that it is made."""
        path = self._note_of(graph.key)
        if path.exists():
            return
        self._notes.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        note = {"what": graph.what, "mode": graph.mode, "settings": settings_of_graphs(self.plan)}
        temporary.write_text(json.dumps(note, indent=1), encoding="utf-8")
        os.replace(temporary, path)

    def _why_new(self, key: str, what: str, mode: str) -> str:
        """Which settings differ from those of the graph in the cache that is most like this one."""
        if self._note_of(key).exists():
            return "it was compiled here before, but the compiler's cache has lost it"
        mine = settings_of_graphs(self.plan)
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
    """What a block's graph depends on, by the settings' names; with the versions of those who make it."""
    names = {
        "model": "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps",
        "trainer": "tp sp micro_batch_size precision recompute deterministic",
        "data": "seq_length pack",
        "finetune": "method lora_rank lora_alpha lora_dropout lora_target_modules modules_to_save frozen_dtype",
        "device": "name",
    }
    found = {
        f"{section}.{name}": getattr(getattr(plan.config, section), name)
        for section, words in names.items()
        for name in words.split()
    }
    return {**found, "torch": torch.__version__, "megatron-core": version("megatron-core")}


def inductor_misses() -> int:
    """Graphs that Inductor did not find in its cache so far, in this process."""
    counters = torch._dynamo.utils.counters["inductor"]
    return int(counters["fxgraph_cache_miss"] + counters["fxgraph_cache_bypass"])


def _mode(train: bool) -> str:
    return "training" if train else "validation"


def _key(graph: torch.fx.GraphModule, inputs: list[Any], mode: str) -> str:
    """Digest of a graph. Dynamo numbers names from zero in each graph, so equal graphs have equal code."""
    code = [module.code for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    forms = [_form(value) for value in inputs]
    return hashlib.blake2b(repr((code, forms, mode)).encode(), digest_size=12).hexdigest()


def _form(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return tuple(value.shape), value.stride(), str(value.dtype), value.device.type, value.requires_grad


def _shapes(graph: torch.fx.GraphModule, inputs: list[Any]) -> str:
    """The inputs in words, weights left out."""
    plain = (v for v in inputs if isinstance(v, torch.Tensor) and not isinstance(v, torch.nn.Parameter))
    return ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in plain)


def _read(path: Path) -> dict[str, Any]:
    """A note on a graph; one that can't be read says nothing."""
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) and isinstance(note.get("settings"), dict) else {}


def _differences(one: dict[str, Any], other: dict[str, Any]) -> int:
    return sum(one.get(name) != value for name, value in other.items())


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keeps other ranks that want the same graph out, where the file system knows locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # then some graphs are compiled twice
            pass
        yield
