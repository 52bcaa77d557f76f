"""Records the memory that operators read and write."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.cuda.host_arithmetic import has_parts
from tests.cuda.in_process import RUNTIME

MAKES_METADATA = ("empty_like", "zeros_like", "new_", "record_stream", "set_", "resize_")
"""Operators that read no numbers of their arguments."""
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operators that compute nothing themselves; compiled blocks use the functional ones."""


class Accesses(TorchDispatchMode):
    """Adds a line to the log for each operator: the addresses that it reads and writes, on the current stream.

    Collectives are not recorded here: the runtime's NCCL has their stream and buffers.
    """

    supports_higher_order_operators = True
    """Compiled blocks under recompute keep the state of the random generator by such operators."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work in this mode, which would otherwise run everything in eager mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_parts(types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            return result
        name = func._schema.name.partition("::")[2]
        if func.namespace in COLLECTIVES or name.startswith(MAKES_METADATA):
            return result
        read, written = list[torch.Tensor](), list[torch.Tensor]()
        arguments = func._schema.arguments
        values = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        for argument in arguments:
            is_view = argument.alias_info is not None and not argument.alias_info.is_write
            if not is_view:
                target = written if argument.alias_info is not None else read
                target += on_device(values.get(argument.name))
        outputs = (result,) if len(func._schema.returns) == 1 else result
        for returned, value in zip(func._schema.returns, outputs or (), strict=False):
            if returned.alias_info is None:
                written += on_device(value)
        if read or written:
            text = f"name={name} read={ranges(read)} written={ranges(written)}"
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            ctypes.CDLL(RUNTIME).host_cuda_mark_access(text.encode(), stream)
        return result


def on_device(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested value that have memory on the device."""
    tensors = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.is_cuda and tensor.untyped_storage().nbytes()]


def ranges(tensors: Iterable[torch.Tensor]) -> str:
    """Return "address,bytes;..." of the memory between the first and last number of each tensor."""
    parts = set()
    for tensor in tensors:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            parts.add(f"{tensor.data_ptr()},{(last + 1) * tensor.element_size()}")
    return ";".join(sorted(parts))
