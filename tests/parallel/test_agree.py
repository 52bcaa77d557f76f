"""One rank's error is every rank's error."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_llama.config import ConfigError, Problem
from megatron_llama.parallel.groups import broadcast_from_rank_0, raise_on_all_ranks, sync_errors
from tests.ranks import run_ranks


def problem(rule: str) -> Problem:
    return Problem("run.dir", ["a", "list"], rule, "mend it")


def raised(rank: int, errors: list[Exception | list[Problem] | None]) -> tuple[str, str] | None:
    try:
        raise_on_all_ranks(errors[rank])
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_no_error_is_raised_where_no_rank_has_one() -> None:
    assert run_ranks(raised, 2, [None, []]) == [None, None]


def test_the_lowest_ranks_error_is_raised_on_all() -> None:
    actual = run_ranks(raised, 3, [None, OSError("first"), ValueError("second")])
    assert actual == [("OSError", "first")] * 3


def test_problems_of_all_ranks_come_together_and_once() -> None:
    both = ConfigError([problem("one"), problem("two")])
    for errors in ([[problem("one")], ConfigError([problem("two"), problem("one")])], [OSError("other"), both]):
        actual = run_ranks(raised, 2, errors)
        assert actual == [("ConfigError", str(both))] * 2


def in_a_block(rank: int) -> str:
    with sync_errors(KeyError):
        if rank == 1:
            raise KeyError("name")
    return "went on"


def test_a_block_ends_alike_on_all_ranks() -> None:
    def on_rank(rank: int) -> str:
        with pytest.raises(KeyError, match="name"):
            in_a_block(rank)
        return "raised"

    assert run_ranks(on_rank, 2) == ["raised", "raised"]


def test_an_error_keeps_its_cause_on_its_own_rank() -> None:
    def on_rank(rank: int) -> bool:
        error = RuntimeError("failed")
        error.__cause__ = OSError("why")
        with pytest.raises(RuntimeError, match="failed") as caught:
            raise_on_all_ranks(error if rank == 1 else None)
        return caught.value.__cause__ is not None

    # Rank 0's copy has no traceback.
    assert run_ranks(on_rank, 2) == [False, True]


def test_a_value_of_rank_0_or_its_mistake() -> None:
    def mistake() -> int:
        raise ConfigError([problem("wrong")])

    def on_rank(rank: int) -> int:
        with pytest.raises(ConfigError, match="wrong"):
            broadcast_from_rank_0(mistake)
        dist.barrier()
        return broadcast_from_rank_0(lambda: 10 + rank)

    assert run_ranks(on_rank, 2) == [10, 10]
