"""The tensors of a rank that a checkpoint holds: weights, optimizer states and random state, under Hugging Face's
names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from megatron_llama import devices
from megatron_llama.arch.names import Shape
from megatron_llama.checkpoint.storage import STATES
from megatron_llama.checkpoint.stored_tensors import Rectangles, Stored
from megatron_llama.config.precision import STATE_BLOCK
from megatron_llama.optim import Optimizer
from megatron_llama.optim.blockwise import BlockwiseState, levels_on
from megatron_llama.parallel import Shard
from megatron_llama.topology import AXES

SCALE = ".scale"
"""In the name of the scales of an 8-bit state, behind the state's own."""


def weights(shards: Iterable[Shard], owned: bool = False) -> dict[str, Rectangles]:
    """This rank's weights, as views; with ``owned`` without those that another rank writes too."""
    return _by_name((("", shard, shard.local) for shard in shards), owned)


def load_quantized(shards: Iterable[Shard], stored: Stored) -> int:
    """Fills the quantized shards from a model's tensors, one at a time, so that only one of them is in memory in
    fp32; returns the bytes that were read."""
    read = 0
    for shard in (s for s in shards if s.quantized is not None and s.rectangles):
        values = shard.values
        read += stored.load_into(_by_name([("", shard, values)], owned=False))
        shard.store(values)
    return read


def optimizer_states(optimizer: Optimizer, owned: bool = False) -> dict[str, Rectangles]:
    """exp_avg and exp_avg_sq of this rank's weights, as views, named like ``optimizer.exp_avg.model.norm.weight``;
    zeros before the optimizer's first step. In 8 bits that is the codes, and ``optimizer.exp_avg.scale.model...`` are
    the scales of their blocks."""
    return _by_name((tensor for state in optimizer.states() for tensor in _tensors(*state)), owned)


def load_converted(optimizer: Optimizer, stored: Stored) -> tuple[set[str], int]:
    """Fills the states that ``stored`` has in 8 bits and the optimizer in more, or the other way round, one at a time:
    dequantized exactly, or quantized. Returns what they are called, and the bytes that were read."""
    names, read = set[str](), 0
    for kind, shard, state in optimizer.states():
        in_8_bits = any(f"{STATES}{kind}{SCALE}.{piece.name}" in stored.tensors for piece in shard.rectangles)
        if in_8_bits == isinstance(state, BlockwiseState) or not shard.rectangles:
            continue
        names |= _by_name(_tensors(kind, shard, state), owned=False).keys()
        if isinstance(state, BlockwiseState):
            values = torch.zeros(state.codes.shape, device=state.codes.device)
            read += stored.load_into(_by_name(_tensors(kind, shard, values), owned=False))
            state[:] = values
        else:
            quantized = BlockwiseState(state, levels_on(state.device, signed=kind not in optimizer.row.unsigned_states))
            read += stored.load_into(_by_name(_tensors(kind, shard, quantized), owned=False))
            state.copy_(quantized[:])
    return names, read


def random_state(rank: int, device: torch.device) -> dict[str, Rectangles]:
    """The states of this rank's random generators, uint8: the CPU's, then the device's where that is another one.

    Only the same rank of as many ranks loads them, by their name.
    """
    states = [torch.get_rng_state()]
    if devices.of(device).is_accelerator:
        states.append(torch.get_device_module(device).get_rng_state())
    both = torch.cat(states)
    return {f"random.rank_{rank:05d}": Rectangles(tuple(both.shape), [((0,), both)])}


def set_random_state(both: torch.Tensor, device: torch.device) -> None:
    """Restores what ``random_state`` gave."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(both[:size].clone())
    if devices.of(device).is_accelerator:
        torch.get_device_module(device).set_rng_state(both[size:].clone())


def extra_states(optimizer: Optimizer, rank: int) -> dict[str, Rectangles]:
    """The optimizer's states that belong to this rank and to no weight, such as the errors of 1-bit Adam; copies.

    Only the same rank of the same layout loads them, by name and shape. For others they begin at zero, as DeepSpeed's
    errors do at every start.
    """
    plan = optimizer.model.plan
    sizes = [f"{axis.name}{plan.grid.sizes[axis.name]}" for axis in AXES if not axis.same_weights]
    layout = "_".join([*sizes, f"vpp{plan.config.trainer.vpp}"])
    return {
        f"{name}.{layout}.rank_{rank:05d}": Rectangles(tuple(values.shape), [((0,) * values.dim(), values)])
        for name, values in optimizer.inner.extra_states().items()
    }


def load_extra_states(optimizer: Optimizer, states: Mapping[str, Rectangles]) -> None:
    """Restore the result of ``extra_states``."""
    optimizer.inner.load_extra_states({name.partition(".")[0]: held.parts[0][1] for name, held in states.items()})


def _tensors(
    kind: str, shard: Shard, state: torch.Tensor | BlockwiseState
) -> Iterator[tuple[str, Shard, torch.Tensor]]:
    """What a state consists of, as ``_by_name`` takes it."""
    if not isinstance(state, BlockwiseState):
        yield f"{STATES}{kind}.", shard, state
        return
    yield f"{STATES}{kind}.", shard, state.codes
    in_blocks = replace(shard, rectangles=[piece.in_blocks(STATE_BLOCK) for piece in shard.rectangles])
    yield f"{STATES}{kind}{SCALE}.", in_blocks, state.scales


def _by_name(tensors: Iterable[tuple[str, Shard, torch.Tensor]], owned: bool) -> dict[str, Rectangles]:
    """The rectangles of tensors (prefix, shard, tensor shaped like the shard) under Hugging Face's names."""
    found: dict[str, tuple[Shape, list[tuple[Shape, torch.Tensor]]]] = {}
    for prefix, shard, tensor in tensors:
        for piece in shard.rectangles:
            if not owned or (shard.counts and piece.replica == 0):
                _, parts = found.setdefault(prefix + piece.name, (piece.global_shape, []))
                parts.append((piece.offset, tensor[piece.local_slices]))
    return {name: Rectangles(shape, parts) for name, (shape, parts) in found.items()}
