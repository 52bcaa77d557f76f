"""Activations that wait in the host's memory between the forward and the backward pass (``trainer.offload``).

What a block's operators keep is copied to the host as it is kept, on a stream of its own; in the backward pass a
block's copies come back together, and those of the block before it are on their way meanwhile. So the device holds the
activations of two blocks instead of all. Copies are exact. With trainer.recompute=full a block keeps its input alone.

On a CPU the host is the device: the same copies are made, and nothing is saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from megatron_llama import devices
from megatron_llama.model.rotary import Rotary


class _Parked:
    """The storage of some kept tensors, in the host's memory and for a while on the device again."""

    def __init__(self, whole: Tensor, side: torch.Stream | None) -> None:
        self.device, self.side = whole.device, side
        self.original = StorageWeakRef(whole.untyped_storage())  # as long as it is there, no other has the same number
        self.again: Tensor | None = None
        self.host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=side is not None)
        with _beside(side):
            self.host.copy_(whole, non_blocking=True)
        if side is not None:
            whole.record_stream(side)  # type: ignore[arg-type]  # the allocator must not reuse it before the copy is done

    def fetch(self) -> None:
        """Begins the copy back."""
        if self.again is None:
            with _beside(self.side):
                self.again = _on_device(self.host, self.device)

    def take(self) -> Tensor:
        """The tensor on the device, for the current stream."""
        self.fetch()
        assert self.again is not None
        if self.side is not None:
            here = torch.accelerator.current_stream(self.device)
            here.wait_stream(self.side)
            self.again.record_stream(here)  # type: ignore[arg-type]
        return self.again


class _Kept(NamedTuple):
    parked: _Parked
    block: _BlockOffload
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _BlockOffload:
    """What one block's forward pass keeps."""

    def __init__(
        self, block: nn.Module, shared: tuple[Tensor, ...], device: torch.device, before: _BlockOffload | None
    ) -> None:
        self.block, self.shared, self.before = block, shared, before
        self.parked: dict[tuple[int, torch.dtype], _Parked] = {}
        self.side = _side_stream(device)
        self._stays: set[int] | None = None

    def pack(self, tensor: Tensor) -> Tensor | _Kept:
        if self._stays is None:  # now, as fully_shard has gathered the weights by the first operator
            self._stays = {_storage(stays) for stays in (*self.block.parameters(), *self.shared)}
        key = _storage(tensor)
        if key in self._stays:
            return tensor
        parked = self.parked.get((key, tensor.dtype))
        if parked is None:
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            parked = self.parked[key, tensor.dtype] = _Parked(tensor.as_strided((size,), (1,), 0), self.side)
        return _Kept(parked, self, tensor.shape, tensor.stride(), tensor.storage_offset())  # type: ignore[arg-type]

    @staticmethod
    def unpack(kept: Any) -> Tensor:
        if not isinstance(kept, _Kept):
            return kept  # type: ignore[no-any-return]
        found = kept.parked.take()
        if (before := kept.block.before) is not None:
            kept.block.before = None
            for parked in before.parked.values():
                parked.fetch()
        return found.as_strided(kept.shape, kept.stride, kept.offset)


class Offload:
    """Offloads the saved tensors of a chunk's blocks, whose ``forward`` it wraps, compiled or not."""

    def __init__(self) -> None:
        self._first: nn.Module | None = None
        self._last: Callable[[], _BlockOffload | None] = lambda: None

    def attach(self, block: nn.Module) -> None:
        """Offload the tensors that ``block`` saves. Call this for each block of the chunk, in their order."""
        self._first = self._first or block
        block.forward = partial(self._run, block, block.forward)  # type: ignore[method-assign]

    def _run(
        self, block: nn.Module, forward: Callable[..., Tensor], x: Tensor, rotary: Rotary, visible: Any, *of_layer: Any
    ) -> Tensor:
        """Run a block. ``rotary`` and ``visible`` stay on the device, because all blocks save them, unless ``of_layer``
        follows: with random-LTD's subset they belong to this layer."""
        if not torch.is_grad_enabled():
            return forward(x, rotary, visible, *of_layer)
        shared = () if of_layer else tuple(leaf for leaf in tree_leaves((rotary, visible)) if isinstance(leaf, Tensor))
        offload = _BlockOffload(block, shared, x.device, None if block is self._first else self._last())
        self._last = weakref.ref(offload)  # the graph owns it, and the host's memory
        with saved_tensors_hooks(offload.pack, offload.unpack):
            return forward(x, rotary, visible, *of_layer)


def _on_device(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(host, device=device).copy_(host, non_blocking=True)


def _storage(tensor: Tensor) -> int:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()._cdata


_streams: dict[torch.device, torch.Stream] = {}


def _side_stream(device: torch.device) -> torch.Stream | None:
    """The stream for copies; None on a device without streams."""
    if not devices.of(device).asynchronous:
        return None
    return _streams.setdefault(device, torch.Stream(device))


@contextmanager
def _beside(side: torch.Stream | None) -> Iterator[None]:
    """Copies inside run on ``side``, after what has been launched so far."""
    if side is None:
        yield
        return
    side.wait_stream(torch.accelerator.current_stream(side.device))
    with side:
        yield
