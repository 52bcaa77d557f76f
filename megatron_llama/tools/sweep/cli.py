"""Command line of ``python train.py -m``: plan all runs of a sweep, start them and summarize the results."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType

from megatron_llama.cli import CONF_DIR, NO_PLAN, flush_output, parse_overrides
from megatron_llama.config import ConfigError, Problem, format_problems
from megatron_llama.config.conf_folders import check_current_folder
from megatron_llama.config.problems import write_override
from megatron_llama.launch.environment import process_context
from megatron_llama.launch.world import find_world
from megatron_llama.plan import Plan
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESTART, EXIT_USER
from megatron_llama.system.files import write_atomically
from megatron_llama.system.output import import_pyplot
from megatron_llama.system.programs import BATCH_FOLDER, ROOT
from megatron_llama.system.signals import JOB_SIGNALS, exit_with_parent, handle_signals
from megatron_llama.system.tables import markdown_table, short_count, text_table
from megatron_llama.tools.common import call_slurm, locked_setting, submit_job
from megatron_llama.tools.figures import STYLE, as_png
from megatron_llama.tools.report.curves import LOSS, Curve, Metrics, is_number, read_run_metrics, smoothed
from megatron_llama.tools.sweep.combinations import RUN_DIR, Combination, Sweep, SweepState, combinations
from megatron_llama.train.metrics_file import METRICS_FILE

FLAGS = ("-m", "--multirun")
_SLURM = "--slurm"

STOPPED = (EXIT_RESTART, EXIT_INTERRUPTED, *(128 + number for number in JOB_SIGNALS))
"""Exit statuses of a run stopped by a signal: the sweep stops too, and the same command resumes it."""
_POLL_SECONDS = 5.0

RunFunction = Callable[[Sequence[str]], int]
"""Runs train.py with these arguments and returns its exit status."""


def run_sequentially(sweep: Sweep, state: SweepState, run: RunFunction) -> int | None:
    """Run the unfinished runs. Return the status of a run stopped by a signal, or None after the last run."""
    unfinished = [combination for combination in sweep.combinations if not state[combination].finished]
    for number, combination in enumerate(unfinished, start=1):
        sys.stdout.write(f"\n== run {number} of {len(unfinished)}: {' '.join(combination.overrides)}\n")
        sys.stdout.flush()
        status = run([*combination.overrides, run_dir(sweep, combination)])
        state.update(combination, status=status)
        if status in STOPPED:
            return status
    return None


def run_train_py(arguments: Sequence[str]) -> int:
    """Run ``python train.py --no-plan`` in a subprocess, which ends with this process, and forward signals to it."""
    signals: list[int] = []
    children: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, str(ROOT / "train.py"), NO_PLAN, *arguments]

    def forward(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for child in children:  # a SIGINT of the terminal and this one count as one
            child.send_signal(number)

    with handle_signals((signal.SIGINT, *JOB_SIGNALS), forward):
        children.append(subprocess.Popen(command, preexec_fn=partial(exit_with_parent, os.getpid())))
        for number in signals:  # received before the process started
            children[0].send_signal(number)
        status = children[0].wait()
    if signals and status == 0:  # the signal arrived between runs or at the end of a run
        return EXIT_RESTART
    return 128 - status if status < 0 else status


def run_slurm_jobs(sweep: Sweep, state: SweepState, options: str) -> None:
    """Submit run.slurm for each unfinished run without a queued job, and wait for all jobs.

    After an interruption the same command finds the jobs. Raises ConfigError if sbatch rejects a job.
    """
    for combination in sweep.combinations:
        job = state[combination].job
        if state[combination].finished or (job is not None and _in_queue([job])):
            continue
        words = [*combination.overrides, run_dir(sweep, combination)]
        instead = "correct the options of sbatch, omit --slurm, or start the sweep on a Slurm login node"
        state.update(combination, job=submit_job(options, words, Problem("--slurm", options, "", instead)))
        sys.stdout.write(f"job {state[combination].job}: {' '.join(combination.overrides)}\n")
    waiting = [combination for combination in sweep.combinations if not state[combination].finished]
    sys.stdout.write("Waiting for the jobs. Ctrl-C does not cancel them; run the same command to wait again.\n")
    sys.stdout.flush()
    while waiting:
        queued = _in_queue([str(state[combination].job) for combination in waiting])
        for combination in [combination for combination in waiting if state[combination].job not in queued]:
            state.update(combination, status=_status_of(str(state[combination].job)), job=state[combination].job)
            waiting.remove(combination)
        time.sleep(_POLL_SECONDS if waiting else 0)


def run_dir(sweep: Sweep, combination: Combination) -> str:
    """Return the run.dir override of a run."""
    return write_override(RUN_DIR, str((sweep.folder / combination.name).absolute()))


def _in_queue(jobs: Sequence[str]) -> set[str]:
    """Return the jobs that are queued or running."""
    if (done := call_slurm(["squeue", "--noheader", "--format=%i", "--me"])).returncode:  # the jobs may still run
        return set(jobs)
    return set(jobs) & set(done.stdout.split())


def _status_of(job: str) -> int:
    """Return the exit status of the first rank in the last start of a job."""
    with suppress(OSError, ValueError, IndexError):
        newest = max((BATCH_FOLDER / "logs" / job).glob("*/status"), key=os.path.getmtime)
        return int(newest.read_text(encoding="utf-8").splitlines()[0])
    return EXIT_FAILED


def main(argv: Sequence[str], run: RunFunction = run_train_py) -> int:
    """Run the sweep of ``argv``, which contains -m. Tests replace ``run``.

    Returns:
        The exit status: 0 all runs are done, 1 some failed, 2 config errors (no run was started). If a signal stopped a
        run, its status; the same command resumes the sweep.
    """
    dry = {"--dry-run", "dry_run=true"} & set(argv)
    slurm = next((word.partition("=")[2] for word in argv if word.partition("=")[0] == _SLURM), None)
    overrides = [word for word in argv if word not in (*FLAGS, *dry) and word.partition("=")[0] != _SLURM]
    try:
        check_current_folder()
        if process_context(os.environ) is not None:
            rule = "a sweep starts its own ranks and cannot run as one of several ranks"
            raise ConfigError([Problem("-m", None, rule, "start it without torchrun, srun or mpirun")])
        sweep = combinations(overrides, CONF_DIR)
        state = SweepState(sweep)
        plans = plan_runs(sweep, any_device=slurm is not None or bool(dry))
        sys.stdout.write(plan_table(sweep, plans, state) + "\n")
        if dry:
            return flush_output()
        stopped = None
        with locked_setting(RUN_DIR, sweep.folder):
            if slurm is None:
                stopped = run_sequentially(sweep, state, run)
            else:
                run_slurm_jobs(sweep, state, slurm)
    except ConfigError as error:
        sys.stderr.write(format_problems(error, "This sweep") + "\n")
        return EXIT_USER
    sys.stdout.write("\n" + summarize(sweep, state))
    if stopped is not None:
        sys.stdout.write("Stopped. Run the same command to resume the sweep.\n")
        return stopped
    return 0 if all(state[combination].finished for combination in sweep.combinations) else EXIT_FAILED


def plan_runs(sweep: Sweep, any_device: bool) -> list[Plan]:
    """Plan each run. ``any_device``: allow unavailable devices, as in a dry run.

    Raises ConfigError with the problems of all runs, without duplicates.
    """
    plans, runs_of_problem = list[Plan](), dict[Problem, list[str]]()
    for combination in sweep.combinations:
        try:
            words = [*combination.overrides, run_dir(sweep, combination), *["dry_run=true"] * any_device]
            plan = find_world(parse_overrides(words), None).plan()
            if (url := plan.config.checkpoint.dir) is not None:
                rule = "would be the folder of all runs of the sweep"
                raise ConfigError([Problem("checkpoint.dir", url, rule, "omit it")])
            if (command := plan.config.hook.on_event) is not None:
                raise ConfigError([Problem("hook.on_event", command, "would run for each run of the sweep", "omit it")])
            plans.append(plan)
        except ConfigError as error:
            for problem in error.problems:
                runs_of_problem.setdefault(problem, []).append(combination.name)
    problems = []
    for problem, names in runs_of_problem.items():
        where = "" if len(names) == len(sweep.combinations) else f" (in {', '.join(names)})"
        problems.append(Problem(problem.field, problem.value, problem.rule + where, problem.instead))
    if problems:
        raise ConfigError(problems)
    return plans


def plan_table(sweep: Sweep, plans: Sequence[Plan], state: SweepState) -> str:
    """Format the plans, one row per run."""
    rows = [[*sweep.varied, "parameters", "ranks", "steps", "tokens", "status"]]
    for combination, plan in zip(sweep.combinations, plans, strict=True):
        trainer = plan.config.trainer
        steps = [f"{trainer.steps:,}", short_count(trainer.steps * plan.tokens_per_step)]
        size = [short_count(plan.parameters), f"{plan.world_size:,}"]
        rows.append([*combination.differing.values(), *size, *steps, state[combination].description])
    return "\n".join([f"{len(plans)} runs in {sweep.folder}", "", *text_table(rows, left=len(sweep.varied))])


# Results: a table for the terminal, a Markdown table and a plot of the curves.
TABLE, PICTURE = "sweep.md", "curves.png"


def summarize(sweep: Sweep, state: SweepState) -> str:
    """Write the table and the plot to the folder of the sweep; return the text to print."""
    rows = [[*sweep.varied, "status", "step", "loss", "val loss", "tokens/s"]]
    curves: dict[str, Curve] = {}
    for run in sweep.combinations:
        folder = sweep.folder / run.name
        metrics = read_run_metrics(folder) if (folder / METRICS_FILE).is_file() else Metrics()
        last, speed = metrics.last, metrics.median_speed
        numbers = [f"{last['step']:,}" if last else "-"]
        numbers += [f"{loss:.4f}" if is_number(loss) else "-" for loss in (last.get(LOSS), metrics.logged_validation)]
        numbers.append("-" if speed is None else f"{speed:,.0f}")
        rows.append([*(run.differing[key] for key in sweep.varied), state[run].description, *numbers])
        if LOSS in metrics.steps.names:
            curves[", ".join(f"{key}={value}" for key, value in run.differing.items())] = metrics.steps
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    write_atomically(sweep.folder / TABLE, "\n".join(markdown_table(escaped[0], escaped[1:])) + "\n")
    lines = [*text_table(rows, left=len(sweep.varied) + 1), "", f"  table   {sweep.folder / TABLE}"]
    if curves:
        write_atomically(sweep.folder / PICTURE, draw(curves))
        lines.append(f"  curves  {sweep.folder / PICTURE}")
    return "\n".join(lines) + "\n"


def draw(curves: Mapping[str, Curve]) -> bytes:
    """Plot the losses of all runs over tokens, raw and smoothed; return the bytes of a PNG."""
    pyplot = import_pyplot()
    with pyplot.style.context(["default", STYLE, {"axes.grid": True}]):
        figure, axes = pyplot.subplots(figsize=(9.0, 5.0), dpi=130, layout="constrained")
        for index, (label, curve) in enumerate(curves.items()):
            losses, color = curve.column(LOSS, 1), f"C{index % 10}"
            axes.plot(curve.tokens, losses, color=color, alpha=0.2, linewidth=0.8)
            style = ("-", "--", ":")[index // 10 % 3]
            axes.plot(curve.tokens, smoothed(losses), color=color, linewidth=1.8, linestyle=style, label=label)
        axes.xaxis.set_major_formatter(lambda tokens, _: short_count(tokens))
        axes.set(xlabel="consumed tokens", ylabel="loss (nats per token)")
        axes.legend(loc="upper right", fontsize=8)
    return as_png(figure)
