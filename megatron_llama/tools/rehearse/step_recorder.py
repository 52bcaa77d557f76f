"""Dispatch mode that records live bytes by kind, FLOPs by module, host synchronizations and operators of a step.

It works on fake and on real tensors, so rehearsals can be compared with runs. A storage is live while a tensor refers
to it. Two special cases:

- The storage of a DTensor is empty but reports the global size, so the storage of the local tensor is used.
- ``fully_shard`` frees memory by resizing storages to 0, which bypasses the dispatcher, so ``resize_`` is patched too
  (as in torch.distributed._tools.mem_tracker).
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megatron_llama.tools.figures import MemoryTimeline
from megatron_llama.tools.forecast.rank_work import any_layer
from megatron_llama.tools.measured_steps import BACKWARD, FORWARD, RECOMPUTED, Modules, Place, TrafficCounter
from megatron_llama.tools.rehearse.report import Holder, MemoryKind

_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_"
# (module of the caller, functions or () for all, kind): the innermost listed frame decides.
_CALLERS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (_FSDP + "collectives", (), MemoryKind.COMMUNICATION),
    (_FSDP + "param", ("all_gather_inputs",), MemoryKind.COMMUNICATION),
    (_FSDP + "param", ("to_accumulated_grad_if_needed", "accumulate_unsharded_grad_if_needed"), MemoryKind.GRADIENTS),
    (_FSDP + "param", (), MemoryKind.GATHERED),
    ("megatron.core.utils", ("get_tensor",), MemoryKind.COMMUNICATION),  # the gather buffer of sequence parallelism
    ("megatron.core.pipeline_parallel.p2p_communication", (), MemoryKind.COMMUNICATION),
    ("megatron_llama.parallel.dp1_weight_casts", ("_on_grad_ready",), MemoryKind.GRADIENTS),
    ("megatron_llama.parallel.replicated_gradients", (), MemoryKind.COMMUNICATION),
    ("megatron_llama.parallel.parallelize", ("count", "init_weights"), MemoryKind.TEMPORARY),
    ("megatron_llama.model.offload", ("__init__",), MemoryKind.HOST),
    ("megatron_llama.model.offload", ("_on_device",), MemoryKind.IN_BACKWARD),
    ("megatron_llama.optim.optimizer", ("to_host",), MemoryKind.HOST),
    ("megatron_llama.optim", (), MemoryKind.TEMPORARY),
    ("torch.optim", (), MemoryKind.TEMPORARY),
    ("megatron_llama.model.rotary", ("rotary_table", "at_positions"), MemoryKind.TABLES),
    ("megatron_llama.devices.attention_inputs", ("positions", "whole"), MemoryKind.TABLES),
    ("megatron_llama.devices.attention_inputs", ("dense_mask",), MemoryKind.TABLES),
)
_MAX_FRAMES = 40
_KIND_OF_SUBMODULE = {
    "self_attn": MemoryKind.ATTENTION,
    "mlp": MemoryKind.FEED_FORWARD,
    "input_layernorm": MemoryKind.NORMS,
    "post_attention_layernorm": MemoryKind.NORMS,
    "post_feedforward_layernorm": MemoryKind.NORMS,
    "q_norm": MemoryKind.NORMS,
    "k_norm": MemoryKind.NORMS,
}
# Operators that return a value to the host, and operators with a data-dependent shape.
_HOST_WAITS = {"_local_scalar_dense", "is_nonzero", "equal"}
_SHAPE_FROM_VALUES = {"nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount"}


Operation = tuple[str, str, tuple[tuple[int, ...], ...]]
"""(module, operator, shapes of its inputs)"""


def _flop_formulas() -> dict[Any, Any]:
    """Return torch's FLOP formulas, with the CPU's flash attention, which torch's counter lacks."""

    def with_ints(formula: Any) -> Any:  # the registry's formulas take tensors and the result
        return lambda *args, out_val=None, **kwargs: int(formula(*args, **kwargs, out_val=out_val))

    def of_shapes(count: Any, inputs: int) -> Any:  # of the query, key and value, preceded by the gradient
        return lambda *args, **_: int(count(*(x.shape for x in args[:inputs])))

    forward, aten = "_scaled_dot_product_flash_attention_for_cpu", torch.ops.aten
    flash = {getattr(aten, forward): of_shapes(sdpa_flop_count, 3)}
    flash[getattr(aten, f"{forward}_backward")] = of_shapes(sdpa_backward_flop_count, 4)
    return {packet: with_ints(formula) for packet, formula in flop_registry.items()} | flash


