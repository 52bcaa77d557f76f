"""Open a checkpoint of any other program, and the state from which a run resumes.

``read_foreign`` chooses the reader by arch/recognize_format.py, and ``open_foreign`` maps what it has read to a model.
``resumed_state`` turns step and position into the state that our checkpoints have, and reports the settings that differ
from the source's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from megatron_llama.arch import recognize_format as formats
from megatron_llama.checkpoint.changed_settings import Difference, check_allowed
from megatron_llama.checkpoint.foreign.megatron import read_ranks, read_torch_dist
from megatron_llama.checkpoint.foreign.source_settings import MODEL, check_model
from megatron_llama.checkpoint.foreign.tensors import MOMENTS, NO_SETTINGS, Foreign, map_tensors
from megatron_llama.checkpoint.foreign.torch_files import read_deepspeed, read_litgpt, read_meta
from megatron_llama.checkpoint.foreign.torch_folders import read_dcp, read_fsdp, read_trainer
from megatron_llama.checkpoint.manifest import State
from megatron_llama.config import ConfigError, ModelConfig, Problem
from megatron_llama.config.limits import LOGGED
from megatron_llama.config.rope import equal_values
from megatron_llama.config.settings_table import get, settings_by_name
from megatron_llama.corpus.blend import MEGATRON
from megatron_llama.data.resume_record import Record
from megatron_llama.plan import Plan

_READERS: dict[str, Callable[[Path], Foreign]] = {
    formats.TORCH_DIST: read_torch_dist,
    formats.RANKS: read_ranks,
    formats.TRAINER: read_trainer,
    formats.FSDP: read_fsdp,
    formats.DCP: read_dcp,
    formats.DEEPSPEED: read_deepspeed,
    formats.META: read_meta,
    formats.LITGPT: read_litgpt,
}


def read_foreign(recognized: formats.Recognized) -> Foreign:
    """Read a checkpoint of another program, without a config of its model.

    Raises:
        ConfigError: A Trainer's folder has no weights, or quantized ones.
        CorruptFile: The folder is damaged or malicious.
    """
    foreign = _READERS[recognized.format](recognized.folder)
    foreign.missing += ["the step"] if foreign.states and foreign.step is None else []
    foreign.missing += [] if foreign.has_settings else [NO_SETTINGS]
    return foreign


def open_foreign(folder: Path, model: ModelConfig, *, resumes: bool = False) -> Foreign:
    """Open a checkpoint of another program: read it, and map its tensors to the tensors of ``model``.

    Args:
        folder: The checkpoint, or a folder with several checkpoints: the newest is opened.
        resumes: Whether the run continues: fp32 copies of bf16 weights are read then.

    Raises:
        ConfigError: The folder has no known format, or the model differs.
        CorruptFile: The folder is damaged or malicious.
    """
    recognized, setting = formats.recognize(folder), "checkpoint.resume" if resumes else "init_from"
    if recognized is None or not recognized.is_foreign:
        rule = "is no checkpoint of a known format" if recognized is None else f"is {formats.LABELS[recognized.format]}"
        raise ConfigError([Problem(setting, str(folder), rule, "name a checkpoint")])
    foreign = read_foreign(recognized)
    if foreign.problems:
        raise ConfigError(replace(each, field=setting) for each in foreign.problems)
    if foreign.vocab_size is not None and foreign.vocab_size > model.vocab_size:  # padding and tokens look alike
        rule = f"the checkpoint {foreign.folder} was trained with {foreign.vocab_size}"
        instead = f"write model.vocab_size={foreign.vocab_size}"
        raise ConfigError([Problem("model.vocab_size", model.vocab_size, rule, instead)])
    try:
        foreign.tensors = map_tensors(foreign, model, masters=resumes)
    except ConfigError as error:
        raise ConfigError(replace(each, field=setting) for each in error.problems) from None
    foreign.missing += [] if foreign.has_moments else [foreign.without_moments]
    check_model(foreign.folder, model, foreign.facts, resumes=resumes)
    return foreign


def resumed_state(plan: Plan, foreign: Foreign, record: Record) -> tuple[State, list[Difference]]:
    """Return the state from which ``plan`` resumes, and the accepted differences.

    The data continues in Megatron's order if the source read a Megatron dataset. Otherwise it starts at its first
    sample, since the formats of other programs have no position in the data.

    Args:
        record: The record of the plan's data at its start.

    Raises:
        ConfigError: Moments or step are missing, or settings differ that ``checkpoint.allow`` does not list.
    """
    folder = foreign.folder
    lacks = [f"it lacks {'; '.join(foreign.missing)}"] if not foreign.has_moments or foreign.step is None else []
    if lacks or foreign.unresumable or foreign.step is None:
        rule = f"cannot be resumed: {'; '.join([*lacks, *foreign.unresumable])}"
        instead = f"write init_from={folder} to start from its weights"
        raise ConfigError([Problem("checkpoint.resume", str(folder), rule, instead)])
    row = plan.config.optim.row
    if set(row.states) != {*MOMENTS} or row.matrix_states or row.extra_states:
        rule = f"has other states than Adam, and the checkpoint {folder} has {', '.join(MOMENTS)}"
        raise ConfigError([Problem("optim.name", plan.config.optim.name, rule, "write optim.name=adamw")])
    if plan.config.finetune.method == "lora":
        rule = f"trains adapters, and the checkpoint {folder} has no adapter"
        instead = "export the weights (scripts/export_hf.py), and start from the exported folder"
        raise ConfigError([Problem("finetune.method", "lora", rule, instead)])
    differences = _differences(plan, foreign)
    check_allowed(differences, plan.config.checkpoint.allow, folder)
    reordered = {difference.name for difference in differences} & {"trainer.seed", "data.seq_length", "data.split"}
    samples = 0 if foreign.samples is None else foreign.samples
    if foreign.samples and foreign.shuffled and record["segments"] and not reordered:
        # All samples of the source's run are shuffled together, and at least the samples that it has read.
        segment = {**record["segments"][0], "first": 0, "starts": {}, "order": MEGATRON}
        segment["shuffled"] = max(foreign.shuffled, foreign.samples)
        record = {**record, "order": MEGATRON, "segments": [segment]}
    state = State(
        step=foreign.step,
        consumed_samples=samples,
        optimizer=plan.config.optim.name,
        updates=foreign.step if foreign.updates is None else foreign.updates,
        world_size=0,
        settings=asdict(plan.config),
        lr=foreign.lr,
        data={**record, "consumed_samples": samples},
    )
    return state, differences


def _differences(plan: Plan, foreign: Foreign) -> list[Difference]:
    """Return the settings of optimizer, batch and data that differ from the source's."""
    differences = [Difference(name, theirs, ours, LOGGED) for name, theirs, ours in foreign.changes]
    for name, theirs in foreign.facts.items():
        if name.startswith(MODEL) or (name.startswith("data.") and name != "data.seq_length" and plan.config.data.mock):
            continue
        ours = get(plan.config, name)
        if not equal_values(ours, theirs):
            differences.append(Difference(name, theirs, ours, settings_by_name()[name].on_change))
    return differences
