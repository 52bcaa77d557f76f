"""Command line of train.py: print the plan of a config, or start the ranks that run it."""

from __future__ import annotations

import copy
import errno
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama import event_hook, optional_tools
from megatron_llama.system.errors import PATHS, LaunchFailed, Stopped, machine_fault
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PIPE, EXIT_RESTART, EXIT_USER
from megatron_llama.system.files import copies_folder, remove_orphans
from megatron_llama.system.missing_packages import require_packages
from megatron_llama.system.output import set_spill_folder, stdout_loss
from megatron_llama.system.programs import CONF_DIR, conf_folders, name_commands, option_name
from megatron_llama.system.rerun_command import note_command
from megatron_llama.system.signals import ignore_signals
from megatron_llama.system.tables import gib
from megatron_llama.system.ulimits import check_run, raise_file_limit
from megatron_llama.system.wrapping import fill, wrap

if TYPE_CHECKING:
    from megatron_llama.config import Config, Problem
    from megatron_llama.launch.environment import ProcessContext
    from megatron_llama.launch.rank import Entry
    from megatron_llama.plan import Plan

NO_PLAN = "--no-plan"
"""Flag of a sweep's runs: the sweep has printed a table of the plans."""
MOST_LISTED = 6
"""Overrides that the plan of a resumed run lists."""

USAGE = """\
usage: python train.py [-m [--slurm=OPTIONS]] [--dry-run] [--no-plan] [--help]
                       [group=choice ...] [section.setting=value ...]

Train a Llama model with 3D parallelism. By default, one process per device of
this host is started (on a CPU: tp x cp x pp x dp processes). Under torchrun,
srun or mpirun, the process becomes a rank or starts the ranks of its node.

  -m          start a run for each combination of values, as in
              optim.lr=1e-3,3e-3; --slurm=OPTIONS submits them by sbatch
  --dry-run   print the plan and exit (same as dry_run=true);
              trainer.dp=N plans for other hosts
  --no-plan   print the path of plan.txt in place of the plan
  --help      print this text and exit

Unset values are chosen by model and device, and the plan lists them. On an
accelerator: the model's sequence length, bf16, and torch.compile for long
runs. On a CPU: short sequences in fp32.

Examples
  A small Llama on this host:
    python train.py
  Another preset; two ranks share each matrix:
    python train.py model=llama_15m trainer.tp=2 trainer.steps=500
  The plan of 512 ranks, on a laptop:
    python train.py --dry-run model=llama70b data=mock \\
        trainer.tp=8 trainer.pp=16 trainer.dp=4
  The settings of an existing run, for more steps:
    python train.py run.dir=runs/mine trainer.steps=1000
  A recipe, from a file or by its name in conf/experiment/:
    python train.py experiment=recipe.yaml trainer.steps=500
  A pretraining recipe, scaled down to try it:
    python train.py +experiment=pretrain_llama7b +scaled=laptop
  Several nodes, by torchrun, srun, sbatch (restarts at the time limit) or ssh:
    torchrun --nnodes 2 --nproc_per_node 8 ... \\
        train.py model=llama7b trainer.tp=8
    srun --nodes 4 --ntasks-per-node 8 \\
        python train.py model=llama7b trainer.tp=8
    sbatch --nodes 4 run.slurm model=llama7b trainer.tp=8
    python train.py launch.hosts=[a,b,c] model=llama7b trainer.tp=8

Experiments (+experiment=NAME; the command line overrides the file)
{experiments}
Groups (files in conf/)
{groups}
docs/reference/config.md lists all settings with type, default and meaning.
Exit status: 0 done; 2 user error; 75 stopped after saving (the last line
is the command that resumes); others: failure.
"""


def main(argv: Sequence[str], entry: Entry | None = None, subfolder: str | None = None) -> int:
    """Run ``train.py`` with ``argv``; return the exit status.

    Args:
        entry: Replaces the training in each rank.
        subfolder: Folder in the requested ``run.dir``, for output that is not the run itself.
    """
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(usage())
        return flush_output()
    overrides = [argument for argument in argv if argument not in ("--dry-run", NO_PLAN)]
    if "--dry-run" in argv:
        overrides.append("dry_run=true")  # last, so that it wins
    try:
        return _report_errors(overrides, entry, subfolder, prints_plan=NO_PLAN not in argv)
    except KeyboardInterrupt:  # before the ranks start; the imports may be what was interrupted
        sys.stderr.write("Stopped by Ctrl-C before the start.\n")
        return EXIT_INTERRUPTED


