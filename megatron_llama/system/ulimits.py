"""Usable cores and memory, and limits of the shell (``ulimit``): messages for too small limits.

Imports the standard library only.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

MOST_FILES = 65536
"""Open files that a run allows itself."""
_LEAST_STACK_BYTES = 1 << 20
"""Smaller stacks explain a crash. The usual limit is 8 MiB. Python itself crashes below about 100 KiB."""
_LEAST_RUN = {"-v": 1 << 30, "-d": 400 << 20}
"""Bytes, by option of ulimit, without which no rank starts: torch alone takes more."""
_LIMITS = {
    "-v": (resource.RLIMIT_AS, "address space", 1024),
    "-d": (resource.RLIMIT_DATA, "data", 1024),
    "-s": (resource.RLIMIT_STACK, "stack", 1024),
    "-u": (getattr(resource, "RLIMIT_NPROC", None), "processes and threads of this user", 1),
}
"""Kind, noun and unit in bytes of a limit, by option of ulimit."""
_MEMORY = re.compile(
    r"cannot allocate memory|can't allocate memory|not enough memory|bad_alloc|failed to map segment"
    r"|resource temporarily unavailable|can't start new thread|memory allocation.*failed|unable to allocate",
    re.IGNORECASE,
)
"""Errors for lack of memory or threads. A thread needs address space, and glibc reports EAGAIN for its lack too."""


def usable_cores() -> list[int]:
    """Return the numbers of the CPU cores that this process may use; of all cores, if the system does not report it."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return list(range(os.cpu_count() or 1)) if affinity is None else sorted(affinity(0))


def memory_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use of each control group of this process (container, batch job) with a limit, in bytes.

    The use is without cached files, which the kernel drops when it needs memory.
    """
    groups = list[tuple[Path, str, str, str]]()
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                tree, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "")
                if controllers:  # version 1
                    tree, names = tree / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
                group = tree / path.lstrip("/")  # a container's own group may be the tree's root
                groups += [(each, *names) for each in (group, *group.parents) if each.is_relative_to(tree)]
    for group, most, current, prefix in groups:
        with suppress(OSError, ValueError):  # no such file, or "max"
            limit, used = int((group / most).read_text()), 0
            with suppress(OSError):
                used = int((group / current).read_text())
                facts = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
                used -= sum(int(facts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            yield limit, used


def available_memory() -> Iterator[int]:
    """Yield the bytes that processes of this host and its control groups can still allocate. The least one counts."""
    yield from (limit - used for limit, used in memory_limits())
    with suppress(OSError):  # not Linux
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        yield int(lines["MemAvailable"].split()[0]) << 10


def raise_file_limit() -> None:
    """Raise the soft limit of open files to MOST_FILES, or to the hard limit. Each dataset needs a few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_run() -> str | None:
    """Return the message for memory limits at which no rank can start; None if they are large enough."""
    sizes = {option: _soft_limit(option) for option in _LEAST_RUN}
    small = [option for option, size in sizes.items() if size is not None and size < _LEAST_RUN[option]]
    if not small:
        return None
    least = ", ".join(f"{_LEAST_RUN[option] >> 20:,} MiB of {_LIMITS[option][1]}" for option in small)
    return f"{_describe_limits(small)}. A rank needs at least {least}, and the memory in the plan. {_remedy(small)}"


def explain_limit(error: BaseException) -> str | None:
    """Return the message for an error that a limit may have caused; None for other errors and without a limit."""
    text = (str(error).splitlines() or [""])[0]
    if not isinstance(error, MemoryError) and not _MEMORY.search(text):
        return None
    limits = [option for option in ("-v", "-d") if _soft_limit(option) is not None]
    # A limit of processes is usual, so it explains only failed threads.
    if not limits and not re.search("thread|temporarily", text):
        return None
    limits += ["-u"] if not limits and _soft_limit("-u") is not None else []
    if not limits:
        return None
    return f"out of memory or threads ({text or type(error).__name__}). {_describe_limits(limits)}. {_remedy(limits)}"


def explain_crash() -> str:
    """Return a clause about small limits for the report of a crashed process; empty without such a limit."""
    limits = [option for option in ("-v", "-d") if _soft_limit(option) is not None]
    stack = _soft_limit("-s")
    limits += ["-s"] if stack is not None and stack < _LEAST_STACK_BYTES else []
    return f"{_describe_limits(limits)}. {_remedy(limits)}" if limits else ""


def _describe_limits(options: Iterable[str]) -> str:
    """Return a clause with the limits, as ulimit prints them."""
    return f"The shell has the limit {' and '.join(map(_describe, options))}"


def _describe(option: str) -> str:
    size, (_, noun, unit) = _soft_limit(option) or 0, _LIMITS[option]
    bytes_of = f"{size / 2**20:,.4g} MiB of " if unit > 1 else ""
    return f"ulimit {option} {size // unit} ({bytes_of}{noun})"


def _remedy(options: Iterable[str]) -> str:
    commands = " and ".join(f"ulimit {option} unlimited" for option in options)
    return f"Type {commands}, or ask the administrator"


def _soft_limit(option: str) -> int | None:
    """Return the limit in bytes or processes; None if there is none."""
    kind = _LIMITS[option][0]
    size = resource.RLIM_INFINITY if kind is None else resource.getrlimit(kind)[0]
    return None if size == resource.RLIM_INFINITY else size
