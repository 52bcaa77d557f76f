"""Runs a plan on this machine: claims the run's folder, starts one process per device, and restarts them if asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatron_llama.launch.rank_process import modules_of
from megatron_llama.launch.run_dir import claimed, rank_outputs, record
from megatron_llama.launch.start import run_on_this_machine
from megatron_llama.launch.supervise import with_restarts
from megatron_llama.plan import Plan


def run_here(plan: Plan, work: Callable[[Plan], None]) -> int:
    """Starts all ranks of the plan here and waits for them; returns the exit status."""
    folder = Path(str(plan.config.run.dir))
    with claimed(folder):
        sys.stdout.write(record(plan, folder) + "\n")
        with rank_outputs(folder, range(plan.world_size)) as output_dir:
            rank = partial(work, plan)
            start = partial(
                run_on_this_machine,
                rank,
                plan,
                imports=modules_of(work),
                output_dir=output_dir,
                hang_seconds=plan.config.trainer.hang_timeout_seconds,
            )
            return with_restarts(plan, start)
