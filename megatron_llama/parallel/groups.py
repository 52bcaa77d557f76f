"""The process groups of a rank: torch.distributed and megatron-core's groups for each parallel axis."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._C._distributed_c10d import _register_process_group

from megatron_llama.config.settings import TrainerConfig
from megatron_llama.devices import Device
from megatron_llama.devices.mcore import route
from megatron_llama.plan import Plan
from megatron_llama.system.attempt import ATTEMPT
from megatron_llama.system.phase import PATIENT
from megatron_llama.topology import Topology


@contextmanager
def process_groups(plan: Plan, topology: Topology, device: Device, torch_device: torch.device) -> Iterator[None]:
    """Process groups that exist inside the context. MASTER_ADDR and MASTER_PORT tell how to reach the other ranks."""
    route(torch_device)
    trainer = plan.config.trainer
    if not dist.is_initialized():
        rank, size, timeout = topology.rank, topology.world_size, _timeout(trainer)
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        # Names of this attempt's own: torchrun keeps the store, with the addresses of ranks that are gone.
        store = dist.PrefixStore(os.environ.get(ATTEMPT, "0"), store)
        dist.init_process_group(device.backend, rank=rank, world_size=size, timeout=timeout, store=store)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=trainer.tp,
        pipeline_model_parallel_size=trainer.pp,
        virtual_pipeline_model_parallel_size=trainer.vpp if trainer.vpp > 1 else None,
        create_gloo_process_groups=False,
    )
    _rename(parallel_state.get_tensor_model_parallel_group(), "tensor-parallel")
    # If megatron-core ordered the grid differently, gradients would be reduced over ranks that hold other weights.
    assert parallel_state.get_tensor_model_parallel_rank() == topology.tp_rank
    assert parallel_state.get_data_parallel_rank() == topology.dp_rank
    assert parallel_state.get_pipeline_model_parallel_rank() == topology.pp_rank
    try:
        with device.pipeline_transfers(topology) if trainer.pp > 1 else nullcontext():
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _timeout(trainer: TrainerConfig) -> timedelta:
    """How long a collective may wait: until the hang watch has spoken, because it knows who is to blame, and a rank may
    compile for an hour while another waits for it."""
    limit = trainer.hang_timeout_seconds
    return timedelta(days=30) if limit is None else timedelta(seconds=(PATIENT + 1) * limit, minutes=10)


def _rename(group: dist.ProcessGroup, name: str) -> None:
    """Gives a group a name that is the same on all ranks, so that they share compiled graphs.

    torch names groups by a running number, and the name is a constant in a compiled graph that uses the group. Ranks of
    different groups would compile the same graph again, each with its own number.
    """
    group._set_group_name(name)  # type: ignore[arg-type]
    _register_process_group(name, group)  # type: ignore[arg-type]
