"""Command line of ``scripts/compile.py``: start the ranks of a run to compile its graphs without training.

With ``--one-per-stage``, one process per distinct pipeline stage represents the world.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_llama import cli
from megatron_llama.config import Config, ConfigError, Problem, load_config
from megatron_llama.devices import ahead_of_time_environment, get_device
from megatron_llama.launch import run_dir
from megatron_llama.launch.start import LocalRanks, start_ranks
from megatron_llama.plan import Machine, Plan, resolve
from megatron_llama.system import phase
from megatron_llama.tools.common import MOCK_RUN, run_tool
from megatron_llama.topology import Grid

ONE_PER_STAGE = "--one-per-stage"
FOLDER = "compile"
"""Subfolder of the run folder, because config.yaml, plan.txt and compile.json there belong to the run."""


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/compile.py`` with ``argv``; return the exit status."""
    return run_tool("compile", argv, _run, {ONE_PER_STAGE: bool})


def _run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    words = [*overrides, *MOCK_RUN, "data.name=compile", "trainer.compile=true"]
    _set_ahead_of_time_environment(words)
    if not arguments.one_per_stage:
        return cli.main(words, entry=compile_ahead, subfolder=FOLDER)
    return _start(_plan(cli.parse_overrides(words, subfolder=FOLDER)))


def compile_ahead(plan: Plan, representatives: Sequence[int] | None = None) -> None:
    """Compile in one process; entry point of the ranks."""
    phase.enter("compiling ahead", phase.UNWATCHED)
    for name, value in get_device(plan.config.device.name).ahead_of_time_environment().items():
        os.environ.setdefault(name, value)
    from megatron_llama.tools.compile.compile_rank import compile_rank

    compile_rank(plan, representatives)


def _set_ahead_of_time_environment(overrides: list[str]) -> None:
    """Set the variables with which the requested device compiles without hardware, before device detection."""
    try:
        name = load_config(overrides, cli.CONF_DIR).device.name
    except ConfigError:
        return  # reported later, with all other problems
    for variable, value in ahead_of_time_environment(name).items():
        os.environ.setdefault(variable, value)


def _plan(config: Config) -> Plan:
    """Resolve the plan of the world for this machine's device."""
    trainer = config.trainer
    if trainer.async_tp:
        rule = f"its matmuls need the memory of other tp ranks, which {ONE_PER_STAGE} does not start"
        raise ConfigError([Problem("trainer.async_tp", True, rule, f"omit {ONE_PER_STAGE}")])
    world_size = Grid.of(trainer).world_size
    try:
        device = get_device(config.device.name)
    except ValueError as error:
        raise ConfigError([Problem("device", config.device.name, str(error), "write device=auto")]) from None
    config.device.name = device.name
    # Processes on CPU share the memory of this machine; accelerators have separate memory.
    sharing_ranks = 1 if device.is_accelerator else min(3, max(1, trainer.pp))
    name, fast_bf16 = f"this machine's {device.name}", device.has_fast_bf16()
    return resolve(config, world_size, Machine(device.memory_bytes(), sharing_ranks, name, fast_bf16=fast_bf16))


def _start(plan: Plan) -> int:
    """Run the representative ranks concurrently."""
    plan.config.run.dir = plan.config.run.dir or run_dir.default_run_dir(plan.config, None)
    folder, pp = Path(plan.config.run.dir), plan.config.trainer.pp
    # One rank of each distinct pipeline stage: first, middle, last.
    ranks = [plan.grid.rank(pp=stage) for stage in sorted({0, min(1, pp - 1), pp - 1})]
    with run_dir.claim_run_dir(folder):
        sys.stdout.write(run_dir.open_plan(plan) + "\n")
        entry = partial(compile_ahead, representatives=ranks)
        with run_dir.rank_outputs(folder, range(len(ranks))) as output_dir:
            return start_ranks(plan, entry, LocalRanks(len(ranks), output_dir=output_dir))
