"""megatron-core's CUDA calls, sent to whatever device the run is on. Nothing else in the project patches megatron-core.

megatron-core asks ``torch.cuda`` for "the current device" when it allocates communication buffers, wherever its
layers run. Each module in ``ROUTED`` gets a ``torch`` of its own: the real one, with these calls replaced:

    torch.cuda.current_device()       buffers of sequence parallelism and of point-to-point transfers
    torch.cuda.synchronize()          after batched point-to-point transfers (a race in NCCL; nothing to wait for
    elsewhere) torch.zeros(..., device="cuda")   the schedules' token counter

Where the device's process group has no send and recv, ``point_to_point_by`` puts other transfers between the stages.
The real ``torch.cuda`` is untouched. tests/devices/test_mcore.py reads megatron-core's sources and fails when a
module that we use makes a CUDA call that is not accounted for here.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

ROUTED = (
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.tensor_parallel.utils",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.utils",  # GlobalMemoryBuffer, the gather buffer of sequence parallelism
)


def route(device: torch.device) -> None:
    """Make megatron-core work on ``device``. On CUDA only its warnings are settled."""
    _settle_warnings()
    if device.type == "cuda":
        return
    routed = _routed_torch(device)
    for name in ROUTED:
        importlib.import_module(name).torch = routed  # type: ignore[attr-defined]


def _settle_warnings() -> None:
    """Two warnings fire inside a linear's forward and would split its compiled graph in two, each time."""
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    # About launch order: devices/cuda.py sets what it asks for.
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True
    # About a group that is not passed: the row-parallel linear does not pass it on, and rank 0 alone warns, so that it
    # would compile graphs of its own.
    layers.get_tensor_model_parallel_group_if_none = _tensor_parallel_group  # type: ignore[attr-defined]


def _tensor_parallel_group(
    tp_group: dist.ProcessGroup | None, is_expert: bool = False, check_initialized: bool = True
) -> dist.ProcessGroup | None:
    """What megatron-core's ``get_tensor_model_parallel_group_if_none`` returns for a dense model, without a word."""
    if tp_group is None and parallel_state.is_initialized():
        return parallel_state.get_tensor_model_parallel_group(check_initialized=check_initialized)
    return tp_group


def _routed_torch(device: torch.device) -> types.ModuleType:
    """A module with torch's attributes, except for the calls listed above."""
    routed = types.ModuleType("torch")
    routed.__dict__.update(torch.__dict__)
    cuda = types.ModuleType("torch.cuda")
    cuda.__dict__.update(torch.cuda.__dict__)
    cuda.current_device = lambda: device  # type: ignore[attr-defined]
    cuda.synchronize = lambda *_: None  # type: ignore[attr-defined]
    routed.cuda = cuda  # type: ignore[attr-defined]

    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = device
        return torch.zeros(*args, **kwargs)

    routed.zeros = zeros  # type: ignore[attr-defined]
    return routed


@contextmanager
def point_to_point_by(exchange: Callable[..., dict[str, dist.Work]]) -> Iterator[None]:
    """Have the pipeline schedules call ``exchange`` for what they would send and receive.

    It gets the arguments of megatron-core's ``_p2p_ops`` and returns, like it, what to wait for by "send_next",
    "recv_prev", "send_prev" and "recv_next".
    """
    module = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    originals = {name: getattr(module, name) for name in ("_p2p_ops", "_batched_p2p_ops")}
    module._p2p_ops = exchange  # type: ignore[attr-defined]
    module._batched_p2p_ops = lambda **tensors: list(exchange(**tensors).values())  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
