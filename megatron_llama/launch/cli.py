"""The command line: from overrides to a plan that is printed, or to ranks that run it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_RESTART, EXIT_USER

if TYPE_CHECKING:
    from megatron_llama.config import Config, Problem
    from megatron_llama.devices import Device
    from megatron_llama.launch.process_context import Place
    from megatron_llama.plan import Machine, Plan

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"

USAGE = """\
python train.py [--dry-run] [--help] [group=choice ...] [section.setting=value ...]

Trains a Llama in 3D parallel. Started plainly, it starts one process per device of this machine (on a CPU:
tp x pp x dp processes); under torchrun or srun it takes its place among the ranks, or starts those of its node.

  --dry-run   print the plan and start nothing (same as dry_run=true); trainer.dp=N plans for other machines
  --help      this text

Examples
  python train.py                                                 a small Llama on this machine
  python train.py model=llama_15m trainer.tp=2 trainer.steps=500  another preset, two ranks share each matrix
  python train.py --dry-run model=llama70b trainer.tp=8 trainer.pp=16 trainer.dp=4
                                                                  what 512 ranks would do, on a laptop
  python train.py experiment=recipe.yaml trainer.steps=500        a recipe: a file, or a name in conf/experiment/
  torchrun --nnodes 2 --nproc_per_node 8 ... train.py model=llama7b trainer.tp=8
  srun --nodes 4 --ntasks-per-node 8 python train.py model=llama7b trainer.tp=8 trainer.zero=1
  sbatch --nodes 4 run.slurm model=llama7b trainer.tp=8           the same as a job that survives its time limit
  python train.py launch.hosts=[a,b,c] model=llama7b trainer.tp=8 the same over ssh

Groups (the files in conf/)
{groups}
Every setting with its type, default, unit and meaning is in docs/config.md.
Exit status: 0 done, 2 a mistake in what was asked, 75 stopped after saving (start it again), else a failure.
"""


def main(argv: Sequence[str], work: Callable[[Plan], None] | None = None, inside: str | None = None) -> int:
    """Runs ``train.py`` with ``argv``; returns the exit status. ``work`` replaces what a rank does.

    ``inside`` names a folder in the ``run.dir`` that is asked for, for what is not the run itself.
    """
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(usage())
        return 0
    overrides = [argument for argument in argv if argument != "--dry-run"]
    if len(overrides) < len(argv):
        overrides.append("dry_run=true")  # last, so that it wins
    # Imported here: --help needs none of it.
    from megatron_llama.launch.run_dir import tell_batch_script

    status, place = _run_as_asked(overrides, work or run_one_rank, inside)
    if place is None or place.rank == 0:
        tell_batch_script(status)
    return status


def _run_as_asked(overrides: list[str], work: Callable[[Plan], None], inside: str | None) -> tuple[int, Place | None]:
    """Does what the command line asks for; returns the exit status, and whose it is."""
    from megatron_llama.config import ConfigError, format_problems
    from megatron_llama.launch.prepare_data import PreparationStopped, with_finished
    from megatron_llama.launch.process_context import place_of
    from megatron_llama.launch.rendezvous import LaunchFailed
    from megatron_llama.plan import format_plan, resolve

    place = None
    try:
        place = place_of(os.environ)
        config = composed(overrides, place, inside)
        if config.dry_run:
            decision = decide(with_finished(config), place)
            plan = resolve(decision.config, decision.world_size, decision.machine)
            if place is None or place.rank == 0:
                _look_into_data(plan.config)
                sys.stdout.write(format_plan(plan).rstrip() + "\n")
            return 0, place
        return _run(config, place, work, overrides), place
    except ConfigError as error:
        return _refuse(format_problems(error), place), place
    except LaunchFailed as error:
        sys.stderr.write(f"The launch failed: {error}.\n")
        return EXIT_FAILED, place
    except PreparationStopped as stopped:
        sys.stderr.write(f"Stopped: {stopped}.\n")
        return EXIT_RESTART, place


def composed(overrides: Sequence[str], place: Place | None = None, inside: str | None = None) -> Config:
    """The config that a command line asks for; its folder is the one ``inside`` run.dir. Raises ConfigError with all
    that is wrong with it, not only with what can't be read: the user should hear of it at once."""
    from megatron_llama.config import ConfigError, load_config
    from megatron_llama.plan import resolve

    try:
        config = load_config(overrides, CONF_DIR)
        told = place is not None and place.starter == "hosts"  # then the folder is named already
        if inside and config.run.dir and not told:
            config.run.dir = str(Path(config.run.dir) / inside)
        return config
    except ConfigError as error:
        if error.config is None:
            raise
        decision = decide(error.config, place)
        resolve(decision.config, decision.world_size, decision.machine, known=error.problems)
        raise


