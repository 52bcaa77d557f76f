"""Hardware, ranks and batch of a run that a tool plans. All tools that plan use this module, so that they agree."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import yaml

from megatron_llama import cli
from megatron_llama.config import Config, ConfigError, Problem
from megatron_llama.config.problems import closest_match
from megatron_llama.devices import HOST, find_device
from megatron_llama.launch.world import World, find_world
from megatron_llama.plan.defaults_and_notes import is_large
from megatron_llama.system.tables import plural
from megatron_llama.tools.cluster_settings import CLUSTER, ClusterConfig, load_section
from megatron_llama.tools.forecast import hardware as hardware_table
from megatron_llama.tools.forecast.hardware import HardwareSpec
from megatron_llama.topology import Grid

AUTO = "auto"
BATCH = "trainer.global_batch_size"
_STATES_BATCH = (BATCH, "experiment")  # overrides that state the batch
RECIPES = "pretrain_*.yaml"


@dataclass(frozen=True)
class Hardware:
    """Hardware that a tool plans for."""

    spec: HardwareSpec | None
    """Row of the hardware table; None: this machine."""
    kind: str
    """Setting ``device.name`` of the run."""
    note: str | None = None
    """How the hardware was chosen, unless the user named it."""

    @property
    def title(self) -> str:
        """Name for titles."""
        if self.spec is not None:
            return f"{self.spec.name} (device={self.kind})"
        return f"device={self.kind}" if self.kind != AUTO else "no device set (defaults of a CPU)"

    def head(self) -> list[str]:
        """Return the first lines of a report: the note, if any."""
        return [] if self.note is None else [self.note, ""]


@dataclass(frozen=True)
class PlannedRun:
    """Config of a command line, with the hardware and the ranks that a tool plans for."""

    world: World
    cluster: ClusterConfig
    """Machines; device and nodes are set if ``hardware`` has a spec."""
    hardware: Hardware
    devices: int
    """Number of devices."""
    names_cluster: bool
    """Whether the command line sets ``cluster``."""


def read_planned_run(overrides: Sequence[str], extra: Sequence[str] = (), *, always_named: bool = False) -> PlannedRun:
    """Return the planned run of a command line.

    Args:
        overrides: Settings of train.py and of ``cluster``.
        extra: Overrides that the tool appends.
        always_named: Plan small models for the default hardware too, instead of this machine.

    Raises ConfigError with all problems of the settings.
    """
    cluster, rest, problems = load_section(ClusterConfig, CLUSTER, overrides)
    config = read_config(rest, extra, problems)
    hardware, more = find_hardware(config or Config(), cluster, overrides, always_named=always_named)
    problems += more
    if problems or config is None or hardware is None:
        raise ConfigError(problems)
    names_cluster = len(rest) < len(overrides)
    if hardware.spec is None:
        world = find_world(config, None)
        kind = world.config.device.name
        note = (
            "device is not set: planned with a CPU's defaults. device=NAME or\n"
            "cluster.device=NAME plans for an accelerator."
        )
        local = Hardware(None, kind, note if kind == AUTO else None)
        return PlannedRun(world, cluster, local, world.size, names_cluster)
    config.device.name = hardware.kind
    spec = hardware.spec
    if cluster.devices_per_node:
        spec = replace(spec, per_node=cluster.devices_per_node)
    ranks, nodes, devices = count_ranks(config, cluster, spec)
    cluster = replace(cluster, device=spec.name, nodes=nodes)
    return PlannedRun(World(config, ranks, None), cluster, replace(hardware, spec=spec), devices, names_cluster)


def read_config(overrides: Sequence[str], extra: Sequence[str], problems: list[Problem]) -> Config | None:
    """Return the config of a command line, None if it is unreadable; add its problems to ``problems``."""
    try:
        config: Config | None = cli.parse_overrides([*overrides, *extra])
    except ConfigError as error:
        problems += error.problems
        config = error.config
    if config is not None:
        problems += batch_problems(config, overrides)
    return config


def count_ranks(config: Config, cluster: ClusterConfig, spec: HardwareSpec) -> tuple[int, int, int]:
    """Return (ranks, nodes, devices) of a run: all of ``cluster.nodes``, else enough for tp * cp * pp * dp."""
    requested = Grid.of(config.trainer).world_size
    nodes = cluster.nodes or -(-requested // (spec.per_node * spec.ranks_per_device))
    devices = nodes * spec.per_node if cluster.nodes else -(-requested // spec.ranks_per_device)
    return (devices * spec.ranks_per_device if cluster.nodes else requested), nodes, devices


def find_hardware(
    config: Config, cluster: ClusterConfig, overrides: Sequence[str], *, always_named: bool = False
) -> tuple[Hardware | None, list[Problem]]:
    """Return the hardware that a command line plans for, and problems.

    ``cluster.device`` names a chip. ``device`` alone stands for a usual chip of its kind. Without both, a model of a
    pretraining recipe is planned for the default chip, and a small model for this machine.
    """
    requested = config.device.name
    names = {text.partition("=")[0] for text in overrides}
    if f"{CLUSTER}.device" in names:
        return _named(config, cluster)
    if requested == HOST:
        return Hardware(None, HOST), []
    facts = find_device(requested)
    if facts is not None and facts.is_accelerator:
        rows = hardware_table.devices()
        spec = next(rows[name] for name in hardware_table.USUAL if rows[name].kind == requested)
        note = f"device={requested} names no chip: planned for {spec.name}.\ncluster.device=NAME plans for another."
        return Hardware(spec, requested, note), []
    in_cluster = any(name.startswith(f"{CLUSTER}.") for name in names)
    if always_named or in_cluster or is_large(config):
        spec = hardware_table.devices()[cluster.device]
        note = (
            f"device is not set: planned for {spec.name} (device={spec.kind}).\n"
            "device=NAME or cluster.device=NAME plans for other hardware."
        )
        return Hardware(spec, spec.kind, note), []
    return Hardware(None, requested), []


def _named(config: Config, cluster: ClusterConfig) -> tuple[Hardware | None, list[Problem]]:
    """Return the hardware of ``cluster.device``."""
    requested, field = config.device.name, f"{CLUSTER}.device"
    spec = None if cluster.device == HOST else hardware_table.find_device(cluster.device)
    if spec is None and cluster.device != HOST:
        names = [*hardware_table.devices(), HOST]
        guess = closest_match(cluster.device, names)
        advice = f"write {field}={guess}" if guess else f"write one of {', '.join(names)}"
        return None, [Problem(field, cluster.device, "is not in the hardware table", advice)]
    kind = HOST if spec is None else spec.kind
    facts = find_device(requested)
    if facts is not None and requested != kind:
        rule = f"is hardware of device={kind}, but device={requested} is set"
        return None, [Problem(field, cluster.device, rule, f"write device={kind}, or remove {field}")]
    return Hardware(spec, kind), []


@functools.cache
def _recipes() -> dict[str, tuple[str, int]]:
    """Return the pretraining recipes by model: (name, global batch size)."""
    recipes: dict[str, tuple[str, int]] = {}
    for path in sorted((cli.CONF_DIR / "experiment").glob(RECIPES)):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        model = next(entry["override /model"] for entry in content["defaults"] if "override /model" in entry)
        recipes.setdefault(model, (path.stem, content["trainer"]["global_batch_size"]))
    return recipes


def batch_problems(config: Config, overrides: Sequence[str]) -> list[Problem]:
    """Reject the default batch for a model of a pretraining recipe: no run of this size has it.

    The tool does not fill in the recipe's batch, because train.py with the same settings would train with the default.
    """
    recipe, default = _recipes().get(config.model.name), Config().trainer.global_batch_size
    stated = {text.lstrip("+").partition("=")[0] for text in overrides}
    from_scratch = config.init_from is None and config.finetune.method == "none"
    is_stated = bool(stated & set(_STATES_BATCH)) or config.trainer.global_batch_size != default
    if recipe is None or is_stated or not from_scratch or not is_large(config):  # large: not cut to a few layers
        return []
    rule = f"is not set. The default, {default} {plural(default, 'sequence')}, is for small models"
    return [Problem(BATCH, None, rule, f"write {BATCH}={recipe[1]}, as in experiment={recipe[0]}, or another size")]
