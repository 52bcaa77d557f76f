"""Real ranks over gloo, watched in the way in which a rehearsal watches fake ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from megatron_llama.devices import get_device
from megatron_llama.plan import Plan
from megatron_llama.tools.rehearse.rehearsal import rehearse, watch_rank
from megatron_llama.tools.rehearse.report import Rehearsal
from tests.ranks import run_ranks

_NOT_TOGETHER = ("send", "recv_")  # a rank that waited for these at once would wait for ever


class OnCopies(TorchDispatchMode):
    """Gives gloo copies of the tensors and waits for it, so that what is alive is the program's, not gloo's.

    gloo's threads let go of their tensors some milliseconds after a collective has ended, which is a whole pass of a
    model this small: what is alive would depend on the machine's load. And it has no reduce-scatter: it sums a copy of
    the whole input, which the caller's wait splits and copies back.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d" and name == "send":
            args = tree_map_only(torch.Tensor, torch.clone, args)
        if func.namespace != "c10d" or name in _NOT_TOGETHER:
            return func(*args, **(kwargs or {}))
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            return copies.setdefault(id(tensor), (tensor, tensor.clone()))[1]

        out = func(*tree_map_only(torch.Tensor, copy, args), **(kwargs or {}))
        several = isinstance(out, list | tuple)
        dist.Work.unbox(out[-1] if several else out).wait()
        originals = {}
        for original, copied in copies.values():
            original.copy_(copied)
            originals[id(copied)] = original
        done: torch.futures.Future = torch.futures.Future()
        done.set_result(None)
        work = _create_work_from_future(done).boxed()
        if not several:
            return work
        return (*tree_map_only(torch.Tensor, lambda tensor: originals.get(id(tensor), tensor), out[:-1]), work)


def real(world_size: int, plan: Plan) -> list[Rehearsal]:
    """What each rank of a real job does."""
    return run_ranks(_real_rank, world_size, plan)


def rehearsed(plan: Plan, *ranks: int) -> list[Rehearsal]:
    """The same ranks, rehearsed one after the other in another process."""
    return run_ranks(_rehearse, 1, plan, ranks)[0]


def _real_rank(rank: int, plan: Plan) -> Rehearsal:
    with OnCopies():
        return watch_rank(plan, plan.topology(rank), get_device("cpu"))


def _rehearse(_: int, plan: Plan, ranks: tuple[int, ...]) -> list[Rehearsal]:
    dist.destroy_process_group()
    return [rehearse(plan, rank) for rank in ranks]
