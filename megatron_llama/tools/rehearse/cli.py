"""``scripts/rehearse.py``: ranks of any world at their true size, on one core."""

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
python scripts/rehearse.py [--ranks 0,31,127] [--json] [--pictures FOLDER] [group=choice ...] [setting=value ...]

Runs a training step of `python train.py` with the same settings on one CPU core, as any rank of a world of any size,
at its true size, and prints what it needs: memory at the peak and what for, the largest tensors then, FLOPs by module,
bytes sent by axis and kind of collective, where the host waits for the device. It is the program itself, with torch's
fake process group and fake tensors: shapes, but no values. trainer.dp=N says how many copies of the model there are.

  --ranks 0,31       the ranks to rehearse; default: one for each kind of pipeline stage
  --json             print a JSON object and write no pictures
  --pictures FOLDER  where the pictures of memory over time go (default: runs/rehearsal)
  --help             this text

Examples
  python scripts/rehearse.py model=llama70b trainer.tp=8 trainer.pp=4 trainer.dp=4 trainer.precision=bf16
  python scripts/rehearse.py --ranks 7 model=llama3_8b trainer.dp=8 trainer.zero=3 device.memory_gib=80

Exit status: 0; 2 a config that can't work; else a failure. docs/guides/tools/rehearse.md says what is exact and what
is left out.
"""


def main(argv: Sequence[str]) -> int:
    """Runs ``scripts/rehearse.py`` with ``argv``; returns the exit status."""
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
        ranks = representatives(plan) if arguments.ranks is None else _ranks(arguments.ranks, plan)
    except ConfigError as error:
        sys.stderr.write(format_problems(error) + "\n")
        return EXIT_USER
    from megatron_llama.plan import layout_lines
    from megatron_llama.system.files import write_atomically
    from megatron_llama.tools.rehearse.rehearsal import rehearse
    from megatron_llama.tools.rehearse.text import as_json, draw, lines

    if arguments.json:
        found = [as_json(rehearse(plan, rank)) for rank in ranks]
        sys.stdout.write(json.dumps({"notes": notes, "ranks": found}, indent=1) + "\n")
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
    """The plan that ``rehearse`` takes, of a command line, and what was replaced in it.

    ``device.memory_gib`` does not refuse it: to see what does not fit is what a rehearsal is for.
    Raises ConfigError with everything that is wrong.
    """
    from megatron_llama.launch.world import find_world

    config = cli.parse_overrides([*overrides, *MOCK_RUN, "data.name=rehearsal", "dry_run=true"])
    notes = []
    memory, config.device.memory_gib = config.device.memory_gib, None
    if config.trainer.compile:
        notes.append("trainer.compile: blocks are rehearsed as they run uncompiled; a compiler keeps fewer tensors")
    if config.trainer.async_tp:
        notes.append(
            "trainer.async_tp: rehearsed without, as what is not compiled has no products to take collectives into"
        )
    config.trainer.compile = config.trainer.async_tp = False  # the one needs the other
    plan = find_world(config, None).plan()
    device = replace(plan.config.device, memory_gib=memory)
    return replace(plan, config=replace(plan.config, device=device)), notes


def representatives(plan: Plan) -> list[int]:
    """The first rank of each kind of pipeline stage: of equal ones the first holds the most micro batches in flight."""
    grid, pp = plan.grid, plan.grid.sizes["pp"]
    kinds: dict[tuple[object, ...], int] = {}
    for stage in range(pp):
        layers = tuple(len(chunk) for chunk in plan.stage_layers[stage::pp])
        kinds.setdefault((layers, stage == 0, stage == pp - 1), grid.rank(pp=stage))
    return sorted(kinds.values())


def _ranks(listed: str, plan: Plan) -> list[int]:
    from megatron_llama.config import ConfigError, Problem

    words = listed.split(",")
    wrong = [word for word in words if not word.strip().isdecimal() or int(word) >= plan.world_size]
    if wrong:
        rule = f"{', '.join(repr(word) for word in wrong)}: not among the ranks 0 to {plan.world_size - 1}"
        raise ConfigError([Problem("--ranks", listed, rule, "write numbers of ranks with commas between them")])
    return [int(word) for word in words]
