"""trainer.async_tp: Inductor fuses sequence parallelism's gathers and scatters with the adjacent matmuls.

The operators are fused_all_gather_matmul and fused_matmul_reduce_scatter, on devices with ``Device.enable_async_tp``.
Fusions are counted, because Inductor does not report a graph in which it finds none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch._inductor.config as inductor
from torch._inductor.custom_graph_pass import CustomGraphPass

from megatron_llama.devices import Device
from megatron_llama.parallel.groups import current_groups

_COLLECTIVES = ("_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor")


class NotOverlapped(RuntimeError):
    """The compiler fused no collective, so trainer.async_tp has no effect."""


class Overlap(NamedTuple):
    """Numbers of a graph's gathers and scatters, forward and backward."""

    fused: int
    """Fused into a matmul."""
    separate: int
    """Left as separate operators."""


class OverlapCount(CustomGraphPass):
    """Inductor pass that counts the fusions of each graph, after the built-in passes. Cached graphs skip it."""

    def __init__(self) -> None:
        self._counted = Overlap(0, 0)

    def __call__(self, graph: torch.fx.Graph) -> None:
        names = [node.target.name() for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        fused = sum(name.startswith("symm_mem::fused_") for name in names)
        separate = sum(name.startswith(_COLLECTIVES) for name in names)
        self._counted = Overlap(self._counted.fused + fused, self._counted.separate + separate)

    def uuid(self) -> str:
        """Return a constant for the cache key: compiled code does not depend on the count."""
        return "megatron_llama: OverlapCount"

    def take(self) -> Overlap:
        """Return the counts since the last call."""
        counted, self._counted = self._counted, Overlap(0, 0)
        return counted


def enable_async_overlap(device: Device) -> OverlapCount:
    """Enable trainer.async_tp for all graphs that this process compiles later.

    A collective over the tensor-parallel ranks. Raises ConfigError if the devices do not support it.
    """
    device.enable_async_tp(current_groups()["tp"])
    count = OverlapCount()
    inductor.post_grad_custom_post_pass = count
    return count


def no_overlap_error(counted: Overlap | None, name: str, mode: str) -> str | None:
    """Return the error message of a graph with collectives but no fused one; None for other graphs."""
    if counted is None or counted.fused or not counted.separate:
        return None
    return (
        f"trainer.async_tp: torch {torch.__version__} fused none of the {counted.separate} gathers and scatters of "
        f"{name}, {mode}, into a matmul. Write trainer.async_tp=false"
    )