def _report_errors(overrides: list[str], entry: Entry | None, subfolder: str | None, prints_plan: bool) -> int:
    """Run the command; turn its errors into one message and an exit status."""
    # Imported here because --help does not need it, and before the try so that import errors surface.
    from megatron_llama.config import ConfigError, format_problems
    from megatron_llama.launch.environment import process_context
    from megatron_llama.launch.failure_cause import CONSEQUENCE_DELAY_SECONDS
    from megatron_llama.launch.run_dir import report_to_batch_script

    context, folder = None, None
    try:
        context = process_context(os.environ)
        note_command(overrides, None if context is None else (context.launcher, context.nodes))
        config = parse_overrides(overrides, context, subfolder, True)
        names = Counter(override.partition("=")[0].lstrip("+") for override in {*overrides})
        for name in [name for name, count in names.items() if count > 1] * (context is None or context.rank == 0):
            sys.stderr.write(f"train.py: {name} is given more than once; the last value is used\n")
        status, folder = _run(config, context, overrides, entry, prints_plan)
    except ConfigError as error:
        status = EXIT_USER
        if context is not None and context.rank > 0:
            # A launcher ends all ranks when the first one ends; rank 0 must report before that.
            time.sleep(CONSEQUENCE_DELAY_SECONDS)
        # Ranks of one host have the same files and devices, so one rank reports. If the job still runs at this point,
        # rank 0 found no problem, and only this host has it.
        if context is None or context.local_rank == 0:
            sys.stderr.write(format_problems(error) + "\n")
    except LaunchFailed as error:
        sys.stderr.write(wrap(f"The launch failed: {error}.") + "\n")
        status = EXIT_FAILED
    except Stopped as stopped:
        sys.stderr.write(f"Stopped: {stopped}.\n")
        status = EXIT_RESTART
    except (OSError, MemoryError, RuntimeError, ImportError, SystemError) as error:
        fault = machine_fault(error)
        if fault is None:
            raise
        sys.stderr.write(f"{wrap(fault)}\n")
        status = EXIT_USER if getattr(error, "errno", None) in PATHS else EXIT_FAILED
    ignore_signals()
    if context is None or context.rank == 0:
        report_to_batch_script(status)
    if folder is not None and status in (0, EXIT_FAILED):  # not after a signal, when a scheduler may kill this process
        _write_report(folder)
    event_hook.finish()
    return status


def _write_report(folder: Path) -> None:
    """Write report.html of a run that has ended. A failure is a warning: it must not change the exit status."""
    try:
        if write := optional_tools.load(optional_tools.REPORT):
            write(folder)
    except (Exception, KeyboardInterrupt) as error:
        rules = "; ".join(problem.rule for problem in getattr(error, "problems", ()))
        reason = " ".join((rules or str(error) or type(error).__name__).split())
        sys.stderr.write(f"WARNING: {folder / optional_tools.REPORT_FILE} was not written: {reason}\n")


def usage() -> str:
    """Return the text of ``--help``."""
    groups: dict[str, dict[str, Path]] = {}
    for folder in conf_folders(CONF_DIR):
        for group in sorted(path for path in folder.glob("*") if path.is_dir()):
            files = {option_name(file, group): file for file in sorted(group.rglob("*.yaml"))}
            groups.setdefault(group.name, {}).update(files)
    experiments = groups.pop("experiment")
    width = max(map(len, experiments))
    recipes = [fill(f"  {name:{width}}  ", describe_recipe(file)) + "\n" for name, file in experiments.items()]
    choices = {group: " | ".join(options) for group, options in sorted(groups.items()) if options}
    lines = [fill(f"  {name + '=':12s}", listed) + "\n" for name, listed in choices.items()]
    return name_commands(USAGE).format(experiments="".join(recipes), groups="".join(lines))


def describe_recipe(recipe: Path) -> str:
    """Return the description of a recipe: the first comment of its file."""
    comments = (line[2:] for line in recipe.read_text(encoding="utf-8").splitlines() if line.startswith("# "))
    described = next((line for line in comments if not line.startswith("@package")), "")
    return described.removesuffix(" Not run on hardware.")


def parse_overrides(
    overrides: Sequence[str], context: ProcessContext | None = None, subfolder: str | None = None, resumes: bool = False
) -> Config:
    """Return the config of a command line; ``resumes`` takes other settings from the run in ``run.dir``.

    Raises:
        ConfigError: with all problems of the config, not only the unreadable overrides.
    """
    from megatron_llama.config import ConfigError, load_config
    from megatron_llama.launch.world import find_world

    try:
        config = load_config(overrides, CONF_DIR, resumes=resumes)
    except ConfigError as error:
        if error.config is not None:
            find_world(error.config, context).plan(known=error.problems)
        raise
    named_by_launcher = context is not None and context.launcher == "hosts"  # then with its subfolder
    if subfolder and config.run.dir and not named_by_launcher:
        config.run.dir = str(Path(config.run.dir) / subfolder)
    return config


