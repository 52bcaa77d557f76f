"""Symmetric memory for ranks on a CPU: replacements with which trainer.async_tp runs without GPUs.

real    Inductor's pass; torch's operators as they run on CUDA (checks, layouts, a matmul per chunk, the sum)
fake    the two functions that copy chunks through peers' memory: here an all-gather over the process group, so all
        chunks arrive at once
fake    queries of GPUs: each rank has one GPU with access to all others
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from megatron_llama.devices.cpu.device import Cpu
from megatron_llama.devices.cuda.device import Cuda

_KEPT = ExitStack()
"""Replacements that last until the process ends. Use them in forked ranks only."""
_moved: Counter[str] = Counter()
_wrong: set[str] = set()


def fused_products() -> int:
    """Number of matmuls with a fused gather or scatter that this rank has run."""
    return _moved.total()


def wrong_pieces(kind: str) -> None:
    """From now on the pieces that this rank's gathers, or scatters, fetch are the wrong rank's."""
    assert kind in ("gather", "scatter")
    _wrong.add(kind)


def symmetric_memory() -> None:
    """Gives this rank's CPU what a GPU has; once is enough for a process."""
    if symmetric._pipelined_all_gather_and_consume is _gather_and_consume:
        return
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter, "CPU")
    group_rank = dist.get_rank()
    for place, names in {
        symmetric: {
            "_pipelined_all_gather_and_consume": _gather_and_consume,
            "_pipelined_produce_and_all2all": _produce_and_exchange,
            "empty": lambda *size, dtype, device: torch.empty(*size, dtype=dtype),
            "rendezvous": lambda memory, name: dist.barrier(dist.distributed_c10d._resolve_process_group(name)),
        },
        torch.cuda: {"current_device": lambda: group_rank, "can_device_access_peer": lambda one, other: True},
        dist: {"is_nccl_available": lambda: True},
        Cpu: {"has_async_tp": True, "enable_async_tp": Cuda.enable_async_tp},
    }.items():
        for name, stand_in in names.items():
            _KEPT.enter_context(patch.object(place, name, stand_in))
    _KEPT.callback(library._destroy)


def _gather_and_consume(
    shard: Tensor, consume: Callable[[Tensor, int], None], out: Tensor, group_name: str, out_needed: bool = True
) -> None:
    """Fills ``out`` with the shards of all ranks and hands each to ``consume``, this rank's first, as it comes."""
    group = dist.distributed_c10d._resolve_process_group(group_name)
    size, group_rank = group.size(), group.rank()
    assert shard.is_contiguous() and out.is_contiguous() and out.shape[0] == size * shard.shape[0]
    chunks = [torch.empty_like(shard) for _ in range(size)]
    dist.all_gather(chunks, shard, group=group)
    _moved["gather"] += 1
    if "gather" in _wrong:
        chunks.reverse()
    out.fill_(torch.nan)  # torch promises nothing of it where it is not needed
    for rank in ((group_rank + step) % size for step in range(size)):
        consume(chunks[rank], rank)
        if out_needed:
            out.chunk(size)[rank].copy_(chunks[rank])


def _produce_and_exchange(
    produce: Callable[[int, Tensor], None], out: Tensor, group_name: str, out_chunk_dim: int = 0
) -> None:
    """``produce`` makes the piece for each rank; ``out`` gets what all ranks have made for this one."""
    assert out_chunk_dim == 0
    group = dist.distributed_c10d._resolve_process_group(group_name)
    size, group_rank = group.size(), group.rank()
    local = torch.full_like(out, torch.nan)
    for rank in ((group_rank - step) % size for step in range(1, size + 1)):
        produce(rank, local.chunk(size)[rank])
    made = [torch.empty_like(out) for _ in range(size)]
    dist.all_gather(made, local, group=group)
    _moved["scatter"] += 1
    taken = (group_rank + ("scatter" in _wrong)) % size
    for rank in range(size):
        out.chunk(size)[rank].copy_(made[rank].chunk(size)[taken])
