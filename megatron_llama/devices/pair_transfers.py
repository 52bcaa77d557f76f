"""Transfers between pipeline stages on devices whose process group has no send and recv: all-reduces of two ranks.

The sender brings its tensor, the receiver minus zeros, the one number that leaves every other as it is when added
(0 + -0 is 0, and would turn a sent -0 into 0). What arrives is what was sent, to the last bit. It moves twice the bytes
of a send. AWS's own Megatron recipe for Trainium transferred in this way, with zeros.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_llama.topology import Topology


class PairTransfers:
    """Groups of neighbouring stages, and the exchange over them.

    Each pair has a group for activations and one for gradients. In either the k-th all-reduce of one rank is the k-th
    of the other, whatever else the two have under way, so nothing can be taken for something else.
    """

    def __init__(self, topology: Topology) -> None:
        """All ranks of the world must make one together: groups are made by all."""
        self._groups: dict[tuple[str, int, int], dist.ProcessGroup] = {}
        ranks_per_stage = topology.tp * topology.dp
        # Interleaved schedules go around: from the last stage to the first for the next chunk of layers.
        pairs = topology.pp if topology.vpp > 1 else topology.pp - 1
        for column in range(ranks_per_stage):
            for stage in range(pairs):
                first = column + stage * ranks_per_stage
                second = column + (stage + 1) % topology.pp * ranks_per_stage
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
        """Start the transfers that are asked for; returns what to wait for, by name.

        Activations go first, on both sides: so two stages that exchange both agree on the order, and a device that
        runs its collectives one after the other does not lock.
        """
        rank = dist.get_rank()
        before, after = (prev_pipeline_rank, rank), (rank, next_pipeline_rank)
        wanted = (
            ("recv_prev", tensor_recv_prev, "activations", before),
            ("send_next", tensor_send_next, "activations", after),
            ("recv_next", tensor_recv_next, "gradients", after),
            ("send_prev", tensor_send_prev, "gradients", before),
        )
        works = {}
        for name, tensor, kind, pair in wanted:
            if tensor is None:
                continue
            if name.startswith("send"):
                buffer = tensor.detach().clone()  # the sum is written into it, and the schedule still needs the tensor
            else:
                buffer = tensor.detach().fill_(-0.0)
            works[name] = dist.all_reduce(buffer, group=self._groups[kind, *pair], async_op=True)
        return works
