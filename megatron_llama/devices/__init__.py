"""Device support. Code outside this package uses the ``Device`` that ``get_device`` returns.

To add a device:

    devices/NAME/            a subclass of ``Device``, its instance DEVICE, and a subclass of ``Kernels`` for operations
                             that are faster than plain torch
    config/settings.py       NAME in DEVICES, at its place in the order of ``auto``
    conf/device/NAME.yaml    the choice device=NAME, one line

A device's module is imported on first use, and torch only inside its methods, so that a dry run on a login node takes
a second.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_llama.config.settings import DEVICES
from megatron_llama.devices.base import INDUCTOR, Device, Peak, async_tp_problem

if TYPE_CHECKING:
    import torch

NAMES = tuple(name for name in DEVICES if name != "auto")
"""Names of devices, in the order of ``auto``."""
# torch's extension builder, which Inductor and megatron-core import also with device=cpu, warns of a missing GPU.
logging.getLogger("torch.utils.cpp_extension").addFilter(lambda record: "No CUDA runtime" not in record.getMessage())
for _package in ("torchao", "torch.utils._pytree"):  # at torchao's import: libraries of kernels that are not used here
    logging.getLogger(_package).setLevel(logging.ERROR)
HOST = "cpu"
"""torch's name of the host, which every machine has."""


def device_named(name: str) -> Device:
    """Return the device called ``name``, for its class attributes. It may be unavailable on this machine."""
    device: Device = import_module(f"megatron_llama.devices.{name}").DEVICE
    return device


def find_device(name: str) -> Device | None:
    """Return ``device_named(name)``, or None for ``auto``, which depends on the machine."""
    return device_named(name) if name in NAMES else None


def of(torch_device: torch.device) -> Device:
    """Return the device of tensors on ``torch_device``."""
    return device_named(torch_device.type)


def pinned(values: torch.Tensor, torch_device: torch.device) -> torch.Tensor:
    """Return host values in pinned memory, if ``torch_device`` can read it: otherwise each copy to it is a sync."""
    return values.pin_memory() if of(torch_device).pins_memory else values


def get_device(name: str = "auto") -> Device:
    """Return the device called ``name``. ``auto`` is the first of DEVICES that is available on this machine.

    Raises:
        ValueError: the device is unknown or unavailable, with the reason.
    """
    if name == "auto":
        return next(device for device in map(device_named, NAMES) if device.probe() is None)  # the last is the CPU
    if name not in NAMES:
        raise ValueError(f"unknown device {name!r}: choose one of {', '.join(DEVICES)}")
    device = device_named(name)
    if reason := device.probe():
        raise ValueError(f"device={name} is unavailable on this host: {reason}")
    return device


def ignored_devices() -> list[str]:
    """Return a sentence for each device of this machine that ``auto`` skips because torch cannot use it."""
    return [reason for name in NAMES if (reason := device_named(name).ignored())]


def ahead_of_time_environment(name: str) -> dict[str, str]:
    """Return the environment with which ``name`` compiles on a machine without it. Empty for ``auto``."""
    device = find_device(name)
    return {} if device is None else device.ahead_of_time_environment()


def request_collectives(rank: int) -> Any:
    """Ask the process of ``rank`` on this machine for its last collectives. Return the recorder, None without one."""
    recorders = (recorder for name in NAMES if (recorder := device_named(name).recorder()) is not None)
    return next((recorder for recorder in recorders if recorder.request_dump(rank)), None)


def variable_prefixes() -> tuple[str, ...]:
    """Return the prefixes of all devices' environment variables."""
    return tuple(prefix for name in NAMES for prefix in device_named(name).variable_prefixes)


__all__ = ["INDUCTOR", "Device", "Peak", "async_tp_problem"]
