"""Which device a config means here and how many ranks: the world that ``resolve`` makes a plan for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_llama.config import Config, ConfigError, Host, Problem, parse_hostfile, parse_hosts
from megatron_llama.config.settings import DEVICES
from megatron_llama.devices import Device, async_tp_missing, async_tp_problem, find_device, get_device
from megatron_llama.launch.environment import ProcessContext
from megatron_llama.plan import Machine, Plan, resolve
from megatron_llama.system.files import read_whole
from megatron_llama.topology import Grid


@dataclass(frozen=True)
class World:
    """A config whose device is known, and the ranks that it means."""

    config: Config
    size: int
    """Ranks in all."""
    device: Device | None
    """None in a dry run about other machines, and where ``problem`` says why it can't be used."""
    problem: Problem | None = None
    nodes: int = 1
    """Machines that the ranks are spread over."""
    hosts: tuple[Host, ...] = ()
    """Where this process is to start the run by ssh: the machines."""

    def plan(self, config: Config | None = None, known: Sequence[Problem] = ()) -> Plan:
        """The plan of this world's config, or of ``config`` in the same world.

        Raises ConfigError with every problem: ``known`` ones, which were found before, the device's, and the config's.
        """
        problems = [] if self.problem is None else [self.problem]
        if self.config.trainer.async_tp and (reason := async_tp_missing(self.config.device.name)):
            problems.append(async_tp_problem(reason))
        machine = None
        if self.device is not None:  # of other machines nothing is known; launch.hosts look at their own memory
            ranks = 1 if self.device.is_accelerator else self.size // self.nodes
            name, accelerator = f"this machine's {self.device.name}", self.device.is_accelerator
            machine = Machine(self.device.memory_bytes(), ranks, name, accelerator, self.device.has_fast_bf16())
        try:
            plan = resolve(config or self.config, self.size, machine, known=known)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        if problems:
            raise ConfigError(problems)
        return plan


def find_world(config: Config, context: ProcessContext | None) -> World:
    """The device and the number of ranks that ``config`` means here; fills in ``config.device.name``.

    Where another program has started the ranks (``context``) it decides; else the devices of this machine, or
    launch.hosts. On a CPU, which has no count of devices, tp * pp * dp decides. Raises ConfigError for a hostfile that
    can't be used.
    """
    grid = Grid.of(config.trainer)
    block, wanted = grid.block, grid.world_size
    facts = find_device(config.device.name)
    accelerator = config.device.name != "auto" and (facts is None or facts.is_accelerator)
    about_others = config.trainer.dp is not None or accelerator
    if config.dry_run and context is None and about_others:
        # About devices that need not be here: asking for them would take seconds and say nothing.
        return World(config, wanted, None)
    by_ssh = context is None and (config.launch.hosts or config.launch.hostfile is not None)
    hosts = tuple(_hosts(config)) if by_ssh else ()
    device, problem = None, None
    if config.device.name in DEVICES:  # else resolve reports it, with the other mistakes
        try:
            device = get_device(config.device.name)
        except ValueError as error:
            instead = "write device=auto to take the best device that is here, or --dry-run to plan"
            problem = Problem("device", config.device.name, str(error), instead)

    def ranks_per_node(nodes: int) -> int:
        """One for each device; on a CPU an equal share of those that are wanted."""
        return device.count() if device is not None and device.is_accelerator else -(-wanted // nodes)

    if by_ssh:  # decided as if the hosts were like this machine; they look again for themselves
        slots = [host.slots for host in hosts if host.slots is not None]
        size = sum(slots) or ranks_per_node(max(1, len(hosts))) * len(hosts) or wanted
        return World(config, size, None, hosts=hosts)
    if device is None:
        return World(config, context.world_size if context else wanted, None, problem)
    config.device.name = device.name
    if context is not None:
        size = context.world_size
        if context.one_per_node:  # one process on a node may start as many ranks as it has devices
            size = sum(context.slots or [ranks_per_node(context.nodes)] * context.nodes)
        return World(config, size, device, nodes=context.nodes)
    if not device.is_accelerator:
        return World(config, wanted, device)
    if config.dry_run and device.count() % block:
        return World(config, wanted, None)
    return World(config, device.count(), device)


def _hosts(config: Config) -> list[Host]:
    """The machines that the config names; of a list with mistakes the good ones, a rule reports the others."""
    launch = config.launch
    if launch.hosts or launch.hostfile is None:
        return parse_hosts(launch.hosts)
    try:
        return parse_hostfile(read_whole(Path(launch.hostfile)).decode())
    except OSError as error:
        rule, instead = f"it can't be read: {error.strerror}", "write its path, or launch.hosts=[a,b]"
    except ValueError as error:
        rule, instead = str(error), "correct it; each host has a line 'name slots=N'"
    raise ConfigError([Problem("launch.hostfile", launch.hostfile, rule, instead)])
