"""``scripts/compile.py``: starts the ranks of a run to compile its graphs, not to train.

With ``--one-per-stage``, one process for each kind of pipeline stage represents the whole world.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama import cli
from megatron_llama.system.exit_status import EXIT_USER
from megatron_llama.tools.common import MOCK_RUN

if TYPE_CHECKING:
    from megatron_llama.config import Config
    from megatron_llama.plan import Plan

ONE_PER_STAGE = "--one-per-stage"
USAGE = f"""\
python scripts/compile.py [{ONE_PER_STAGE}] [group=choice ...] [section.setting=value ...]

Compiles every graph that `python train.py` with the same settings will need, without training: no TensorBoard, no
checkpoints, random data. The graphs go to trainer.compile_cache; a run with trainer.compile=true finds them there.
Starts its own ranks, or is a rank under torchrun and srun (sbatch compile.slurm ...), as train.py does.

  {ONE_PER_STAGE}  on this machine alone, for a run of any size: one process for each kind of pipeline stage
                   (trainer.dp=N is the run's number of model copies); each needs its stage's memory
  --help           this text

Examples
  python scripts/compile.py model=llama_15m trainer.tp=2 trainer.micro_batch_size=2
  python scripts/compile.py {ONE_PER_STAGE} model=llama_15m trainer.tp=8 trainer.pp=4 trainer.dp=2

Ends with the numbers of graphs, of successful and of failed compilations. Where run.dir is given, that run's own
files stay as they are: all output, the report compile.json too, goes to <run.dir>/compile.
Exit status: 0 all graphs were compiled, 2 a config that can't work, else a failure.
"""
FOLDER = "compile"
"""Inside the run's folder, where config.yaml, plan.txt and compile.json belong to the run itself."""


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
            return cli.main(words, entry=compile_one_rank, subfolder=FOLDER)
        return _start(_plan(cli.parse_overrides(words, subfolder=FOLDER)))
    except ConfigError as error:
        sys.stderr.write(format_problems(error) + "\n")
        return EXIT_USER


def compile_one_rank(plan: Plan, representatives: Sequence[int] | None = None) -> None:
    """What each process does that is started."""
    from megatron_llama.devices import get_device
    from megatron_llama.system import phase

    phase.enter("compiling ahead", phase.UNWATCHED)
    for name, value in get_device(plan.config.device.name).ahead_of_time_environment().items():
        os.environ.setdefault(name, value)
    from megatron_llama.tools.compile.compile_rank import compile_rank

    compile_rank(plan, representatives)


def _need_no_device(overrides: list[str]) -> None:
    """Sets the variables with which the requested device compiles without being here, before it is looked for."""
    from megatron_llama.config import ConfigError, load_config
    from megatron_llama.devices import ahead_of_time_environment

    try:
        name = load_config(overrides, cli.CONF_DIR).device.name
    except ConfigError:
        return  # reported later, with all other problems
    for variable, value in ahead_of_time_environment(name).items():
        os.environ.setdefault(variable, value)


def _plan(config: Config) -> Plan:
    """The plan of the whole world, on this machine's device."""
    from megatron_llama.config import ConfigError, Problem
    from megatron_llama.devices import get_device
    from megatron_llama.plan import Machine, resolve
    from megatron_llama.topology import Grid

    trainer = config.trainer
    if trainer.async_tp:
        rule = f"its products wait for the other ranks' memory, and {ONE_PER_STAGE} leaves these ranks out"
        raise ConfigError([Problem("trainer.async_tp", True, rule, f"leave out {ONE_PER_STAGE}")])
    world_size = Grid.of(trainer).world_size
    try:
        device = get_device(config.device.name)
    except ValueError as error:
        raise ConfigError([Problem("device", config.device.name, str(error), "write device=auto")]) from None
    config.device.name = device.name
    # Representatives on a CPU share this machine's memory; accelerators have their own.
    together = 1 if device.is_accelerator else min(3, max(1, trainer.pp))
    name, fast_bf16 = f"this machine's {device.name}", device.has_fast_bf16()
    machine = Machine(device.memory_bytes(), together, name, fast_bf16=fast_bf16)
    return resolve(config, world_size, machine)


def _start(plan: Plan) -> int:
    """Runs the representatives, all at once."""
    from megatron_llama.launch import run_dir
    from megatron_llama.launch.start import Share, start_ranks

    plan.config.run.dir = plan.config.run.dir or run_dir.default_run_dir(plan.config, None)
    folder, pp = Path(plan.config.run.dir), plan.config.trainer.pp
    # A rank of each kind of pipeline stage: the first, one in the middle, the last.
    ranks = [plan.grid.rank(pp=stage) for stage in sorted({0, min(1, pp - 1), pp - 1})]
    with run_dir.claim_run_dir(folder):
        sys.stdout.write(run_dir.write_config_and_plan(plan, folder) + "\n")
        entry = partial(compile_one_rank, representatives=ranks)
        with run_dir.rank_outputs(folder, range(len(ranks))) as output_dir:
            return start_ranks(plan, entry, Share(len(ranks), output_dir=output_dir))
