"""Which axis of the layout a process group belongs to, for whoever counts or times collectives."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.tensor import DTensor

from megatron_llama.parallel.parallelize import ParallelModel


def axes_of(model: ParallelModel) -> dict[str, str]:
    """The axis of every group that ``model`` uses, by the group's name."""
    parameter, data = model.shards[0].parameter, model.data_groups
    meshes = parameter.device_mesh.get_all_groups() if isinstance(parameter, DTensor) else []
    groups: list[tuple[str, Iterable[dist.ProcessGroup | None]]] = [
        ("tp", [parallel_state.get_tensor_model_parallel_group(), model.replicated.kv_group]),
        ("pp", [parallel_state.get_embedding_group(check_initialized=False)]),
        ("dp", [*meshes, data.copies, *(data.hops or ()), data.secondary, parallel_state.get_data_parallel_group()]),
        ("world", [dist.group.WORLD]),  # last: a mesh may be this very group
    ]
    return {group.group_name: axis for axis, some in groups for group in some if group is not None}


def axis_of(group: dist.ProcessGroup, axes: Mapping[str, str]) -> str | None:
    """The axis that a collective which is being started in ``group`` belongs to; None for a group of none."""
    axis = axes.get(group.group_name)
    if axis != "world":
        return axis
    # Where all ranks are data-parallel ones, fully_shard uses the world's group.
    callers = (str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_stack(None))
    return "dp" if any(name.startswith("torch.distributed.fsdp") for name in callers) else axis
