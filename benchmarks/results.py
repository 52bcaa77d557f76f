"""Helpers of all benchmarks: run a program, describe the machine and the commit, publish a page."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from megatron_llama.devices.processor import processor
from megatron_llama.system.files import write_atomically
from megatron_llama.system.programs import commit as commit
from megatron_llama.tools.common import package_version

ROOT = Path(__file__).resolve().parents[1]


def run_program(program: str, *words: object) -> None:
    """Run one of the project's programs. Raises CalledProcessError."""
    subprocess.run([sys.executable, program, *map(str, words)], cwd=ROOT, check=True)


def read_studies() -> dict[str, dict[str, Any]]:
    """Return the studies of studies.toml by name."""
    return tomllib.loads((ROOT / "benchmarks/studies.toml").read_text(encoding="utf-8"))


def command_line() -> str:
    """Return the command of this benchmark, for its page."""
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])


def describe_machine(device: str) -> str:
    """Return a description of the cores, the processor, its bf16 matmul units, and the accelerators."""
    cpu = processor()
    units = [unit for unit in ("amx_bf16", "avx512_bf16") if unit in cpu.get("flags", "").split()]
    text = f"{os.cpu_count()} cores of {cpu.get('model name', 'an unknown processor')}, "
    text += f"bf16 units ({', '.join(units)})" if units else "no bf16 units"
    if device != "cpu":
        import torch

        text += f"; {torch.accelerator.device_count()} x {torch.get_device_module(device).get_device_name(0)}"
    return text


def conditions(packages: Sequence[str] = ("torch", "megatron-core")) -> str:
    """Return date, commit, machine, load and versions of installed packages, for a page of results."""
    name = processor().get("model name", platform.machine())
    numbers = {package: package_version(package) for package in packages}
    versions = [f"{package} {number}" if number else f"no {package}" for package, number in numbers.items()]
    return (
        f"{date.today()}, commit {commit()}, {os.cpu_count()} cores of {name}, shared with other work (load "
        f"{os.getloadavg()[0]:.0f}); Python {platform.python_version()}, {', '.join(versions)}."
    )


def publish(page: str, path: Path | None) -> None:
    """Write the page to ``path``, or print it."""
    if path is None:
        sys.stdout.write(page)
    else:
        write_atomically(path, page)
