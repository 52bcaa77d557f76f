"""Differences between the settings of a run and of the checkpoint that it resumes from.

``Setting.on_change`` states whether a change is accepted, logged or rejected. All rejected changes are reported in one
error. ``checkpoint.allow`` accepts changes of data, batch or optim.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_llama.checkpoint.manifest import State
from megatron_llama.config import Config, ConfigError, Problem
from megatron_llama.config.limits import ALLOWED, BATCH, DATA, FIXED, FREE, LOGGED, OPTIM
from megatron_llama.config.problems import format_value, quote_value
from megatron_llama.config.settings_table import FREE_DICT, get, sections, settings_by_name
from megatron_llama.data.resume_record import Record
from megatron_llama.data.resume_record import differences as record_differences
from megatron_llama.plan import Plan
from megatron_llama.plan.data_schedules import BatchSchedule, all_sizes
from megatron_llama.plan.derive import COSINE, derive_optimizer


@dataclass(frozen=True)
class Difference:
    """A setting whose value differs from the checkpoint's."""

    name: str
    """Full name of the setting."""
    saved: Any
    now: Any
    kind: str
    """LOGGED, FIXED or one of ALLOWED."""
    undo: str = ""
    """How to restore the saved value; empty: write ``saved``."""

    def __str__(self) -> str:
        return f"{self.name}: from {format_value(self.saved)} to {format_value(self.now)}"


def find_differences(plan: Plan, state: State, record: Record) -> list[Difference]:
    """Return the settings that differ, except accepted ones and defaults that were derived from other settings.

    A checkpoint of step 0 accepts any data, batch and optimizer.

    Args:
        record: The record of the plan's data.
    """
    settings, rederived = state.settings, _rederive(plan.requested, state.settings)
    unused = []
    if "lora" not in (plan.config.finetune.method, _saved(settings, "finetune.method")):
        unused += [n for n, each in settings_by_name().items() if n.startswith("finetune.") and each.on_change == FIXED]
    if not (plan.config.trainer.val_every_steps and _saved(settings, "trainer.val_every_steps")):
        unused.append("trainer.val_steps")
    differences = [] if state.step == 0 else _data_differences(plan, state, record)
    for name, setting in settings_by_name().items():
        kind = setting.on_change
        if kind in (FREE, DATA) or name in unused or (kind in ALLOWED and state.step == 0):
            continue
        saved, now = _saved(settings, name), get(plan.config, name)
        was_derived = name == FREE_DICT or get(plan.requested, name) is None
        follows = was_derived and (saved is None or (name.startswith("optim.") and get(rederived, name) == saved))
        if saved != now and not follows:
            section = name.rpartition(".")[0]
            undo = f"write {section}=null" if section in sections() and _saved(settings, section) is None else ""
            differences.append(Difference(name, saved, now, kind, undo))
    if _remaining_sizes(settings["trainer"], state) == _remaining_sizes(vars(plan.config.trainer), state):
        # The change affects only past steps and the validation batches.
        differences = [replace(d, kind=LOGGED) if d.kind == BATCH else d for d in differences]
    order = [*settings_by_name()]
    return sorted(differences, key=lambda difference: order.index(difference.name))


def data_record(state: State) -> Record:
    """Return the record of a checkpoint's data. Raises ConfigError if an older version saved none."""
    if state.data is None:
        rule = f"the checkpoint of step {state.step} has no data record: an older version saved it"
        instead = "write another run.dir, and init_from=FOLDER with its exported weights (scripts/export_hf.py)"
        raise ConfigError([Problem("checkpoint.resume", None, rule, instead)])
    return state.data


def check_allowed(differences: Sequence[Difference], allow: Sequence[str], folder: object) -> None:
    """Raise ConfigError with all differences that are neither accepted nor in ``allow``."""
    rejected = [d for d in differences if d.kind == FIXED or (d.kind in ALLOWED and d.kind not in allow)]
    needed = {*allow, *(difference.kind for difference in rejected)}
    setting = f"checkpoint.allow={format_value([kind for kind in ALLOWED if kind in needed])}"
    problems = []
    for difference in rejected:
        undo = difference.undo or f"write {difference.name}={quote_value(difference.saved)}"
        instead = f"{undo} to keep the saved value, or {setting} to accept the change"
        if difference.kind == FIXED:
            instead = f"{undo}, or export the weights (scripts/export_hf.py) and start a run with init_from"
        rule = f"the checkpoint {folder} was trained with {format_value(difference.saved)}"
        problems.append(Problem(difference.name, difference.now, rule, instead))
    if problems:
        raise ConfigError(problems)


