"""Watches a rank compute: the bytes that are alive and what for, FLOPs by module, and what makes the host wait.

A dispatch mode sees every operator. It works alike on fake and on real tensors, so a rehearsal can be checked against
a run. What counts as alive is a storage that some tensor still refers to. Two traps: the storage of a DTensor says the
size of the whole tensor and holds nothing, so its local tensor's is taken; and ``fully_shard`` frees by resizing
storages to 0, which no mode sees, so resizing is observed too (as torch.distributed._tools.mem_tracker does).
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megatron_llama.tools.forecast.module_work import any_layer
from megatron_llama.tools.rehearse.modules import BACKWARD, RECOMPUTED, Modules, Place
from megatron_llama.tools.rehearse.report import (
    ATTENTION,
    COMMUNICATION,
    FEED_FORWARD,
    GATHERED,
    GRADIENTS,
    HOST,
    IN_BACKWARD,
    LOGITS,
    NORMS,
    RESIDUAL,
    TABLES,
    TEMPORARY,
)
from megatron_llama.tools.traffic.count import TrafficCounter

_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_"
# (module of the caller, functions or all, kind): the innermost frame that is listed decides.
_CALLERS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (_FSDP + "collectives", (), COMMUNICATION),
    (_FSDP + "param", ("all_gather_inputs",), COMMUNICATION),
    (_FSDP + "param", ("to_accumulated_grad_if_needed", "accumulate_unsharded_grad_if_needed"), GRADIENTS),
    (_FSDP + "param", (), GATHERED),
    ("megatron.core.utils", ("get_tensor",), COMMUNICATION),  # the gather buffer of sequence parallelism
    ("megatron.core.pipeline_parallel.p2p_communication", (), COMMUNICATION),
    ("megatron_llama.parallel.fsdp", ("_on_grad_ready",), GRADIENTS),
    ("megatron_llama.parallel.tensor", (), COMMUNICATION),
    ("megatron_llama.parallel.parallelize", ("count", "init_weights"), TEMPORARY),
    ("megatron_llama.model.offload", ("__init__",), HOST),
    ("megatron_llama.model.offload", ("_on_device",), IN_BACKWARD),
    ("megatron_llama.optim.optimizer", ("to_host",), HOST),
    ("megatron_llama.optim", (), TEMPORARY),
    ("torch.optim", (), TEMPORARY),
    ("megatron_llama.model.rotary", ("rotary_table", "at_positions"), TABLES),
    ("megatron_llama.devices.visibility", ("positions", "whole"), TABLES),
    ("megatron_llama.devices.visibility", ("dense_mask",), TABLES),
)
_MOST_FRAMES = 40
_AFTER_NAME = {"self_attn": ATTENTION, "mlp": FEED_FORWARD, "input_layernorm": NORMS, "post_attention_layernorm": NORMS}
# Operators that give the host a value, or whose result has a shape that only the values tell.
_HOST_WAITS = {"_local_scalar_dense", "is_nonzero", "equal"}
_SHAPE_FROM_VALUES = {"nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount"}


Operation = tuple[str, str, tuple[tuple[int, ...], ...]]
"""(module, operator, shapes of its inputs)"""


def _flash_on_cpu(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _flash_on_cpu_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _flop_formulas() -> dict[Any, Any]:
    """torch's own formulas, for the CPU's flash attention too, which torch's counter leaves out."""

    def plain(formula: Any) -> Any:  # the registry's formulas want tensors and the result
        return lambda *args, out_val=None, **kwargs: int(formula(*args, **kwargs, out_val=out_val))

    aten = torch.ops.aten
    ours = {
        aten._scaled_dot_product_flash_attention_for_cpu: _flash_on_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_on_cpu_backward,
    }
    return {**{packet: plain(formula) for packet, formula in flop_registry.items()}, **ours}


class Record:
    """A storage, from its birth."""

    __slots__ = ("dtype", "kind", "module", "operation", "shape")

    def __init__(self, kind: str, module: str, operation: str, shape: tuple[int, ...], dtype: str) -> None:
        self.kind, self.module, self.operation, self.shape, self.dtype = kind, module, operation, shape, dtype


