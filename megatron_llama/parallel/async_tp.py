"""Sequence parallelism's gathers and scatters inside the products beside them (trainer.async_tp).

    gather, then product:   x shard → all_gather → x Wᵀ        becomes  fused_all_gather_matmul
    product, then scatter:  x Wᵀ partial → reduce_scatter      becomes  fused_matmul_reduce_scatter

Inductor does it, in graphs whose products stand beside functional collectives, as traceable_linear.py and the compiled
megatron-core layers write them; a device says whether and how (``Device.enable_async_tp``). Here it is counted what
became of them: a compiler that recognises nothing says nothing.
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
    """The compiler has put no collective into a product, and trainer.async_tp would do nothing."""


class Overlap(NamedTuple):
    """What became of a graph's gathers and scatters, forward and backward."""

    inside: int
    """Those that run inside a product."""
    beside: int
    """Those that stayed operators of their own."""


class OverlapCount(CustomGraphPass):
    """Counts in each graph that Inductor compiles, after its own passes; graphs out of the cache do not come here."""

    def __init__(self) -> None:
        self._found = Overlap(0, 0)

    def __call__(self, graph: torch.fx.Graph) -> None:
        names = [node.target.name() for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        inside = sum(name.startswith("symm_mem::fused_") for name in names)
        beside = sum(name.startswith(_COLLECTIVES) for name in names)
        self._found = Overlap(self._found.inside + inside, self._found.beside + beside)

    def uuid(self) -> str:
        """Part of the cache's key. What is compiled does not depend on the count."""
        return "megatron_llama: OverlapCount"

    def take(self) -> Overlap:
        """What was counted since the last call."""
        found, self._found = self._found, Overlap(0, 0)
        return found


def overlap_products(device: Device) -> OverlapCount:
    """Turns it on for all graphs that this process compiles from now on. A collective of the tensor-parallel ranks.

    Raises ConfigError where the devices can't do it."""
    device.enable_async_tp(current_groups()["tp"])
    count = OverlapCount()
    inductor.post_grad_custom_post_pass = count
    return count


def nothing_overlaps(found: Overlap | None, what: str, mode: str) -> str | None:
    """What is wrong with a graph in which all collectives stayed as they were; None for others."""
    if found is None or found.inside or not found.beside:
        return None
    return (
        f"trainer.async_tp: torch {torch.__version__} has put none of the {found.beside} gathers and scatters of "
        f"{what}, {mode}, into a product. Write trainer.async_tp=false"
    )
