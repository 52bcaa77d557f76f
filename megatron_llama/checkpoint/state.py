"""The tensors of a rank that a checkpoint holds: weights, optimizer states and random state, under Hugging Face's
names."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_llama.checkpoint.storage import STATES
from megatron_llama.checkpoint.stored_tensors import Rectangles, Stored
from megatron_llama.model.names import Shape
from megatron_llama.optim import Optimizer
from megatron_llama.optim.onebit_adam import OneBitAdam
from megatron_llama.parallel import Shard


def weights(shards: Iterable[Shard], owned: bool = False) -> dict[str, Rectangles]:
    """This rank's weights, as views; with ``owned`` without those that another rank writes too."""
    return _by_name((("", shard, shard.local) for shard in shards), owned)


def load_quantized(shards: Iterable[Shard], stored: Stored) -> int:
    """Fills the quantized shards from a model's tensors, one at a time, so that only one of them is in memory in
    fp32; returns the bytes that were read."""
    read = 0
    for shard in (s for s in shards if s.quantized is not None and s.pieces):
        values = shard.values
        read += stored.load_into(_by_name([("", shard, values)], owned=False))
        shard.store(values)
    return read


def optimizer_states(optimizer: Optimizer, owned: bool = False) -> dict[str, Rectangles]:
    """exp_avg and exp_avg_sq of this rank's weights, as views, named like ``optimizer.exp_avg.model.norm.weight``;
    zeros before the optimizer's first step."""
    states = ((f"{STATES}{kind}.", shard, tensor) for kind, shard, tensor in optimizer.states())
    return _by_name(states, owned)


def random_state(rank: int, device: torch.device) -> dict[str, Rectangles]:
    """The states of this rank's random generators, uint8: the CPU's, then the device's where that is another one.

    Only the same rank of as many ranks loads them, by their name.
    """
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    both = torch.cat(states)
    return {f"random.rank_{rank:05d}": Rectangles(tuple(both.shape), [((0,), both)])}


def set_random_state(both: torch.Tensor, device: torch.device) -> None:
    """Restores what ``random_state`` gave."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(both[:size].clone())
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(both[size:].clone())


def own_errors(optimizer: Optimizer, rank: int) -> dict[str, Rectangles]:
    """What this rank's compression has lost so far, fp32, with 1-bit Adam; a copy. Only the same rank of the same
    layout loads it, by its name and shape: for others the errors begin at zero, as DeepSpeed's do at every start."""
    if not isinstance(optimizer.inner, OneBitAdam):
        return {}
    trainer, errors = optimizer.model.plan.config.trainer, optimizer.inner.errors()
    layout = f"tp{trainer.tp}_pp{trainer.pp}_vpp{trainer.vpp}"
    return {f"onebit_errors.{layout}.rank_{rank:05d}": Rectangles(tuple(errors.shape), [((0,), errors)])}


def set_errors(optimizer: Optimizer, errors: torch.Tensor) -> None:
    """Restores what ``own_errors`` gave."""
    assert isinstance(optimizer.inner, OneBitAdam)
    optimizer.inner.set_errors(errors)


def _by_name(tensors: Iterable[tuple[str, Shard, torch.Tensor]], owned: bool) -> dict[str, Rectangles]:
    """The rectangles of tensors (prefix, shard, tensor shaped like the shard) under Hugging Face's names."""
    found: dict[str, tuple[Shape, list[tuple[Shape, torch.Tensor]]]] = {}
    for prefix, shard, tensor in tensors:
        for piece in shard.pieces:
            if not owned or (shard.counts and piece.replica == 0):
                _, parts = found.setdefault(prefix + piece.name, (piece.global_shape, []))
                parts.append((piece.offset, tensor[piece.local_slices]))
    return {name: Rectangles(shape, parts) for name, (shape, parts) in found.items()}
