"""Start and end of torch.distributed and of megatron-core's process groups in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._C._distributed_c10d import _register_process_group

from megatron_llama.devices import Device
from megatron_llama.devices.mcore import point_to_point_by, route
from megatron_llama.devices.pair_transfers import PairTransfers
from megatron_llama.plan import Plan
from megatron_llama.topology import Topology


@contextmanager
def process_groups(plan: Plan, topology: Topology, device: Device, torch_device: torch.device) -> Iterator[None]:
    """Join the other ranks, which MASTER_ADDR and MASTER_PORT lead to, for the time of the context."""
    route(torch_device)
    trainer = plan.config.trainer
    if not dist.is_initialized():
        dist.init_process_group(
            device.backend, rank=topology.rank, world_size=topology.world_size, timeout=timedelta(minutes=30)
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=trainer.tp,
        pipeline_model_parallel_size=trainer.pp,
        virtual_pipeline_model_parallel_size=trainer.vpp if trainer.vpp > 1 else None,
        create_gloo_process_groups=False,
    )
    _rename(parallel_state.get_tensor_model_parallel_group(), "tensor-parallel")
    # megatron-core and we must see the same grid, or weights would be cut for other ranks than they are reduced over.
    assert parallel_state.get_tensor_model_parallel_rank() == topology.tp_rank
    assert parallel_state.get_data_parallel_rank() == topology.dp_rank
    assert parallel_state.get_pipeline_model_parallel_rank() == topology.pp_rank
    lacking = trainer.pp > 1 and not device.has_point_to_point()
    try:
        with point_to_point_by(PairTransfers(topology).exchange) if lacking else nullcontext():
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _rename(group: dist.ProcessGroup, name: str) -> None:
    """Gives a group a name that is the same on all ranks.

    torch counts groups, and the count is a constant in a compiled graph that uses the group: ranks of different
    groups would compile the same graph again, each under its number.
    """
    group._set_group_name(name)  # type: ignore[arg-type]
    _register_process_group(name, group)  # type: ignore[arg-type]
