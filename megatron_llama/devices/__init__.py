"""The only package that knows kinds of devices. Everything else asks the ``Device`` that ``get_device`` returns.

To add a device:

    devices/NAME/            a subclass of ``Device``, its instance DEVICE, and a subclass of ``Kernels`` for what
                             the device does better than plain torch
    config/settings.py       NAME in DEVICES, where ``auto`` should try it
    conf/device/NAME.yaml    the choice device=NAME, one line

A device's module is imported when the device is first asked for, and torch only inside its methods, so that a dry run
on a login node takes a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from megatron_llama.config.settings import DEVICES
from megatron_llama.devices.base import INDUCTOR, Device, Peak, async_tp_problem

if TYPE_CHECKING:
    import torch

NAMES = tuple(name for name in DEVICES if name != "auto")
"""Kinds of devices, in the order in which ``auto`` tries them."""
HOST = "cpu"
"""torch's name of the host's memory, and of the device that every machine has."""


def device_named(name: str) -> Device:
    """The device called ``name``, for its facts: it need not be usable on this machine."""
    device: Device = import_module(f"megatron_llama.devices.{name}").DEVICE
    return device


def of(torch_device: torch.device) -> Device:
    """The kind of device that holds tensors on ``torch_device``."""
    return device_named(torch_device.type)


def get_device(name: str = "auto") -> Device:
    """The device called ``name``; ``auto`` is the first of DEVICES that can be used here.

    Raises ValueError, with the reason, if that device can't be used on this machine.
    """
    if name == "auto":
        return next(device for device in map(device_named, NAMES) if device.probe() is None)  # the last is the CPU
    if name not in NAMES:
        raise ValueError(f"unknown device {name!r}: choose one of {', '.join(DEVICES)}")
    device = device_named(name)
    if reason := device.probe():
        raise ValueError(f"device={name} can't be used here: {reason}")
    return device


def ahead_of_time_environment(name: str) -> dict[str, str]:
    """The variables with which ``name`` compiles on a machine without it; none for ``auto``, which needs a device."""
    return device_named(name).ahead_of_time_environment() if name in NAMES else {}


def async_tp_missing(name: str) -> str | None:
    """Why trainer.async_tp can't work on ``name``, which need not be here; None where it can, and for ``auto``."""
    return device_named(name).async_tp_missing() if name in NAMES else None


def request_collectives(rank: int) -> Device | None:
    """Ask the process of ``rank`` on this machine for its last collectives. Return the device that records them."""
    return next((device for device in map(device_named, NAMES) if device.request_collectives(rank)), None)


def variable_prefixes() -> tuple[str, ...]:
    """Prefixes of the names of all devices' environment variables."""
    return tuple(prefix for name in NAMES for prefix in device_named(name).variable_prefixes)


__all__ = [
    "HOST",
    "INDUCTOR",
    "NAMES",
    "Device",
    "Peak",
    "ahead_of_time_environment",
    "async_tp_missing",
    "async_tp_problem",
    "device_named",
    "get_device",
    "of",
    "request_collectives",
    "variable_prefixes",
]
