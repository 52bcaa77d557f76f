"""Suggestions for settings that do not exist."""

from __future__ import annotations

import difflib
from typing import Any

from megatron_llama.config.fields import sections, settings_by_name
from megatron_llama.config.problems import Problem, nearest, shown

# Names in Megatron, NeMo, transformers and PEFT, and ours.
KNOWN_ELSEWHERE = {
    "tensor_model_parallel_size": "trainer.tp",
    "tensor_parallel_size": "trainer.tp",
    "tensor_parallel": "trainer.tp",
    "pipeline_parallel": "trainer.pp",
    "data_parallel": "trainer.dp",
    "pipeline_model_parallel_size": "trainer.pp",
    "pipeline_parallel_size": "trainer.pp",
    "virtual_pipeline_model_parallel_size": "trainer.vpp",
    "data_parallel_size": "trainer.dp",
    "sequence_parallel": "trainer.sp",
    "zero_stage": "trainer.zero",
    "max_steps": "trainer.steps",
    "train_iters": "trainer.steps",
    "learning_rate": "optim.lr",
    "max_seq_length": "data.seq_length",
    "encoder_seq_length": "data.seq_length",
    "data_prefix": "data.prefixes",
    "num_layers": "model.num_hidden_layers",
    "num_query_groups": "model.num_key_value_heads",
    "ffn_hidden_size": "model.intermediate_size",
    "gradient_clip_val": "optim.clip",
    "lora_r": "finetune.lora_rank",
    "target_modules": "finetune.lora_target_modules",
    "num_train_epochs": "trainer.epochs",
    "packing": "data.pack",
}
# Their settings that have no counterpart here.
ADVICE = {
    "cluster": "leave it out: a run finds its machines; cluster.* is of scripts/plan.py and scripts/tune.py",
    "tune": "leave it out: tune.* is of scripts/tune.py, which writes an experiment for train.py",
    "objective": "leave it out: it is of scripts/tune.py, which writes an experiment for train.py",
    "bf16": "write trainer.precision=bf16",
    "fp16": "write trainer.precision=bf16; there is no fp16, which needs a loss scale",
    "gradient_accumulation": "write trainer.global_batch_size, which is micro_batch_size x dp x accumulation",
    "gradient_accumulation_steps": "write trainer.global_batch_size, which is micro_batch_size x dp x accumulation",
    "rampup_batch_size": "write trainer.batch_schedule=[[samples,size],...]: from so many consumed samples, that size",
    "context_parallel_size": "leave it out: there is no context parallelism; trainer.sp shares the sequence among tp",
    "cp": "leave it out: there is no context parallelism; trainer.sp shares the sequence among tp",
}


def unknown_setting(name: str, value: Any) -> Problem:
    """The problem of a setting that does not exist, with the setting that was probably meant."""
    instead = ADVICE.get(name.rpartition(".")[2].lower()) or ADVICE.get(name.partition(".")[0])
    if instead is None and (guess := suggest(name)):
        instead = f"write {guess}={shown(value)}"
    if instead is None:
        section = name.rpartition(".")[0]
        beside = (_settings_in(section) if section else []) or [f"{known}.*" for known in sections()]
        instead = f"write one of {', '.join(beside)}; docs/config.md has them all"
    return Problem(name, value, "there is no setting of this name", instead)


def suggest(name: str) -> str | None:
    """The known setting that ``name`` was probably meant to be."""
    section, _, leaf = name.rpartition(".")
    if leaf in KNOWN_ELSEWHERE:
        return KNOWN_ELSEWHERE[leaf]
    known = settings_by_name()
    same_leaf = [other for other in known if other.rpartition(".")[2] == leaf]
    if same_leaf:
        return max(same_leaf, key=lambda other: difflib.SequenceMatcher(None, name, other).ratio())
    # Misspelt: look in the given section first, then everywhere.
    for others, cutoff in ((_settings_in(section), 0.6), (list(known), 0.8)):
        by_leaf = {other.rpartition(".")[2]: other for other in others}
        guess = nearest(leaf, by_leaf, cutoff)
        if guess:
            return by_leaf[guess]
    return None


def _settings_in(section: str) -> list[str]:
    return [name for name in settings_by_name() if name.rpartition(".")[0] == section]
