"""Real ranks over gloo, measured as a rehearsal measures fake ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from megatron_llama.devices import get_device
from megatron_llama.plan import Plan
from megatron_llama.tools.rehearse.rehearsal import measure_rank, rehearse
from megatron_llama.tools.rehearse.report import Rehearsal
from tests.ranks import run_ranks

_NOT_WAITED_FOR = ("send", "recv_")  # waiting for these at once would deadlock


class CollectivesOnCopies(TorchDispatchMode):
    """Dispatch mode that runs gloo on copies and waits, so that live tensors do not depend on gloo.

    gloo's threads free their tensors some milliseconds after a collective, which is a full pass of this small model.
    The live bytes would depend on the load of the machine. gloo has no reduce-scatter either: it sums a copy of the
    whole input, which the caller's wait splits and copies back.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d" and name == "send":
            args = tree_map_only(torch.Tensor, torch.clone, args)
        if func.namespace != "c10d" or name in _NOT_WAITED_FOR:
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


def run_real_ranks(world_size: int, plan: Plan) -> list[Rehearsal]:
    """Measure each rank of a real job."""
    return run_ranks(_real_rank, world_size, plan)


def run_rehearsals(plan: Plan, *ranks: int) -> list[Rehearsal]:
    """Rehearse the ranks one after the other in another process."""
    return run_ranks(_rehearse, 1, plan, ranks)[0]


def _real_rank(rank: int, plan: Plan) -> Rehearsal:
    with CollectivesOnCopies():
        return measure_rank(plan, plan.topology(rank), get_device("cpu"))


def _rehearse(_: int, plan: Plan, ranks: tuple[int, ...]) -> list[Rehearsal]:
    dist.destroy_process_group()
    return [rehearse(plan, rank) for rank in ranks]
