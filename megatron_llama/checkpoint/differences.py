"""Where a run differs from the checkpoint that it goes on from, and what that means for it.

Every setting is of one kind (``SETTINGS``; docs/guides/training/resume.md is generated from it). All differences are
told at once:
those that would make another run of it are refused unless ``checkpoint.allow`` names their kind.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron_llama.checkpoint.manifest import State
from megatron_llama.config import Config, ConfigError, Problem
from megatron_llama.config.fields import FREE_DICT, get, sections, settings_by_name
from megatron_llama.config.problems import format_value, quote_value
from megatron_llama.config.settings import ALLOWED
from megatron_llama.data.record import Record
from megatron_llama.data.record import differences as record_differences
from megatron_llama.plan import Plan
from megatron_llama.plan.derive import COSINE, derive_optimizer
from megatron_llama.plan.schedules import BatchSchedule, all_sizes
from megatron_llama.topology import AXIS_NAMES

FREE, LOGGED, FIXED = "free", "told", "fixed"
DATA, BATCH, OPTIM = ALLOWED

SETTINGS = {
    # Where and how fast it computes, what it prints and keeps, and what only its beginning reads.
    FREE: {
        "model": "name initializer_range",
        "data": "name tokenizer cache_dir prepare",
        "trainer": f"{' '.join(AXIS_NAMES)} vpp pipeline_layers sp zero shard_group secondary_group micro_batch_size "
        "epochs recompute recompute_every offload compile compile_strict compile_cache async_tp deterministic "
        "skip_nonfinite_steps hang_timeout_seconds profile max_restarts val_every_steps",
        "optim": "warmup_ratio",
        "finetune": "adapter",
        "device": "name peak_tflops memory_gib",
        "logging": "every_steps tensorboard csv wandb wandb_project parameter_norm sample_prompts sample_tokens",
        "checkpoint": "every_steps keep keep_every keep_best resume allow save_last export_hf asynchronous",
        "launch": "hosts hostfile ssh",
        "run": "dir",
        "": "dry_run allow_targets",
    },
    # It is the same run, and yet not to the last bit, or not for somebody who compares its numbers.
    LOGGED: {
        "model": "max_position_embeddings",
        "data": "document_mask eod_mask_loss",
        "trainer": "steps precision grad_reduce reduce_group param_gather val_steps",
        "trainer.random_ltd": "min_value max_value require_steps seq_per_step layers",
        "optim": "state_bits",
        "finetune": "lora_dropout frozen_dtype",
        "": "init_from",
    },
    # Which tensors there are, and what they mean.
    FIXED: {
        "model": "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "head_dim rms_norm_eps rope_theta sliding_window tie_word_embeddings",
        "model.sparse_attention": "block num_local_blocks num_global_blocks",
        "model.rope_scaling": "rope_type factor low_freq_factor high_freq_factor original_max_position_embeddings",
        "optim": "name",
        "finetune": "method lora_rank lora_alpha lora_target_modules modules_to_save",
    },
    DATA: {
        "data": "kind pack mock prefixes schedule curriculum validation_prefixes chat_template template split "
        "seq_length",
        "trainer": "seed",
    },
    BATCH: {"trainer": "global_batch_size batch_schedule"},
    OPTIM: {"optim": "lr min_lr warmup_steps constant_steps betas eps weight_decay clip schedule freeze_step"},
}
"""The settings of each kind, by section."""


@dataclass(frozen=True)
class Difference:
    """Something that is not what it was in the checkpoint's run."""

    name: str
    """The setting."""
    saved: Any
    now: Any
    kind: str
    """LOGGED, FIXED, or one of ALLOWED."""
    undo: str = ""
    """How to go on as before; empty where writing ``saved`` does it."""

    def __str__(self) -> str:
        return f"{self.name}: from {format_value(self.saved)} to {format_value(self.now)}"


@cache
def kinds() -> dict[str, str]:
    """The kind of each setting, by its full name."""
    return {
        f"{section}.{name}".lstrip("."): kind
        for kind, by_section in SETTINGS.items()
        for section, names in by_section.items()
        for name in names.split()
    }


def find_differences(plan: Plan, state: State, record: Record) -> list[Difference]:
    """Every setting that is not what it was, except those that may be anything, or only follow from others.

    ``record`` is that of the plan's data. At step 0 nothing was trained, so that data, batch and optimizer may be any.
    """
    settings, then = state.settings, _as_derived_then(plan.requested, state.settings)
    unused = []
    if "lora" not in (plan.config.finetune.method, _saved(settings, "finetune.method")):
        unused += [name for name in kinds() if name.startswith("finetune.")]
    if plan.config.trainer.val_every_steps is None:
        unused.append("trainer.val_steps")
    found = [] if state.step == 0 else _data_differences(plan, state, record)
    for name, kind in kinds().items():
        if kind in (FREE, DATA) or name in unused or (kind in ALLOWED and state.step == 0):
            continue
        saved, now = _saved(settings, name), get(plan.config, name)
        was_derived = name == FREE_DICT or get(plan.requested, name) is None
        follows = was_derived and (saved is None or (name.startswith("optim.") and get(then, name) == saved))
        if saved != now and not follows:
            section = name.rpartition(".")[0]
            undo = f"write {section}=null" if section in sections() and _saved(settings, section) is None else ""
            found.append(Difference(name, saved, now, kind, undo))
    if _sizes_left(settings["trainer"], state) == _sizes_left(vars(plan.config.trainer), state):
        # What differs is in the past of the schedule, and in the batches of the validation.
        found = [replace(difference, kind=LOGGED) if difference.kind == BATCH else difference for difference in found]
    order = [*kinds()]
    return sorted(found, key=lambda difference: order.index(difference.name))


