"""Trace when a rank waits for other ranks, and in which collective of which axis.

Eager collectives call methods of the process group and ``Work.wait``; both are patched. Compiled blocks call functional
collectives, which a dispatch mode intercepts. The mode costs microseconds per operator and is used in profiled steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_llama.parallel.groups import axis_of
from megatron_llama.topology import AXIS_NAMES

# Operators in torch's dispatcher (c10d, _c10d_functional, shared_memory) by collective. Methods of a process group have
# the same names without the last underscore. The names depend on torch's version.
OPERATORS = {
    "all_reduce": "allreduce_ allreduce_coalesced_ all_reduce all_reduce_",
    "all_gather": "_allgather_base_ allgather_ allgather_into_tensor_coalesced_ all_gather_into_tensor "
    "all_gather_into_tensor_out all_gather_ all_gather_single",
    "reduce_scatter": "_reduce_scatter_base_ reduce_scatter_ reduce_scatter_tensor_coalesced_ reduce_scatter_tensor "
    "reduce_scatter_tensor_out reduce_scatter_single",
    "all_to_all": "alltoall_base_ all_to_all_single",
    "broadcast": "broadcast_",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv_",
}
KIND_OF_OPERATOR = {name: kind for kind, names in OPERATORS.items() for name in names.split()}
_METHODS = {name.removesuffix("_"): kind for name, kind in KIND_OF_OPERATOR.items()}
AXES = (*AXIS_NAMES, "world")
DATA = "data"
"""Name of the wait for samples."""
WAIT_METRICS = tuple(f"waited_{name}_s" for name in (DATA, *AXES))
"""Metrics of a profiled step."""


WaitContext = Callable[[str], AbstractContextManager[None]]
"""Returns a context that is active during a wait; called with "axis kind", such as "tp all_reduce"."""


@contextmanager
def trace_waits(waiting: WaitContext, *, compiled: bool) -> Iterator[None]:
    """Enter ``waiting`` around each wait; with ``compiled`` also in compiled blocks."""
    started: WeakKeyDictionary[dist.Work, str] = WeakKeyDictionary()
    wait, waits = dist.Work.wait, False

    @contextmanager
    def once(name: str) -> Iterator[None]:
        """Enter ``waiting`` unless active: shared-memory groups delegate some collectives to another group."""
        nonlocal waits
        if waits:
            yield
            return
        waits = True
        try:
            with waiting(name):
                yield
        finally:
            waits = False

    def waited(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        if (name := started.get(work)) is None:
            return wait(work, *args, **kwargs)
        with once(name):
            return wait(work, *args, **kwargs)

    with ExitStack() as stack:
        for group in (dist.ProcessGroup, *dist.ProcessGroup.__subclasses__()):
            for method in _METHODS.keys() & vars(group).keys():
                starting = _starting(getattr(group, method), method, once, started)
                stack.enter_context(patch.object(group, method, starting))
        stack.enter_context(patch.object(dist.Work, "wait", waited))
        if compiled:
            stack.enter_context(_Collectives(once))
        yield


def _starting(
    original: Callable[..., dist.Work], method: str, waiting: WaitContext, started: WeakKeyDictionary[dist.Work, str]
) -> Callable[..., dist.Work]:
    def start(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> dist.Work:
        if group.size() == 1:
            return original(group, *args, **kwargs)
        name = _name(_METHODS[method], group)
        with waiting(name):  # shared-memory groups finish inside this call
            work = original(group, *args, **kwargs)
        if work is not None:
            started[work] = name
        return work

    # pybind11 treats a Python function with another name as an override and would call it recursively.
    start.__code__ = start.__code__.replace(co_name=method)
    return start


def _name(kind: str, group: dist.ProcessGroup) -> str:
    # megatron-core uses the world group for one direction between two stages. Devices without send and recv have
    # separate groups for it (PairTransfers).
    axis = "pp" if kind in ("send", "recv") else axis_of(group) or "pp"
    return f"{axis} {kind}"


class CollectiveMode(TorchDispatchMode):
    """Dispatch mode in which compiled blocks stay compiled; by default a mode disables them."""

    supports_higher_order_operators = True  # they appear during torch.compile tracing and contain no collective

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Collectives(CollectiveMode):
    """Intercepts the functional collectives of compiled blocks."""

    def __init__(self, waiting: WaitContext) -> None:
        super().__init__()
        self._waiting = waiting
        self._started: dict[int, str] = {}  # by data pointer of the result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not isinstance(func, torch._ops.OpOverload) or func.namespace != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        operator = func._schema.name.split("::")[1]
        if operator == "wait_tensor" and (name := self._started.pop(args[0].data_ptr(), None)) is not None:
            with self._waiting(name):
                return func(*args, **(kwargs or {}))
        if (kind := KIND_OF_OPERATOR.get(operator)) is None:
            return func(*args, **(kwargs or {}))
        group = next(value for value in reversed(args) if isinstance(value, str | dist.ProcessGroup))
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
        name = _name(kind, group)
        with self._waiting(name):
            out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            self._started[tensor.data_ptr()] = name
        return out
