"""Time that other processes can't make longer: the processor's."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def children_cpu_seconds(limit: float) -> Iterator[None]:
    """Fails where the processes started, and waited for, in this block need more than ``limit`` seconds together."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < limit, f"{seconds:.1f} s of a processor"
