"""Virtual environments of the peers in .bench/, with pinned versions and the installed torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.results import ROOT
from megatron_llama.system.files import write_atomically

BENCH_DIR = ROOT / ".bench"
OURS = "ours"


@dataclass(frozen=True)
class Peer:
    """A program to compare."""

    name: str
    packages: tuple[str, ...]
    """Packages to install in addition to torch; empty for this project, which runs in the current environment."""
    program: str
    """Module to run with ``python -m``."""
    checkout: Path = ROOT
    """Checkout with the module."""
    needs_accelerator: bool = False
    modes: tuple[str, ...] = ("eager", "compiled")


# The newest releases on 2026-11-22.
PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, (), "benchmarks.peers.train_ours"),
        Peer("transformers", ("transformers==5.23.0",), "benchmarks.peers.train_transformers"),
        Peer("litgpt", ("litgpt==0.5.13",), "benchmarks.peers.train_litgpt"),
        # torchtitan imports triton on all devices; torch's CPU build does not include it.
        Peer("torchtitan", ("torchtitan==0.3.0", "triton"), "benchmarks.peers.train_torchtitan"),
    )
}


class NotInstalled(RuntimeError):
    """A peer's environment could not be created."""


def interpreter(peer: Peer, folder: Path = BENCH_DIR) -> Path:
    """Return the Python of ``peer``; create its environment if it is missing or has other versions.

    Raises NotInstalled.
    """
    if not peer.packages:
        return Path(sys.executable)
    place = folder / peer.name
    python, stamp = place / "bin" / "python", place / "installed.txt"
    # Without the build tag, such as +cpu, pip takes the build of its index; the installed build is checked below.
    requirements = [f"torch=={version('torch').partition('+')[0]}", "numpy", "setuptools<82", *peer.packages]
    if not stamp.is_file() or stamp.read_text(encoding="utf-8").split() != requirements:
        _install(place, python, requirements)
        write_atomically(stamp, "\n".join(requirements) + "\n")
    return python


def _install(place: Path, python: Path, requirements: Sequence[str]) -> None:
    """Create the environment. Raises NotInstalled."""
    log = place.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(place)],
            [str(python), "-m", "pip", "install", "--disable-pip-version-check", *requirements],
        ):
            status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
            if status:
                raise NotInstalled(f"{' '.join(command[1:4])} ended with status {status}, see {log}")
    code = "from importlib.metadata import version; print(version('torch'))"
    installed = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    if installed != version("torch"):
        raise NotInstalled(f"pip installed torch {installed} instead of {version('torch')}: times are not comparable")
