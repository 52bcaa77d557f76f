"""Counts what a rank sends: every collective that passes torch's dispatcher, by axis and kind.

Bytes come from the tensors that the operators are given, never from a plan: tools/forecast/traffic.py, which predicts
them, is checked against this. For tests and ``scripts/traffic.py``; training does not count.
"""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_llama.data.batches import build_data
from megatron_llama.devices import Device
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.parallel.groups import axis_of
from megatron_llama.plan import Plan
from megatron_llama.tools.forecast.traffic import Amount, Traffic, TrafficKey, bytes_leaving_node, sort_traffic
from megatron_llama.tools.steps import open_steps

# Operator, its kind, and which of its arguments are the payload and the group. The functional all_gather has no result
# among its arguments: its payload is the input times the group's size.
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
    """A collective or a process group that the counter does not know; without it the count would be wrong."""


class TrafficCounter(TorchDispatchMode):
    """A context manager that counts; ``taken`` returns what was counted since its last call."""

    def __init__(self, per_node: int | None = None) -> None:
        """``per_node``: also count what this rank sends to other nodes, each of so many successive ranks."""
        super().__init__()
        self._per_node = per_node
        self._found: Traffic = {}
        self._left: Traffic = {}

    supports_higher_order_operators = True  # appear while torch.compile traces; they contain no collective

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keeps compiled blocks compiled under this mode; by default a mode disables them."""
        return True

    def taken(self) -> Traffic:
        """Returns what was counted so far, and starts again at zero."""
        found, self._found = sort_traffic(self._found), {}
        return found

    def left(self) -> Traffic:
        """Returns what went to other nodes so far (tools/forecast/traffic.py: leaving), and starts again at zero."""
        left, self._left = sort_traffic(self._left), {}
        return left

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.observe(func, args)
        return func(*args, **(kwargs or {}))

    def observe(self, func: Any, args: tuple[Any, ...]) -> None:
        """Counts ``func`` if it is a collective, for modes that see the operators themselves."""
        if isinstance(func, torch._ops.OpOverload) and func.namespace in _OPERATORS:
            self._count(func.namespace, func._schema.name.split("::")[1], args)

    def _count(self, namespace: str, name: str, args: tuple[Any, ...]) -> None:
        if name in _NO_PAYLOAD:
            return
        if name not in _OPERATORS[namespace]:
            raise UnknownCollective(f"{namespace}::{name} is not counted")
        kind, payload, group_at = _OPERATORS[namespace][name]
        group = args[group_at]
        # By name, as torch knows it: gloo's part of a group that shares memory is an object of its own.
        name = group if isinstance(group, str) else _unboxed(group).group_name
        group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(args[payload]))
        if namespace == "_c10d_functional" and kind == "all_gather":
            size *= group.size()
        if group.size() == 1:
            return
        if kind in ("send", "recv"):  # megatron-core uses the world's group for one direction between two stages
            line = TrafficKey("pp", kind, 2)
        else:
            line = TrafficKey(self._axis(kind, group), kind, group.size())
        _add(self._found, line, size)
        if self._per_node is not None:
            me, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
            if kind in ("send", "recv"):
                ranks = [me, dist.get_global_rank(group, args[2])]
            if away := bytes_leaving_node(kind, ranks, me, size, self._per_node):
                _add(self._left, line, away)

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


# Counts what a rank sends in real training steps, for comparison with ``tools/forecast/traffic.py``.


STEPS = 2


def count_steps(
    plan: Plan, rank: int, device: Device, torch_device: torch.device, per_node: int | None = None
) -> list[Traffic]:
    """What ``rank`` sends in each of the first STEPS steps of ``train``; with ``per_node`` ranks on a node, followed by
    what it sends to other nodes in each.

    Nothing is logged or saved. All ranks of the plan must call it.
    """
    topology = plan.topology(rank)
    counted, left = [], []
    with process_groups(plan, topology, device, torch_device):
        model = build_model(plan, topology, device, torch_device)
        optimizer = build_optimizer(plan, model)
        data = build_data(plan, topology, torch_device)
        with (
            open_steps(plan, topology, model, optimizer, data) as steps,
            TrafficCounter(per_node) as counter,
        ):
            for step in range(1, STEPS + 1):
                steps.run(step)
                counted.append(counter.taken())
                left.append(counter.left())
    return counted if per_node is None else counted + left
