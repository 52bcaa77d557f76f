"""What one rank finds becomes known to all, so that none waits in a collective for a rank that has given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_llama.config import ConfigError, Problem

T = TypeVar("T")


def raise_together(error: Exception | Sequence[Problem] | None) -> None:
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
def together(*expected: type[Exception]) -> Iterator[None]:
    """A block that ends on all ranks with the same error where one of ``expected`` is raised on any. All must enter it;
    it may hold no collective, as a rank that fails would be missing there."""
    error: Exception | None = None
    try:
        yield
    except expected as caught:
        error = caught
    raise_together(error)


def from_rank_0(make: Callable[[], T]) -> T:
    """What ``make`` returns on rank 0, on all ranks; a ConfigError that it raises there is raised on all."""
    made: list[T | None] = [None]
    with together(ConfigError):
        if dist.get_rank() == 0:
            made[0] = make()
    dist.broadcast_object_list(made)
    return made[0]  # type: ignore[return-value]