@dataclass(slots=True)
class StorageRecord:
    """Origin and kind of a storage."""

    kind: str
    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: str


class StepWatcher(TorchDispatchMode):
    """Context manager that records all operators inside it."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled, and the guard of torch.compile takes longer than the call."""
        return False

    def __init__(self, logits_width: int) -> None:
        """Args:
        logits_width: Last dimension of a rank's logits.
        """
        super().__init__()
        self.modules: Modules | None = None
        """Set after the model is built."""
        self.counter: TrafficCounter | None = None
        self._logits_width = logits_width
        self._formulas = _flop_formulas()
        self.records: list[StorageRecord] = []
        self.changes: list[tuple[int, int]] = []
        """(index of the record, difference in bytes) of each allocation, resize and free."""
        self.begin = 0
        """Number of changes before the step."""
        self._live: dict[int, tuple[int, int]] = {}  # by storage: (index of the record, bytes)
        self._numbers_of_host: set[int] = set()  # by storage
        self.flops: dict[tuple[str, str], int] = defaultdict(int)
        """FLOPs by module and phase."""
        self.host_waits: Counter[tuple[str, str]] = Counter()
        self.shapes_from_values: Counter[tuple[str, str]] = Counter()
        self.operators: dict[tuple[Any, str], tuple[str, int]] = {}
        """(source line of the first call, number of calls) by operator and module."""
        self.shapes: set[Operation] = set()
        """Operators with input shapes, which a compiler would compile separately."""
        self.marks: list[tuple[int, Place]] = []
        """(change, place) at each change of the phase or the forward pass."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "prim":  # a query of tensor metadata, not an operator
            return out
        if self.counter is not None:
            self.counter.observe(func, args)
        place = self.modules.place() if self.modules is not None else None
        name = func._schema.name.split("::")[1]
        if place is not None:
            self._record_operator(name, func, args, kwargs, out, place)
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._track(tensor, name, place)
                if self._numbers_of_host and not tensor.dim() and self._is_number_of_host(*args):
                    self._numbers_of_host.add(_storage(tensor)._cdata)
            elif isinstance(tensor, list | tuple):
                for inner in tree_leaves(tensor):
                    if isinstance(inner, torch.Tensor):
                        self._track(inner, name, place)
        return out

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Enable the mode and observe resizing of storages."""
        resize = torch.UntypedStorage.resize_

        def observed(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (entry := self._live.get(storage._cdata)) is not None:
                self._change(storage._cdata, entry[0], size)
            return result

        with patch.object(torch.UntypedStorage, "resize_", observed), self:
            yield

    def new_step(self) -> None:
        """Discard the counts of the last step, but not the live storages."""
        for container in (self.flops, self.host_waits, self.shapes_from_values, self.operators, self.marks):
            container.clear()
        self.shapes, self.begin = set(), len(self.changes)
        if self.modules is not None:
            self.modules.new_step()

    def label(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Set the kind of ``tensors``, retroactively; start tracking unknown ones."""
        for tensor in tensors:
            if tensor is not None:
                self._track(tensor, kind, None)
                self.records[self._live[_storage(tensor)._cdata][0]].kind = kind

    def keep_on_host(self, numbers: Iterable[torch.Tensor]) -> None:
        """Mark scalars that a run keeps in host memory; reading them or their results is no synchronization."""
        self._numbers_of_host.update(_storage(number)._cdata for number in numbers)

    @property
    def alive(self) -> dict[str, int]:
        """Live bytes by kind."""
        bytes_by_kind: dict[str, int] = defaultdict(int)
        for number, size in self._live.values():
            bytes_by_kind[self.records[number].kind] += size
        return {kind: size for kind, size in bytes_by_kind.items() if size}

    def _track(self, tensor: torch.Tensor, name: str, place: Place | None) -> None:
        if tensor.device.type == "meta":
            return
        storage = _storage(tensor)
        key = storage._cdata
        if key in self._live:
            if place is not None and place.of_weight:
                self.records[self._live[key][0]].kind = MemoryKind.GRADIENTS
            return
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        module = "the build of the model" if place is None else _module(place)
        self.records.append(StorageRecord(self._kind(tensor, place), module, name, shape, dtype))
        self._change(key, len(self.records) - 1, storage.nbytes())
        weakref.finalize(storage, self._freed, key).atexit = False

    def _is_number_of_host(self, *args: Any) -> bool:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        return bool(tensors) and all(_storage(a)._cdata in self._numbers_of_host for a in tensors)

    def _synchronizes(self, copy: torch.Tensor, original: torch.Tensor, non_blocking: bool = False) -> bool:
        """Return whether a copy is a blocking transfer between host and device memory."""
        sides = [self._live.get(_storage(tensor)._cdata) for tensor in (copy, original)]
        on_host = [entry is not None and self.records[entry[0]].kind == MemoryKind.HOST for entry in sides]
        return on_host[0] != on_host[1] and not non_blocking

    def _change(self, key: int, number: int, size: int) -> None:
        before = self._live[key][1] if key in self._live else 0
        self._live[key] = (number, size)
        if size != before:
            self.changes.append((number, size - before))

    def _freed(self, key: int) -> None:
        number, size = self._live.pop(key)
        self._numbers_of_host.discard(key)
        if size:
            self.changes.append((number, -size))

    def _kind(self, tensor: torch.Tensor, place: Place | None) -> str:
        if place is None:  # during model construction; weights are labeled afterwards
            return MemoryKind.TEMPORARY
        if place.accumulates:
            return MemoryKind.GRADIENTS if place.of_weight else MemoryKind.IN_BACKWARD
        if (kind := _kind_by_caller()) is not None:
            return kind
        if place.run < 0:
            return MemoryKind.TEMPORARY
        parts = place.module.split(".")
        if tensor.dim() and tensor.shape[-1] == self._logits_width and parts[0] in ("", "lm_head", "loss"):
            return MemoryKind.LOGITS
        if place.phase == BACKWARD:
            return MemoryKind.IN_BACKWARD
        if parts[0] == "layers" and len(parts) > 2:
            return _KIND_OF_SUBMODULE.get(parts[2], MemoryKind.RESIDUAL)
        kinds = {"norm": MemoryKind.NORMS, "lm_head": MemoryKind.LOGITS, "loss": MemoryKind.LOGITS}
        return kinds.get(parts[0], MemoryKind.RESIDUAL)

    def _record_operator(self, name: str, func: Any, args: Any, kwargs: Any, out: Any, place: Place) -> None:
        if not self.marks or self.marks[-1][1][::2] != place[::2]:
            if not place.accumulates:
                self.marks.append((len(self.changes), place))
        if (formula := self._formulas.get(func._overloadpacket)) is not None:
            self.flops[place.module, place.phase] += formula(*args, **kwargs, out_val=out)
        read = name in _HOST_WAITS and not self._is_number_of_host(args[0])
        if read or (name == "copy_" and self._synchronizes(*args, **kwargs)):
            self.host_waits[name, _caller()] += 1
        elif name in _SHAPE_FROM_VALUES or (name.startswith("index") and any(map(_is_mask, tree_leaves(args[1:2])))):
            self.shapes_from_values[name, _caller()] += 1
        key = (func, any_layer(_module(place)))
        caller, count = self.operators.get(key) or (_caller(), 0)
        self.operators[key] = caller, count + 1
        shapes = tuple(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))
        self.shapes.add((place.module, name, shapes))


def _module(place: Place) -> str:
    if place.run < 0 and not place.accumulates:
        return "the optimizer and the loop"
    return place.module or "the chunk itself"


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _is_mask(index: Any) -> bool:
    """Return whether an index is a mask, so that the size of the result is data-dependent."""
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _frames() -> Iterator[tuple[str, str, Any]]:
    frame = sys._getframe(2)
    for _ in range(_MAX_FRAMES):
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name, frame
        if frame.f_back is None:
            return
        frame = frame.f_back


def _kind_by_caller() -> str | None:
    for module, function, _ in _frames():
        if module.startswith(("torch.distributed.fsdp", "torch.optim", "megatron")):
            for prefix, functions, kind in _CALLERS:
                if module.startswith(prefix) and (not functions or function in functions):
                    return kind
    return None


def _caller() -> str:
    """Return the innermost source line of this project or megatron-core that called the operator."""
    for module, function, frame in _frames():
        if module.startswith("megatron") and not module.startswith("megatron_llama.tools"):
            return f"{module}:{frame.f_lineno} ({function})"
    return "torch"


# Memory of a step, from the changes that a watcher has recorded.


def memory_of_step(watch: StepWatcher, runs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the memory fields of ``Rehearsal``, of the step since the last ``new_step``.

    ``runs`` are (chunk, micro batch) of the forward passes.
    """
    changes, records = np.array(watch.changes, dtype=np.int64).reshape(-1, 2), watch.records
    numbers: dict[str, int] = {kind: number for number, kind in enumerate(MemoryKind)}
    kinds = np.array([numbers[record.kind] for record in records], dtype=np.int64)
    before, after = changes[: watch.begin], changes[watch.begin :]
    steps = np.zeros((len(after) + 1, len(MemoryKind)), np.int64)
    steps[0] = np.bincount(kinds[before[:, 0]], before[:, 1], len(MemoryKind))
    steps[np.arange(1, len(steps)), kinds[after[:, 0]]] = after[:, 1]
    alive = steps.cumsum(axis=0)
    totals = alive[:, : numbers[MemoryKind.HOST]].sum(axis=1)  # HOST is the last kind
    peak = int(totals.argmax())
    marked = [(change - watch.begin, place) for change, place in watch.marks]
    last = [place for change, place in marked if change <= peak]
    storage = records[after[peak - 1, 0]] if peak else None
    where = f", in {storage.module}: {storage.operation}" if storage else ""
    return {
        "peak": int(totals[peak]),
        "at_peak": _nonzero_kinds(alive[peak]),
        "most": _nonzero_kinds(alive.max(axis=0)),
        "moment": (_pass_name(last[-1], runs) if last else "before the first pass") + where,
        "holders": _holders(records, changes[: watch.begin + peak]),
        "timeline": MemoryTimeline(tuple(MemoryKind), np.arange(len(alive)), alive, tuple(_passes(marked, runs))),
    }


def _holders(records: Sequence[StorageRecord], changes: Any) -> tuple[Holder, ...]:
    sizes = np.bincount(changes[:, 0], changes[:, 1], len(records)).astype(np.int64)
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0])
    for number in np.flatnonzero(sizes):
        record = records[int(number)]
        group = groups[record.kind, any_layer(record.module), record.operation, record.shape, record.dtype]
        group[0] += int(sizes[number])
        group[1] += 1
    holders = [Holder(size, count, *key) for key, (size, count) in groups.items()]
    return tuple(sorted(holders, key=lambda holder: -holder.size))


def _nonzero_kinds(row: Any) -> Mapping[str, int]:
    return {kind: int(size) for kind, size in zip(MemoryKind, row, strict=True) if size}


def _pass_name(place: Place, runs: Sequence[tuple[int, int]]) -> str:
    if place.run < 0:
        return "outside of forward and backward"
    chunk, microbatch = runs[place.run]
    several = f", chunk {chunk}" if any(other for other, _ in runs) else ""
    phase = "recomputation" if place.phase == RECOMPUTED else place.phase
    return f"{phase} of micro batch {microbatch}{several}"


def _passes(marked: Sequence[tuple[int, Place]], runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, str]]:
    """Yield the change at which each pass begins, and its name; recomputation belongs to the backward pass."""
    last, several = "", any(chunk for chunk, _ in runs)
    for change, place in marked:
        if place.run >= 0:
            chunk, microbatch = runs[place.run]
            name = f"{'F' if place.phase == FORWARD else 'B'}{microbatch}" + (f"'{chunk}" if several else "")
            if name != last:
                yield change, name
            last = name