def data_record(state: State) -> Record:
    """The record of a checkpoint's data. Raises ConfigError if it has none: the order of its samples is unknown."""
    if state.data is None:
        rule = f"the checkpoint of step {state.step} has no record of its data: an older version saved it"
        advice = "write another run.dir, with init_from=FOLDER of its weights (scripts/export_hf.py)"
        raise ConfigError([Problem("checkpoint.resume", None, rule, advice)])
    return state.data


def check_allowed(differences: Sequence[Difference], allow: Sequence[str], folder: Path) -> None:
    """Raises ConfigError with all differences that are neither harmless nor allowed."""
    refused = [d for d in differences if d.kind == FIXED or (d.kind in ALLOWED and d.kind not in allow)]
    wanted = {*allow, *(difference.kind for difference in refused)}
    setting = f"checkpoint.allow={format_value([kind for kind in ALLOWED if kind in wanted])}"
    problems = []
    for difference in refused:
        undo = difference.undo or f"write {_written(difference.name, difference.saved)}"
        instead = f"{undo} to go on as before, or {setting} to go on with what is new"
        if difference.kind == FIXED:
            instead = f"{undo}, or start another run from its weights (scripts/export_hf.py, then init_from)"
        rule = f"the checkpoint {folder} was trained with {format_value(difference.saved)}"
        problems.append(Problem(difference.name, difference.now, rule, instead))
    if problems:
        raise ConfigError(problems)


def _data_differences(plan: Plan, state: State, record: Record) -> list[Difference]:
    """The differences of the data, which is known by what is in it: a dataset may lie elsewhere now."""
    found, saved = [], data_record(state)
    made_up = "mock" in (saved["kind"], record["kind"])  # which has nothing to split or to write
    for name, before, after, how in record_differences(saved, record):
        if made_up and name in ("data.split", "data.chat_template", "data.template"):
            continue
        if made_up and name == "data.kind":
            name, before, after = "data.mock", before == "mock", after == "mock"
        if how == "blend":  # weights by prefix
            before, after = (
                [item for path, weight in blend.items() for item in (weight, path)] for blend in (before, after)
            )
        undo = ""
        if how == "content":  # facts by prefix
            before, after = map(_described, (before, after))
            undo = "put the dataset back that it was trained on"
        found.append(Difference(name, before, after, LOGGED if how == "moved" else DATA, undo))
    for name in ("data.schedule", "data.validation_prefixes"):
        then, now = _saved(state.settings, name), get(plan.config, name)
        if name == "data.schedule":  # the blends before are history
            then, now = (
                [entry for entry in entries if entry["samples"] >= state.consumed_samples] for entries in (then, now)
            )
        if then != now:
            # Without a set for validation, a part of the training data is taken for it.
            is_validation = name == "data.validation_prefixes" and then and now
            found.append(Difference(name, then, now, LOGGED if is_validation else DATA))
    return found


def _described(datasets: Mapping[str, Mapping[str, Any]]) -> str:
    """A dataset, and what it is known by."""
    ((prefix, facts),) = datasets.items()
    size = f"{facts['sequences']:,} documents, {facts['tokens']:,} tokens"
    return f"{prefix} of {size}, fingerprint {facts['fingerprint'][:8]}"


def _written(name: str, value: Any) -> str:
    """A setting as it is typed into a shell."""
    text = f"{name}={quote_value(value)}"
    return f"'{text}'" if isinstance(value, (dict, list)) and " " in text else text


def _sizes_left(trainer: Mapping[str, Any], state: State) -> list[tuple[int, int]]:
    """The global batches after a checkpoint: (consumed samples, size), the first from the checkpoint on."""
    now = state.consumed_samples
    schedule = BatchSchedule(all_sizes(trainer["global_batch_size"], trainer.get("batch_schedule", ())), seq_length=0)
    return [(now, schedule.size_from(now)), *(entry for entry in schedule.sizes if entry[0] > now)]


def _as_derived_then(asked: Config, saved: Mapping[str, Any]) -> Config:
    """The settings that the checkpoint's run would have, had it left the same ones to be derived as this run.

    What is derived in it as it was saved follows from a difference in other settings, such as the number of steps, and
    is no difference of its own.
    """
    then = copy.deepcopy(asked)
    then.optim.schedule = {"_target_": (asked.optim.schedule or COSINE).get("_target_")}
    then.trainer.steps, then.trainer.epochs = _saved(saved, "trainer.steps"), None
    names = [name for name, kind in kinds().items() if kind == OPTIM and name != FREE_DICT]
    for name in names:
        if get(then, name) is not None:
            setattr(then.optim, name.removeprefix("optim."), _saved(saved, name))
    derive_optimizer(then)
    # The schedule's own ${...} are the other settings as they were saved.
    schedule = copy.deepcopy(then)
    schedule.optim.schedule = asked.optim.schedule
    for name in names:
        setattr(schedule.optim, name.removeprefix("optim."), _saved(saved, name))
    derive_optimizer(schedule)
    then.optim.schedule = schedule.optim.schedule
    return then


def _saved(settings: Mapping[str, Any], name: str) -> Any:
    """The value of a setting in a checkpoint; its default where the program that saved it did not know it yet."""
    value: Any = settings
    for key in name.split("."):
        if not isinstance(value, Mapping):
            return None  # inside a section that is null
        if key not in value:
            return settings_by_name()[name].default
        value = value[key]
    return value
