"""Command line of ``scripts/rehearse.py``: run ranks of any world at full size on one core."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_llama.config import ConfigError, Problem
from megatron_llama.plan import Plan, batch_line, layout_lines
from megatron_llama.system.exit_status import EXIT_FAILED
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import GIB
from megatron_llama.tools.common import MOCK_RUN, run_tool
from megatron_llama.tools.figures import draw_memory
from megatron_llama.tools.planned_run import Hardware, read_planned_run
from megatron_llama.tools.rehearse.report import Rehearsal, as_json, free_bytes, lines


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/rehearse.py`` with ``argv``; return the exit status."""
    return run_tool("rehearse", argv, _run, {"--ranks": str, "--json": bool, "--pictures": Path})


def _run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    plan, notes, hardware = read_rehearsal(overrides)
    ranks = representative_ranks(plan) if arguments.ranks is None else _ranks(arguments.ranks, plan)
    from megatron_llama.tools.rehearse.rehearsal import rehearse  # needs torch

    if not arguments.json:
        sys.stdout.write("\n".join([*hardware.head(), *layout_lines(plan, hardware.title), *notes]) + "\n")
    status, reports = 0, []
    for rank in ranks:
        rehearsal = rehearse(plan, rank)
        if (free_bytes(rehearsal, plan) or 0) < 0:
            status = EXIT_FAILED
        if arguments.json:
            reports.append(as_json(rehearsal))
        else:
            _report(plan, rehearsal, hardware.title, arguments.pictures or Path("runs/rehearsal"))
    if arguments.json:
        trainer = plan.config.trainer
        report = {
            "hardware": hardware.title,
            "global_batch_size": trainer.global_batch_size,
            "seq_length": plan.config.data.length,
            "precision": trainer.precision,
            "notes": notes,
            "ranks": reports,
        }
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return status


def _report(plan: Plan, rehearsal: Rehearsal, hardware: str, pictures: Path) -> None:
    """Print the report of a rank and draw its picture."""
    path = pictures / f"{plan.model.name}_rank_{rehearsal.rank}_of_{plan.world_size}.png"
    pictures.mkdir(parents=True, exist_ok=True)
    title = f"{plan.model.name}, rank {rehearsal.rank} of {plan.world_size}: memory of a training step"
    title += f"\n{batch_line(plan.config, hardware)}"
    axis = "allocations and frees of a step; F: forward, B: backward of a micro batch"
    memory = plan.config.device.memory_gib
    write_atomically(path, draw_memory(rehearsal.timeline, title=title, axis=axis, memory_gib=memory))
    sys.stdout.write("\n".join(["", *lines(rehearsal, plan), "", f"  memory over time: {path}"]) + "\n")
    sys.stdout.flush()


def read_rehearsal(overrides: Sequence[str]) -> tuple[Plan, list[str], Hardware]:
    """Return the plan for ``rehearse``, notes on the settings that it replaces, and the hardware.

    ``device.memory_gib`` does not reject the plan, so that configs that do not fit can be rehearsed.
    Raises ConfigError with all problems.
    """
    run = read_planned_run(overrides, [*MOCK_RUN, "data.name=rehearsal", "dry_run=true"])
    config, spec = run.world.config, run.hardware.spec
    notes = []
    memory, config.device.memory_gib = config.device.memory_gib, None
    if memory is None and spec is not None:
        memory = spec.per_rank().memory_bytes / GIB
    if config.trainer.compile:
        notes.append("trainer.compile: rehearsed in eager mode; compiled blocks save fewer tensors")
    if config.trainer.async_tp:
        notes.append("trainer.async_tp: rehearsed without it, because it needs compiled matmuls")
    config.trainer.compile = config.trainer.async_tp = False  # async_tp needs compile
    plan = run.world.plan()
    device = replace(plan.config.device, memory_gib=memory)
    return replace(plan, config=replace(plan.config, device=device)), notes, run.hardware


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
    words = listed.split(",")
    invalid = [word for word in words if not word.strip().isdecimal() or int(word) >= plan.world_size]
    if invalid:
        rule = f"{', '.join(repr(word) for word in invalid)}: not in the ranks 0 to {plan.world_size - 1}"
        raise ConfigError([Problem("--ranks", listed, rule, "write ranks separated by commas, such as --ranks 0,1")])
    return [int(word) for word in words]
