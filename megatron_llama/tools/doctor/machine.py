"""Whether all nodes have the same devices and drivers, and as many of them."""
from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import resource
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_llama.config.settings import DEVICES
from megatron_llama.devices import get_device
from megatron_llama.system.installed import missing
from megatron_llama.system.tables import GIB, gib
from megatron_llama.tools.doctor.finding import BREAKS, WARNS, Finding, Node, majority, names
from megatron_llama.tools.doctor.network import ClockReading

HARDWARE = "devices"


def observe_hardware(wanted: str, *, count: bool) -> dict[str, Any]:
    """The device that ``device=wanted`` means here, its number (for ``count``, which may import torch), and what its
    driver's files say; ``missing`` has the reason where it can't be used."""
    if wanted not in DEVICES:  # the plan's problems name it
        return {"missing": None}
    try:
        device = get_device(wanted)
    except ValueError as error:
        return {"missing": str(error)}
    number = device.count() if count else None
    return {"missing": None, "device": device.name, "count": number, **device.hardware()}


def judge_hardware(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Devices that are missing, and what differs between nodes."""
    for node in nodes:
        if reason := node.seen[HARDWARE]["missing"]:
            remedy = "check the driver on that node and that the job was given devices, or leave the node out"
            yield Finding(HARDWARE, BREAKS, node.name, reason, remedy)
    there = [node for node in nodes if "device" in node.seen[HARDWARE]]
    for name in ("device", "count", "devices", "driver", "processor"):
        values = [node.seen[HARDWARE].get(name) for node in there]
        usual = majority(values) if values else None
        for node, value in zip(there, values, strict=True):
            if value == usual:
                continue
            like = next(other for other in there if other.seen[HARDWARE].get(name) == usual)
            what = f"{_words(name, value)}, and {like.name} has {usual}"
            yield Finding(HARDWARE, BREAKS if name == "device" else WARNS, node.name, what, _remedy(name, node, like))


def _words(name: str, value: Any) -> str:
    noun = {"device": "its device", "count": "its devices: it", "devices": "its devices"}.get(name, f"its {name}")
    return f"{noun} has {value}" if name == "count" else f"{noun} is {value}"


def _remedy(name: str, node: Node, like: Node) -> str:
    if name == "driver":
        return f"install {like.name}'s driver on {node.name}"
    if name == "processor":
        return "ask for nodes of one kind (sbatch --constraint=...): a step lasts as long as its slowest rank"
    return f"leave {node.name} out (sbatch --exclude={node.name}), or find the device that is not visible there"


# What the system lets a process have: open files, processes, locked memory, memory shared between processes.


LIMITS = "limits"
LEAST_FILES, LEAST_PROCESSES = 4096, 4096
"""A rank has a socket to each other rank of the world, files of the datasets, and its compiler's processes."""
LEAST_SHARED = GIB
"""Of /dev/shm: the communication libraries of accelerators exchange data between the ranks of a node there."""
_INFINIBAND = Path("/sys/class/infiniband")


def observe_limits() -> dict[str, Any]:
    """Limits; None where there is none."""
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "files": _limit(resource.RLIMIT_NOFILE),
        "processes": _limit(resource.RLIMIT_NPROC),
        "locked": _limit(resource.RLIMIT_MEMLOCK),
        "shared": None if shared is None else shared.f_blocks * shared.f_frsize,
        "rdma": _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()),
    }


def judge_limits(nodes: Sequence[Node], *, accelerator: bool) -> Iterator[Finding]:
    """Limits that are too low."""
    for node in nodes:
        seen = node.seen[LIMITS]
        for name, least, option in (("files", LEAST_FILES, "n"), ("processes", LEAST_PROCESSES, "u")):
            if seen[name] is not None and seen[name] < least:
                what = f"a process may have {seen[name]:,} {'open files' if name == 'files' else name}"
                remedy = f"ulimit -{option} 65536 before the start, or raise it in /etc/security/limits.conf"
                yield Finding(LIMITS, WARNS, node.name, what, remedy + " (slurmd's own limits count under Slurm)")
        if seen["rdma"] and seen["locked"] is not None:
            what = f"a process may lock {gib(seen['locked'])} of memory, and InfiniBand or EFA locks what it sends"
            remedy = "ulimit -l unlimited before the start, or LimitMEMLOCK=infinity for slurmd"
            yield Finding(LIMITS, WARNS, node.name, what, remedy)
        if accelerator and seen["shared"] is not None and seen["shared"] < LEAST_SHARED:
            what = f"/dev/shm has {gib(seen['shared'])}, too little for what the ranks of a node exchange there"
            remedy = "docker run --shm-size=16g, or mount -o remount,size=16g /dev/shm"
            yield Finding(LIMITS, WARNS, node.name, what, remedy)


