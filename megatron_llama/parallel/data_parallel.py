"""Data parallelism: PyTorch's ``fully_shard`` in all its ZeRO stages (Rajbhandari et al. 2020, arXiv:1910.02054).

    zero  parameters between uses   gradients                               optimizer states
    0     replicated                all-reduced at the last micro batch     replicated
    1     whole within a step       reduce-scattered at the last one        sharded
    2     whole within a step       reduce-scattered at each one            sharded
    3     sharded                   reduce-scattered at each one            sharded

zero=0 is a shard group of one rank, replicated over all: ``fully_shard`` over one rank still casts, reduces and
overlaps, so all stages share one code path. ``shard_group`` sets sizes in between (hybrid sharding).

With dp * cp = 1 nothing is sharded (``Storage.kind``). The rank keeps plain parameters, or casts them itself
(``ComputeCopies``); under ZeRO 3 ``fully_shard`` casts them.

DeepSpeed's ZeRO 3 settings correspond to units. Live parameters: a unit and the next one. Prefetch: the next unit,
forward and backward (``shard_chunk``). Reduce bucket: a unit. A parameter persistence threshold is not needed, because
one collective gathers all parameters of a unit.

Unsharded gradients and sums over ranks have the precision's ``grad_accum_dtype``. quantized_comm.py has other message
formats. A reduced gradient has the parameters' dtype, so with fp32 master weights stages 2 and 3 also accumulate the
micro batches in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megatron_llama import devices
from megatron_llama.model.init import torch_dtype
from megatron_llama.model.llama import Llama
from megatron_llama.parallel.dp1_weight_casts import ComputeCopies
from megatron_llama.parallel.groups import Groups
from megatron_llama.parallel.quantized_comm import Hops, set_collectives
from megatron_llama.plan import Plan
from megatron_llama.plan.plan import COPIES, SHARDS
from megatron_llama.topology import AXES, Topology


class DataGroups(NamedTuple):
    """Groups in which a rank exchanges weights and gradients."""

    mesh: DeviceMesh
    """Mesh of ``fully_shard``: (replicate, shard), or (shard) if ``fully_shard`` sums nothing over replicas."""
    replicas: dist.ProcessGroup | None = None
    """Ranks with replicas of this rank's shards, if quantized_comm.py sums over them (``trainer.grad_reduce``)."""
    hops: Hops | None = None
    """Groups of a two-hop reduction (``trainer.reduce_group``)."""
    secondary: dist.ProcessGroup | None = None
    """Ranks among which the backward pass gathers weights (``trainer.secondary_group``)."""


