"""Facts and rates of a device and its machine. As a module, ``python -m ... DEVICE [small|full]`` prints JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from megatron_llama import devices
from megatron_llama.devices.kernels import Float8Operand
from megatron_llama.devices.processor import processor
from megatron_llama.system.programs import commit
from megatron_llama.system.ulimits import usable_cores
from megatron_llama.tools.common import package_version

PACKAGES = (
    *("megatron_llama", "torch", "megatron-core", "triton", "numpy", "torchao", "transformer-engine"),
    *("transformers", "torchtitan", "litgpt"),
)
VARIABLES = ("TORCH", "PYTORCH_", "TRITON_", "OMP_")
"""Beginnings of names of variables that matter, in addition to the devices' prefixes."""
SECRETS = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL", "AUTH")
ROUNDS, CALLS = 5, 4
ATTENTION = {"7 B": (2, 32, 32, 4096, 128), "8 B": (1, 32, 8, 8192, 128), "1 B": (2, 32, 8, 4096, 64)}
"""Sequences, heads, kv heads, tokens, head dimension."""
MATMUL_SIZE = 256


def main(argv: Sequence[str]) -> int:
    """Print the facts of the device ``argv[0]``, or {"missing": reason}; with a size in ``argv[1]``, its rates."""
    if len(argv) == 1:
        values = collect(argv[0])
    else:
        device = devices.get_device(argv[0])
        measured = measurements(device, device.enter(0, 1), 32 if argv[1] == "small" else 1)
        values = {label: _attempt(measure) for label, measure in measured}
    sys.stdout.write(json.dumps(values) + "\n")
    return 0


def _attempt(measure: Callable[[], float]) -> float | str:
    """Return a measurement, or the error as text: an error of a driver or a library is a result."""
    try:
        return measure()
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def collect(name: str) -> dict[str, Any]:
    """Return the facts as JSON values. Without a usable device: ``missing``, the reason."""
    if name != "auto":
        try:
            return _facts(devices.get_device(name))
        except ValueError as error:
            return {"missing": str(error)}
    accelerators = [devices.device_named(other) for other in devices.NAMES if other != devices.HOST]
    device = next((other for other in accelerators if other.probe() is None), None)
    if device is None:
        reasons = devices.ignored_devices() or [f"{accelerators[0].name}: {accelerators[0].probe()}"]
        return {"missing": "; ".join(reasons)}
    return _facts(device)


def _facts(device: devices.Device) -> dict[str, Any]:
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
        "processor": processor().get("model name", platform.machine()),
        "cores": len(usable_cores()),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "compiler": _compiler_version(),
        "compiler_missing": device.compiler_missing(),
        "variables": settings_of_environment(os.environ),
        "matmul_error": _attempt(lambda: _matmul_error(device)),
    }


def settings_of_environment(environ: Any) -> dict[str, str]:
    """Return the variables that change a run, without names that may hold secrets."""
    prefixes = (*VARIABLES, *devices.variable_prefixes())
    names = sorted(name for name in environ if name.startswith(prefixes))
    return {name: environ[name] for name in names if not any(word in name.upper() for word in SECRETS)}


def _cards(device: devices.Device) -> list[dict[str, Any]]:
    """Return name, memory and capability of each accelerator. Empty for the CPU."""
    if not device.is_accelerator:
        return []
    module = torch.get_device_module(torch.device(device.name))
    cards = []
    for properties in map(module.get_device_properties, range(device.count())):
        numbers = [str(getattr(properties, name)) for name in ("major", "minor") if hasattr(properties, name)]
        card = {"name": str(properties.name), "memory_bytes": int(properties.total_memory)}
        card |= {"capability": f"capability {'.'.join(numbers)}" if numbers else ""}
        cards.append(card | {"processors": getattr(properties, "multi_processor_count", None)})
    return cards


def _compiler_version() -> str:
    """Return the first line of the C compiler's version, or an empty text."""
    for name in filter(None, (os.environ.get("CC"), "gcc", "clang")):
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.check_output([name, "--version"], text=True, timeout=20).partition("\n")[0]
    return ""