def _limit(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


# Whether all nodes run the same program: Python, the packages, and this project's own files.


VERSIONS = "versions"
PACKAGES = ("torch", "megatron-core", "numpy")
LACKS = "lacks"
"""The packages that a run needs and that are not there, whatever is known of their versions."""
PROGRAM = "program"
"""The digest of this project's files: two nodes of one commit may have different ones."""
_ROOT = Path(__file__).resolve().parents[3]


def observe_versions() -> dict[str, Any]:
    """Versions by name; None for a package that is not installed."""
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        LACKS: list(missing().values()),
        "commit": _commit(),
        PROGRAM: _digest(),
    }


def judge_versions(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Packages that are missing, and what differs between nodes."""
    for package in dict.fromkeys(package for node in nodes for package in node.seen[VERSIONS][LACKS]):
        lacking = [node for node in nodes if package in node.seen[VERSIONS][LACKS]]
        remedy = "pip install -e . in the environment that PYTHON names, on that node"
        yield Finding(VERSIONS, BREAKS, names(lacking), f"{package} is not installed", remedy)
    for name in ("python", *PACKAGES, PROGRAM):
        versions = [node.seen[VERSIONS][name] for node in nodes]
        usual = majority([version for version in versions if version is not None] or [None])
        for node, version in zip(nodes, versions, strict=True):
            if version is None or version == usual:
                continue
            like = next(other for other in nodes if other.seen[VERSIONS][name] == usual)
            yield _difference(name, node, like)


def _difference(name: str, node: Node, like: Node) -> Finding:
    here, there = node.seen[VERSIONS], like.seen[VERSIONS]
    if name == PROGRAM:
        what = f"its files of this project are not {like.name}'s (commits {here['commit']} and {there['commit']})"
        remedy = f"use one checkout on a disk that all nodes share, or on {node.name}: git checkout {there['commit']}"
        return Finding(VERSIONS, BREAKS, node.name, what, remedy)
    severity = BREAKS if name in ("torch", "megatron-core") else WARNS
    what = f"{name} {here[name]}, and {like.name} has {there[name]}"
    version = there[name].partition("+")[0]
    remedy = f"pip install '{name}=={version}' on {node.name}, or use one environment on a disk that all share"
    if name == "python":
        remedy = f"make the environment with Python {there[name]} on {node.name}, or share one on a common disk"
    return Finding(VERSIONS, severity, node.name, what, remedy)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit that is checked out, its first 9 digits; ? outside of git."""
    try:
        command = ["git", "-C", str(_ROOT), "rev-parse", "--short=9", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "?"
    return done.stdout.strip() or "?"


def _digest() -> str:
    """Of all of the project's Python files and settings."""
    digest = hashlib.sha256()
    for folder, pattern in (("megatron_llama", "*.py"), ("conf", "*.yaml")):
        for path in sorted((_ROOT / folder).rglob(pattern)):
            digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


# Whether the nodes agree what time it is. The first one asks the others, and takes half the way there and back off.


CLOCKS = "clocks"
MOST_SECONDS = 1.0
"""Logs and metrics of several nodes can't be put in order beyond that, and newest files are not the newest."""


def judge_clocks(nodes: Sequence[Node], readings: Sequence[ClockReading | None]) -> Iterator[Finding]:
    """Clocks that differ from the first node's by more than MOST_SECONDS and what the reading may be wrong by."""
    for node, reading in zip(nodes, readings, strict=True):
        if reading is not None and abs(reading.ahead) > MOST_SECONDS + reading.round_trip / 2:
            way = "ahead of" if reading.ahead > 0 else "behind"
            what = f"its clock is {abs(reading.ahead):,.1f} s {way} {nodes[0].name}'s"
            remedy = f"systemctl restart chronyd (or ntpd) on {node.name}, then chronyc tracking shows the difference"
            yield Finding(CLOCKS, WARNS, node.name, what, remedy)
