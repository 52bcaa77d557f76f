"""``python train.py -m``: several runs by one line, planned before any starts, and what came of them."""
from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron_llama.cli import CONF_DIR, parse_overrides
from megatron_llama.config import ConfigError, Problem, format_problems
from megatron_llama.launch.environment import process_context
from megatron_llama.launch.world import find_world
from megatron_llama.plan import Plan
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_USER
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import short_count, text_table
from megatron_llama.tools.compare.report import MOST_POINTS, STYLE
from megatron_llama.tools.sweep.combinations import Combination, Record, Sweep, combinations
from megatron_llama.tools.sweep.starters import Run, as_slurm_jobs, one_after_another, run_dir, run_train_py
from megatron_llama.train.metrics_file import METRICS_FILE, read_run_records

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
    pass  # draws, which a dry run need not import

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


# What a sweep has found: a table for the terminal and one in Markdown, and the curves over one another.


TABLE, PICTURE = "sweep.md", "curves.png"
_SMOOTHED_PARTS = 50
"""Steps of a curve are averaged over one of so many parts of it."""


@dataclass(frozen=True)
class Result:
    """What a run has logged."""

    run: Combination
    status: str
    records: list[dict[str, Any]]

    def row(self, varied: Sequence[str]) -> list[str]:
        """Its row of the table."""
        last = self.records[-1] if self.records else {}
        losses = [record["val_loss"] for record in self.records if record.get("val_loss") is not None]
        speeds = [record["tokens_per_second"] for record in self.records]
        return [
            *(self.run.differing[key] for key in varied),
            self.status,
            f"{last['step']:,}" if last else "-",
            f"{last['reduced_train_loss']:.4f}" if last else "-",
            f"{losses[-1]:.4f}" if losses else "-",
            f"{median(speeds):,.0f}" if speeds else "-",
        ]


def summarize(sweep: Sweep, record: Record) -> str:
    """Writes the table and, where anything was logged, the picture into the sweep's folder; returns what to print."""
    results = [Result(one, record[one].in_words, _logged(sweep.folder / one.name)) for one in sweep.combinations]
    rows = [[*sweep.varied, "status", "step", "loss", "val loss", "tokens/s"], *(r.row(sweep.varied) for r in results)]
    write_atomically(sweep.folder / TABLE, markdown(rows))
    told = [*text_table(rows, left=len(sweep.varied) + 1), "", f"  table   {sweep.folder / TABLE}"]
    drawn = [result for result in results if result.records]
    if drawn:
        write_atomically(sweep.folder / PICTURE, draw(drawn))
        told.append(f"  curves  {sweep.folder / PICTURE}")
    return "\n".join(told) + "\n"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """``rows``, the first of them the heads, as a table in Markdown."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [escaped[0], ["---"] * len(rows[0]), *escaped[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def draw(results: Sequence[Result]) -> bytes:
    """The losses of all runs over their tokens, as the bytes of a PNG: each step thin, their mean over a fiftieth of
    the run thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.style.context(["default", STYLE]):
        figure, axes = pyplot.subplots(figsize=(9.0, 5.0), dpi=130, layout="constrained")
        for index, result in enumerate(results):
            tokens = np.array([record["consumed_tokens"] for record in result.records], dtype=float)
            losses = np.array([record["reduced_train_loss"] for record in result.records], dtype=float)
            every, colour = -(-len(losses) // MOST_POINTS), f"C{index % 10}"
            axes.plot(tokens[::every], losses[::every], color=colour, alpha=0.2, linewidth=0.8)
            width = max(1, len(losses) // _SMOOTHED_PARTS)
            whole = len(losses) // width * width
            means = [values[:whole].reshape(-1, width).mean(axis=1) for values in (tokens, losses)]
            label = ", ".join(f"{key}={value}" for key, value in result.run.differing.items())
            axes.plot(*means, color=colour, linewidth=1.8, linestyle=("-", "--", ":")[index // 10 % 3], label=label)
        axes.xaxis.set_major_formatter(lambda tokens, _: short_count(tokens))
        axes.set_xlabel("consumed tokens")
        axes.set_ylabel("loss (nats per token)")
        axes.legend(loc="upper right", fontsize=8)
        written = io.BytesIO()
        figure.savefig(written, format="png")
        pyplot.close(figure)
    return written.getvalue()


def _logged(folder: Path) -> list[dict[str, Any]]:
    """What a run has logged; nothing where it has not begun."""
    path = folder / METRICS_FILE
    return read_run_records(path) if path.is_file() else []