def _data_differences(plan: Plan, state: State, record: Record) -> list[Difference]:
    """Return the differences of the data. Datasets are compared by content, not by path."""
    differences, saved = [], data_record(state)
    is_mock = "mock" in (saved["kind"], record["kind"])  # mock data has no split and no template
    for name, before, after, how in record_differences(saved, record):
        if is_mock and name in ("data.split", "data.chat_template", "data.chat_template_kwargs", "data.template"):
            continue
        if is_mock and name == "data.kind":
            name, before, after = "data.mock", before == "mock", after == "mock"
        if how == "blend":  # weights by prefix
            before, after = (
                [item for path, weight in blend.items() for item in (weight, path)] for blend in (before, after)
            )
        undo = ""
        if how == "content":  # facts by prefix
            before, after = map(_describe_dataset, (before, after))
            undo = "restore the dataset of the checkpoint"
        differences.append(Difference(name, before, after, LOGGED if how == "moved" else DATA, undo))
    for name in ("data.schedule", "data.validation_prefixes"):
        then, now = _saved(state.settings, name), get(plan.config, name)
        if name == "data.schedule":  # past blends do not matter
            then, now = (
                [entry for entry in entries if entry["samples"] >= state.consumed_samples] for entries in (then, now)
            )
        if then != now:
            # Without a validation set, a part of the training data is used.
            is_validation = name == "data.validation_prefixes" and then and now
            differences.append(Difference(name, then, now, LOGGED if is_validation else DATA))
    return differences


def _describe_dataset(datasets: Mapping[str, Mapping[str, Any]]) -> str:
    """Format a dataset with its size and fingerprint."""
    ((prefix, facts),) = datasets.items()
    size = f"{facts['sequences']:,} documents, {facts['tokens']:,} tokens"
    content = "".join(f", {key} {value[:8]}" for key, value in facts.items() if key.startswith("content"))
    return f"{prefix} of {size}, fingerprint {facts['fingerprint'][:8]}{content}"


def _remaining_sizes(trainer: Mapping[str, Any], state: State) -> list[tuple[int, int]]:
    """Return the global batch sizes after a checkpoint: (consumed samples, size), starting at the checkpoint."""
    now = state.consumed_samples
    schedule = BatchSchedule(all_sizes(trainer["global_batch_size"], trainer.get("batch_schedule", ())), seq_length=0)
    return [(now, schedule.size_from(now)), *(entry for entry in schedule.sizes if entry[0] > now)]


def _rederive(requested: Config, saved: Mapping[str, Any]) -> Config:
    """Derive the optimizer settings that are unset in ``requested`` from the checkpoint's other settings.

    A saved value that equals the derived one was derived too: its change follows from another setting, such as the
    number of steps, and is not reported.
    """
    then = copy.deepcopy(requested)
    then.optim.schedule = {"_target_": (requested.optim.schedule or COSINE).get("_target_")}
    then.trainer.steps, then.trainer.epochs = _saved(saved, "trainer.steps"), None
    then.data.kind, then.finetune.method = _saved(saved, "data.kind"), _saved(saved, "finetune.method")
    then.init_from = _saved(saved, "init_from")
    marked = [name for name, setting in settings_by_name().items() if setting.on_change == OPTIM]
    names = [name for name in marked if name.startswith("optim.") and name != FREE_DICT]
    for name in names:
        if get(then, name) is not None:
            setattr(then.optim, name.removeprefix("optim."), _saved(saved, name))
    derive_optimizer(then)
    # ${...} in the schedule refer to the saved settings.
    schedule = copy.deepcopy(then)
    schedule.optim.schedule = requested.optim.schedule
    for name in names:
        setattr(schedule.optim, name.removeprefix("optim."), _saved(saved, name))
    derive_optimizer(schedule)
    then.optim.schedule = schedule.optim.schedule
    return then


def _saved(settings: Mapping[str, Any], name: str) -> Any:
    """Return a setting's saved value; its default if the version that saved the checkpoint did not have the setting."""
    value: Any = settings
    for key in name.split("."):
        if not isinstance(value, Mapping):
            return None  # the section is null
        if key not in value:
            return settings_by_name()[name].default
        value = value[key]
    return value
