"""Process groups of a rank: torch.distributed and megatron-core's groups of each axis. Errors raised on all ranks."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.settings import TrainerConfig
from megatron_llama.devices import Device, get_device
from megatron_llama.devices.mcore_patches import patch_mcore
from megatron_llama.plan import Plan
from megatron_llama.system.phase import ATTEMPT, PATIENT
from megatron_llama.topology import AXES, Topology


class Groups:
    """A rank's process groups. ``groups["tp"]`` has the ranks that differ from this rank only along tp."""

    def __init__(self, topology: Topology) -> None:
        """Read megatron-core's groups, which must exist."""
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._axes: dict[str, str] = {}
        for axis in AXES:
            group = getattr(parallel_state, f"get_{axis.mcore}_group")()
            # In another order gradients would be reduced over ranks with other weights.
            expected = topology.grid.ranks(topology.rank, axis.name)
            assert dist.get_process_group_ranks(group) == expected, f"megatron-core orders {axis.name} differently"
            self._groups[axis.name] = self.label(axis.name, group)
        self.label("dp", parallel_state.get_data_parallel_group(with_context_parallel=True))
        self.embedding: dist.ProcessGroup | None = parallel_state.get_embedding_group(check_initialized=False)
        """First and last pipeline stage, which share tied embeddings. None on other stages."""
        if self.embedding is not None:
            self.label("pp", self.embedding)

    def __getitem__(self, axis: str) -> dist.ProcessGroup:
        return self._groups[axis]

    def label(self, axis: str, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Label a group as traffic of ``axis`` for ``axis_of``, and return it. ``groups[axis]`` does not change."""
        self._axes[group.group_name] = axis
        return group

    def axis_of(self, group: dist.ProcessGroup) -> str | None:
        """Return the axis that ``group`` is labeled with (for reports and traffic counts); None for other groups."""
        return self._axes.get(group.group_name)


_current: Groups | None = None
_TENSOR_PARALLEL, _CONTEXT_PARALLEL = "tensor-parallel", "context-parallel"


def current_groups() -> Groups:
    """Return the groups of this process, inside ``process_groups``."""
    assert _current is not None, "process_groups creates them"
    return _current


def axis_of(group: dist.ProcessGroup) -> str | None:
    """Return the axis of a collective in ``group``: tp, ..., or world. None for a group without a label."""
    world = dist.group.WORLD
    if world is None or group.group_name != world.group_name:
        return None if _current is None else _current.axis_of(group)
    # If all ranks are data-parallel, fully_shard uses the world's group.
    callers = (str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_stack(None))
    return "dp" if any(name.startswith("torch.distributed.fsdp") for name in callers) else "world"


def open_device(plan: Plan) -> tuple[Device, torch.device]:
    """Open this rank's device, with torch's settings of a run. Reads LOCAL_RANK and LOCAL_WORLD_SIZE.

    Inductor's cache has other graphs for other settings, so compile.py needs the settings of the run.
    """
    device = get_device(plan.config.device.name)
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    device.prepare_memory(plan.activation_bytes)
    torch.use_deterministic_algorithms(plan.config.trainer.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # takes time
    return device, torch_device


@contextmanager
def process_groups(plan: Plan, topology: Topology, device: Device, torch_device: torch.device) -> Iterator[Groups]:
    """Create the process groups for the duration of the context. Reads MASTER_ADDR and MASTER_PORT."""
    global _current
    patch_mcore(torch_device)
    trainer = plan.config.trainer
    if not dist.is_initialized():
        rank, size, timeout = topology.rank, topology.world_size, _timeout(trainer)
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        # A prefix per attempt: after a restart torchrun's store still has the addresses of the earlier ranks.
        store = dist.PrefixStore(os.environ.get(ATTEMPT, "0"), store)
        bound = torch_device if device.binds_process_group else None
        dist.init_process_group(
            device.backend, rank=rank, world_size=size, timeout=timeout, store=store, device_id=bound
        )
    with group_timeout(trainer):
        parallel_state.initialize_model_parallel(
            **{f"{axis.mcore}_size": topology.sizes[axis.name] for axis in AXES if not axis.is_derived},
            virtual_pipeline_model_parallel_size=trainer.vpp if trainer.vpp > 1 else None,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=_timeout(trainer) / timedelta(minutes=1),  # type: ignore[arg-type]
        )
    _rename(parallel_state.get_tensor_model_parallel_group(), _TENSOR_PARALLEL)
    _rename(parallel_state.get_context_parallel_group(), _CONTEXT_PARALLEL)
    _current = Groups(topology)
    ended_together = False
    try:
        with device.pipeline_transfers(topology) if topology.sizes["pp"] > 1 else nullcontext():
            yield _current
        ended_together = True
    except SystemExit:  # all ranks stop after a save
        ended_together = True
        raise
    finally:
        _current = None
        parallel_state.destroy_model_parallel()
        for name in (_TENSOR_PARALLEL, _CONTEXT_PARALLEL):
            _unregister_process_group(name)  # type: ignore[arg-type]
        # NCCL waits here for the other ranks, which may wait in a collective for a rank that failed alone.
        if ended_together or dist.get_world_size() == 1 or dist.get_backend() == "fake":
            dist.destroy_process_group()


@contextmanager
def group_timeout(trainer: TrainerConfig) -> Iterator[None]:
    """Give process groups that are created inside the context the plan's timeout. They connect at their first use.

    torch's default is 10 minutes for NCCL, after which NCCL ends all ranks without a report. If the world is bound to a
    device, torch would connect each new group at once, also the groups of megatron-core that no rank uses. Each
    communicator takes device memory.
    """
    world = dist.group.WORLD
    assert world is not None
    bound = world.bound_device_id
    if bound is not None:
        world.bound_device_id = None
    try:
        with patch.object(dist.distributed_c10d, "_get_default_timeout", lambda backend: _timeout(trainer)):
            yield
    finally:
        if bound is not None:
            world.bound_device_id = bound


def _timeout(trainer: TrainerConfig) -> timedelta:
    """Return the timeout of collectives: longer than the watchdog's (``phase.PATIENT`` times the limit, plus margin).

    The watchdog names the rank that hangs, and a rank may compile for an hour while others wait.
    """
    limit = trainer.hang_timeout_seconds
    return timedelta(days=30) if limit is None else timedelta(seconds=(PATIENT + 1) * limit, minutes=10)


def _rename(group: dist.ProcessGroup, name: str) -> None:
    """Give a group the same name on all ranks, so that they share compiled graphs.

    torch names groups by a running number, and the name is a constant in compiled graphs. Ranks of different groups
    would compile the same graph once per name.
    """
    group._set_group_name(name)  # type: ignore[arg-type]
    _register_process_group(name, group)  # type: ignore[arg-type]


# Errors of one rank are raised on all, so that no rank waits in a collective for a rank that has failed.

T = TypeVar("T")


def raise_on_all_ranks(error: Exception | Sequence[Problem] | None) -> None:
    """Raise on all ranks the error that any rank passes; return if no rank has one. A collective over all ranks.

    Problems of all ranks, also of ConfigErrors, are raised as one ConfigError without duplicates. If there are none,
    the lowest rank's exception is raised; other ranks raise a pickled copy.
    """
    gathered: list[Any] = gather_objects(error.problems if isinstance(error, ConfigError) else error)
    problems: list[Problem] = []
    for reported in gathered:
        if not isinstance(reported, Exception):  # not a set below: a problem's value may be a list
            problems += [problem for problem in reported or () if problem not in problems]
    if problems:
        raise ConfigError(problems)
    gathered[dist.get_rank()] = error  # the original has its traceback and cause
    for reported in gathered:
        if isinstance(reported, Exception):
            raise reported


def gather_objects(value: T) -> list[T]:
    """Return each rank's ``value``, by rank. A collective over all ranks; pickles the values."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


@contextmanager
def sync_errors(*expected: type[Exception]) -> Iterator[None]:
    """Raise an error of the ``expected`` types on all ranks if any rank raises one inside the context.

    All ranks must enter the context. It must contain no collective, because a failed rank would not take part.
    """
    error: Exception | None = None
    try:
        yield
    except expected as caught:
        error = caught
    raise_on_all_ranks(error)


def broadcast_from_rank_0(make: Callable[[], T]) -> T:
    """Call ``make`` on rank 0 and return its result on all ranks. Raises rank 0's ConfigError on all ranks."""
    result: list[T | None] = [None]
    with sync_errors(ConfigError):
        if dist.get_rank() == 0:
            result[0] = make()
    dist.broadcast_object_list(result)
    return result[0]  # type: ignore[return-value]
