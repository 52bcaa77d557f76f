"""Data parallelism: PyTorch's ``fully_shard`` in all its ZeRO stages (Rajbhandari et al. 2020, arXiv:1910.02054).

    zero  parameters between uses   gradients                               optimizer states
    0     replicated                all-reduced at the last micro batch     replicated
    1     whole within a step       reduce-scattered at the last one        sharded
    2     whole within a step       reduce-scattered at each one            sharded
    3     sharded                   reduce-scattered at each one            sharded

zero=0 is a shard group of one rank, replicated over all: ``fully_shard`` over one rank still casts, reduces and
overlaps, so all stages share one code path. ``shard_group`` sets sizes in between (hybrid sharding).

With one data-parallel rank nothing is sharded (``Storage.kind``). The rank keeps plain parameters, or casts them itself
(``ComputeCopies``), except under ZeRO 3. ``fully_shard`` would copy each weight once and each gradient three times per
step, and hold the weights twice.

DeepSpeed's ZeRO 3 settings correspond to units. Live parameters: a unit and the next one. Prefetch: the next unit,
forward and backward (``shard_chunk``). Reduce bucket: a unit. A parameter persistence threshold is not needed, because
one collective gathers all parameters of a unit.

Unsharded gradients and sums over ranks have the precision's ``grad_accum_dtype``. exchange.py has other message
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
from megatron_llama.parallel.exchange import Hops, set_collectives
from megatron_llama.parallel.groups import Groups
from megatron_llama.plan import Plan
from megatron_llama.plan.storage import COPIES, SHARDS
from megatron_llama.topology import AXES, Topology


class DataGroups(NamedTuple):
    """Groups in which a rank exchanges weights and gradients."""

    mesh: DeviceMesh
    """Mesh of ``fully_shard``: (replicate, shard), or (shard) if ``fully_shard`` sums nothing over replicas."""
    copies: dist.ProcessGroup | None = None
    """Ranks with replicas of this rank's shards, if parallel/exchange.py sums over them (``trainer.grad_reduce``)."""
    hops: Hops | None = None
    """Groups of a two-hop reduction (``trainer.reduce_group``)."""
    secondary: dist.ProcessGroup | None = None
    """Ranks among which the backward pass gathers weights (``trainer.secondary_group``)."""


def data_groups(topology: Topology, device_type: str, plan: Plan, groups: Groups) -> DataGroups:
    """Create this rank's data-parallel groups and add them to ``groups``. A collective over all ranks."""
    trainer, size = plan.config.trainer, topology.shard_size
    replicas = topology.grid.product(*topology.grid.same_weights) // size

    def cut(**parts: int) -> DeviceMesh:
        """Create a mesh of all ranks. ``parts``, the slowest first, replace the axes with the same weights."""
        shape: dict[str, int] = {}
        for axis in reversed(AXES):
            shape |= parts if axis.same_weights else {axis.name: topology.sizes[axis.name]}
        mesh = init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        for part in parts:
            groups.add("dp", mesh.get_group(part))
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
            copies=groups.copies,
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
    shard(chunk, reused_at_once=chunk.is_last)
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
    for module in chunk.modules():  # to_empty cannot replace a rehearsal's parameters
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


def before_last_microbatch(
    chunk: nn.Module, zero: int, copies: ComputeCopies | None
) -> Callable[[], AbstractContextManager[None]] | None:
    """Return the ``no_sync_func`` of megatron-core's schedules: a context around all micro batches except the last.

    Below stage 3 the parameters stay unsharded in it, and below stage 2 gradients accumulate locally.
    """
    if copies is not None:
        return copies.before_last_microbatch()
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


# A rank without data-parallel peers casts its weights itself: ``fully_shard`` over one rank would write each cast
# weight three times per step, and copy frozen weights too. A layer's parameter is the copy in the compute dtype, and
# ``Shard`` holds the master. The gradient gets the master's dtype unless ``Storage.keeps_bf16_grads``.


class ComputeCopies:
    """Compute-dtype copies of a chunk's weights. They replace the chunk's parameters that need a cast.

    A copy has memory from the cast at the start of a pass until its gradient is complete. With one micro batch the
    embedding's copy is freed after the lookup, because its gradient does not depend on it.
    """

    def __init__(self, chunk: Llama, plan: Plan) -> None:
        dtype = torch_dtype(plan.precision.compute_dtype)
        # Below ZeRO 2 micro batches are summed in this dtype, from ZeRO 2 on in the master's dtype.
        self._sums_in_bf16 = plan.precision.grad_accum_dtype == "bfloat16" and plan.config.trainer.zero < 2
        self._keeps_bf16_grads = plan.storage.keeps_bf16_grads
        self._is_last_microbatch = True
        self.master_of: dict[nn.Parameter, nn.Parameter] = {}
        for module in chunk.modules():
            for name, master in list(module.named_parameters(recurse=False)):
                if master.is_floating_point() and master.dtype != dtype:
                    copy = nn.Parameter(torch.empty_like(master, dtype=dtype), master.requires_grad)
                    if copy.requires_grad:
                        copy.register_post_accumulate_grad_hook(self._on_grad_ready)
                    self.master_of[copy] = master
                    if self._keeps_bf16_grads:
                        master.grad_dtype = None  # any  # type: ignore[attr-defined]
                    setattr(module, name, copy)
        if plan.storage.frees_embedding_of(is_first=chunk.is_first, is_last=chunk.is_last):
            chunk.get_submodule("embed_tokens").register_forward_hook(self._free_embedding)
        self._free_all()

    def _free_embedding(self, embedding: nn.Module, *_: object) -> None:
        weight = embedding.get_parameter("weight")
        if torch.is_grad_enabled() and weight in self.master_of:  # validation may have several micro batches
            weight.untyped_storage().resize_(0)

    @torch.no_grad()
    def _fill_all(self) -> None:
        for copy, master in self.master_of.items():
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
            copy.data.copy_(master)

    def _free_all(self) -> None:
        for copy in self.master_of:
            copy.untyped_storage().resize_(0)

    @torch.no_grad()
    def _on_grad_ready(self, copy: torch.Tensor) -> None:
        """Move ``copy.grad`` to the master's gradient. Called after a backward pass has added to ``copy.grad``."""
        if copy.grad is None:  # trainer.exact sums gradients itself
            return
        last = self._is_last_microbatch
        if self._sums_in_bf16 and not last:
            return
        assert isinstance(copy, nn.Parameter)
        master, grad = self.master_of[copy], copy.grad
        if master.grad is None:
            master.grad = grad if self._keeps_bf16_grads else grad.to(master.dtype)
        else:
            master.grad = master.grad.to(master.dtype)
            devices.of(grad.device).kernels(compiled=False).add_(master.grad, grad)
        copy.grad = None
        if last:
            copy.untyped_storage().resize_(0)  # no later operation of this pass reads the weight

    def before_last_microbatch(self) -> Callable[[], AbstractContextManager[None]]:
        """Return the ``no_sync_func`` of megatron-core's schedules: a context around all micro batches but the last."""

        @contextmanager
        def context() -> Iterator[None]:
            self._is_last_microbatch = False
            try:
                yield
            finally:
                self._is_last_microbatch = True

        return context


@contextmanager
def filled_copies(chunks: Sequence[ComputeCopies | None]) -> Iterator[None]:
    """Allocate the chunks' copies and cast the masters into them, for the duration of one pass."""
    present = [copies for copies in chunks if copies is not None]
    for copies in present:
        copies._fill_all()
    try:
        yield
    finally:
        for copies in present:
            copies._free_all()
