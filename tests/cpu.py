"""CPU time, which does not depend on other processes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def children_cpu_seconds(limit: float) -> Iterator[None]:
    """Fail if the child processes of this block use more than ``limit`` seconds of CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < limit, f"{seconds:.1f} s of a processor"
