"""A torch.compile backend like Trainium's: static shapes only, one file per graph in a cache that ranks share."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from stand_in import record


def register(name: str, folder: Callable[[], Path], suffix: str) -> None:
    """Make ``torch.compile(backend=name)`` compile into ``folder()``, one file with ``suffix`` per graph."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        _refuse_dynamic_shapes(graph)
        text = "\n".join([graph.code, *(str(_description(node)) for node in graph.graph.nodes)])
        key = hashlib.sha256(text.encode()).hexdigest()
        path = folder() / key[:2] / key[2:4] / f"{key}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:  # ranks that need the same graph compile it once
            fcntl.flock(lock, fcntl.LOCK_EX)
            hit = path.exists()
            record("cache hit" if hit else "compiled", graph=key, shapes=[_description(n) for n in graph.graph.nodes])
            if not hit:
                part = path.with_suffix(f".{os.getpid()}.part")
                part.write_text(text)
                part.rename(path)
        return make_boxed_func(graph.forward)

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        return aot_autograd(fw_compiler=compile_graph)(graph, inputs)

    torch._dynamo.register_backend(backend, name=name)


def _values(node: torch.fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, tuple | list) else [value]


def _description(node: torch.fx.Node) -> list[str]:
    """Return the shape and dtype of a node's output."""
    return [f"{list(v.shape)} {v.dtype}" for v in _values(node) if isinstance(v, torch.Tensor)]


def _refuse_dynamic_shapes(graph: torch.fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        for value in _values(node):
            sizes = list(value.shape) if isinstance(value, torch.Tensor) else [value]
            if any(isinstance(size, torch.SymInt) for size in sizes):
                raise RuntimeError(f"dynamic shapes are not supported: {node.name} is {sizes}")
