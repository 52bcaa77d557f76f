"""Patches that make megatron-core run on any device. No other module patches megatron-core.

megatron-core allocates buffers on ``torch.cuda.current_device()``, regardless of the device of its layers and pipeline
schedules. So the name ``torch`` in each module of ``PATCHED_MODULES`` is replaced by a copy of torch in which these
calls differ:

    torch.cuda.current_device()        buffers of sequence parallelism and of point-to-point transfers
    torch.cuda.synchronize()           after batched point-to-point transfers, a workaround for a race in NCCL
    torch.zeros(..., device="cuda")    the schedules' token counter

The real ``torch.cuda`` is unchanged. ``replace_p2p_ops`` replaces the transfers between pipeline stages, for process
groups without send and recv. tests/devices/test_mcore_patches.py checks that runs fail on a CPU without these patches.
So a new CUDA call of megatron-core, which is not handled here, fails tests/layouts.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state

PATCHED_MODULES = (
    *(f"megatron.core.tensor_parallel.{name}" for name in ("layers", "mappings", "utils")),
    *(f"megatron.core.pipeline_parallel.{name}" for name in ("schedules", "p2p_communication")),
    "megatron.core.utils",  # GlobalMemoryBuffer, the gather buffer of sequence parallelism
)


def patch_mcore(device: torch.device) -> None:
    """Make megatron-core run on ``device``. On CUDA, only silence two warnings that are graph breaks."""
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    # The warning about CUDA_DEVICE_MAX_CONNECTIONS, which devices/cuda/device.py sets.
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True
    # The warning about a missing tp_group, which RowParallelLinear does not pass. Only rank 0 warns, so its graphs
    # would differ from the other ranks'.
    layers.get_tensor_model_parallel_group_if_none = _tensor_parallel_group  # type: ignore[attr-defined]
    if device.type == "cuda":
        return
    patched = _patched_torch(device)
    for name in PATCHED_MODULES:
        importlib.import_module(name).torch = patched  # type: ignore[attr-defined]


def _tensor_parallel_group(
    tp_group: dist.ProcessGroup | None, is_expert: bool = False, check_initialized: bool = True
) -> dist.ProcessGroup | None:
    """Replace ``get_tensor_model_parallel_group_if_none`` for a dense model, without the warning."""
    if tp_group is None and parallel_state.is_initialized():
        return parallel_state.get_tensor_model_parallel_group(check_initialized=check_initialized)
    return tp_group


def _patched_torch(device: torch.device) -> types.ModuleType:
    """Return a copy of the torch module with the calls above replaced."""
    patched = types.ModuleType("torch")
    patched.__dict__.update(torch.__dict__)
    cuda = types.ModuleType("torch.cuda")
    cuda.__dict__.update(torch.cuda.__dict__)
    cuda.current_device = lambda: device  # type: ignore[attr-defined]
    cuda.synchronize = lambda *_: None  # type: ignore[attr-defined]
    patched.cuda = cuda  # type: ignore[attr-defined]

    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = device
        return torch.zeros(*args, **kwargs)

    patched.zeros = zeros  # type: ignore[attr-defined]
    return patched


@contextmanager
def replace_p2p_ops(exchange: Callable[..., dict[str, dist.Work]]) -> Iterator[None]:
    """Replace send and recv of megatron-core's pipeline schedules by ``exchange`` inside the context.

    ``exchange`` has the interface of megatron-core's ``_p2p_ops``: it returns the handles to wait for, under
    "send_next", "recv_prev", "send_prev" and "recv_next".
    """
    module = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    batched = lambda **tensors: list(exchange(**tensors).values())  # noqa: E731
    with patch.multiple(module, _p2p_ops=exchange, _batched_p2p_ops=batched):
        yield