def _run(
    config: Config, context: ProcessContext | None, overrides: list[str], entry: Entry | None, prints_plan: bool
) -> tuple[int, Path | None]:
    """Print the plan, become one of the run's processes, or start them.

    Returns:
        The exit status, and the folder of a run that this process trained as process 0; else None.
    """
    if not config.dry_run:
        require_packages()
        raise_file_limit()
        if too_small := check_run():
            raise LaunchFailed(too_small)
    from megatron_llama.config import ConfigError
    from megatron_llama.config.stored_settings import copies_of
    from megatron_llama.launch.world import find_world

    if entry is not None:  # a tool's work, such as a profile
        config.hook.on_event = None
    requested = copy.deepcopy(config)
    world = find_world(config, context)
    plan = world.plan()  # first, so that errors are reported before data is prepared or ranks meet
    if not config.dry_run and (problems := _fetch_weights(plan)):
        raise ConfigError(problems)
    is_first = context is None or context.rank == 0
    if plan.raw_data_files and (config.dry_run or not world.hosts):  # hosts may have separate disks
        from data_prep.lib.prepare_at_start import prepare_datasets

        files, length = plan.raw_data_files, plan.config.data.length
        plan = world.plan(prepare_datasets(world.config, files, length, make=not config.dry_run, quiet=not is_first))
    # As typed: device=auto and raw data files, which a later start may find or prepare elsewhere.
    plan = replace(plan, requested=requested, chosen=(*_describe_source(config, overrides), *plan.chosen))
    if config.dry_run:
        return _print_plan(plan) if is_first else flush_output(), None

    if freed := remove_orphans(keep=copies_of(plan.run_dir, config) if config.run.dir else ""):
        sys.stderr.write(f"freed {gib(freed)} in {copies_folder()}: copies in memory of deleted runs\n")
    from megatron_llama.launch.other_launchers import join
    from megatron_llama.launch.rank import TRAIN
    from megatron_llama.launch.run_dir import choose_run_dir
    from megatron_llama.launch.ssh import run_on_hosts
    from megatron_llama.launch.start import run_here

    if context is not None:
        status = join(plan, world, context, entry or TRAIN, prints_plan)
        return status, plan.run_dir if is_first and entry is None else None
    choose_run_dir(plan)
    set_spill_folder(Path(str(plan.config.run.dir)))
    if world.hosts:
        return run_on_hosts(plan, world.hosts, overrides if prints_plan else [*overrides, NO_PLAN]), None
    if problems := _check_datasets(plan):  # else the ranks would fail only after building a model
        raise ConfigError(problems)
    return run_here(plan, entry or TRAIN, prints_plan), plan.run_dir if entry is None else None


def _describe_source(config: Config, overrides: Sequence[str]) -> Iterator[str]:
    """Yield a line if run.dir has a run: whether its settings are used, and which settings override them."""
    from megatron_llama.config.stored_settings import NAME, has_run

    folder = Path(config.run.dir) if config.run.dir is not None else None
    if folder is None or config.checkpoint.resume == "never" or not (folder / NAME).is_file():
        return
    if not has_run(folder):
        yield f"settings of this command only: {folder} has no checkpoint to resume from"
        return
    others = [text for text in overrides if text.partition("=")[0] not in ("run.dir", "dry_run")]
    listed = ", ".join(others) if len(others) <= MOST_LISTED else f"{len(others)} on the command line"
    yield f"settings from {folder / NAME}" + (f", except {listed}" if others else "")


def _print_plan(plan: Plan) -> int:
    """Print the plan of a dry run; return the exit status."""
    from megatron_llama.config import ConfigError
    from megatron_llama.plan import format_plan

    if problems := _check_datasets(plan):
        raise ConfigError(problems)
    sys.stdout.write(format_plan(plan).rstrip() + "\n")
    return flush_output()


def _fetch_weights(plan: Plan) -> list[Problem]:
    """Download missing weights of ``init_from``, or return their problem, before data is prepared; no dry run does."""
    from megatron_llama.arch.recognize_format import is_foreign
    from megatron_llama.config.hf_config import has_weights, missing_weights
    from megatron_llama.config.hub import fetch_weights
    from megatron_llama.config.stored_settings import has_run

    folder, run_dir = plan.config.init_from, plan.config.run.dir
    resumes = plan.config.checkpoint.resume not in ("auto", "never") or (run_dir and has_run(Path(run_dir)))
    if folder is None or resumes or not Path(folder).is_dir() or is_foreign(folder):
        return []
    problems = fetch_weights(folder)
    return problems if problems or has_weights(Path(folder)) else [missing_weights(Path(folder))]


def _check_datasets(plan: Plan) -> list[Problem]:
    """Return the problems of existing datasets. A dry run may lack some."""
    from megatron_llama.plan.rules.data import check_data as missing_data

    if plan.config.data.mock or plan.raw_data_files or missing_data(plan.config, os.path.exists):
        return []
    from megatron_llama.data.checks import check_data

    return check_data(plan.config)


def flush_output() -> int:
    """Flush stdout; return an error status if output was lost."""
    sys.stdout.flush()
    loss = stdout_loss()
    if loss == os.strerror(errno.EPIPE):  # the reader, such as head, exited
        return EXIT_PIPE
    if loss is not None:
        sys.stderr.write(f"The output could not be written: {loss}\n")
    return 0 if loss is None else EXIT_FAILED
