"""The virtual environments of the peers, below .bench/, each with pinned versions and this interpreter's torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from megatron_llama.system.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
BENCH_DIR = ROOT / ".bench"
OURS = "ours"


@dataclass(frozen=True)
class Peer:
    """A program that trains the same model."""

    name: str
    packages: tuple[str, ...]
    """What pip installs besides torch; none for this project, which runs in the environment at hand."""
    program: str
    """The module of its worker."""
    needs_accelerator: bool = False
    modes: tuple[str, ...] = ("eager", "compiled")


# The newest releases on 2026-11-22.
PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, (), "benchmarks.peers.train_ours"),
        Peer("transformers", ("transformers==5.23.0",), "benchmarks.peers.train_transformers"),
        Peer("litgpt", ("litgpt==0.5.13",), "benchmarks.peers.train_litgpt"),
        # It imports triton's kernels wherever it runs; torch for CPUs comes without.
        Peer("torchtitan", ("torchtitan==0.3.0", "triton"), "benchmarks.peers.train_torchtitan"),
    )
}


class NotInstalled(RuntimeError):
    """A peer's environment can't be made; the message says why."""


def torch_version() -> str:
    """The version of this environment's torch, with its build, such as 2.13.0+cpu."""
    return version("torch")


def interpreter(peer: Peer, folder: Path = BENCH_DIR) -> Path:
    """The Python of ``peer``, installed first where it is not there yet or other versions are wanted.

    Raises NotInstalled.
    """
    if not peer.packages:
        return Path(sys.executable)
    place = folder / peer.name
    python, stamp = place / "bin" / "python", place / "installed.txt"
    # The number without the build: pip then takes the build that its index or its wheels have, which is checked below.
    wanted = [f"torch=={torch_version().partition('+')[0]}", "numpy", "setuptools<82", *peer.packages]
    if not stamp.is_file() or stamp.read_text(encoding="utf-8").split() != wanted:
        _install(place, python, wanted)
        write_atomically(stamp, "\n".join(wanted) + "\n")
    return python


def _install(place: Path, python: Path, wanted: Sequence[str]) -> None:
    """Makes the environment. Raises NotInstalled."""
    log = place.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(place)],
            [str(python), "-m", "pip", "install", "--disable-pip-version-check", *wanted],
        ):
            status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
            if status:
                raise NotInstalled(f"{' '.join(command[1:4])} ended with status {status}, see {log}")
    find = "from importlib.metadata import version; print(version('torch'))"
    found = subprocess.run([str(python), "-c", find], capture_output=True, text=True, check=False).stdout.strip()
    if found != torch_version():
        raise NotInstalled(f"pip installed torch {found}, and {torch_version()} is here: times would not compare")
