"""Where a run differs from the checkpoint that it goes on from, and what that means for it.

Every setting is of one kind (``SETTINGS``; docs/resume.md is generated from it). All differences are told at once:
those that would make another run of it are refused unless ``checkpoint.allow`` names their kind.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_llama.checkpoint.manifest import State
from megatron_llama.config import Config, ConfigError, Problem
from megatron_llama.config.fields import FREE_DICT, get, settings_by_name
from megatron_llama.config.problems import shown, typed
from megatron_llama.config.settings import ALLOWED
from megatron_llama.plan import Plan
from megatron_llama.plan.derive import derive_optimizer

FREE, TOLD, FIXED = "free", "told", "fixed"
DATA, BATCH, OPTIM = ALLOWED

SETTINGS = {
    # Where and how fast it computes, what it prints and keeps, and what only its beginning reads.
    FREE: {
        "model": "name initializer_range",
        "data": "name tokenizer cache_dir prepare",
        "trainer": "tp pp vpp pipeline_layers sp zero dp shard_group micro_batch_size epochs recompute compile "
        "compile_strict compile_cache deterministic skip_nonfinite_steps hang_timeout_seconds max_restarts "
        "val_every_steps",
        "optim": "warmup_ratio",
        "finetune": "adapter",
        "device": "name peak_tflops memory_gib",
        "logging": "every_steps tensorboard parameter_norm sample_prompts sample_tokens",
        "checkpoint": "every_steps keep keep_every keep_best resume allow save_last export_hf asynchronous",
        "launch": "hosts hostfile ssh",
        "run": "dir",
        "": "dry_run",
    },
    # It is the same run, and yet not to the last bit, or not for somebody who compares its numbers.
    TOLD: {
        "model": "max_position_embeddings",
        "data": "validation_prefixes",
        "trainer": "steps precision val_steps",
        "finetune": "lora_dropout frozen_dtype",
        "": "init_from",
    },
    # Which tensors there are, and what they mean.
    FIXED: {
        "model": "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "head_dim rms_norm_eps rope_theta tie_word_embeddings",
        "model.rope_scaling": "rope_type factor low_freq_factor high_freq_factor original_max_position_embeddings",
        "optim": "name",
        "finetune": "method lora_rank lora_alpha lora_target_modules modules_to_save",
    },
    DATA: {
        "data": "kind pack mock prefixes chat_template template split seq_length",
        "trainer": "seed",
    },
    BATCH: {"trainer": "global_batch_size batch_schedule"},
    OPTIM: {"optim": "lr min_lr warmup_steps constant_steps betas eps weight_decay clip schedule"},
}
"""The settings of each kind, by section."""


@dataclass(frozen=True)
class Difference:
    """Something that is not what it was in the checkpoint's run."""

    name: str
    """The setting, or the part of the data that a setting names."""
    saved: Any
    now: Any
    kind: str
    """TOLD, FIXED, or one of ALLOWED."""

    def __str__(self) -> str:
        return f"{self.name}: from {shown(self.saved)} to {shown(self.now)}"


@cache
def kinds() -> dict[str, str]:
    """The kind of each setting, by its full name."""
    return {
        f"{section}.{name}".lstrip("."): kind
        for kind, by_section in SETTINGS.items()
        for section, names in by_section.items()
        for name in names.split()
    }


def find_differences(plan: Plan, state: State) -> list[Difference]:
    """Every setting that is not what it was, except those that may be anything, or only follow from others.

    At step 0 nothing was trained, so that data, batch and optimizer may be any.
    """
    follows = _as_derived_then(plan.asked, state.settings)
    lora = "lora" in (plan.config.finetune.method, _saved(state.settings, "finetune.method"))
    found = []
    for name, kind in kinds().items():
        if kind == FREE or (kind in ALLOWED and state.step == 0) or (name.startswith("finetune.") and not lora):
            continue
        saved, now = _saved(state.settings, name), get(plan.config, name)
        was_derived = name == FREE_DICT or get(plan.asked, name) is None
        if saved != now and not (name.startswith("optim.") and was_derived and get(follows, name) == saved):
            found.append(Difference(name, saved, now, kind))
    return found


def refuse(differences: Sequence[Difference], allow: Sequence[str], folder: Path) -> None:
    """Raises ConfigError with all differences that are neither harmless nor allowed."""
    refused = [d for d in differences if d.kind == FIXED or (d.kind in ALLOWED and d.kind not in allow)]
    wanted = {*allow, *(d.kind for d in refused if d.kind != FIXED)}
    setting = f"checkpoint.allow={shown([kind for kind in ALLOWED if kind in wanted])}"
    problems = []
    for difference in refused:
        back = f"write {difference.name}={typed(difference.saved)}"
        instead = f"{back} to go on as before, or {setting} to go on with what is written now"
        if difference.kind == FIXED:
            instead = f"{back}, or start another run from its weights (scripts/export_hf.py, then init_from)"
        rule = f"the checkpoint {folder} was trained with {shown(difference.saved)}"
        problems.append(Problem(difference.name, difference.now, rule, instead))
    if problems:
        raise ConfigError(problems)


def _as_derived_then(asked: Config, saved: Mapping[str, Any]) -> Config:
    """The settings that the checkpoint's run would have, had it left the same ones to be derived as this run.

    What is derived in it as it was saved follows from a difference in other settings, such as the number of steps, and
    is no difference of its own.
    """
    then = copy.deepcopy(asked)
    then.trainer.steps, then.trainer.epochs = _saved(saved, "trainer.steps"), None
    for name in kinds():
        section, _, key = name.rpartition(".")
        # The schedule's own ${...} are derived from the others.
        if section == "optim" and name != FREE_DICT and getattr(then.optim, key) is not None and key != "warmup_ratio":
            setattr(then.optim, key, _saved(saved, name))
    derive_optimizer(then)
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
