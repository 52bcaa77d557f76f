"""Optional tools that the trainer loads by name; it also runs without ``tools/``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ADVICE = ("megatron_llama.tools.forecast.advice", "fitting_changes")
PROFILER = ("megatron_llama.tools.profile.profiler", "StepProfiler")
REPORT = ("megatron_llama.tools.report.cli", "write_run_report")

REPORT_FILE = "report.html"
"""The page of a run, in its folder."""


def advice() -> Callable[..., list[Any]] | None:
    """Return ``fitting_changes``, which finds settings with which a run fits in memory; None without tools."""
    return _load(*ADVICE)


def profiler() -> type[Any] | None:
    """Return ``StepProfiler``, which measures the steps of trainer.profile; None without tools."""
    return _load(*PROFILER)


def report() -> Callable[[Path], None] | None:
    """Return ``write_run_report``, which writes the page of a run folder; None without tools."""
    return _load(*REPORT)


def has_report() -> bool:
    """Return whether ``report`` returns a function."""
    return _is_installed(REPORT[0])


def has_profiler() -> bool:
    """Return whether ``profiler`` returns a class. Imports no torch."""
    return _is_installed(PROFILER[0])


def _load(module: str, name: str) -> Any:
    return getattr(import_module(module), name) if _is_installed(module) else None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError as error:  # a parent package is missing; errors inside the package are raised
        if error.name is not None and module.startswith(error.name):
            return False
        raise
