"""The tools that the trainer uses where they are installed, by name: the trainer runs without ``tools/``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

ADVICE = ("megatron_llama.tools.forecast.advice", "fitting_changes")
PROFILER = ("megatron_llama.tools.profile.profiler", "StepProfiler")


def advice() -> Callable[..., list[Any]] | None:
    """``fitting_changes``, which finds the settings with which a run fits; None without tools."""
    return _load(*ADVICE)


def profiler() -> type[Any] | None:
    """``StepProfiler``, which measures the steps of trainer.profile; None without tools."""
    return _load(*PROFILER)


def has_profiler() -> bool:
    """Whether ``profiler`` returns a class. Imports no torch."""
    return _is_installed(PROFILER[0])


def _load(module: str, name: str) -> Any:
    return getattr(import_module(module), name) if _is_installed(module) else None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError as error:  # a package above it is missing; an error inside that package is not hidden
        if error.name is not None and module.startswith(error.name):
            return False
        raise
