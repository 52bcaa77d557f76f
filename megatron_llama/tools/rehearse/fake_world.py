"""All that a rehearsal replaces. Everything else is the program as it trains.

process group           torch's fake one: a collective returns at once and moves nothing
tensors                 FakeTensorMode: shapes, dtypes and storages, but no values and no memory
other ranks' groups     are not made: a world of 16,384 ranks costs what one of 128 does
the data-parallel mesh  is made outside the mode, because it computes with the values of its ranks
initial weights         are left empty: drawing them costs time, and there are no values
kernels                 plain torch, unless the plan's device is the host. Documents go through a dense mask or tiles
quantization            the same: only the size of its result is needed
values read by the host are answered: 1.0 for a loss, a norm, a count of updates; 0 for counts of tokens and flags
the data                made up (``data.mock``), with the run's shapes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from megatron_llama.config.precision import quantized_bytes
from megatron_llama import devices
from megatron_llama.devices import INDUCTOR, Device, device_named, find_device
from megatron_llama.devices.kernels import Kernels
from megatron_llama.parallel import parallelize, shards
from megatron_llama.topology import Topology


@contextmanager
def fake_world(topology: Topology, device: str = devices.HOST) -> Iterator[None]:
    """A world of which only this rank is there. The process group ends with ``parallel.process_groups``.

    ``device`` is the name of the plan's device.
    """
    _clear_sharding_prop_cache()  # DTensor's answers would bring the meshes of an earlier world in this process
    dist.init_process_group("fake", store=FakeStore(), rank=topology.rank, world_size=topology.world_size)
    new_group = dist.new_group
    planned = find_device(device)
    kind = device_named(devices.HOST).kernel_type() if device == devices.HOST else Kernels
    masked = planned is not None and planned.attention == "mask"

    def kernels(self: Device, compiled: bool) -> Kernels:
        attention = "mask" if masked else "tiles"  # varlen needs its device
        return kind(attention=attention, compiled=compiled, fuses_loss=compiled and self.compiler == INDUCTOR)

    def own_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and topology.rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return new_group(ranks, *args, **kwargs)

    with (
        patch.object(dist, "new_group", own_group),
        patch.object(dist.distributed_c10d, "new_group", own_group),
        patch.object(device_mesh, "new_group", own_group),
        patch.object(parallelize, "data_groups", _without_modes(parallelize.data_groups)),
        patch.object(parallelize, "initial_values", lambda piece, model, seed: torch.empty(piece.size)),
        patch.object(Device, "kernels", kernels),
        patch.object(kind, "is_one", lambda self, factor: False),  # fake numbers have no value
        patch.object(shards, "quantize", _quantized_size),
    ):
        yield


class FakeTensors(FakeTensorMode):
    """Tensors that are made inside the context have no values; where the host reads one, it is 1.0, 0 or False."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see Watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0
        return super().__torch_dispatch__(func, types, args, kwargs)


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    def outside(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return outside


def _quantized_size(values: torch.Tensor, kind: str) -> torch.Tensor:
    return values.new_empty(len(values), quantized_bytes(kind, values.shape[1]), dtype=torch.uint8)
