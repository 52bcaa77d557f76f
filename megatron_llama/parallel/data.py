"""Data parallelism: PyTorch's ``fully_shard`` in all its ZeRO stages (Rajbhandari et al. 2020, arXiv:1910.02054).

    zero  parameters between uses   gradients                          optimizer
    0     whole                     all-reduced at the last micro batch   whole
    1     whole within a step       reduce-scattered at the last one      sharded
    2     whole within a step       reduce-scattered at each one          sharded
    3     sharded                   reduce-scattered at each one          sharded

zero=0 is a shard group of one rank, replicated over all; ``shard_group`` is anything between (hybrid).

Gradients are summed in the precision's ``accumulation`` dtype while they are whole, and over ranks; what has been
reduced takes the dtype of the parameters, so stages 2 and 3 add the micro batches of an fp32 master in fp32.
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


def data_mesh(topology: Topology, device_type: str) -> DeviceMesh:
    """This rank's data-parallel mesh: (replicate, shard), or (shard) alone where there is one copy."""
    replicas = topology.dp // topology.shard_size
    shape = (topology.pp, replicas, topology.shard_size, topology.tp)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("pp", "replicate", "shard", "tp"))
    return mesh["replicate", "shard"] if replicas > 1 else mesh["shard"]


def shard_chunk(chunk: Llama, mesh: DeviceMesh, plan: Plan) -> None:
    """Apply ``fully_shard`` in place: one unit per block, one for embedding, norm and head."""
    precision = plan.precision
    policy = MixedPrecisionPolicy(
        param_dtype=torch_dtype(precision.compute_dtype),  # no cast where they are stored in it
        reduce_dtype=torch_dtype(precision.grad_accum_dtype),
        cast_forward_inputs=False,  # the rotary tables stay fp32
    )
    reshard = plan.config.trainer.zero == 3
    for block in chunk.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(chunk, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums: the loss is already divided by the tokens of the global batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # the default way to divide by 1 is an operation gloo lacks


def before_last_microbatch(chunk: FSDPModule, zero: int) -> Callable[[], AbstractContextManager[None]] | None:
    """What megatron-core's schedules call ``no_sync_func``: the state of all micro batches but the last."""
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
