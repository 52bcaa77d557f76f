"""Pipeline transfers on process groups without send and recv, by all-reduces between two ranks.

The sender contributes its tensor, the receiver a tensor of -0.0: x + -0.0 is x for every float, while 0.0 would change
-0.0 to 0.0. So the received tensor is bit-identical, for twice the traffic of a send. AWS's Megatron recipe for
Trainium (neuronx-nemo-megatron) transfers in the same way, with zeros.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from megatron_llama.devices.mcore_patches import replace_p2p_ops
from megatron_llama.topology import Topology


def transfers_context(topology: Topology, torch_device: torch.device) -> AbstractContextManager[None]:
    """Return a context for transfers by send and recv if they work, else by ``PairTransfers``. A collective."""
    if point_to_point_works(torch_device):
        return nullcontext()
    return replace_p2p_ops(PairTransfers(topology).exchange)


class PairTransfers:
    """Process groups of adjacent stages, and the exchange over them.

    Each pair has one group for activations and one for gradients. All-reduces have no tag and match by order: in each
    group, both ranks make the same calls in the same order.
    """

    def __init__(self, topology: Topology) -> None:
        """Create the groups. A collective over all ranks, because ``new_group`` is."""
        self._groups: dict[tuple[str, int, int], dist.ProcessGroup] = {}
        # Interleaved schedules wrap around: the last stage sends to the first, which holds the next chunk.
        pairs = topology.sizes["pp"] if topology.vpp > 1 else topology.sizes["pp"] - 1
        for column in range(topology.grid.stride("pp")):  # the ranks of the first stage
            stages = topology.grid.ranks(column, "pp")
            for first, second in list(zip(stages, stages[1:] + stages[:1], strict=True))[:pairs]:
                for kind in ("activations", "gradients"):
                    group = dist.new_group(sorted((first, second)))
                    if topology.rank in (first, second):
                        self._groups[kind, first, second] = group

    def exchange(
        self,
        *,
        tensor_send_prev: torch.Tensor | None,
        tensor_recv_prev: torch.Tensor | None,
        tensor_send_next: torch.Tensor | None,
        tensor_recv_next: torch.Tensor | None,
        group: dist.ProcessGroup,
        prev_pipeline_rank: int,
        next_pipeline_rank: int,
    ) -> dict[str, dist.Work]:
        """Start the requested transfers. Return the handles to wait for, by name, as megatron-core's ``_p2p_ops``.

        Activations precede gradients on both ranks, so a device that runs one collective at a time does not deadlock.
        """
        rank = dist.get_rank()
        before, after = (prev_pipeline_rank, rank), (rank, next_pipeline_rank)
        requested = (
            ("recv_prev", tensor_recv_prev, "activations", before),
            ("send_next", tensor_send_next, "activations", after),
            ("recv_next", tensor_recv_next, "gradients", after),
            ("send_prev", tensor_send_prev, "gradients", before),
        )
        works = {}
        for name, tensor, kind, pair in requested:
            if tensor is None:
                continue
            if name.startswith("send"):
                buffer = tensor.detach().clone()  # all_reduce overwrites its input, which the backward pass reads
            else:
                buffer = tensor.detach().fill_(-0.0)
            works[name] = dist.all_reduce(buffer, group=self._groups[kind, *pair], async_op=True)
        return works


def point_to_point_works(torch_device: torch.device) -> bool:
    """Return whether a number sent from rank 2k to 2k+1 arrives, for all pairs. A collective.

    Ranks wait for messages only after all ranks have started theirs, so no rank hangs if another rank's send raises.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    peer = rank ^ 1
    number = torch.full((1,), 7.0 if rank % 2 == 0 else 0.0, device=torch_device)
    work = None

    def everywhere(good: bool) -> bool:
        flag = torch.full((1,), float(good), device=torch_device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return flag.item() == 1.0

    try:
        if peer < world:
            work = dist.isend(number, peer) if rank % 2 == 0 else dist.irecv(number, peer)
        started = True
    except (RuntimeError, NotImplementedError, AttributeError):  # what backends raise for lack of send or recv
        started = False
    if not everywhere(started):
        return False
    if work is not None:
        work.wait()
    return everywhere(peer >= world or number.item() == 7.0)
