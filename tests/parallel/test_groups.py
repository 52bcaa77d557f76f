"""A rank's process groups, against the grid that its plan describes. One rank's error is every rank's error."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_llama.config import ConfigError, Problem
from megatron_llama.devices import get_device
from megatron_llama.devices.cpu.device import Cpu
from megatron_llama.parallel import groups as process_group_module
from megatron_llama.parallel import process_groups
from megatron_llama.parallel.groups import (
    axis_of,
    broadcast_from_rank_0,
    current_groups,
    group_timeout,
    raise_on_all_ranks,
    sync_errors,
)
from megatron_llama.plan import Plan
from megatron_llama.topology import AXES
from tests.oracle import CPU, make_plan, rank_groups, rank_model
from tests.ranks import run_ranks


def _groups(rank: int, plan: Plan) -> tuple[dict[str, list[int]], dict[str, str | None]]:
    """The ranks of each axis' group, and the axis of each kind of group."""
    with rank_groups(plan, rank) as groups:
        assert groups is current_groups()
        model = rank_model(plan, rank)
        ranks = {axis.name: dist.get_process_group_ranks(groups[axis.name]) for axis in AXES}
        kinds = {axis.name: axis_of(groups[axis.name]) for axis in AXES}
        kinds["embedding"] = "pp" if groups.embedding is None else axis_of(groups.embedding)
        assert model.replicated.kv_group is not None
        kinds["kv heads"] = axis_of(model.replicated.kv_group)
        for name in ("replicate", "shard"):
            kinds[name] = axis_of(model.shards[0].parameter.device_mesh.get_group(name))
        assert dist.group.WORLD is not None
        kinds["world"] = axis_of(dist.group.WORLD)
        kinds["unknown"] = axis_of(dist.new_group(range(8)))
    return ranks, kinds


def test_groups_are_the_grids_and_each_has_its_axis() -> None:
    layout = ("trainer.tp=2", "trainer.shard_group=2", "trainer.zero=1")
    plan = make_plan(8, *layout, "model.num_key_value_heads=1", "model.tie_word_embeddings=true")
    expected = {axis.name: axis.name for axis in AXES} | {"embedding": "pp", "kv heads": "tp", "replicate": "dp"}
    expected |= {"shard": "dp", "world": "world", "unknown": None}
    for rank, (ranks, kinds) in enumerate(run_ranks(_groups, 8, plan)):
        assert ranks == {axis.name: plan.grid.ranks(rank, axis.name) for axis in AXES}
        assert kinds == expected


def _timeouts(rank: int, plan: Plan) -> list[timedelta]:
    """The timeout of each process group except the world's, which the test creates."""
    with rank_groups(plan, rank):
        rank_model(plan, rank)
        groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
        assert len(groups) > 10
        return [group._get_backend(CPU).options._timeout for group in groups]  # type: ignore[attr-defined]


def test_all_groups_have_the_plans_timeout() -> None:
    layout = ("trainer.tp=2", "trainer.shard_group=1", "trainer.hang_timeout_seconds=1000")
    plan = make_plan(4, *layout, "model.num_key_value_heads=1")
    expected = process_group_module._timeout(plan.config.trainer)
    assert expected > timedelta(minutes=30), "torch's and megatron-core's default"
    for timeouts in run_ranks(_timeouts, 4, plan):
        assert set(timeouts) == {expected}


class Failed(Exception):
    """An error of one rank."""


def _destroyed(rank: int, plan: Plan, ends: list[BaseException | None]) -> list[int]:
    """Return the number of calls of destroy_process_group for each end of the context."""
    calls = []
    for error in ends:
        with patch.object(dist, "destroy_process_group") as destroy:
            try:
                with rank_groups(plan, rank):
                    if error is not None:
                        raise error
            except (Failed, KeyboardInterrupt, SystemExit):
                pass
            calls.append(destroy.call_count)
    return calls


def test_groups_are_destroyed_only_if_all_ranks_end() -> None:
    # NCCL's groups wait for all ranks when they are destroyed.
    ends = [None, Failed(), KeyboardInterrupt(), SystemExit(75)]
    assert run_ranks(_destroyed, 2, make_plan(2, "trainer.tp=2"), ends) == [[1, 0, 0, 1]] * 2
    assert run_ranks(_destroyed, 1, make_plan(1), ends) == [[1, 1, 1, 1]], "no other rank to wait for"


class _Initialized(Exception):
    pass


@pytest.mark.parametrize("binds", [False, True])
def test_the_world_is_bound_to_the_device(binds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(1)
    device, card = Cpu(), torch.device("cuda", 3)
    device.binds_process_group = binds  # type: ignore[misc]
    monkeypatch.setattr(process_group_module, "patch_mcore", lambda device: None)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 1)]))
    with patch.object(dist, "init_process_group", side_effect=_Initialized) as init, pytest.raises(_Initialized):
        with process_groups(plan, plan.topology(0), device, card):
            pass
    assert init.call_args.kwargs["device_id"] == (card if binds else None)
    assert get_device("cpu").binds_process_group is False


def test_groups_of_a_bound_world_connect_at_their_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch connects a new group at once if the world is bound; most groups of megatron-core are not used.
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 3))
    monkeypatch.setattr(dist.group.__class__, "WORLD", world)
    with group_timeout(make_plan(1).config.trainer):
        assert world.bound_device_id is None
    assert world.bound_device_id == torch.device("cuda", 3)


def problem(rule: str) -> Problem:
    return Problem("run.dir", ["a", "list"], rule, "mend it")


BOTH = ConfigError([problem("one"), problem("two")])
ERRORS: dict[str, tuple[list[Exception | list[Problem] | None], Exception | None]] = {
    "none": ([None, [], None], None),
    "the lowest rank's": ([None, OSError("first"), ValueError("second")], OSError("first")),
    "problems of all ranks, each once": ([[problem("one")], ConfigError([problem("two"), problem("one")]), None], BOTH),
    "problems before others": ([OSError("other"), BOTH, None], BOTH),
}
"""Errors of three ranks, and the error that all raise."""


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    for results in run_ranks(_raised, 3, [errors for errors, _ in ERRORS.values()]):
        expected = [None if error is None else (type(error).__name__, str(error)) for _, error in ERRORS.values()]
        assert results[:-2] == expected
        assert results[-2:] == [("KeyError", "'name'"), ("ConfigError", str(ConfigError([problem("wrong")])))]


def _raised(rank: int, cases: list[list[Exception | list[Problem] | None]]) -> list[tuple[str, str] | None]:
    """Return the type and text that ``raise_on_all_ranks`` raises in each case, then ``sync_errors`` and rank 0."""

    def block() -> None:
        with sync_errors(KeyError):
            if rank == 1:
                raise KeyError("name")

    def mistake() -> int:
        raise ConfigError([problem("wrong")])

    calls = [partial(raise_on_all_ranks, errors[rank]) for errors in cases]
    results = [_error_of(call) for call in (*calls, block, partial(broadcast_from_rank_0, mistake))]
    dist.barrier()
    assert broadcast_from_rank_0(lambda: 10 + rank) == 10
    error = RuntimeError("failed")
    error.__cause__ = OSError("why")
    with pytest.raises(RuntimeError, match="failed") as caught:
        raise_on_all_ranks(error if rank == 1 else None)
    assert (caught.value.__cause__ is not None) == (rank == 1), "the copy of another rank has no traceback"
    return results


def _error_of(call: Callable[[], object]) -> tuple[str, str] | None:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None
