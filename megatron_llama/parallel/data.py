"""Data parallelism: PyTorch's ``fully_shard`` in all its ZeRO stages (Rajbhandari et al. 2020, arXiv:1910.02054).

    zero  parameters between uses   gradients                               optimizer states
    0     replicated                all-reduced at the last micro batch     replicated
    1     whole within a step       reduce-scattered at the last one        sharded
    2     whole within a step       reduce-scattered at each one            sharded
    3     sharded                   reduce-scattered at each one            sharded

zero=0 is a shard group of one rank, replicated over all: ``fully_shard`` over one rank still casts, reduces and
overlaps, so all stages share one code path. ``shard_group`` is anything in between (hybrid sharding).

Unsharded gradients, and sums over ranks, have the precision's ``grad_accum_dtype``. A reduced gradient gets the
parameters' dtype, so with fp32 master weights stages 2 and 3 also accumulate the micro batches in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megatron_llama.model.llama import Llama
from megatron_llama.model.mcore_config import torch_dtype
from megatron_llama.plan import Plan
from megatron_llama.topology import Topology


def data_mesh(topology: Topology, device_type: str, sums_itself: bool = False) -> DeviceMesh:
    """This rank's data-parallel mesh: (replicate, shard), or only (shard) if there is one replica, or if the optimizer
    ``sums_itself`` over the replicas."""
    replicas = topology.dp // topology.shard_size
    shape = (topology.pp, replicas, topology.shard_size, topology.tp)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("pp", "replicate", "shard", "tp"))
    if sums_itself:
        return mesh["shard"]
    return mesh["replicate", "shard"] if replicas > 1 else mesh["shard"]


def shard_chunk(chunk: Llama, mesh: DeviceMesh, plan: Plan) -> None:
    """Applies ``fully_shard`` in place: one unit per block, one for embedding, norm and head."""
    precision = plan.precision
    policy = MixedPrecisionPolicy(
        param_dtype=torch_dtype(precision.compute_dtype),  # the layers see the weights in this dtype
        reduce_dtype=torch_dtype(precision.grad_accum_dtype),
        cast_forward_inputs=False,  # activations have it already, and rotary tables stay fp32
    )
    reshard = plan.config.trainer.zero == 3
    for block in chunk.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(chunk, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            # Sum, not mean: the loss is already divided by the tokens of the global batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo lacks the reduction that divides


def before_last_microbatch(chunk: FSDPModule, zero: int) -> Callable[[], AbstractContextManager[None]] | None:
    """The ``no_sync_func`` of megatron-core's schedules: a context around all micro batches except the last.

    Below stage 3 the parameters stay unsharded in it, and below stage 2 gradients accumulate locally.
    """
    if zero == 3:
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
