"""``scripts/plan.py``: forecast memory, time and cost of a run; compare forecasts with published runs."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

from megatron_llama.config import ConfigError, Problem
from megatron_llama.system.exit_status import EXIT_FAILED
from megatron_llama.system.programs import IN_CHECKOUT
from megatron_llama.system.tables import GIB, text_table
from megatron_llama.system.wrapping import wrap_lines
from megatron_llama.tools.common import NO_FILES, run_tool
from megatron_llama.tools.forecast.hardware import devices
from megatron_llama.tools.plan.forecast_run import forecast_run, report_json, report_lines

PUBLISHED = "--published"


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/plan.py`` with ``argv``; return the exit status."""
    return run_tool("plan", argv, _run, {"--json": bool, "--devices": bool, "--calibrate": bool})


def _run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    if arguments.devices:
        return _devices()
    if arguments.calibrate:
        return _calibrate(rest)
    if any(argument.partition("=")[0] == PUBLISHED for argument in rest):
        return _published(rest, arguments.json)
    return _plan(rest, arguments.json)


def _plan(overrides: Sequence[str], as_json: bool) -> int:
    forecast = forecast_run([*overrides, *NO_FILES, "dry_run=true"])
    text = json.dumps(report_json(forecast), indent=1) if as_json else "\n".join(report_lines(forecast))
    sys.stdout.write(text + "\n")
    return 0 if forecast.fits else EXIT_FAILED


def _published(arguments: Sequence[str], as_json: bool) -> int:
    """Run `python -m benchmarks published`, which a checkout has."""
    if not IN_CHECKOUT:
        advice = "run python -m benchmarks published runs.csv in a checkout"
        raise ConfigError([Problem(PUBLISHED, None, "needs a checkout of the repository", advice)])
    published = importlib.import_module("benchmarks.planner.published")
    values = [argument.removeprefix(PUBLISHED + "=") for argument in arguments if argument != PUBLISHED]
    return int(published.run(argparse.Namespace(table=values, json=as_json)))


def _calibrate(others: Sequence[str]) -> int:
    from megatron_llama.tools.plan.measure_machine import calibrate  # needs torch

    if others:
        rule, advice = "accepts no other argument", "remove the other arguments"
        raise ConfigError([Problem("--calibrate", " ".join(others), rule, advice)])
    return calibrate()


def _devices() -> int:
    head = ("device", "bf16 TFLOP/s", "fp8", "memory GiB", "TB/s", "per node", "link GB/s", "net GB/s")
    rows = [
        (
            device.name,
            f"{device.peak('bf16') / 1e12:,.0f}",
            f"{device.peaks['fp8'] / 1e12:,.0f}" if "fp8" in device.peaks else "",
            f"{device.memory_bytes / GIB:.0f}",
            f"{device.bandwidth / 1e12:.2f}",
            str(device.per_node),
            f"{device.link / 1e9:.0f}",
            f"{device.network / 1e9:.4g}",
        )
        for device in devices().values()
    ]
    lines = text_table([head, *rows], left=1)
    lines += ["", "sources"]
    for device in devices().values():
        lines += wrap_lines(f"{device.name}: {device.source}", "  ", "    ")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
