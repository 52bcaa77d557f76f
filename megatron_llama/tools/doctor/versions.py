"""Whether all nodes run the same program: Python, the packages, and this project's own files."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_llama.system.installed import missing
from megatron_llama.tools.doctor.finding import BREAKS, WARNS, Finding, Node, majority, names

CHECK = "versions"
PACKAGES = ("torch", "megatron-core", "numpy")
LACKS = "lacks"
"""The packages that a run needs and that are not there, whatever is known of their versions."""
PROGRAM = "program"
"""The digest of this project's files: two nodes of one commit may have different ones."""
_ROOT = Path(__file__).resolve().parents[3]


def observe() -> dict[str, Any]:
    """Versions by name; None for a package that is not installed."""
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        LACKS: list(missing().values()),
        "commit": _commit(),
        PROGRAM: _digest(),
    }


def judge(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Packages that are missing, and what differs between nodes."""
    for package in dict.fromkeys(package for node in nodes for package in node.seen[CHECK][LACKS]):
        lacking = [node for node in nodes if package in node.seen[CHECK][LACKS]]
        remedy = "pip install -e . in the environment that PYTHON names, on that node"
        yield Finding(CHECK, BREAKS, names(lacking), f"{package} is not installed", remedy)
    for name in ("python", *PACKAGES, PROGRAM):
        versions = [node.seen[CHECK][name] for node in nodes]
        usual = majority([version for version in versions if version is not None] or [None])
        for node, version in zip(nodes, versions, strict=True):
            if version is None or version == usual:
                continue
            like = next(other for other in nodes if other.seen[CHECK][name] == usual)
            yield _difference(name, node, like)


def _difference(name: str, node: Node, like: Node) -> Finding:
    here, there = node.seen[CHECK], like.seen[CHECK]
    if name == PROGRAM:
        what = f"its files of this project are not {like.name}'s (commits {here['commit']} and {there['commit']})"
        remedy = f"use one checkout on a disk that all nodes share, or on {node.name}: git checkout {there['commit']}"
        return Finding(CHECK, BREAKS, node.name, what, remedy)
    severity = BREAKS if name in ("torch", "megatron-core") else WARNS
    what = f"{name} {here[name]}, and {like.name} has {there[name]}"
    version = there[name].partition("+")[0]
    remedy = f"pip install '{name}=={version}' on {node.name}, or use one environment on a disk that all share"
    if name == "python":
        remedy = f"make the environment with Python {there[name]} on {node.name}, or share one on a common disk"
    return Finding(CHECK, severity, node.name, what, remedy)


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
