"""What the system lets a process have: open files, processes, locked memory, memory shared between processes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_llama.system.units import GIB, gib
from megatron_llama.tools.doctor.finding import WARNS, Finding, Node

CHECK = "limits"
LEAST_FILES, LEAST_PROCESSES = 4096, 4096
"""A rank has a socket to each other rank of the world, files of the datasets, and its compiler's processes."""
LEAST_SHARED = GIB
"""Of /dev/shm: the communication libraries of accelerators exchange data between the ranks of a node there."""
_INFINIBAND = Path("/sys/class/infiniband")


def observe() -> dict[str, Any]:
    """Limits; None where there is none."""
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "files": _limit(resource.RLIMIT_NOFILE),
        "processes": _limit(resource.RLIMIT_NPROC),
        "locked": _limit(resource.RLIMIT_MEMLOCK),
        "shared": None if shared is None else shared.f_blocks * shared.f_frsize,
        "rdma": _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()),
    }


def judge(nodes: Sequence[Node], *, accelerator: bool) -> Iterator[Finding]:
    """Limits that are too low."""
    for node in nodes:
        seen = node.seen[CHECK]
        for name, least, option in (("files", LEAST_FILES, "n"), ("processes", LEAST_PROCESSES, "u")):
            if seen[name] is not None and seen[name] < least:
                what = f"a process may have {seen[name]:,} {'open files' if name == 'files' else name}"
                remedy = f"ulimit -{option} 65536 before the start, or raise it in /etc/security/limits.conf"
                yield Finding(CHECK, WARNS, node.name, what, remedy + " (slurmd's own limits count under Slurm)")
        if seen["rdma"] and seen["locked"] is not None:
            what = f"a process may lock {gib(seen['locked'])} of memory, and InfiniBand or EFA locks what it sends"
            remedy = "ulimit -l unlimited before the start, or LimitMEMLOCK=infinity for slurmd"
            yield Finding(CHECK, WARNS, node.name, what, remedy)
        if accelerator and seen["shared"] is not None and seen["shared"] < LEAST_SHARED:
            what = f"/dev/shm has {gib(seen['shared'])}, too little for what the ranks of a node exchange there"
            remedy = "docker run --shm-size=16g, or mount -o remount,size=16g /dev/shm"
            yield Finding(CHECK, WARNS, node.name, what, remedy)


def _limit(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft
