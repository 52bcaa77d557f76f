"""The process groups of a rank: torch.distributed and megatron-core's groups for each parallel axis; errors that all
ranks raise together."""
from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._C._distributed_c10d import _register_process_group

from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.settings import TrainerConfig
from megatron_llama.devices import Device
from megatron_llama.devices.mcore import patch_mcore
from megatron_llama.plan import Plan
from megatron_llama.system.phase import ATTEMPT, PATIENT
from megatron_llama.topology import AXES, Topology


class Groups:
    """A rank's process groups: ``groups["tp"]`` has the ranks that differ from this one only along tp."""

    def __init__(self, topology: Topology) -> None:
        """megatron-core's groups, which exist already."""
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._axes: dict[str, str] = {}
        for axis in AXES:
            group = getattr(parallel_state, f"get_{axis.mcore}_group")()
            # In another order gradients would be reduced over ranks that have other weights.
            expected = topology.grid.ranks(topology.rank, axis.name)
            assert dist.get_process_group_ranks(group) == expected, f"megatron-core orders {axis.name} in another way"
            self._groups[axis.name] = self.add(axis.name, group)
        self.embedding: dist.ProcessGroup | None = parallel_state.get_embedding_group(check_initialized=False)
        """The first and the last pipeline stage, which share tied embeddings; None on other stages."""
        if self.embedding is not None:
            self.add("pp", self.embedding)

    def __getitem__(self, axis: str) -> dist.ProcessGroup:
        return self._groups[axis]

    def add(self, axis: str, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Counts a further group among the groups of ``axis``, and returns it."""
        self._axes[group.group_name] = axis
        return group

    def axis_of(self, group: dist.ProcessGroup) -> str | None:
        """The axis that ``group`` was added to."""
        return self._axes.get(group.group_name)


_current: Groups | None = None


def current_groups() -> Groups:
    """The groups of this process, inside ``process_groups``."""
    assert _current is not None, "process_groups creates them"
    return _current


def axis_of(group: dist.ProcessGroup) -> str | None:
    """The axis of a collective that starts in ``group``: tp, ..., or world; None for a group of no axis."""
    world = dist.group.WORLD
    if world is None or group.group_name != world.group_name:
        return None if _current is None else _current.axis_of(group)
    # Where all ranks are data-parallel ones, fully_shard uses the world's group.
    callers = (str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_stack(None))
    return "dp" if any(name.startswith("torch.distributed.fsdp") for name in callers) else "world"


@contextmanager
def process_groups(plan: Plan, topology: Topology, device: Device, torch_device: torch.device) -> Iterator[Groups]:
    """Process groups that exist inside the context. MASTER_ADDR and MASTER_PORT tell how to reach the other ranks."""
    global _current
    patch_mcore(torch_device)
    trainer = plan.config.trainer
    if not dist.is_initialized():
        rank, size, timeout = topology.rank, topology.world_size, _timeout(trainer)
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        # Names of this attempt's own: torchrun keeps the store, with the addresses of ranks that are gone.
        store = dist.PrefixStore(os.environ.get(ATTEMPT, "0"), store)
        dist.init_process_group(device.backend, rank=rank, world_size=size, timeout=timeout, store=store)
    parallel_state.initialize_model_parallel(
        **{f"{axis.mcore}_size": topology.sizes[axis.name] for axis in AXES if not axis.is_derived},
        virtual_pipeline_model_parallel_size=trainer.vpp if trainer.vpp > 1 else None,
        create_gloo_process_groups=False,
    )
    _rename(parallel_state.get_tensor_model_parallel_group(), "tensor-parallel")
    _current = Groups(topology)
    try:
        with device.pipeline_transfers(topology) if topology.sizes["pp"] > 1 else nullcontext():
            yield _current
    finally:
        _current = None
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _timeout(trainer: TrainerConfig) -> timedelta:
    """How long a collective may wait: until the hang watch has spoken, because it knows who is to blame, and a rank may
    compile for an hour while another waits for it."""
    limit = trainer.hang_timeout_seconds
    return timedelta(days=30) if limit is None else timedelta(seconds=(PATIENT + 1) * limit, minutes=10)


def _rename(group: dist.ProcessGroup, name: str) -> None:
    """Gives a group a name that is the same on all ranks, so that they share compiled graphs.

    torch names groups by a running number, and the name is a constant in a compiled graph that uses the group. Ranks of
    different groups would compile the same graph again, each with its own number.
    """
    group._set_group_name(name)  # type: ignore[arg-type]
    _register_process_group(name, group)  # type: ignore[arg-type]


# An error of one rank becomes known to all, so that none waits in a collective for a rank that has given up.

T = TypeVar("T")


def raise_on_all_ranks(error: Exception | Sequence[Problem] | None) -> None:
    """Raises on all ranks what any rank passes; returns where no rank has an error. Collective over all ranks.

    Problems are raised as one ConfigError, those of several ranks with each problem once, also where they come as
    ConfigErrors. Without any, the lowest rank's error is raised: on the other ranks a copy, by pickle, of it.
    """
    mine = error.problems if isinstance(error, ConfigError) else error
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    problems: list[Problem] = []
    for reported in found:
        if not isinstance(reported, Exception):  # not a set below: a problem's value may be a list
            problems += [problem for problem in reported or () if problem not in problems]
    if problems:
        raise ConfigError(problems)
    found[dist.get_rank()] = error  # not a copy: this one has its traceback and its cause
    for reported in found:
        if isinstance(reported, Exception):
            raise reported


@contextmanager
def sync_errors(*expected: type[Exception]) -> Iterator[None]:
    """A block that ends on all ranks with the same error where one of ``expected`` is raised on any. All must enter it;
    it may hold no collective, as a rank that fails would be missing there."""
    error: Exception | None = None
    try:
        yield
    except expected as caught:
        error = caught
    raise_on_all_ranks(error)


def broadcast_from_rank_0(make: Callable[[], T]) -> T:
    """What ``make`` returns on rank 0, on all ranks; a ConfigError that it raises there is raised on all."""
    made: list[T | None] = [None]
    with sync_errors(ConfigError):
        if dist.get_rank() == 0:
            made[0] = make()
    dist.broadcast_object_list(made)
    return made[0]  # type: ignore[return-value]
