"""``python train.py -m``: several runs by one line, planned before any starts, and what came of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_llama.cli import CONF_DIR, parse_overrides
from megatron_llama.config import ConfigError, Problem, format_problems
from megatron_llama.launch.environment import process_context
from megatron_llama.launch.world import find_world
from megatron_llama.plan import Plan
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_USER
from megatron_llama.system.text_table import text_table
from megatron_llama.system.units import short_count
from megatron_llama.tools.sweep.combinations import Sweep, combinations
from megatron_llama.tools.sweep.outcomes import Record
from megatron_llama.tools.sweep.starters import Run, as_slurm_jobs, one_after_another, run_dir, run_train_py

FLAGS = ("-m", "--multirun")
_SLURM = "--slurm"


def main(argv: Sequence[str], run: Run = run_train_py) -> int:
    """Runs the sweep that ``argv``, of which one word is -m, means. ``run`` is for tests.

    Returns the exit status: 0 all runs are done, 1 some failed, 2 some can't work and none was started; that of the run
    that was asked to stop, and then the same line goes on with the sweep.
    """
    dry = {"--dry-run", "dry_run=true"} & set(argv)
    slurm = next((word.partition("=")[2] for word in argv if word.partition("=")[0] == _SLURM), None)
    overrides = [word for word in argv if word not in (*FLAGS, *dry) and word.partition("=")[0] != _SLURM]
    try:
        if process_context(os.environ) is not None:
            rule = "a sweep starts its runs itself, and this is one rank of several"
            raise ConfigError([Problem("-m", None, rule, "start it by hand, without torchrun, srun or mpirun")])
        sweep = combinations(overrides, CONF_DIR)
        record = Record(sweep)
        plans = planned(sweep, elsewhere=slurm is not None or bool(dry))
        sys.stdout.write(table_of_plans(sweep, plans, record) + "\n")
        if dry:
            return 0
        stopped = None
        if slurm is None:
            stopped = one_after_another(sweep, record, run)
        else:
            as_slurm_jobs(sweep, record, slurm)
    except ConfigError as error:
        sys.stderr.write(format_problems(error, "This sweep") + "\n")
        return EXIT_USER
    from megatron_llama.tools.sweep.summary import summarize  # draws, which a dry run need not import

    sys.stdout.write("\n" + summarize(sweep, record))
    if stopped is not None:
        sys.stdout.write("Stopped. The same line goes on with the sweep.\n")
        return stopped
    return 0 if all(record[one].finished for one in sweep.combinations) else EXIT_FAILED


def planned(sweep: Sweep, elsewhere: bool) -> list[Plan]:
    """The plan of each run. ``elsewhere``: as in a dry run, on devices that need not be here.

    Raises ConfigError with every problem of every run; one that several runs have stands there once."""
    plans, found = list[Plan](), dict[Problem, list[str]]()
    for one in sweep.combinations:
        try:
            dry = ["dry_run=true"] if elsewhere else []
            plans.append(find_world(parse_overrides([*one.overrides, run_dir(sweep, one), *dry]), None).plan())
        except ConfigError as error:
            for problem in error.problems:
                found.setdefault(problem, []).append(one.name)
    problems = []
    for problem, names in found.items():
        where = "" if len(names) == len(sweep.combinations) else f" (in {', '.join(names)})"
        problems.append(Problem(problem.field, problem.value, problem.rule + where, problem.instead))
    if problems:
        raise ConfigError(problems)
    return plans


def table_of_plans(sweep: Sweep, plans: Sequence[Plan], record: Record) -> str:
    """What will run, a row for each run."""
    rows = [[*sweep.varied, "parameters", "ranks", "steps", "tokens", "so far"]]
    for one, plan in zip(sweep.combinations, plans, strict=True):
        trainer = plan.config.trainer
        steps = [f"{trainer.steps:,}", short_count(trainer.steps * plan.tokens_per_step)]
        rows.append(
            [
                *one.differing.values(),
                short_count(plan.parameters),
                f"{plan.world_size:,}",
                *steps,
                record[one].in_words,
            ]
        )
    title = f"{len(plans)} runs in {sweep.folder}"
    return "\n".join([title, "", *text_table(rows, left=len(sweep.varied))])
