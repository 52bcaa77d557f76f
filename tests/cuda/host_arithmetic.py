"""Operators of the device, computed on the host.

Kernels of the runtime compute nothing. Device memory is host memory, so a tensor on the CPU can share it: after the
launch of a kernel, the operator's implementation for the CPU writes the result to the same place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.cuda.in_process import RUNTIME


def on_host(value: Any) -> Any:
    """Return a tensor on the CPU that shares the memory of a tensor on the device; other values as they are."""
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    storage = value.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
    shared = torch.frombuffer(memory, dtype=torch.uint8)[: storage.nbytes() // value.itemsize * value.itemsize]
    return shared.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())


def has_parts(types: Iterable[Any]) -> bool:
    """Whether an operator has a DTensor or similar, whose parts it dispatches again."""
    return any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types)


FLASH_ATTENTION = "flash_attention"
"""Part of the names of operators that the CPU does not have."""
STORAGE_OPERATORS = ("aten::resize_", "aten::set_", "aten::record_stream")


def _computes(func: Any) -> bool:
    """Whether an operator writes numbers: not a view, a change of the storage or a collective."""
    schema = func._schema
    is_view = not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)
    is_computed = not is_view and FLASH_ATTENTION not in schema.name
    return func.namespace == "aten" and is_computed and schema.name not in STORAGE_OPERATORS


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


class HostArithmetic(TorchDispatchMode):
    """Computes operators on the host after their launch on the device."""

    def __init__(self, most: float) -> None:
        """``most``: numbers in a tensor. Operators with a larger tensor are not computed."""
        super().__init__()
        self._most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_parts(types):
            return NotImplemented
        kwargs = kwargs or {}
        host_args, host_kwargs = tree_map(on_host, args), tree_map(on_host, kwargs)
        result = func(*args, **kwargs)
        is_small = all(tensor.numel() <= self._most for tensor in _tensors(args, kwargs, result))
        if _computes(func) and is_small and any(tensor.is_cuda for tensor in _tensors(result)):
            ctypes.CDLL(RUNTIME).host_cuda_drain_all()
            if host_kwargs.get("device") is not None:
                host_kwargs["device"] = torch.device("cpu")
            computed = func(*host_args, **host_kwargs)
            if not func._schema.is_mutable:
                _store(computed, result)
        return result


def _store(computed: Any, result: Any) -> None:
    """Write computed values to the memory of the device's tensors."""
    for source, target in zip(tree_flatten(computed)[0], tree_flatten(result)[0], strict=True):
        if isinstance(target, torch.Tensor):
            on_host(target).copy_(source)
