"""The only package that knows kinds of devices. Everything else asks the ``Device`` that ``get_device`` returns.

To add a device:

    devices/NAME.py          a subclass of ``Device``, and its instance DEVICE
    config/settings.py       NAME in DEVICES, where ``auto`` should try it, and in the tables beside it
    conf/device/NAME.yaml    the choice device=NAME, one line

A device's module is imported when the device is first asked for, and torch only inside its methods, so that a dry run
on a login node takes a second.
"""

from __future__ import annotations

from importlib import import_module

from megatron_llama.config.settings import DEVICES
from megatron_llama.devices.base import Device, Peak, async_tp_problem

_NAMES = tuple(name for name in DEVICES if name != "auto")


def get_device(name: str = "auto") -> Device:
    """The device called ``name``; ``auto`` is the first of DEVICES that can be used here.

    Raises ValueError, with the reason, if that device can't be used on this machine.
    """
    if name == "auto":
        return next(device for device in map(_load, _NAMES) if device.probe() is None)  # the last is the CPU
    if name not in _NAMES:
        raise ValueError(f"unknown device {name!r}: choose one of {', '.join(DEVICES)}")
    device = _load(name)
    if reason := device.probe():
        raise ValueError(f"device={name} can't be used here: {reason}")
    return device


def ahead_of_time_environment(name: str) -> dict[str, str]:
    """The variables with which ``name`` compiles on a machine without it; none for ``auto``, which needs a device."""
    return _load(name).ahead_of_time_environment() if name in _NAMES else {}


def async_tp_missing(name: str) -> str | None:
    """Why trainer.async_tp can't work on ``name``, which need not be here; None where it can, and for ``auto``."""
    return _load(name).async_tp_missing() if name in _NAMES else None


def variable_prefixes() -> tuple[str, ...]:
    """What the names of all devices' own environment variables begin with."""
    return tuple(prefix for name in _NAMES for prefix in _load(name).variable_prefixes)


def _load(name: str) -> Device:
    device: Device = import_module(f"megatron_llama.devices.{name}").DEVICE
    return device


__all__ = [
    "Device",
    "Peak",
    "ahead_of_time_environment",
    "async_tp_missing",
    "async_tp_problem",
    "get_device",
    "variable_prefixes",
]
