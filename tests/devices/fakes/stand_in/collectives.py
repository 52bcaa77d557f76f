"""A process group like TorchNeuron's beta: collectives, but no send and recv. Gloo does the work."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stand_in import record

# torch 2.13 renamed three: the new name here, gloo's at the right.
RENAMED = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}
PASSED_ON = (
    *RENAMED,
    *RENAMED.values(),
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)


class WithoutPointToPoint(dist.ProcessGroup):
    """Process group of dist.init_process_group("neuron") and dist.new_group."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.own_name = ""

    def getBackendName(self) -> str:
        return "neuron"

    def _set_group_name(self, name: str) -> None:
        self.own_name = name

    def _get_backend(self, device: torch.device) -> WithoutPointToPoint:
        return self

    @property
    def group_name(self) -> str:
        return self.own_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def send(self, *args: Any) -> None:
        record("send refused")
        raise RuntimeError("Backend neuron does not support send")

    def recv(self, *args: Any) -> None:
        record("recv refused")
        raise RuntimeError("Backend neuron does not support recv")


def _pass_on(name: str) -> Any:
    def collective(self: WithoutPointToPoint, *args: Any, **named: Any) -> Any:
        if name == "allreduce" and self.size() == 2 and args[0][0].dim() == 3:
            record("activation or gradient by all-reduce")
        return getattr(self.gloo, RENAMED.get(name, name))(*args, **named)

    return collective


for _name in PASSED_ON:
    setattr(WithoutPointToPoint, _name, _pass_on(_name))


def register(backend: str) -> None:
    """Make ``backend`` known to torch.distributed."""
    dist.Backend.register_backend(backend, WithoutPointToPoint, devices=["cpu"])
