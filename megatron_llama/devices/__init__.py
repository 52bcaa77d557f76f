"""The only room that knows what a device is. Everything else asks the object that ``get_device`` returns.

To add a device: one module with a subclass of ``Device``, and its line in ``_KNOWN``. Modules are imported when asked
for, and torch only inside their methods, so that a dry run on a login node stays quick.
"""

from __future__ import annotations

from importlib import import_module

from megatron_llama.devices.base import Device, Peak

_KNOWN = {
    "cuda": "megatron_llama.devices.cuda",
    "neuron": "megatron_llama.devices.neuron",
    "hpu": "megatron_llama.devices.hpu",
    "cpu": "megatron_llama.devices.cpu",
}  # "auto" takes the first that works

VARIABLES = ("CUDA_", "CUBLAS_", "NCCL_", "NEURON_", "XLA_", "HABANA_", "PT_HPU_", "HLS_")
"""What the names of the devices' own environment variables begin with."""


def get_device(name: str = "auto") -> Device:
    """The device called ``name``; ``auto`` is the first in the table that can be used here.

    Raises ValueError, saying why, when that device can't be used on this machine.
    """
    if name != "auto":
        if name not in _KNOWN:
            raise ValueError(f"unknown device {name!r}: choose one of auto, {', '.join(sorted(_KNOWN))}")
        device: Device = import_module(_KNOWN[name]).DEVICE
        if reason := device.probe():
            raise ValueError(f"device={name} can't be used here: {reason}")
        return device
    for module in _KNOWN.values():
        device = import_module(module).DEVICE
        if device.probe() is None:
            return device
    raise AssertionError("the CPU is always there")


def ahead_of_time_environment(name: str) -> dict[str, str]:
    """The variables with which ``name`` compiles without being here. None for ``auto``, which looks for what is."""
    if name not in _KNOWN:
        return {}
    device: Device = import_module(_KNOWN[name]).DEVICE
    return device.ahead_of_time_environment()


__all__ = ["VARIABLES", "Device", "Peak", "ahead_of_time_environment", "get_device"]
