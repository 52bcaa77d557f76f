"""Activation offload to host memory between the forward and the backward pass (``trainer.offload``).

Saved-tensor hooks copy a block's saved tensors to the host on a separate stream. The backward pass of a block
prefetches the tensors of the block before it. So the device holds the activations of two blocks instead of all. Copies
are exact. With trainer.recompute=full a block saves its input only.

On a CPU the host is the device: the copies are made, but no memory is saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from megatron_llama.devices.copy_stream import copy_stream, on_stream
from megatron_llama.model.rotary import Rotary


class _HostCopy:
    """Host copy of a storage of saved tensors, and its device copy during the backward pass."""

    def __init__(self, storage: Tensor, stream: torch.Stream | None) -> None:
        self.device, self.stream = storage.device, stream
        self.original = StorageWeakRef(storage.untyped_storage())  # the reference keeps its number from other storages
        self.device_copy: Tensor | None = None
        self.host = torch.empty(storage.shape, dtype=storage.dtype, pin_memory=stream is not None)
        with on_stream(stream):
            self.host.copy_(storage, non_blocking=True)
        if stream is not None:
            storage.record_stream(stream)  # type: ignore[arg-type]  # not reused before the copy is done

    def prefetch(self) -> None:
        """Start the copy to the device."""
        if self.device_copy is None:
            with on_stream(self.stream):
                self.device_copy = _on_device(self.host, self.device)

    def get(self) -> Tensor:
        """Return the device copy, ready for the current stream."""
        self.prefetch()
        assert self.device_copy is not None
        if self.stream is not None:
            current = torch.accelerator.current_stream(self.device)
            current.wait_stream(self.stream)
            self.device_copy.record_stream(current)  # type: ignore[arg-type]
        return self.device_copy


class _SavedView(NamedTuple):
    copy: _HostCopy
    block: _BlockOffload
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _BlockOffload:
    """Saved tensors of one forward pass of a block.

    ``shared`` tensors stay on the device. ``before`` is the block that the backward pass reaches next.
    """

    def __init__(
        self, block: nn.Module, shared: tuple[Tensor, ...], device: torch.device, before: _BlockOffload | None
    ) -> None:
        self.block, self.shared, self.before = block, shared, before
        self.copies: dict[tuple[int, torch.dtype], _HostCopy] = {}
        self.device, self.stream = device, copy_stream(device, "activations")
        self._on_device: set[int] | None = None

    def pack(self, tensor: Tensor) -> Tensor | _SavedView:
        if self._on_device is None:  # not in __init__: fully_shard gathers the weights before the first operator
            self._on_device = {_storage(tensor) for tensor in (*self.block.parameters(), *self.shared)}
        key = _storage(tensor)
        # Attention kernels of torch 2.11 save random states on the host.
        if key in self._on_device or tensor.device.type != self.device.type:
            return tensor
        copy = self.copies.get((key, tensor.dtype))
        if copy is None:
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            copy = self.copies[key, tensor.dtype] = _HostCopy(tensor.as_strided((size,), (1,), 0), self.stream)
        return _SavedView(copy, self, tensor.shape, tensor.stride(), tensor.storage_offset())  # type: ignore[arg-type]

    @staticmethod
    def unpack(saved: Any) -> Tensor:
        if not isinstance(saved, _SavedView):
            return saved  # type: ignore[no-any-return]
        storage = saved.copy.get()
        if (before := saved.block.before) is not None:
            saved.block.before = None
            for copy in before.copies.values():
                copy.prefetch()
        return storage.as_strided(saved.shape, saved.stride, saved.offset)


class Offload:
    """Offload of the saved tensors of a chunk's blocks. Wraps their ``forward``, compiled or not."""

    def __init__(self) -> None:
        self._first: nn.Module | None = None
        self._last: Callable[[], _BlockOffload | None] = lambda: None

    def wrap(self, block: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a block's ``forward`` that offloads. Call this for each block of the chunk, in their order."""
        self._first = self._first or block
        return partial(self._run, block, forward)

    def _run(
        self, block: nn.Module, forward: Callable[..., Tensor], x: Tensor, rotary: Rotary, visible: Any, *of_layer: Any
    ) -> Tensor:
        """Run a block.

        ``rotary`` and ``visible`` stay on the device, because all blocks save them. With random-LTD's subset in
        ``of_layer`` they belong to this layer and are offloaded.
        """
        if not torch.is_grad_enabled():
            return forward(x, rotary, visible, *of_layer)
        shared = () if of_layer else tuple(leaf for leaf in tree_leaves((rotary, visible)) if isinstance(leaf, Tensor))
        offload = _BlockOffload(block, shared, x.device, None if block is self._first else self._last())
        self._last = weakref.ref(offload)  # the autograd graph owns it, and with it the host memory
        with saved_tensors_hooks(offload.pack, offload.unpack):
            return forward(x, rotary, visible, *of_layer)


def _on_device(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(host, device=device).copy_(host, non_blocking=True)


def _storage(tensor: Tensor) -> int:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()._cdata
