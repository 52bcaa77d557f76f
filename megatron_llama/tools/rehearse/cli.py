"""Command line of ``scripts/rehearse.py``: run ranks of any world at full size on one core."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama import cli
from megatron_llama.system.exit_status import EXIT_USER
from megatron_llama.tools.common import MOCK_RUN

if TYPE_CHECKING:
    from megatron_llama.plan import Plan

USAGE = """\
usage: python scripts/rehearse.py [--ranks 0,31,127] [--json]
                                  [--pictures FOLDER] [group=choice ...]
                                  [section.setting=value ...]

Run a training step of `python train.py` with the same settings as one rank of
a world of any size, at its true size, on one CPU core. Prints the peak memory
by kind, the largest tensors, FLOPs by module, bytes sent by axis and
collective, and the places where the host waits for the device. The training
code runs with torch's fake process group and fake tensors, which have shapes
but no values. trainer.dp=N sets the number of model replicas.

  --ranks 0,31       ranks to rehearse (default: one per distinct pipeline
                     stage)
  --json             print a JSON object and draw no pictures
  --pictures FOLDER  folder of the pictures of memory over time (default:
                     runs/rehearsal)
  --help             show this text

Examples
  python scripts/rehearse.py model=llama70b trainer.tp=8 trainer.pp=4 \\
      trainer.dp=4 trainer.precision=bf16
  python scripts/rehearse.py --ranks 7 model=llama3_8b trainer.dp=8 \\
      trainer.zero=3 device.memory_gib=80

Exit status: 0 done, 2 a config error, else a failure.
docs/guides/tools/rehearse.md lists the exact and the approximate numbers.
"""


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/rehearse.py`` with ``argv``; return the exit status."""
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(USAGE)
        return 0
    # Imported late to keep --help fast.
    from megatron_llama.config import ConfigError, format_problems

    parser = argparse.ArgumentParser(usage=USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("--ranks")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pictures", type=Path, default=Path("runs/rehearsal"))
    arguments, overrides = parser.parse_known_args(argv)
    try:
        plan, notes = plan_rehearsal(overrides)
        ranks = representative_ranks(plan) if arguments.ranks is None else _ranks(arguments.ranks, plan)
    except ConfigError as error:
        sys.stderr.write(format_problems(error) + "\n")
        return EXIT_USER
    from megatron_llama.plan import layout_lines
    from megatron_llama.system.files import write_atomically
    from megatron_llama.tools.rehearse.rehearsal import rehearse
    from megatron_llama.tools.rehearse.text import as_json, draw, lines

    if arguments.json:
        reports = [as_json(rehearse(plan, rank)) for rank in ranks]
        sys.stdout.write(json.dumps({"notes": notes, "ranks": reports}, indent=1) + "\n")
        return 0
    sys.stdout.write("\n".join([*layout_lines(plan), *notes]) + "\n")
    for rank in ranks:
        rehearsal = rehearse(plan, rank)
        path = arguments.pictures / f"{plan.model.name}_rank_{rank}_of_{plan.world_size}.png"
        arguments.pictures.mkdir(parents=True, exist_ok=True)
        title = f"{plan.model.name}, rank {rank} of {plan.world_size}: memory of a training step"
        write_atomically(path, draw(rehearsal, title, plan.config.device.memory_gib))
        sys.stdout.write("\n".join(["", *lines(rehearsal, plan), "", f"  memory over time: {path}"]) + "\n")
        sys.stdout.flush()
    return 0


def plan_rehearsal(overrides: Sequence[str]) -> tuple[Plan, list[str]]:
    """Return the plan for ``rehearse`` and notes on the settings that it replaces.

    ``device.memory_gib`` does not reject the plan, so that configs that do not fit can be rehearsed.
    Raises ConfigError with all problems.
    """
    from megatron_llama.launch.world import find_world

    config = cli.parse_overrides([*overrides, *MOCK_RUN, "data.name=rehearsal", "dry_run=true"])
    notes = []
    memory, config.device.memory_gib = config.device.memory_gib, None
    if config.trainer.compile:
        notes.append("trainer.compile: rehearsed in eager mode; compiled blocks save fewer tensors")
    if config.trainer.async_tp:
        notes.append("trainer.async_tp: rehearsed without it, because it needs compiled matmuls")
    config.trainer.compile = config.trainer.async_tp = False  # async_tp needs compile
    plan = find_world(config, None).plan()
    device = replace(plan.config.device, memory_gib=memory)
    return replace(plan, config=replace(plan.config, device=device)), notes


def representative_ranks(plan: Plan) -> list[int]:
    """Return the first rank of each distinct pipeline stage.

    Of equal stages the first one has the most micro batches in flight.
    """
    grid, pp = plan.grid, plan.grid.sizes["pp"]
    kinds: dict[tuple[object, ...], int] = {}
    for stage in range(pp):
        layers = tuple(len(chunk) for chunk in plan.stage_layers[stage::pp])
        kinds.setdefault((layers, stage == 0, stage == pp - 1), grid.rank(pp=stage))
    return sorted(kinds.values())


def _ranks(listed: str, plan: Plan) -> list[int]:
    from megatron_llama.config import ConfigError, Problem

    words = listed.split(",")
    invalid = [word for word in words if not word.strip().isdecimal() or int(word) >= plan.world_size]
    if invalid:
        rule = f"{', '.join(repr(word) for word in invalid)}: not in the ranks 0 to {plan.world_size - 1}"
        raise ConfigError([Problem("--ranks", listed, rule, "write ranks separated by commas, such as --ranks 0,1")])
    return [int(word) for word in words]
