"""The first part: versions, driver, devices, compiler. Runs as a module: ``python -m ... DEVICE`` prints JSON."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_llama.system.programs import commit
from megatron_llama.system.tables import gib
from megatron_llama.tools.common import package_version
from megatron_llama.tools.prove_gpu.checks import Check, CheckFailed, NotRun, Outcome

if TYPE_CHECKING:
    from megatron_llama.devices import Device
    from megatron_llama.tools.prove_gpu.session import Session

PACKAGES = (
    *("megatron_llama", "torch", "megatron-core", "triton", "numpy", "torchao", "transformer-engine"),
    *("transformers", "torchtitan", "litgpt"),
)
VARIABLES = ("TORCH", "PYTORCH_", "TRITON_", "OMP_")
"""Beginnings of names of variables that matter, in addition to the devices' prefixes."""
SECRETS = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL", "AUTH")
MATMUL_SIZE = 256
MATMUL_TOLERANCE = 1e-4
COMPILER_SECONDS = 20.0


def checks(session: Session) -> Sequence[Check[Session]]:
    """Return the checks of the facts that were collected before the first part."""
    return [Check("versions", _versions), Check("first matmul", _matmul), Check("compiler", _compiler)]


def _versions(session: Session) -> Outcome:
    facts = session.environment
    cards = ", ".join(dict.fromkeys(card["name"] for card in facts["cards"]))
    packages = facts["packages"]
    detail = f"{facts['count']} x {cards or facts['device']}, torch {packages['torch']}, Python {facts['python']}"
    return Outcome(detail, facts)


def _matmul(session: Session) -> Outcome:
    error = session.environment["matmul_error"]
    if isinstance(error, str):
        raise CheckFailed(f"the first matmul failed: {error}")
    if not error <= MATMUL_TOLERANCE:
        raise CheckFailed(f"a matmul differs from the CPU's by {error:.1e}")
    return Outcome(f"differs from the CPU's by {error:.1e}", {"error": error})


def _compiler(session: Session) -> Outcome:
    if reason := session.environment["compiler_missing"]:
        raise NotRun(f"torch.compile is unavailable: {reason}")
    return Outcome(session.environment["compiler"] or "torch.compile's requirements are installed")


def lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows (property, value) for the page."""
    rows = [(name, str(facts[name])) for name in ("device", "count", "python", "platform", "processor", "cores")]
    rows += [("memory", gib(facts["memory_bytes"])), ("commit", facts["commit"])]
    for number, card in enumerate(facts["cards"]):
        rows.append((f"card {number}", f"{card['name']}, {gib(card['memory_bytes'])}, {card['capability']}"))
    for title in ("hardware", "libraries", "packages", "variables"):
        rows += [(name, value) for name, value in facts[title].items()]
    return [*rows, ("compiler", facts["compiler"] or "not installed")]


# In the process that imports torch.


def main(argv: Sequence[str]) -> int:
    """Print the facts of the device ``argv[0]``, or {"missing": reason}."""
    sys.stdout.write(json.dumps(collect(argv[0])) + "\n")
    return 0


def collect(name: str) -> dict[str, Any]:
    """Return the facts as JSON values. Without a usable device: ``missing``, the reason."""
    from megatron_llama.devices import HOST, NAMES, device_named, get_device, ignored_devices

    if name == "auto":
        accelerators = [device_named(other) for other in NAMES if other != HOST]
        device = next((other for other in accelerators if other.probe() is None), None)
        if device is None:
            reasons = ignored_devices() or [f"{accelerators[0].name}: {accelerators[0].probe()}"]
            return {"missing": "; ".join(reasons)}
    else:
        try:
            device = get_device(name)
        except ValueError as error:
            return {"missing": str(error)}
    return _facts(device)


def _facts(device: Device) -> dict[str, Any]:
    return {
        "device": device.name,
        "is_accelerator": device.is_accelerator,
        "count": device.count(),
        "cards": _cards(device),
        "libraries": device.libraries(),
        "hardware": device.hardware(),
        "commit": commit(),
        "packages": {package: package_version(package) or "not installed" for package in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "compiler": _compiler_version(),
        "compiler_missing": device.compiler_missing(),
        "variables": settings_of_environment(os.environ),
        "matmul_error": _attempt(lambda: _matmul_error(device)),
    }


def settings_of_environment(environ: Any) -> dict[str, str]:
    """Return the variables that change a run, without names that may hold secrets."""
    from megatron_llama.devices import variable_prefixes

    prefixes = (*VARIABLES, *variable_prefixes())
    names = sorted(name for name in environ if name.startswith(prefixes))
    return {name: environ[name] for name in names if not any(word in name.upper() for word in SECRETS)}


def _cards(device: Device) -> list[dict[str, Any]]:
    """Return name, memory and capability of each accelerator. Empty for the CPU."""
    import torch

    if not device.is_accelerator:
        return []
    module = torch.get_device_module(torch.device(device.name))
    cards = []
    for index in range(device.count()):
        properties = module.get_device_properties(index)
        numbers = [getattr(properties, name, None) for name in ("major", "minor")]
        capability = ".".join(str(number) for number in numbers if number is not None)
        cards.append(
            {
                "name": str(properties.name),
                "memory_bytes": int(properties.total_memory),
                "capability": f"capability {capability}" if capability else "",
                "processors": getattr(properties, "multi_processor_count", None),
            }
        )
    return cards


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _compiler_version() -> str:
    """Return the first line of the C compiler's version, or an empty text."""
    for name in filter(None, (os.environ.get("CC"), "gcc", "clang")):
        if shutil.which(name):
            with suppress(OSError, subprocess.SubprocessError):
                words = [name, "--version"]
                done = subprocess.run(words, capture_output=True, text=True, timeout=COMPILER_SECONDS, check=False)
                return done.stdout.partition("\n")[0]
    return ""


def _attempt(measure: Callable[[], float]) -> float | str:
    """Return the measurement, or the error as text."""
    try:
        return measure()
    except Exception as error:  # any error of a driver or library is a finding
        return f"{type(error).__name__}: {error}"


def _matmul_error(device: Device) -> float:
    """Return the relative error of an fp32 matmul on the device."""
    import torch

    place = device.enter(0, 1)
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, generator=generator) for _ in range(2))
    expected = a.double() @ b.double()
    actual = (a.to(place) @ b.to(place)).cpu().double()
    return ((actual - expected).norm() / expected.norm()).item()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
