"""``scripts/plan.py``: memory, time and cost of a run on machines that need not be here, and published runs beside
what is predicted of them."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_llama.system.exit_status import EXIT_USER
from megatron_llama.tools.common import NO_FILES

USAGE = """\
python scripts/plan.py [--json] [group=choice ...] [section.setting=value ...] [cluster.setting=value ...]
python scripts/plan.py --published FILE.csv [--json]
python scripts/plan.py --devices
python scripts/plan.py --calibrate

Forecasts a run of `python train.py` with the same settings on other machines, in a second and without a device: memory
of each pipeline stage by component, time of a step by component, tokens/s, MFU, days and cost, and how it scales to
16,384 devices with failures and checkpoints. docs/guides/tools/planning.md has the formulas and their measured errors.

  --published FILE  predict every row of a table of published runs, and print the errors by source and device
  --devices         the hardware table, with sources
  --calibrate       measure this machine, in a minute or two; then cluster.device=cpu plans for it
  --json            the same for programs
  --help            this text

  cluster.device=h100             the accelerator
  cluster.nodes=16                machines; derived from tp * pp * dp
  cluster.price=2.5               of a device and hour, any currency
  cluster.tokens=2e12             to train on; derived from the run's steps
  docs/reference/config.md has all settings of cluster, which are of this program only.

Examples
  python scripts/plan.py model=llama70b data.seq_length=4096 trainer.precision=bf16 trainer.tp=8 trainer.pp=4 \\
      trainer.global_batch_size=512 cluster.nodes=16 cluster.device=h100 cluster.tokens=2e12
  python scripts/plan.py --published runs.csv

Exit status: 0; 2 a mistake in what was asked.
"""
PUBLISHED, CALIBRATE = "--published", "--calibrate"


def main(argv: Sequence[str]) -> int:
    """Runs ``scripts/plan.py`` with ``argv``; returns the exit status."""
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(USAGE)
        return 0
    # Imported here: --help needs none of it.
    from megatron_llama.config import ConfigError, format_problems

    as_json = "--json" in argv
    rest = [argument for argument in argv if argument != "--json"]
    try:
        if "--devices" in rest:
            return _devices()
        if CALIBRATE in rest:
            return _calibrate([argument for argument in rest if argument != CALIBRATE])
        if any(argument.partition("=")[0] == PUBLISHED for argument in rest):
            return _published(rest, as_json)
        return _plan(rest, as_json)
    except ConfigError as error:
        sys.stderr.write(format_problems(error) + "\n")
        return EXIT_USER


def _plan(overrides: Sequence[str], as_json: bool) -> int:
    from megatron_llama.tools.plan.forecast_page import report_json, report_lines
    from megatron_llama.tools.plan.forecast_run import forecast_run

    found = forecast_run([*overrides, *NO_FILES, "dry_run=true"])
    text = json.dumps(report_json(found), indent=1) if as_json else "\n".join(report_lines(found))
    sys.stdout.write(text + "\n")
    return 0


def _published(arguments: Sequence[str], as_json: bool) -> int:
    from megatron_llama.config import ConfigError, Problem
    from megatron_llama.tools.plan.compare_published import as_json as judged_json
    from megatron_llama.tools.plan.compare_published import compare_file, lines

    values = [argument for argument in arguments if argument != PUBLISHED]
    named = [value.removeprefix(PUBLISHED + "=") for value in values]
    if len(named) != 1 or not Path(named[0]).is_file():
        shown = " ".join(named) or None
        rule = "takes the path of one CSV file" if len(named) != 1 else "there is no such file"
        raise ConfigError([Problem(PUBLISHED, shown, rule, f"write {PUBLISHED} runs.csv")])
    try:
        found, unspoken = compare_file(Path(named[0]))
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        advice = "write it as UTF-8 text, with commas, the first line naming the columns"
        raise ConfigError([Problem(PUBLISHED, named[0], f"can't be read: {error}", advice)]) from error
    if as_json:
        sys.stdout.write(json.dumps(judged_json(found, unspoken), indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(lines(found, unspoken)) + "\n")
    return 0


def _calibrate(others: Sequence[str]) -> int:
    from megatron_llama.config import ConfigError, Problem
    from megatron_llama.tools.plan.measure_machine import calibrate

    if others:
        raise ConfigError([Problem(CALIBRATE, " ".join(others), "takes nothing else", "leave the rest out")])
    return calibrate()


def _devices() -> int:
    from megatron_llama.system.tables import GIB, text_table
    from megatron_llama.tools.forecast.hardware import devices

    head = ("device", "bf16 TFLOP/s", "fp8", "memory GiB", "TB/s", "a node", "link GB/s", "network GB/s", "source")
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
            device.source,
        )
        for device in devices().values()
    ]
    sys.stdout.write("\n".join(text_table([head, *rows], left=1)) + "\n")
    return 0
