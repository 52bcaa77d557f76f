"""Rules on the run's length, learning rate, validation and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megatron_llama import optional_tools
from megatron_llama.config.data_settings import derives_validation
from megatron_llama.config.problems import Problem, duplicate_length, format_value
from megatron_llama.config.settings import Config, TrainerConfig
from megatron_llama.plan.derive import resolved_schedule
from megatron_llama.plan.rules.rule import reads

SCHEDULE_MODULES = ("torch.optim.lr_scheduler", "nemo.core.optim.lr_scheduler", "megatron_llama.optim.schedules")
"""Modules whose classes a schedule may use."""


@reads("optim.warmup_steps", "optim.constant_steps", "trainer.steps")
def schedule_fits_run(config: Config, world_size: int) -> Iterator[Problem]:
    """Warm-up and constant steps fit in the run."""
    warmup, constant, steps = config.optim.warmup_steps or 0, config.optim.constant_steps or 0, config.trainer.steps
    if 0 < steps < warmup + constant:
        rule = f"warmup_steps + constant_steps = {warmup} + {constant} must be at most trainer.steps={steps}"
        name, value, left = "optim.constant_steps", constant, max(steps - warmup, 0)
        if constant <= steps and warmup:
            name, value, left = "optim.warmup_steps", warmup, min(warmup, steps - constant)
        yield Problem(name, value, rule, f"write {name}={left}, or omit it")


@reads("trainer.epochs", "trainer.steps")
def epochs_or_steps(config: Config, world_size: int) -> Iterator[Problem]:
    """A run's length is set once."""
    epochs, steps = config.trainer.epochs, config.trainer.steps
    if epochs is not None and steps != TrainerConfig.steps:
        yield duplicate_length(epochs, steps)


@reads("trainer.profile", "trainer.steps")
def profiled_steps_are_run(config: Config, world_size: int) -> Iterator[Problem]:
    """The profiled steps are part of the run."""
    profile, steps = config.trainer.profile, config.trainer.steps
    if profile is not None and not optional_tools.is_installed(optional_tools.PROFILER):
        rule = "needs megatron_llama/tools/profile, which is not installed here"
        yield Problem("trainer.profile", profile, rule, "write trainer.profile=null, or install the whole package")
    if profile is not None and profile[1] > steps:
        advice = f"write trainer.profile=[{max(1, steps - 1)},{steps}]" if steps else "write trainer.profile=null"
        yield Problem("trainer.profile", profile, f"must end at or before the last step, trainer.steps={steps}", advice)


@reads("optim.lr", "optim.min_lr")
def lr_falls(config: Config, world_size: int) -> Iterator[Problem]:
    """The minimum learning rate is at most the maximum."""
    lr, min_lr = config.optim.peak_lr, config.optim.min_lr
    if min_lr is not None and min_lr > lr:
        advice = f"write optim.min_lr={lr / 10:g}, or omit it"
        yield Problem("optim.min_lr", min_lr, f"must be at most optim.lr={lr:g}", advice)


@reads("optim.schedule")
def schedule_has_a_class(config: Config, world_size: int) -> Iterator[Problem]:
    """A schedule has a class, which Hydra instantiates."""
    schedule = config.optim.schedule
    if schedule and not str(schedule.get("_target_") or ""):
        advice = "write optim=cosine, linear, constant or wsd, or optim.schedule._target_=package.module.Class"
        yield Problem("optim.schedule", schedule, "needs _target_, the class of the schedule", advice)


@reads("optim.schedule", "allow_targets")
def schedule_may_be_built(config: Config, world_size: int) -> Iterator[Problem]:
    """Each _target_ is a permitted class: Hydra imports and calls it, so a recipe could run any program."""
    for target in _targets(resolved_schedule(config)):
        module, _, name = target.rpartition(".")
        if target in config.allow_targets or (module in SCHEDULE_MODULES and name[:1].isupper()):
            continue
        rule = f"its _target_ {target} must be a class of {', '.join(SCHEDULE_MODULES)}"
        advice = f"write such a class, or, if you trust this one, add allow_targets=[{target}] to the command line"
        yield Problem("optim.schedule", target, rule, advice)


def _targets(node: Any) -> Iterator[str]:
    """Yield each _target_ in a schedule, at any depth."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield str(node["_target_"])
        node = list(node.values())
    if isinstance(node, list | tuple):
        for item in node:
            yield from _targets(item)


@reads(
    "checkpoint.keep_best",
    "checkpoint.every_steps",
    "checkpoint.save_last",
    "trainer.val_every_steps",
    "trainer.steps",
    "data.kind",
    "data.mock",
    "data.validation_prefixes",
)
def best_has_a_loss(config: Config, world_size: int) -> Iterator[Problem]:
    """The best checkpoint needs a validated step."""
    checkpoint, every, steps = config.checkpoint, config.trainer.val_every_steps, config.trainer.steps
    if not checkpoint.keep_best or steps == 0:
        return
    if every is None and derives_validation(config.data):
        return  # derived; checked again then
    if not every:
        advice = f"write trainer.val_every_steps={checkpoint.every_steps or steps}, or checkpoint.keep_best=false"
        rule = f"needs validation: trainer.val_every_steps is {format_value(every)}"
        yield Problem("checkpoint.keep_best", True, rule, advice)
        return
    both = math.lcm(every, checkpoint.every_steps) if checkpoint.every_steps else steps + 1
    if both > steps and not (checkpoint.save_last and steps % every == 0):
        saved = f"every {checkpoint.every_steps} steps" if checkpoint.every_steps else "only at the end"
        rule = f"needs a checkpoint of a validated step: the run validates every {every} steps and saves {saved}"
        yield Problem("checkpoint.keep_best", True, rule, f"write checkpoint.every_steps={every}")
