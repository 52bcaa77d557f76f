"""What a checkpoint holds of a rank: its weights, and what the optimizer remembers of them, under Hugging Face's
names."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_llama.checkpoint.rectangles import Rectangles
from megatron_llama.checkpoint.stored_tensors import Stored
from megatron_llama.model.names import Shape
from megatron_llama.optim import Optimizer
from megatron_llama.parallel import Shard

_Found = dict[str, tuple[Shape, list[tuple[Shape, torch.Tensor]]]]


def moment_name(kind: str, name: str) -> str:
    """``optimizer.exp_avg.model.norm.weight``: the moment of a Hugging Face tensor."""
    return f"optimizer.{kind}.{name}"


def random_name(rank: int) -> str:
    """The random state of a rank; of use only to the same rank of as many."""
    return f"random.rank_{rank:05d}"


def weights(shards: Iterable[Shard], owned: bool = False) -> dict[str, Rectangles]:
    """This rank's weights, as views; with ``owned`` only what no other rank also writes."""
    found: _Found = {}
    for shard in shards:
        _collect(found, "", shard, shard.local, owned)
    return _rectangles(found)


def load_quantized(shards: Iterable[Shard], stored: Stored) -> int:
    """Fills the quantized shards from a model's tensors, one at a time, so that only one of them is in memory in
    fp32; returns the bytes that were read."""
    read = 0
    for shard in (s for s in shards if s.quantized is not None and s.pieces):
        found: _Found = {}
        values = shard.values
        _collect(found, "", shard, values, owned=False)
        read += stored.load_into(_rectangles(found))
        shard.store(values)
    return read


def moments(optimizer: Optimizer, owned: bool = False) -> dict[str, Rectangles]:
    """What the optimizer remembers of this rank's weights, as views; made as zeros where it has not begun."""
    found: _Found = {}
    for kind, shard, moment in optimizer.states():
        _collect(found, moment_name(kind, ""), shard, moment, owned)
    return _rectangles(found)


def random_state(rank: int, device: torch.device) -> dict[str, Rectangles]:
    """The state of this rank's random generators: the CPU's, then the device's where that is another one."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    both = torch.cat(states)
    return {random_name(rank): Rectangles(tuple(both.shape), [((0,), both)])}


def set_random_state(both: torch.Tensor, device: torch.device) -> None:
    """The opposite of ``random_state``."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(both[:size].clone())
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(both[size:].clone())


def _collect(found: _Found, prefix: str, shard: Shard, tensor: torch.Tensor, owned: bool) -> None:
    """Add the rectangles of a tensor that is shaped like the shard."""
    for piece in shard.pieces:
        if not owned or (shard.counts and piece.replica == 0):
            _, parts = found.setdefault(prefix + piece.name, (piece.global_shape, []))
            parts.append((piece.offset, tensor[piece.local_slices]))


def _rectangles(found: _Found) -> dict[str, Rectangles]:
    return {name: Rectangles(shape, parts) for name, (shape, parts) in found.items()}
