"""Tensors of a rank in a checkpoint, by Hugging Face name: weights, optimizer states, random state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from megatron_llama import devices
from megatron_llama.arch.hf_tp_mapping import Shape
from megatron_llama.checkpoint.rank_files import STATES
from megatron_llama.checkpoint.tensor_source import Rectangles, Stored
from megatron_llama.config.precision import STATE_BLOCK
from megatron_llama.optim import Optimizer
from megatron_llama.optim.eight_bit_states import BlockwiseState, levels_on
from megatron_llama.parallel import Shard
from megatron_llama.topology import AXES

SCALE = ".scale"
"""Suffix in the names of 8-bit states' scales."""


def weights(shards: Iterable[Shard], owned: bool = False) -> dict[str, Rectangles]:
    """Return views of this rank's weights; with ``owned`` only tensors that this rank saves."""
    return _by_name((("", shard, shard.local) for shard in shards), owned)


def load_quantized(shards: Iterable[Shard], stored: Stored) -> None:
    """Load and quantize the quantized shards, one at a time to limit fp32 memory."""
    for shard in (s for s in shards if s.quantized is not None and s.rectangles):
        values = shard.values
        stored.load_into(_by_name([("", shard, values)], owned=False))
        shard.store(values)


def optimizer_states(optimizer: Optimizer, owned: bool = False) -> dict[str, Rectangles]:
    """Return views of this rank's optimizer states, named like ``optimizer.exp_avg.model.norm.weight``.

    States are zero before the first step. With optim.state_bits=8 these are the codes, and
    ``optimizer.exp_avg.scale.model...`` are the scales per block.
    """
    return _by_name((tensor for state in optimizer.states() for tensor in _parts(*state)), owned)


def load_converted(optimizer: Optimizer, stored: Stored) -> dict[str, Rectangles]:
    """Load states whose bits (8 or 32) differ from the optimizer's, one at a time: dequantize or quantize them.

    Returns ``optimizer_states`` without the loaded states.
    """
    others = optimizer_states(optimizer)
    for kind, shard, state in optimizer.states():
        in_8_bits = any(f"{STATES}{kind}{SCALE}.{rectangle.name}" in stored.tensors for rectangle in shard.rectangles)
        if in_8_bits == isinstance(state, BlockwiseState) or not shard.rectangles:
            continue
        for name in _by_name(_parts(kind, shard, state), owned=False):
            others.pop(name, None)
        if isinstance(state, BlockwiseState):
            values = torch.zeros(state.codes.shape, device=state.codes.device)
            stored.load_into(_by_name(_parts(kind, shard, values), owned=False))
            state[:] = values
        else:
            quantized = BlockwiseState(state, levels_on(state.device, signed=kind not in optimizer.row.unsigned_states))
            stored.load_into(_by_name(_parts(kind, shard, quantized), owned=False))
            state.copy_(quantized[:])
    return others


def random_state(rank: int, device: torch.device) -> dict[str, Rectangles]:
    """Return the states of this rank's random generators, uint8: CPU, then accelerator.

    A resume loads them only with the same world size: the name contains the rank.
    """
    states = [torch.get_rng_state()]
    if devices.of(device).is_accelerator:
        states.append(torch.get_device_module(device).get_rng_state())
    both = torch.cat(states)
    return {f"random.rank_{rank:05d}": Rectangles(tuple(both.shape), [((0,), both)])}


def set_random_state(both: torch.Tensor, device: torch.device) -> None:
    """Restore the state of ``random_state``."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(both[:size].clone())
    if devices.of(device).is_accelerator:
        torch.get_device_module(device).set_rng_state(both[size:].clone())


def extra_states(optimizer: Optimizer, rank: int) -> dict[str, Rectangles]:
    """Return copies of optimizer states that belong to a rank, not to a weight, such as 1-bit Adam's errors.

    The name contains layout and rank; another layout starts them at zero, as DeepSpeed does at each start.
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


def _parts(kind: str, shard: Shard, state: torch.Tensor | BlockwiseState) -> Iterator[tuple[str, Shard, torch.Tensor]]:
    """Yield the tensors of a state for ``_by_name``: the state, or 8-bit codes and scales."""
    if not isinstance(state, BlockwiseState):
        yield f"{STATES}{kind}.", shard, state
        return
    yield f"{STATES}{kind}.", shard, state.codes
    in_blocks = replace(shard, rectangles=[rectangle.in_blocks(STATE_BLOCK) for rectangle in shard.rectangles])
    yield f"{STATES}{kind}{SCALE}.", in_blocks, state.scales


def _by_name(tensors: Iterable[tuple[str, Shard, torch.Tensor]], owned: bool) -> dict[str, Rectangles]:
    """Group rectangles by Hugging Face name. ``tensors``: (prefix, shard, tensor shaped like the shard)."""
    grouped: dict[str, tuple[Shape, list[tuple[Shape, torch.Tensor]]]] = {}
    for prefix, shard, tensor in tensors:
        for rectangle in shard.rectangles:
            if not owned or (shard.is_primary_replica and rectangle.replica == 0):
                _, parts = grouped.setdefault(prefix + rectangle.name, (rectangle.global_shape, []))
                parts.append((rectangle.offset, tensor[rectangle.local_slices]))
    return {name: Rectangles(shape, parts) for name, (shape, parts) in grouped.items()}
