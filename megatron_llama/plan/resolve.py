"""From a ``Config`` and a number of devices to a ``Plan``, or to everything that is wrong with the config; and variants
of a config."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from megatron_llama.config.fields import check_limits, get, reset_to_defaults
from megatron_llama.config.problems import ConfigError, Problem, merge_problems
from megatron_llama.config.settings import Config, OptimConfig
from megatron_llama.corpus.epochs import DatasetUsage, dataset_usage
from megatron_llama.plan.choices import choose_defaults, list_notes
from megatron_llama.plan.derive import derive_plan
from megatron_llama.plan.memory import Machine, check_memory
from megatron_llama.plan.plan import Plan
from megatron_llama.plan.rules import RULES
from megatron_llama.plan.rules.data import check_paths
from megatron_llama.plan.rules.rule import check_rules
from megatron_llama.topology import AXES


def _again(config: Config, world_size: int) -> Plan:
    """The plan of a variation of a config, wherever its files are."""
    return resolve(config, world_size, exists=lambda path: True)


def resolve(
    config: Config,
    world_size: int,
    machine: Machine | None = None,
    exists: Callable[[str], bool] = os.path.exists,
    known: Sequence[Problem] = (),
) -> Plan:
    """What ``config`` means on ``world_size`` devices.

    Args:
        config: The settings; left as they are.
        world_size: Devices, one process each.
        machine: The memory that the ranks must fit into; None leaves that to ``device.memory_gib``.
        exists: Whether a file that the config names is there. With ``lambda path: True``, plans for another machine.
        known: Problems that ``load_config`` found. They are reported too, and no rule reports their settings again.

    Raises:
        ConfigError: with everything that is wrong.
    """
    beyond_limits = check_limits(config)
    problems = [*known, *beyond_limits]
    # Rules see a copy with defaults in place of impossible values: each mistake is reported once, and the others are
    # still found.
    requested = reset_to_defaults(config, beyond_limits)
    sanitized, chosen = choose_defaults(requested, fast_bf16=machine is None or machine.fast_bf16)
    problems += check_rules(RULES, sanitized, world_size, {problem.field for problem in problems})
    plan = None if problems else derive_plan(sanitized, world_size)
    plan = plan and replace(plan, requested=requested, chosen=(*chosen, *plan.chosen))
    if plan is not None and sanitized.trainer.epochs is not None:
        problems += check_rules(RULES, plan.config, world_size)  # of the steps, which are known only now
        if plan.config.trainer.steps == 0:
            size = sanitized.trainer.global_batch_size
            rule = f"gives no step: all samples together are less than trainer.global_batch_size={size}"
            advice = "write a smaller trainer.global_batch_size, or more epochs"
            problems.append(Problem("trainer.epochs", sanitized.trainer.epochs, rule, advice))
    found = check_paths(sanitized, exists) + (check_memory(plan, machine, _again) if plan else [])
    # A dry run is about what a run would be, perhaps elsewhere: what only this machine lacks is a note there.
    noted = [problem for problem in found if sanitized.dry_run and problem.machine_specific]
    problems += [problem for problem in found if problem not in (*noted, *known)]
    if problems or plan is None:
        raise ConfigError(problems)
    refusals = [f"a run would be refused here: {told}" for told in merge_problems(noted)]
    read: tuple[DatasetUsage, ...] = ()
    if not plan.config.data.mock:
        with contextlib.suppress(OSError, ValueError):  # a missing or broken dataset is for the checks of files
            read = dataset_usage(plan.config.data, plan.batches.after(plan.config.trainer.steps).samples)
    return replace(plan, dataset_usage=read, notes=(*plan.notes, *refusals, *list_notes(sanitized, plan)))


# Configs that differ from one in a few settings: plans of other possible runs.

def change_settings(config: Config, settings: Mapping[str, Any], optim: OptimConfig | None = None) -> Config:
    """A copy of ``config``, as it was asked for, with other ``settings`` by their full names.

    Data are made up, and no memory is stated, so that nothing is refused for what is tried by itself. With another tp
    or pp, what follows from them is derived again unless it is among the settings. ``optim`` is the derived one, where
    it is known: to resolve the schedule again takes most of the time of a plan.
    """
    config = deepcopy(config)
    if optim is not None:
        config.optim = deepcopy(optim)
    config.data.mock, config.data.prefixes, config.device.memory_gib = True, [], None
    if any(f"trainer.{axis.name}" in settings for axis in AXES if not axis.is_derived):
        config.trainer.dp = None  # what the others leave
        config.trainer.shard_group = None
    if "trainer.pp" in settings:
        config.trainer.pipeline_layers = None
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        setattr(get(config, section), key, value)
    return config
