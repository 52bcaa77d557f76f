"""``resolve``: from a ``Config`` and a number of devices to a ``Plan`` or all errors; and variants of a config."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_llama.config.optimizers import OptimConfig
from megatron_llama.config.problems import ConfigError, Problem, merge_problems
from megatron_llama.config.settings import Config
from megatron_llama.config.settings_table import check_limits, get, put, reset_to_defaults
from megatron_llama.corpus.splits import DatasetUsage, dataset_usage
from megatron_llama.plan.defaults_and_notes import choose_defaults, list_notes
from megatron_llama.plan.derive import derive_plan
from megatron_llama.plan.plan import Plan
from megatron_llama.plan.rules import RULES
from megatron_llama.plan.rules.data import check_paths
from megatron_llama.plan.rules.memory import Machine, check_memory, reserve_notes
from megatron_llama.plan.rules.rule import check_rules
from megatron_llama.system.files import path_exists
from megatron_llama.topology import AXES


def resolve(
    config: Config,
    world_size: int,
    machine: Machine | None = None,
    exists: Callable[[str], bool] = path_exists,
    known: Sequence[Problem] = (),
) -> Plan:
    """Return the plan of ``config`` on ``world_size`` devices.

    Args:
        config: Settings; not changed.
        world_size: Number of devices, one process each.
        machine: Memory that the ranks must fit into; None: ``device.memory_gib`` if set.
        exists: Whether a path exists. ``lambda path: True`` plans for another host.
        known: Problems that ``load_config`` found. They are reported too, and rules skip their settings.

    Raises:
        ConfigError: With all problems.
    """
    beyond_limits = check_limits(config)
    problems = [*known, *beyond_limits]
    # Rules check a copy with defaults in place of invalid values: each error is reported once, the others are found.
    requested = reset_to_defaults(config, beyond_limits)
    sanitized, chosen = choose_defaults(requested, fast_bf16=machine is None or machine.fast_bf16)
    problems += check_rules(RULES, sanitized, world_size, {problem.field for problem in problems})
    plan = None if problems else derive_plan(sanitized, world_size)
    plan = plan and replace(plan, requested=requested, chosen=(*chosen, *plan.chosen))
    late = ("trainer.steps", "trainer.val_every_steps")  # derived from datasets
    if plan is not None and any(get(plan.config, name) != get(sanitized, name) for name in late):
        problems += check_rules(RULES, plan.config, world_size)
        if plan.config.trainer.steps == 0 and sanitized.trainer.epochs is not None:
            size = sanitized.trainer.global_batch_size
            rule = f"has no step: all samples together are fewer than trainer.global_batch_size={size}"
            advice = "write a smaller trainer.global_batch_size, or more epochs"
            problems.append(Problem("trainer.epochs", sanitized.trainer.epochs, rule, advice))
    replan = partial(resolve, exists=lambda path: True)
    host_problems = check_paths(sanitized, exists) + (check_memory(plan, machine, replan) if plan else [])
    # A dry run may plan for another host: problems of this host are only notes.
    noted = [problem for problem in host_problems if sanitized.dry_run and problem.machine_specific]
    reported = [(problem.field, problem.value) for problem in known]
    host_problems = [problem for problem in host_problems if (problem.field, problem.value) not in reported]
    problems += [problem for problem in host_problems if problem not in noted]
    if problems or plan is None:
        raise ConfigError(problems)
    refusals = [f"a run on this host would be rejected: {message}" for message in merge_problems(noted)]
    tight = [] if refusals else reserve_notes(plan, machine)
    read: tuple[DatasetUsage, ...] = ()
    if not plan.config.data.mock:
        with contextlib.suppress(OSError, ValueError):  # the checks of files report missing and broken datasets
            read = dataset_usage(plan.config.data, plan.batches.after(plan.config.trainer.steps).samples)
    plan = replace(plan, dataset_usage=read)
    return replace(plan, notes=(*plan.notes, *refusals, *tight, *list_notes(sanitized, plan)))


# Variants of a config, for the planner and the tuner.


def change_settings(config: Config, settings: Mapping[str, Any], optim: OptimConfig | None = None) -> Config:
    """Return a copy of a config before derivation with other ``settings``, by full name.

    The copy uses mock data and states no memory, so that neither data nor memory rejects it. With another tp or pp,
    settings that depend on them are derived from scratch unless ``settings`` contains them.

    Args:
        optim: Derived optimizer settings, if known: resolving the schedule takes most of the time of a plan.
    """
    config = deepcopy(config)
    if optim is not None:
        config.optim = deepcopy(optim)
    config.data.mock, config.data.prefixes, config.device.memory_gib = True, [], None
    if any(f"trainer.{axis.name}" in settings for axis in AXES if not axis.is_derived):
        config.trainer.dp = None  # derived from the others
        config.trainer.shard_group = None
    if "trainer.pp" in settings:
        config.trainer.pipeline_layers = None
    for name, value in settings.items():
        put(config, name, value)
    return config