def usage() -> str:
    """The text of ``--help``."""
    lines = []
    for group in sorted(path for path in CONF_DIR.iterdir() if path.is_dir()):
        choices = sorted(path.stem for path in group.glob("*.yaml"))
        lines.append(f"  {group.name + '=':12s}{' | '.join(choices)}\n")
    return USAGE.format(groups="".join(lines))


def run_one_rank(plan: Plan) -> None:
    """What a rank does. The only place that calls into the training itself."""
    from megatron_llama.train.run_rank import run_rank

    run_rank(plan)


@dataclass(frozen=True)
class Decision:
    """A config whose device is known, and what it is resolved against."""

    config: Config
    world_size: int
    device: Device | None
    """None in a dry run that speaks of other machines."""
    problem: Problem | None = None
    """Why the device that was asked for can't be used."""
    nodes: int = 1
    """Machines that the ranks are spread over."""

    @property
    def machine(self) -> Machine | None:
        """The memory that the ranks on this machine share; None where that is not the question."""
        from megatron_llama.plan import Machine

        if self.device is None:
            return None
        ranks = 1 if self.device.is_accelerator else self.world_size // self.nodes
        return Machine(self.device.memory_bytes(), ranks, f"this machine's {self.device.name}")


def decide(config: Config, place: Place | None) -> Decision:
    """Which device and how many ranks ``config`` means here. Fills in ``device.name``."""
    from megatron_llama.launch import ssh as hosts

    asked = max(1, config.trainer.tp) * max(1, config.trainer.pp)
    wanted = asked * max(1, config.trainer.dp or 1)
    elsewhere = config.trainer.dp is not None or config.device.name not in ("auto", "cpu")
    if config.dry_run and place is None and elsewhere:
        # About devices that need not be here: asking for them would take seconds and say nothing.
        return Decision(config, wanted, None)
    device, problem = _device(config)
    if place is None and hosts.asked_for(config):
        return _decide_for_hosts(config, wanted, device)
    if device is None:
        return Decision(config, place.world_size if place else wanted, None, problem)
    config.device.name = device.name
    if place is not None:
        world = place.world_size
        if place.one_per_node:  # one task on a node may start as many ranks as it has devices
            world = sum(place.slots or [_ranks_of_a_node(device, wanted, place.nodes)] * place.nodes)
        return Decision(config, world, device, nodes=place.nodes)
    if not device.is_accelerator or (config.dry_run and device.count() % asked):
        return Decision(config, wanted, device if not device.is_accelerator else None)
    return Decision(config, device.count(), device)


def _decide_for_hosts(config: Config, wanted: int, device: Device | None) -> Decision:
    """The world that launch.hosts means, if the hosts are like this machine. They look again for themselves."""
    from megatron_llama.launch.ssh import hosts_of

    hosts = hosts_of(config)
    if not hosts:  # none of them has a name; a rule will say so
        return Decision(config, wanted, None)
    slots = [host.slots for host in hosts if host.slots is not None]
    return Decision(config, sum(slots or [_ranks_of_a_node(device, wanted, len(hosts))] * len(hosts)), None)


