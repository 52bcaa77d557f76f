"""Optional tools that the trainer loads by name; it also runs without ``tools/``."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

ADVICE = ("megatron_llama.tools.forecast.memory_advice", "fitting_changes")
"""Function that finds settings with which a run fits in memory."""
PROFILER = ("megatron_llama.tools.profile.profiler", "StepProfiler")
"""Class that measures the steps of trainer.profile."""
REPORT = ("megatron_llama.tools.report.cli", "write_run_report")
"""Function that writes the page of a run folder."""
REPORT_FILE = "report.html"
"""The page of a run, in its folder."""


def load(tool: tuple[str, str]) -> Any:
    """Return the function or class of a tool; None without tools."""
    module, name = tool
    return getattr(import_module(module), name) if is_installed(tool) else None


def is_installed(tool: tuple[str, str]) -> bool:
    """Return whether ``load`` returns a function or class. Imports only the packages around it."""
    module, _ = tool
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError as error:  # a parent package is missing; errors inside the package are raised
        if error.name is not None and module.startswith(error.name):
            return False
        raise
