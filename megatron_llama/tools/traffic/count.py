"""Count the bytes that a rank sends: every collective in torch's dispatcher, by axis and kind.

Bytes come from the arguments of the operators, not from the plan, to verify tools/forecast/traffic.py. Used by tests
and ``scripts/traffic.py``; training does not count.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_llama.devices import Device
from megatron_llama.parallel import open_device
from megatron_llama.parallel.groups import axis_of
from megatron_llama.plan import Plan
from megatron_llama.tools.forecast.traffic import Amount, Traffic, TrafficKey, bytes_leaving_node, sort_traffic
from megatron_llama.tools.steps import open_rank

# Operator to its kind and the indices of the payload and group arguments. The functional all_gather has no result
# argument: its payload is the input times the size of the group.
_C10D: dict[str, tuple[str, int, int]] = {
    "allreduce_": ("all_reduce", 0, 1),
    "allreduce_coalesced_": ("all_reduce", 0, 1),
    "_allgather_base_": ("all_gather", 0, 2),
    "allgather_": ("all_gather", 0, 2),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, 2),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "reduce_scatter_": ("reduce_scatter", 1, 2),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 2),
    "alltoall_base_": ("all_to_all", 1, 2),
    "send": ("send", 0, 1),
    "recv_": ("recv", 0, 1),
}
_FUNCTIONAL: dict[str, tuple[str, int, int]] = {
    "all_reduce": ("all_reduce", 0, 2),
    "all_reduce_": ("all_reduce", 0, 2),
    "all_to_all_single": ("all_to_all", 0, 3),
    "all_gather_into_tensor": ("all_gather", 0, 2),
    "all_gather_into_tensor_out": ("all_gather", 0, 2),
    "reduce_scatter_tensor": ("reduce_scatter", 0, 3),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0, 3),
}
_SHARED_MEMORY: dict[str, tuple[str, int, int]] = {
    "all_reduce_": ("all_reduce", 0, 1),
    "all_gather_": ("all_gather", 0, 2),
    "reduce_scatter_": ("reduce_scatter", 1, 2),
}
_OPERATORS = {"c10d": _C10D, "_c10d_functional": _FUNCTIONAL, "shared_memory": _SHARED_MEMORY}
_NO_PAYLOAD = ("barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd", "check_for_nan")


class UnknownCollective(NotImplementedError):
    """An unknown collective or process group, which would make the count wrong."""


class TrafficCounter(TorchDispatchMode):
    """Context manager that counts traffic; ``take`` returns the counts since its last call."""

    def __init__(self, per_node: int | None = None) -> None:
        """Args:
        per_node: Also count traffic to other nodes, each with this number of consecutive ranks.
        """
        super().__init__()
        self._per_node = per_node
        self._traffic: Traffic = {}
        self._node_traffic: Traffic = {}

    supports_higher_order_operators = True  # they appear during torch.compile tracing and contain no collective

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled blocks compiled under this mode; by default a mode disables them."""
        return True

    def take(self) -> Traffic:
        """Return the traffic so far and reset it."""
        traffic, self._traffic = sort_traffic(self._traffic), {}
        return traffic

    def take_node_traffic(self) -> Traffic:
        """Return the traffic to other nodes so far (``bytes_leaving_node``) and reset it."""
        node_traffic, self._node_traffic = sort_traffic(self._node_traffic), {}
        return node_traffic

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.observe(func, args)
        return func(*args, **(kwargs or {}))

    def observe(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count ``func`` if it is a collective; for other dispatch modes that forward their operators."""
        if isinstance(func, torch._ops.OpOverload) and func.namespace in _OPERATORS:
            self._count(func.namespace, func._schema.name.split("::")[1], args)

    def _count(self, namespace: str, name: str, args: tuple[Any, ...]) -> None:
        if name in _NO_PAYLOAD:
            return
        if name not in _OPERATORS[namespace]:
            raise UnknownCollective(f"{namespace}::{name} is not counted")
        kind, payload, group_at = _OPERATORS[namespace][name]
        group = args[group_at]
        # Resolve by name: in a group that shares memory, the gloo backend is a separate object.
        name = group if isinstance(group, str) else _unboxed(group).group_name
        group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(args[payload]))
        if namespace == "_c10d_functional" and kind == "all_gather":
            size *= group.size()
        if group.size() == 1:
            return
        if kind in ("send", "recv"):  # with two stages megatron-core uses the world group for one direction
            line = TrafficKey("pp", kind, 2)
        else:
            line = TrafficKey(self._axis(kind, group), kind, group.size())
        _add(self._traffic, line, size)
        if self._per_node is not None:
            me, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
            if kind in ("send", "recv"):
                ranks = [me, dist.get_global_rank(group, args[2])]
            if away := bytes_leaving_node(kind, ranks, me, size, self._per_node):
                _add(self._node_traffic, line, away)

    def _axis(self, kind: str, group: dist.ProcessGroup) -> str:
        axis = axis_of(group)
        if axis is None:
            raise UnknownCollective(f"{kind} in a group of no axis: {dist.get_process_group_ranks(group)}")
        return axis


def _add(traffic: Traffic, line: TrafficKey, size: int) -> None:
    before = traffic.get(line, Amount(0, 0))
    traffic[line] = Amount(before.calls + 1, before.payload + size)


def _unboxed(group: Any) -> dist.ProcessGroup:
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


# Traffic of real training steps, for comparison with ``tools/forecast/traffic.py``.
STEPS = 2


def count_steps(
    plan: Plan, rank: int, device: Device, torch_device: torch.device, per_node: int | None = None
) -> list[Traffic]:
    """Return the traffic of ``rank`` in each of the first STEPS steps, without logging or saving.

    With ``per_node`` ranks per node, the traffic to other nodes in each step follows. All ranks must call it.
    """
    counted, node_traffic = [], []
    with open_rank(plan, rank, device, torch_device) as steps, TrafficCounter(per_node) as counter:
        for step in range(1, STEPS + 1):
            steps.run(step)
            counted.append(counter.take())
            node_traffic.append(counter.take_node_traffic())
    return counted if per_node is None else counted + node_traffic


def count_on_rank(plan: Plan) -> list[Traffic]:
    """Return the traffic of this rank in each of the first STEPS steps."""
    return count_steps(plan, int(os.environ["RANK"]), *open_device(plan))