class Watch(TorchDispatchMode):
    """A context manager that watches all operators inside it."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch.compile's guard around each call of a mode takes longer than the call, and nothing is compiled."""
        return False

    def __init__(self, logits_width: int) -> None:
        """``logits_width`` is the last dimension of a rank's logits."""
        super().__init__()
        self.modules: Modules | None = None
        """Set once the model is built."""
        self.counter: TrafficCounter | None = None
        self._logits_width = logits_width
        self._formulas = _flop_formulas()
        self.records: list[Record] = []
        self.changes: list[tuple[int, int]] = []
        """(number of the record, bytes more) of every birth, change of size and death."""
        self._live: dict[int, tuple[int, int]] = {}  # by storage: (number of the record, bytes)
        self._numbers_of_host: set[int] = set()  # by storage
        self.flops: dict[tuple[str, str], int] = defaultdict(int)
        """By module and phase."""
        self.host_waits: Counter[tuple[str, str]] = Counter()
        self.shapes_from_values: Counter[tuple[str, str]] = Counter()
        self.operators: dict[tuple[Any, str], tuple[str, int]] = {}
        """By operator and module: (where it was first called, how often)."""
        self.shapes: set[Operation] = set()
        """What a compiler would have to make a kernel of."""
        self.marks: list[tuple[int, Place]] = []
        """(change, place) wherever the phase or the forward pass changes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "prim":  # a question about a tensor, not an operator
            return out
        if self.counter is not None:
            self.counter.observe(func, args)
        place = self.modules.place() if self.modules is not None else None
        name = func._schema.name.split("::")[1]
        if place is not None:
            self._note(name, func, args, kwargs, out, place)
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, name, place)
                if self._numbers_of_host and not tensor.dim() and self._is_number_of_host(*args):
                    self._numbers_of_host.add(_storage(tensor)._cdata)
            elif isinstance(tensor, list | tuple):
                for inner in tree_leaves(tensor):
                    if isinstance(inner, torch.Tensor):
                        self._see(inner, name, place)
        return out

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The mode, and resizing of storages."""
        resize = torch.UntypedStorage.resize_

        def observed(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (known := self._live.get(storage._cdata)) is not None:
                self._change(storage._cdata, known[0], size)
            return result

        torch.UntypedStorage.resize_ = observed  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def new_step(self) -> None:
        """Forgets the FLOPs and sightings of the last step; what is alive stays."""
        for kept in (self.flops, self.host_waits, self.shapes_from_values, self.operators, self.marks):
            kept.clear()
        self.shapes = set()
        if self.modules is not None:
            self.modules.new_step()

    def label(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Says what ``tensors`` are, from their birth on; unknown ones are counted from now on."""
        for tensor in tensors:
            if tensor is not None:
                self._see(tensor, kind, None)
                self.records[self._live[_storage(tensor)._cdata][0]].kind = kind

    def keep_on_host(self, numbers: Iterable[torch.Tensor]) -> None:
        """Says that a run has these scalars in the host's memory, and what is made of them alone: reading one waits for
        nothing."""
        self._numbers_of_host.update(_storage(number)._cdata for number in numbers)

    @property
    def alive(self) -> dict[str, int]:
        """Bytes by kind that are alive now."""
        found: dict[str, int] = defaultdict(int)
        for number, size in self._live.values():
            found[self.records[number].kind] += size
        return {kind: size for kind, size in found.items() if size}

    def _see(self, tensor: torch.Tensor, name: str, place: Place | None) -> None:
        if tensor.device.type == "meta":
            return
        storage = _storage(tensor)
        key = storage._cdata
        if key in self._live:
            if place is not None and place.of_weight:
                self.records[self._live[key][0]].kind = GRADIENTS
            return
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        module = "the build of the model" if place is None else _module(place)
        self.records.append(Record(self._kind(tensor, place), module, name, shape, dtype))
        self._change(key, len(self.records) - 1, storage.nbytes())
        weakref.finalize(storage, self._gone, key).atexit = False

    def _is_number_of_host(self, *args: Any) -> bool:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        return bool(tensors) and all(_storage(a)._cdata in self._numbers_of_host for a in tensors)

    def _waits(self, copy: torch.Tensor, original: torch.Tensor, non_blocking: bool = False) -> bool:
        """Whether the host waits for a copy: between its memory and the device's, unless told not to."""
        sides = [self._live.get(_storage(tensor)._cdata) for tensor in (copy, original)]
        on_host = [known is not None and self.records[known[0]].kind == HOST for known in sides]
        return on_host[0] != on_host[1] and not non_blocking

    def _change(self, key: int, number: int, size: int) -> None:
        before = self._live[key][1] if key in self._live else 0
        self._live[key] = (number, size)
        if size != before:
            self.changes.append((number, size - before))

    def _gone(self, key: int) -> None:
        number, size = self._live.pop(key)
        self._numbers_of_host.discard(key)
        if size:
            self.changes.append((number, -size))

    def _kind(self, tensor: torch.Tensor, place: Place | None) -> str:
        if place is None:  # while the model is built; weights are labelled when it is there
            return TEMPORARY
        if place.accumulates:
            return GRADIENTS if place.of_weight else IN_BACKWARD
        if (kind := _kind_by_caller()) is not None:
            return kind
        if place.run < 0:
            return TEMPORARY
        parts = place.module.split(".")
        if tensor.dim() and tensor.shape[-1] == self._logits_width and parts[0] in ("", "lm_head", "loss"):
            return LOGITS
        if place.phase == BACKWARD:
            return IN_BACKWARD
        if parts[0] == "layers" and len(parts) > 2:
            return _AFTER_NAME.get(parts[2], RESIDUAL)
        return {"norm": NORMS, "lm_head": LOGITS, "loss": LOGITS}.get(parts[0], RESIDUAL)

    def _note(self, name: str, func: Any, args: Any, kwargs: Any, out: Any, place: Place) -> None:
        if not self.marks or self.marks[-1][1][::2] != place[::2]:
            if not place.accumulates:
                self.marks.append((len(self.changes), place))
        if (formula := self._formulas.get(func._overloadpacket)) is not None:
            phase = RECOMPUTED if place.phase == RECOMPUTED else place.phase
            self.flops[place.module, phase] += formula(*args, **kwargs, out_val=out)
        read = name in _HOST_WAITS and not self._is_number_of_host(args[0])
        if read or (name == "copy_" and self._waits(*args, **kwargs)):
            self.host_waits[name, _caller()] += 1
        elif name in _SHAPE_FROM_VALUES or (name.startswith("index") and _by_mask(args)):
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


def _by_mask(args: tuple[Any, ...]) -> bool:
    """Whether an index is a mask: how many values it selects is known to the device only."""
    wanted = [i for a in args[1:2] if isinstance(a, list | tuple) for i in a]
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in wanted)


def _frames() -> Iterator[tuple[str, str, Any]]:
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
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
    """The innermost line of ours or megatron-core's that led to the operator."""
    for module, function, frame in _frames():
        if module.startswith("megatron") and not module.startswith("megatron_llama.tools"):
            return f"{module}:{frame.f_lineno} ({function})"
    return "torch"
