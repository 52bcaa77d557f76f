"""Checks of devices, drivers, limits, versions and clocks of the nodes."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_llama.config.settings import DEVICES
from megatron_llama.devices import get_device
from megatron_llama.system.missing_packages import missing_packages, pip_install
from megatron_llama.system.programs import CONF_DIR, PACKAGE, commit
from megatron_llama.system.tables import GIB, gib
from megatron_llama.tools.common import package_version
from megatron_llama.tools.doctor.finding import BREAKS, WARNS, Finding, NodeState, names, odd_ones
from megatron_llama.tools.doctor.network import ClockReading

HARDWARE = "devices"


def observe_hardware(device_name: str, *, count: bool) -> dict[str, Any]:
    """Return the device that ``device=device_name`` selects on this node and the facts from its driver's files.

    ``missing`` has the reason if the device cannot be used. ``count`` adds the number of devices, which may import
    torch.
    """
    if device_name not in DEVICES:  # reported with the errors of the plan
        return {"missing": None}
    try:
        device = get_device(device_name)
    except ValueError as error:
        return {"missing": str(error)}
    return {"missing": None, "device": device.name, "count": device.count() if count else None, **device.hardware()}


def judge_hardware(nodes: Sequence[NodeState]) -> Iterator[Finding]:
    """Report missing devices and differences between nodes."""
    for node in nodes:
        if reason := node.seen[HARDWARE]["missing"]:
            remedy = "check the driver of that node and that the job has devices, or exclude the node"
            yield Finding(HARDWARE, BREAKS, node.name, reason, remedy)
    there = [node for node in nodes if "device" in node.seen[HARDWARE]]
    for name in ("device", "count", "devices", "driver", "processor"):
        for node, value, like, usual in odd_ones(there, [node.seen[HARDWARE].get(name) for node in there]):
            message = f"{value} devices" if name == "count" else f"{name}: {value}"
            severity, message = BREAKS if name == "device" else WARNS, f"{message}; {like.name} has {usual}"
            yield Finding(HARDWARE, severity, node.name, message, _remedy(name, node, like))


def _remedy(name: str, node: NodeState, like: NodeState) -> str:
    if name == "driver":
        return f"install {like.name}'s driver on {node.name}"
    if name == "processor":
        return "request nodes of one type (sbatch --constraint=...): the slowest rank sets the step time"
    return f"exclude {node.name} (sbatch --exclude={node.name}), or find the device that is not visible there"


# Resource limits of a process: open files, processes, locked memory, shared memory.
LIMITS = "limits"
MIN_FILES, MIN_PROCESSES = 4096, 4096
"""A rank opens a socket to each other rank and the dataset files, and starts compiler processes."""
MIN_SHARED_MEMORY = GIB
"""Bytes in /dev/shm, where NCCL and similar libraries exchange data between the ranks of a node."""
_INFINIBAND = Path("/sys/class/infiniband")


def observe_limits() -> dict[str, Any]:
    """Return the limits; None for unlimited."""
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "files": _limit(resource.RLIMIT_NOFILE),
        "processes": _limit(resource.RLIMIT_NPROC),
        "locked": _limit(resource.RLIMIT_MEMLOCK),
        "shared": None if shared is None else shared.f_blocks * shared.f_frsize,
        "rdma": _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()),
    }


def judge_limits(nodes: Sequence[NodeState], *, accelerator: bool) -> Iterator[Finding]:
    """Report limits that are too low."""
    for node in nodes:
        seen = node.seen[LIMITS]
        for name, minimum, option in (("files", MIN_FILES, "n"), ("processes", MIN_PROCESSES, "u")):
            if seen[name] is not None and seen[name] < minimum:
                message = f"the limit is {seen[name]:,} {'open files' if name == 'files' else name}"
                remedy = f"run ulimit -{option} 65536 before the start, or raise it in /etc/security/limits.conf"
                yield Finding(LIMITS, WARNS, node.name, message, remedy + " (under Slurm the limits of slurmd apply)")
        if seen["rdma"] and seen["locked"] is not None:
            message = f"the locked-memory limit is {gib(seen['locked'])}, but InfiniBand and EFA lock send buffers"
            remedy = "run ulimit -l unlimited before the start, or set LimitMEMLOCK=infinity for slurmd"
            yield Finding(LIMITS, WARNS, node.name, message, remedy)
        if accelerator and seen["shared"] is not None and seen["shared"] < MIN_SHARED_MEMORY:
            message = f"/dev/shm has {gib(seen['shared'])}, too little for communication between the ranks of a node"
            remedy = "use docker run --shm-size=16g, or run mount -o remount,size=16g /dev/shm"
            yield Finding(LIMITS, WARNS, node.name, message, remedy)


def _limit(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


# Versions of Python, the packages and this project's files.
VERSIONS = "versions"
PACKAGES = ("torch", "megatron-core", "numpy")
LACKS = "lacks"  # JSON key of the packages that a run needs and that are not installed
PROGRAM = "program"
"""JSON key of the digest of this project's files: nodes at one commit may have different local changes."""