def _ranks_of_a_node(device: Device | None, wanted: int, nodes: int) -> int:
    """One for each device; on a CPU, and where there is none to ask, as many as hold the ``wanted`` ones together."""
    return device.count() if device is not None and device.is_accelerator else -(-wanted // nodes)


def _device(config: Config) -> tuple[Device | None, Problem | None]:
    """The device that the config asks for, or why it can't be used."""
    from megatron_llama.config import Problem
    from megatron_llama.config.settings import DEVICES
    from megatron_llama.devices import get_device

    if config.device.name not in DEVICES:
        return None, None  # resolve says so, with the others' mistakes
    try:
        return get_device(config.device.name), None
    except ValueError as error:
        rule, instead = str(error), "write device=auto to take the best device that is here, or --dry-run to plan"
        return None, Problem("device", config.device.name, rule, instead)


def _plan(decision: Decision) -> Plan:
    """The plan of a run; every problem, the device's included, in one error."""
    from megatron_llama.config import ConfigError
    from megatron_llama.plan import resolve

    problems = [] if decision.problem is None else [decision.problem]
    try:
        plan = resolve(decision.config, decision.world_size, decision.machine)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return plan


def _look_into_data(config: Config) -> None:
    """Raises ConfigError for data that is here and can't be used: the ranks find out only once they have a model."""
    from megatron_llama.config import ConfigError
    from megatron_llama.config.data_prefixes import record_files
    from megatron_llama.plan.rules.paths import check_data as what_is_missing

    if record_files(config.data) or what_is_missing(config, os.path.exists):
        return  # a dry run, which has said so
    from megatron_llama.data.checks import check_data

    problems = check_data(config)
    if problems:
        raise ConfigError(problems)


def _with_prepared(decision: Decision, speaks: bool = True) -> Plan:
    """The plan once the files of records are prepared; what is wrong with everything else has been said by then."""
    from megatron_llama.launch.prepare_data import with_prepared

    return _plan(replace(decision, config=with_prepared(decision.config, speaks=speaks)))


def _run(config: Config, place: Place | None, work: Callable[[Plan], None], overrides: list[str]) -> int:
    """Starts all ranks, or is, or starts, those that ``place`` says."""
    from megatron_llama.launch import run_dir
    from megatron_llama.launch import ssh as hosts
    from megatron_llama.launch.join import join

    decision = decide(config, place)
    plan = _plan(decision)  # first: what is wrong must be said before the ranks talk to each other
    if place is not None:
        assert decision.device is not None, "_plan refuses a device that is not here"
        return join(plan, decision.device, place, work, partial(_with_prepared, decision, place.rank == 0))
    if not hosts.asked_for(config):  # the hosts have disks of their own
        plan = _with_prepared(decision)
        _look_into_data(plan.config)
    plan.config.run.dir = config.run.dir or run_dir.default_dir_of_job(config, os.environ.get("SLURM_JOB_ID"))
    run_dir.tell_batch_script("running", plan.config.run.dir)
    if hosts.asked_for(config):
        return _with_restarts(plan, lambda: hosts.start_on_hosts(plan, overrides))
    assert decision.device is not None, "_plan refuses a device that is not here"
    return _start_here(plan, decision.device, work)


def _start_here(plan: Plan, device: Device, work: Callable[[Plan], None]) -> int:
    """Starts the ranks on this machine and waits for them."""
    from megatron_llama.launch import run_dir
    from megatron_llama.launch.start import start_ranks
    from megatron_llama.launch.variables import variables

    folder = Path(str(plan.config.run.dir))
    with run_dir.claimed(folder):
        sys.stdout.write(run_dir.record(plan, folder) + "\n")
        environment = variables(device, plan)
        if device.forkable:
            os.environ.update(environment)
            if work.__module__.startswith("megatron_llama."):
                import megatron_llama.train.run_rank  # noqa: F401  imported once here, and not in each rank
        with run_dir.outputs(folder, range(plan.world_size)) as output_dir:
            start = partial(
                start_ranks,
                partial(work, plan),
                plan.world_size,
                fork=device.forkable,
                environment=environment,
                output_dir=output_dir,
            )
            return _with_restarts(plan, start)


def _with_restarts(plan: Plan, start: Callable[[], int]) -> int:
    """Starts a run that fails again, as often as trainer.max_restarts allows; returns the last exit status."""
    allowed = plan.config.trainer.max_restarts
    for restart in range(1, allowed + 1):
        status = start()
        if status != EXIT_FAILED:
            return status
        sys.stderr.write(f"\nStarting again, {restart} of {allowed} times, from the newest checkpoint.\n\n")
        sys.stderr.flush()
        if plan.config.checkpoint.resume == "never":  # that was about the first start
            plan.config.checkpoint.resume = "auto"
    return start()


def _refuse(text: str, place: Place | None) -> int:
    """Says what is wrong with what was asked: once, although every rank has found it."""
    if place is not None and place.rank > 0:
        from megatron_llama.launch.rank_process import CONSEQUENCE_DELAY_SECONDS

        # A starter ends all ranks with the first that ends; rank 0 must have spoken by then.
        time.sleep(CONSEQUENCE_DELAY_SECONDS)
    # Ranks on one machine see the same files and devices. Another machine may lack what the first one has: where the
    # job still goes on by now, rank 0 had no complaint and this is news.
    if place is None or place.local_rank == 0:
        sys.stderr.write(text + "\n")
    return EXIT_USER
