"""Initial magnitudes of DoRA: the norms of the rows of the frozen matrices, which ranks may hold in parts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_llama.arch.names import MAGNITUDE, lora_name
from megatron_llama.arch.shapes import matrices
from megatron_llama.parallel.parallelize import ParallelModel


@torch.no_grad()
def init_magnitudes(model: ParallelModel) -> None:
    """Set DoRA's magnitudes to the row norms of the frozen matrices, as PEFT at its start.

    A collective over the ranks of a pipeline stage, which together hold whole rows. Without DoRA it does nothing.
    """
    if not model.plan.config.finetune.use_dora:
        return
    # Each rank has the same names, because shards of the magnitudes and of the matrices have other rows.
    squares = {name: torch.zeros(rows, device=model.device) for name, rows in _target_rows(model).items()}
    for shard in model.shards:
        for part in shard.rectangles:
            total = squares.get(lora_name(part.name, MAGNITUDE))
            if total is not None and len(part.size) == 2 and shard.counts and part.replica == 0:
                rows = slice(part.offset[0], part.offset[0] + part.size[0])
                total[rows] += shard.values[part.local_slices].float().square().sum(dim=1)
    names = sorted(squares)
    flat = torch.cat([squares[name] for name in names])
    dist.all_reduce(flat, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    norms = dict(zip(names, flat.sqrt().split([len(squares[name]) for name in names]), strict=True))
    for shard in model.shards:
        for part in shard.rectangles if shard.name.endswith(f".{MAGNITUDE}") else ():
            first, last = part.offset[0], part.offset[0] + part.size[0]
            shard.local[part.local_slices] = norms[part.name][first:last].to(shard.local.dtype)


def _target_rows(model: ParallelModel) -> dict[str, int]:
    """Return the rows of each adapted matrix of this rank's stage, by the name of its magnitudes."""
    plan = model.plan
    layers = [int(number) for chunk in model.chunks for number in chunk.layers]
    return {
        lora_name(f"model.layers.{layer}.{matrix.name}.weight", MAGNITUDE): matrix.shape[0]
        for layer in layers
        for module, matrix in matrices(plan.model).items()
        if module in plan.config.finetune.lora_target_modules
    }