def observe_versions() -> dict[str, Any]:
    """Return the versions by name; None for a package that is not installed."""
    return {
        "python": platform.python_version(),
        **{package: package_version(package) for package in PACKAGES},
        LACKS: list(missing_packages().values()),
        "commit": commit(),
        PROGRAM: _digest(),
    }


def judge_versions(nodes: Sequence[NodeState]) -> Iterator[Finding]:
    """Report missing packages and differences between nodes."""
    for package in dict.fromkeys(package for node in nodes for package in node.seen[VERSIONS][LACKS]):
        lacking = [node for node in nodes if package in node.seen[VERSIONS][LACKS]]
        remedy = f"run {pip_install()} on that node"
        yield Finding(VERSIONS, BREAKS, names(lacking), f"{package} is not installed", remedy)
    for name in ("python", *PACKAGES, PROGRAM):
        with_version = [node for node in nodes if node.seen[VERSIONS][name] is not None]
        for node, _, like, _ in odd_ones(with_version, [node.seen[VERSIONS][name] for node in with_version]):
            yield _difference(name, node, like)


def _difference(name: str, node: NodeState, like: NodeState) -> Finding:
    here, there = node.seen[VERSIONS], like.seen[VERSIONS]
    if name == PROGRAM:
        message = f"project files differ from {like.name} (commits {here['commit']} and {there['commit']})"
        remedy = f"use one checkout on a shared disk, or run git checkout {there['commit']} on {node.name}"
        return Finding(VERSIONS, BREAKS, node.name, message, remedy)
    severity = BREAKS if name in ("torch", "megatron-core") else WARNS
    message = f"{name} {here[name]}; {like.name} has {there[name]}"
    version = there[name].partition("+")[0]
    remedy = f"run {pip_install(f'{name}=={version}')} on {node.name}, or use one environment on a shared disk"
    if name == "python":
        remedy = f"create the environment with Python {there[name]} on {node.name}, or use one on a shared disk"
    return Finding(VERSIONS, severity, node.name, message, remedy)


def _digest() -> str:
    """Hash the Python files and the configs of the project."""
    digest = hashlib.sha256()
    for folder, pattern in ((PACKAGE, "*.py"), (CONF_DIR, "*.yaml")):
        for path in sorted(folder.rglob(pattern)):
            digest.update(path.relative_to(folder.parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


# Clock differences: the first process asks the others for their time and subtracts half of the round trip.
CLOCKS = "clocks"
MAX_SECONDS = 1.0
"""Largest acceptable difference: beyond it, logs and file times of several nodes cannot be ordered."""


def judge_clocks(nodes: Sequence[NodeState], readings: Sequence[ClockReading | None]) -> Iterator[Finding]:
    """Report clocks that differ from the first node by more than MAX_SECONDS plus the error of the reading."""
    for node, reading in zip(nodes, readings, strict=True):
        if reading is not None and abs(reading.ahead) > MAX_SECONDS + reading.round_trip / 2:
            way = "ahead of" if reading.ahead > 0 else "behind"
            message = f"the clock is {abs(reading.ahead):,.1f} s {way} {nodes[0].name}"
            remedy = f"run systemctl restart chronyd (or ntpd) on {node.name}; chronyc tracking shows the difference"
            yield Finding(CLOCKS, WARNS, node.name, message, remedy)