def _matmul_error(device: devices.Device) -> float:
    """Return the relative error of an fp32 matmul on the device."""
    place = device.enter(0, 1)
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, generator=generator) for _ in range(2))
    expected = a.double() @ b.double()
    actual = (a.to(place) @ b.to(place)).cpu().double()
    return ((actual - expected).norm() / expected.norm()).item()


def measurements(
    device: devices.Device, place: torch.device, divisor: int
) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield (name with unit, measurement), with sizes divided by ``divisor``."""
    kernels, size = device.kernels(False), 8192 // divisor

    def rate(work: float, call: Callable[[], object]) -> float:
        return work / _seconds(device, call)

    def matmul(dtype: torch.dtype, size: int) -> float:
        a, b = (torch.randn(size, size, device=place, dtype=dtype) for _ in range(2))
        return rate(2e-12 * size**3, lambda: a @ b)

    def float8(by_row: bool, fast: bool) -> float:
        scales = [torch.ones(shape if by_row else (), device=place) for shape in ((size, 1), (1, size))]
        drawn = [torch.randn(size, size, device=place).to(torch.float8_e4m3fn) for _ in range(2)]
        a, b = (Float8Operand(data, scale) for data, scale in zip(drawn, scales, strict=True))
        return rate(2e-12 * size**3, lambda: kernels.float8_mm(a, b, torch.bfloat16, fast))

    def copy(source: torch.Tensor, target: torch.Tensor) -> float:
        return rate(source.nbytes / 1e9, lambda: target.copy_(source, non_blocking=True))

    def attention(shape: Sequence[int], backward: bool) -> float:
        rows, heads, kv_heads, tokens, dim = shape
        sizes = [(tokens // divisor, rows, number, dim) for number in (heads, kv_heads, kv_heads)]
        drawn = [torch.randn(*size, device=place, dtype=torch.bfloat16).permute(1, 2, 0, 3) for size in sizes]
        q, k, v = (x.requires_grad_(backward) for x in drawn)

        def call() -> None:
            out = kernels.attend(q, k, v)
            if backward:
                torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        flops = 2e-12 * rows * heads * (tokens // divisor) ** 2 * dim  # causal: half of the scores
        return rate(flops * (3.5 if backward else 1), call)

    yield "bf16 matmul, TFLOP/s", partial(matmul, torch.bfloat16, size)
    yield "fp32 matmul, TFLOP/s", partial(matmul, torch.float32, size // 2)
    for name, by_row in (("tensorwise", False), ("rowwise", True)):
        yield f"float8 {name}, TFLOP/s", partial(float8, by_row, False)
        yield f"float8 {name}, fast sums, TFLOP/s", partial(float8, by_row, True)
    memory = torch.empty((1 << 30) // divisor**2, dtype=torch.uint8, device=place)
    host = torch.empty(memory.shape, dtype=torch.uint8, pin_memory=device.pins_memory)
    yield "copy on the device, GB/s", lambda: copy(memory, torch.empty_like(memory))
    yield "copy to the device, GB/s", lambda: copy(host, memory)
    yield "copy to the host, GB/s", lambda: copy(memory, host)
    small = torch.zeros(16, device=place)
    yield "small kernel, microseconds", lambda: _seconds(device, lambda: small.add_(1), 500) * 1e6
    for name, shape in ATTENTION.items():
        yield f"attention of {name}, forward, TFLOP/s", partial(attention, shape, False)
        yield f"attention of {name}, both passes, TFLOP/s", partial(attention, shape, True)


def _seconds(device: devices.Device, call: Callable[[], object], calls: int = CALLS) -> float:
    """Return the seconds of a call in the fastest round."""
    best = float("inf")
    for _ in range(ROUNDS + 1):  # the first warms up
        device.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        device.synchronize()
        best = min(best, (time.perf_counter() - begin) / calls)
    return best


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