def data_groups(topology: Topology, device_type: str, plan: Plan, groups: Groups) -> DataGroups:
    """Create this rank's data-parallel groups, with labels in ``groups`` for reports. A collective over all ranks."""
    trainer, size = plan.config.trainer, topology.shard_size
    replicas = topology.grid.product(*topology.grid.same_weights) // size

    def cut(**parts: int) -> DeviceMesh:
        """Create a mesh of all ranks. ``parts``, the slowest first, replace dp and cp, which are adjacent in AXES."""
        shape: dict[str, int] = {}
        for axis in reversed(AXES):
            # Runs for dp and for cp; the second time changes nothing.
            shape |= parts if axis.same_weights else {axis.name: topology.sizes[axis.name]}
        mesh = init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        for part in parts:
            groups.label("dp", mesh.get_group(part))
        return mesh

    def split(inside: int) -> Hops:
        parts = cut(replicate=replicas, across=size // inside, inside=inside)
        return Hops(parts.get_group("inside"), parts.get_group("across"))

    mesh = cut(replicate=replicas, shard=size)
    secondary = split(trainer.secondary_group).inside if trainer.secondary_group else None
    hops = split(trainer.reduce_group) if trainer.reduce_group else None
    if replicas == 1 or plan.config.optim.row.sums_gradients:
        return DataGroups(mesh["shard"], None, hops, secondary)
    if trainer.grad_reduce is not None:
        return DataGroups(mesh["shard"], mesh.get_group("replicate"), hops, secondary)
    return DataGroups(mesh["replicate", "shard"], secondary=secondary)


def shard_chunk(chunk: Llama, groups: DataGroups, plan: Plan) -> None:
    """Apply ``fully_shard`` in place. Units: the embedding, each block, norm with head.

    Tied embeddings form one unit with the norm, gathered for the whole step. A unit is gathered while the previous unit
    computes. Does nothing unless ``Storage.kind`` is SHARDS.
    """
    if plan.storage.kind != SHARDS:
        return
    precision = plan.precision
    policy = MixedPrecisionPolicy(
        param_dtype=torch_dtype(precision.compute_dtype),  # dtype of the weights in the layers
        reduce_dtype=torch_dtype(precision.grad_accum_dtype),
        cast_forward_inputs=False,  # activations have this dtype already; rotary tables stay fp32
    )

    def shard(module: Any, reused_at_once: bool, in_backward: bool = True) -> None:
        """Shard a unit. ``reused_at_once``: the backward pass begins with it; ``in_backward``: it reads the weights."""
        reshard = plan.config.trainer.zero == 3 and not reused_at_once
        parameters: dict[nn.Parameter, None] = {}
        fully_shard(  # calls shard_placement_fn for each parameter of the unit; None shards by rows
            module,
            mesh=groups.mesh,
            mp_policy=policy,
            reshard_after_forward=reshard,
            shard_placement_fn=parameters.setdefault,
        )
        unit = module[0] if isinstance(module, list) else module
        unit.set_unshard_in_backward(in_backward)
        set_collectives(
            unit,
            [*parameters],
            plan.shard_size,
            grad_reduce=plan.config.trainer.grad_reduce,
            hops=groups.hops,
            replicas=groups.replicas,
            param_gather=plan.config.trainer.param_gather,
            secondary=groups.secondary if reshard and in_backward else None,
        )

    tied = chunk.is_first and chunk.is_last and plan.model.tie_word_embeddings
    order: list[Any] = list(chunk.layers.values())  # fully_shard adds methods to their classes
    for block in order:
        # The backward pass begins with the last block and the head: they stay gathered.
        shard(block, reused_at_once=chunk.is_last and block is order[-1])
    if chunk.is_first and not tied:
        shard(chunk.embed_tokens, reused_at_once=False, in_backward=False)  # its gradient does not depend on the weight
        order.insert(0, chunk.embed_tokens)
    if chunk.is_last and not tied:
        shard([chunk.norm, chunk.lm_head], reused_at_once=True)
        order.append(chunk.norm)
    shard(chunk, reused_at_once=chunk.is_last)  # the rest, such as tied embeddings and the norm
    for unit, following in pairwise(order):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    # By default the first unit would prefetch the last unit of another micro batch in vain. It is gathered itself, so
    # prefetching it does nothing.
    order[0].set_modules_to_backward_prefetch([order[0]])
    _sum_gradients(chunk, plan)


def _sum_gradients(chunk: Llama, plan: Plan) -> None:
    """Set the units' gradient reduction: a sum, or none for one data-parallel rank."""
    for module in chunk.modules():
        if not isinstance(module, FSDPModule):
            continue
        if plan.data_ranks == 1:
            module.set_custom_reduce_scatter(_NoReduction())  # type: ignore[arg-type]  # its base class is private
            continue
        # Sum, not mean: the loss is already divided by the tokens of the global batch.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo lacks the reduction that divides


def allocate(chunk: Llama, device: torch.device, plan: Plan) -> ComputeCopies | None:
    """Allocate the parameters, which are on the meta device, on ``device``, in place.

    Returns:
        The compute-dtype copies, if this rank casts its weights itself (``Storage.kind`` is COPIES).
    """
    if isinstance(chunk, FSDPModule):
        chunk.to_empty(device=device)
        return None
    for module in chunk.modules():  # to_empty can't replace the fake tensors of tools/rehearse
        for name, meta in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty_like(meta, device=device), meta.requires_grad))
    return ComputeCopies(chunk, plan) if plan.storage.kind == COPIES else None


class _NoReduction:
    """Reduce-scatter over one rank, for ``FSDPModule.set_custom_reduce_scatter``.

    ``fully_shard`` allocates a buffer for the input, then one for the result. Both are the same, so nothing is copied.
    """

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new buffer for a reduction's input, then the same buffer for its result."""
        last, self._last = self._last, None
        if last is None:
            last = self._last = torch.empty(*size, dtype=dtype, device=device)
        elif devices.of(device).asynchronous:
            # fully_shard requests the result in its reduction stream, which later adds it to earlier gradients. Its
            # event for the next writer of the input's memory precedes that addition.
            last.record_stream(torch.accelerator.current_stream())
        return last

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Do nothing: input and result are one buffer."""


def no_sync_func(
    chunk: nn.Module, zero: int, copies: ComputeCopies | None
) -> Callable[[], AbstractContextManager[None]] | None:
    """Return the ``no_sync_func`` of megatron-core's schedules: a context around all micro batches except the last.

    Below stage 3 the parameters stay unsharded in it, and below stage 2 gradients accumulate locally.
    """
    if copies is not None:
        return copies.no_sync_func()
    if zero == 3 or not isinstance(chunk, FSDPModule):
        return None

    @contextmanager
    def context() -> Iterator[None]:
        chunk.set_reshard_after_backward(False)
        chunk.set_requires_gradient_sync(zero == 2)
        try:
            yield
        finally:
            chunk.set_reshard_after_backward(True)
            chunk.set_requires_gradient_sync(True)

    return context
