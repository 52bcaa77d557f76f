"""``scripts/compile.py``: the ranks of a run are started to compile its graphs, not to train.

With ``--one-per-stage``, one process for each kind of pipeline stage stands for the whole world.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.launch import cli
from megatron_llama.system.exit_status import EXIT_USER
from megatron_llama.tools.mock_run import MOCK_RUN

if TYPE_CHECKING:
    from megatron_llama.config import Config
    from megatron_llama.devices import Device
    from megatron_llama.plan import Plan

ONE_PER_STAGE = "--one-per-stage"
USAGE = f"""\
python scripts/compile.py [{ONE_PER_STAGE}] [group=choice ...] [section.setting=value ...]

Compiles every graph that `python train.py` with the same settings will need, without training: no TensorBoard, no
checkpoints, made-up data. The graphs go to trainer.compile_cache; a run with trainer.compile=true finds them there.
Starts its own ranks, or takes its place under torchrun and srun (sbatch compile.slurm ...), as train.py does.

  {ONE_PER_STAGE}  on this machine alone, for a run of any size: one process for each kind of pipeline stage
                   (trainer.dp=N says how many copies the run will have); each needs its stage's memory
  --help           this text

Examples
  python scripts/compile.py model=llama_15m trainer.tp=2 trainer.micro_batch_size=2
  python scripts/compile.py {ONE_PER_STAGE} model=llama_15m trainer.tp=8 trainer.pp=4 trainer.dp=2

Ends with the numbers of graphs, of successful and of failed compilations. Where run.dir is given, that run's own
files stay as they are: all of this, the report compile.json too, goes to <run.dir>/compile.
Exit status: 0 all graphs were compiled, 2 a mistake in what was asked, else a failure.
"""
FOLDER = "compile"
"""In the run's folder, whose config.yaml, plan.txt and compile.json are the run's."""


def main(argv: Sequence[str]) -> int:
    """Runs ``scripts/compile.py`` with ``argv``; returns the exit status."""
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(USAGE)
        return 0
    from megatron_llama.config import ConfigError, format_problems

    overrides = [argument for argument in argv if argument != ONE_PER_STAGE]
    words = [*overrides, *MOCK_RUN, "data.name=compile", "trainer.compile=true"]
    try:
        _need_no_device(words)
        if len(overrides) == len(argv):
            return cli.main(words, work=compile_one_rank, inside=FOLDER)
        plan, device = _plan(cli.composed(words, inside=FOLDER))
        return _start(plan, device)
    except ConfigError as error:
        sys.stderr.write(format_problems(error) + "\n")
        return EXIT_USER


def compile_one_rank(plan: Plan) -> None:
    """What each rank does."""
    _prepare(plan)
    from megatron_llama.tools.compile.compile_rank import compile_rank

    compile_rank(plan)


def compile_one_representative(plan: Plan) -> None:
    """What each process does that stands for a stage."""
    _prepare(plan)
    from megatron_llama.tools.compile.compile_rank import compile_representative

    compile_representative(plan)


def _prepare(plan: Plan) -> None:
    from megatron_llama.devices import get_device

    for name, value in get_device(plan.config.device.name).ahead_of_time_environment().items():
        os.environ.setdefault(name, value)


def _need_no_device(overrides: list[str]) -> None:
    """Sets what lets the device that is asked for compile without being here, before it is asked whether it is."""
    from megatron_llama.config import ConfigError, load_config
    from megatron_llama.devices import ahead_of_time_environment

    try:
        name = load_config(overrides, cli.CONF_DIR).device.name
    except ConfigError:
        return  # it will be said with all else that is wrong
    for variable, value in ahead_of_time_environment(name).items():
        os.environ.setdefault(variable, value)


def _plan(config: Config) -> tuple[Plan, Device]:
    """The plan of the whole world, and this machine's device."""
    from megatron_llama.config import ConfigError, Problem
    from megatron_llama.devices import get_device
    from megatron_llama.plan import Machine, resolve

    trainer = config.trainer
    world_size = max(1, trainer.tp) * max(1, trainer.pp) * max(1, trainer.dp or 1)
    try:
        device = get_device(config.device.name)
    except ValueError as error:
        raise ConfigError([Problem("device", config.device.name, str(error), "write device=auto")]) from None
    config.device.name = device.name
    # As many as are started here share this machine's memory; an accelerator has one each.
    together = 1 if device.is_accelerator else min(3, max(1, trainer.pp))
    machine = Machine(device.memory_bytes(), together, f"this machine's {device.name}")
    return resolve(config, world_size, machine), device


def _start(plan: Plan, device: Device) -> int:
    """Runs the representatives, all at once."""
    from megatron_llama.launch import run_dir
    from megatron_llama.launch.start import start_ranks
    from megatron_llama.launch.variables import variables

    plan.config.run.dir = plan.config.run.dir or run_dir.default_dir_by_time(plan.config)
    folder = Path(plan.config.run.dir)
    with run_dir.claimed(folder):
        sys.stdout.write(run_dir.record(plan, folder) + "\n")
        environment = variables(device, plan)
        os.environ.update(environment)
        from megatron_llama.tools.compile.compile_rank import representatives

        work, count = partial(compile_one_representative, plan), len(representatives(plan))
        with run_dir.outputs(folder, range(count)) as output_dir:
            return start_ranks(work, count, fork=device.forkable, environment=environment, output_dir=output_dir)
