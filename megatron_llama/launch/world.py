"""Device and number of ranks of a config on this machine, or on its hosts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_llama.config import Config, ConfigError, Problem
from megatron_llama.config.hostfile import Host, parse_hostfile, parse_hosts
from megatron_llama.config.settings import DEVICES
from megatron_llama.devices import Device, async_tp_problem, find_device, get_device, ignored_devices
from megatron_llama.launch.environment import ProcessContext
from megatron_llama.plan import Machine, Plan, resolve
from megatron_llama.system.files import read_whole
from megatron_llama.system.wrapping import wrap
from megatron_llama.topology import Grid


@dataclass(frozen=True)
class World:
    """A config with its device and number of ranks."""

    config: Config
    size: int
    """World size."""
    device: Device | None
    """None in a dry run for other machines, and if ``problem`` is set."""
    problem: Problem | None = None
    nodes: int = 1
    """Number of machines."""
    hosts: tuple[Host, ...] = ()
    """Machines on which this process starts the run over ssh."""

    def plan(self, config: Config | None = None, known: Sequence[Problem] = ()) -> Plan:
        """Plan this config, or ``config`` on the same ranks.

        Raises ConfigError with all problems: ``known`` ones, of the device and of the config.
        """
        problems = [] if self.problem is None else [self.problem]
        device = find_device(self.config.device.name)
        if self.config.trainer.async_tp and device is not None and not device.has_async_tp:
            reason = f"device={device.name} has no matmuls that overlap with gathers and scatters"
            problems.append(async_tp_problem(reason))
        machine = None
        if self.device is not None:  # other machines are unknown; hosts of launch.hosts check their own memory
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
    """Find the device and the number of ranks of ``config``; set ``config.device.name``.

    The number of ranks comes from the launcher (``context``), launch.hosts, or the devices of this machine; on a CPU it
    is tp * cp * pp * dp. Raises ConfigError for an invalid hostfile.
    """
    grid = Grid.of(config.trainer)
    block, requested = grid.ranks_per_replica, grid.world_size
    named = find_device(config.device.name)  # None for auto and unknown names
    accelerator = config.device.name != "auto" and (named is None or named.is_accelerator)
    for_other_machines = config.trainer.dp is not None or accelerator
    if config.dry_run and context is None and for_other_machines:
        # For other devices: querying local ones would take seconds.
        return World(config, requested, None)
    by_ssh = context is None and (config.launch.hosts or config.launch.hostfile is not None)
    hosts = tuple(_hosts(config)) if by_ssh else ()
    device, problem = None, None
    if config.device.name in DEVICES:  # otherwise resolve reports it, with the other problems
        try:
            device = get_device(config.device.name)
            if config.device.name == "auto" and not device.is_accelerator and (context is None or context.rank == 0):
                sys.stderr.writelines(f"{wrap(reason)}\n" for reason in ignored_devices())
        except ValueError as error:
            instead = "write device=auto for the best available device, or add --dry-run"
            problem = Problem("device", config.device.name, str(error), instead)

    def ranks_per_node(nodes: int) -> int:
        """Return one rank per device; on a CPU an equal share of the requested ranks."""
        return device.count() if device is not None and device.is_accelerator else -(-requested // nodes)

    if by_ssh:  # as if the hosts equal this machine; each host checks itself
        slots = [host.slots for host in hosts if host.slots is not None]
        size = sum(slots) or ranks_per_node(max(1, len(hosts))) * len(hosts) or requested
        return World(config, size, None, hosts=hosts)
    if device is None:
        return World(config, context.world_size if context else requested, None, problem)
    config.device.name = device.name
    if context is not None:
        size = context.world_size
        if context.one_per_node:  # a node's process starts one rank per device
            size = sum(context.slots or [ranks_per_node(context.nodes)] * context.nodes)
        return World(config, size, device, nodes=context.nodes)
    if not device.is_accelerator:
        return World(config, requested, device)
    if config.dry_run and device.count() % block:  # the layout does not fit here: a plan for other devices
        return World(config, requested, None)
    # A given trainer.dp may use a part of the devices.
    limited = config.trainer.dp is not None and requested < device.count()
    return World(config, requested if limited else device.count(), device)


def _hosts(config: Config) -> list[Host]:
    """Return the hosts of the config. Invalid entries are omitted; a planning rule reports them."""
    launch = config.launch
    if launch.hosts or launch.hostfile is None:
        return parse_hosts(launch.hosts)
    try:
        return parse_hostfile(read_whole(Path(launch.hostfile)).decode())
    except OSError as error:
        rule, instead = f"cannot be read: {error.strerror}", "write the path of a hostfile, or launch.hosts=[a,b]"
    except ValueError as error:
        rule, instead = str(error), "write one line 'name slots=N' per host"
    raise ConfigError([Problem("launch.hostfile", launch.hostfile, rule, instead)])
