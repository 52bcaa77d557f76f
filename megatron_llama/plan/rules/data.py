"""Rules on datasets, raw data files, tokenizers and curricula, and checks of the files that a config refers to."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

from megatron_llama.arch.parameters import head_dim, kv_heads
from megatron_llama.arch.recognize_format import LABELS, OURS, WEIGHTS_ONLY, is_foreign, recognize
from megatron_llama.config import hf_config, hub
from megatron_llama.config.data_settings import (
    DISCRETE,
    MASK_SUFFIX,
    RESHAPE,
    SECTION,
    TRUNCATE,
    NewTokens,
    check_curriculum,
    datasets_named,
    derives_validation,
    has_columns,
    is_table,
    list_paths,
    raw_data_files,
    raw_data_tokenizer,
    split_weights,
    suggest_for_data,
    valid_metrics,
)
from megatron_llama.config.precision import QUANTIZED_BITS
from megatron_llama.config.problems import Problem, closest_match, format_value, quote_value
from megatron_llama.config.rope import longest_sequence
from megatron_llama.config.settings import LABEL_TEMPLATES, Config, DataConfig
from megatron_llama.plan.data_schedules import MOST_LEVELS, first_steps
from megatron_llama.plan.rules.layout import sequence_parts
from megatron_llama.plan.rules.rule import reads
from megatron_llama.system.missing_packages import pip_install
from megatron_llama.system.object_store import RemotePath, is_plain_url, is_url, missing_package
from megatron_llama.topology import Grid


@reads("data.seq_length", "model.max_position_embeddings", "model.rope_scaling.factor")
def sequence_fits_model(config: Config, world_size: int) -> Iterator[Problem]:
    """Sequences are at most as long as the model supports."""
    length, longest = config.data.length, longest_sequence(config.model)
    if length > longest:
        advice = f"write data.seq_length={longest}, or model.max_position_embeddings={length}"
        yield Problem("data.seq_length", length, f"must be at most model.max_position_embeddings={longest}", advice)


@reads("data.kind", "data.prefixes")
def fine_tuning_sets_are_whole(config: Config, world_size: int) -> Iterator[Problem]:
    """Fine-tuning reads whole sets."""
    data = config.data
    weights, paths = split_weights(data.prefixes)
    if data.kind == "sft" and weights:
        advice = f"write data.prefixes={format_value(paths)}; a dataset that is listed twice counts twice"
        rule = "must have no weights with data.kind=sft: each epoch reads all datasets"
        yield Problem("data.prefixes", data.prefixes, rule, advice)


@reads("data.prefixes", "data.mock")
def data_is_there(config: Config, world_size: int) -> Iterator[Problem]:
    """Training needs a dataset or mock data."""
    if not config.data.mock and not config.data.prefixes:
        advice = "write data.prefixes=[path/to/dataset_text_document], data=python_stdlib, or data=mock"
        yield Problem("data.prefixes", config.data.prefixes, "must list a dataset", advice)


@reads("data.split", "data.validation_prefixes", "data.kind", "trainer.val_every_steps", "trainer.val_at_start")
def validation_has_documents(config: Config, world_size: int) -> Iterator[Problem]:
    """Validation needs documents that training does not use; a first one is part of regular validations."""
    every, split = config.trainer.val_every_steps, config.data.split
    if config.trainer.val_at_start and not every and (every is not None or not derives_validation(config.data)):
        rule = f"needs validation: trainer.val_every_steps is {format_value(every)}"
        advice = f"write trainer.val_every_steps={max(1, config.trainer.steps)}, or trainer.val_at_start=false"
        yield Problem("trainer.val_at_start", True, rule, advice)
    has_set = config.data.mock or config.data.validation_prefixes
    if every and not has_set and float(split.split(",")[1]) == 0:
        rule = f"trainer.val_every_steps={every} needs a second share above 0, for validation"
        instead = f"write data.split={quote_value(DataConfig.split)}, or trainer.val_every_steps=0"
        yield Problem("data.split", split, rule, instead)


@reads("data.prefixes", "data.validation_prefixes", "data.kind", "data.tokenizer", "data.template", "init_from")
def records_can_be_prepared(config: Config, world_size: int) -> Iterator[Problem]:
    """Raw data files need a tokenizer, and tables also a prompt template."""
    data, files = config.data, raw_data_files(config.data)
    if files and raw_data_tokenizer(config) is None:
        rule = f"is needed to encode the text in {files[0][1]}"
        instead = "write data.tokenizer=FOLDER (Hugging Face) or tokenizer.model, or init_from=FOLDER"
        yield Problem("data.tokenizer", None, rule, instead)
    tables = [path for _, path in files if is_table(path)]
    if tables and data.template is None:
        rule = f"is needed for the table {tables[0]}"
        yield Problem("data.template", None, rule, f"write data.template={' or '.join(LABEL_TEMPLATES)}")
    if data.template is not None and not any(has_columns(path) for _, path in files):
        rule = "needs a file with columns (.tsv, .csv, .parquet, .jsonl) in data.prefixes"
        yield Problem("data.template", data.template, rule, "omit data.template")
    defaults = DataConfig()
    for name in ("chat_template", "chat_template_kwargs", "format", "response_marker"):
        if (value := getattr(data, name)) != getattr(defaults, name) and not files:
            rule = "needs raw data files; an indexed dataset was rendered with its template"
            yield Problem(f"data.{name}", value, rule, f"omit data.{name}")


# Rules on data.curriculum.

NONE = f"{SECTION}=[]"


@reads("data.curriculum")
def curriculum_has_schedules(config: Config, world_size: int) -> Iterator[Problem]:
    """Each entry is a metric with a complete schedule."""
    for problem in check_curriculum(config.data.curriculum):
        yield replace(problem, instead=f"{problem.instead}, or {NONE}")


@reads("data.curriculum", "trainer.steps")
def curriculum_has_few_levels(config: Config, world_size: int) -> Iterator[Problem]:
    """The number of difficulty levels is limited: each has a list of samples, or a shape to compile."""
    metrics = valid_metrics(config.data.curriculum)
    for metric in metrics:
        if metric.schedule_type == DISCRETE:
            continue
        assert metric.min_difficulty is not None and metric.max_difficulty is not None
        difference = metric.max_difficulty - metric.min_difficulty
        if (levels := difference // metric.difficulty_step) > MOST_LEVELS:
            rule = f"{metric.metric} has {levels:,} difficulty levels; the limit is {MOST_LEVELS:,}"
            advice = f"write difficulty_step: {-(-difference // MOST_LEVELS)} or more in its entry, or {NONE}"
            yield Problem(SECTION, None, rule, advice)
            return
    if metrics and len(first_steps(config)) > MOST_LEVELS:
        rule = f"its metrics together have more than {MOST_LEVELS:,} difficulty levels"
        yield Problem(SECTION, None, rule, f"write a larger difficulty_step in its entries, or {NONE}")


@reads("data.curriculum", "data.seq_length", "data.kind", "trainer.sp", "trainer.tp", "trainer.cp")
def curriculum_lengths_fit(config: Config, world_size: int) -> Iterator[Problem]:
    """Curriculum lengths end at data.seq_length and suit sequence parallelism."""
    data, trainer = config.data, config.trainer
    for metric in valid_metrics(config.data.curriculum):
        if not metric.is_length:
            continue
        if metric.highest != data.length:
            rule = f"{metric.metric} must end at data.seq_length={data.length}, not at {metric.highest}"
            name = "the last of difficulty" if metric.schedule_type == DISCRETE else "max_difficulty"
            advice = f"write {data.length} as {name} in its entry, or data.seq_length={metric.highest}"
            yield Problem(SECTION, None, rule, advice)
        if metric.metric == RESHAPE and data.kind == "sft":
            rule = f"{RESHAPE} needs data.kind=pretrain: it would split examples after their prompt"
            advice = f"write metric: {TRUNCATE}, or metric: length, which draws short examples first, or {NONE}"
            yield Problem(SECTION, None, rule, advice)
        lengths = metric.difficulty if metric.schedule_type == DISCRETE else [metric.difficulty_step]
        grid = Grid.of(trainer)
        parts = grid.sequence_unit(sp=True)
        is_split = trainer.sp is not False and data.length % parts == 0  # where null is derived to be on
        unit = grid.sequence_unit(sp=False)
        if unit > 1 and any(length % unit for length in lengths):
            rule = f"lengths {format_value(lengths)}: each must be a multiple of 2 * trainer.cp = {unit}"
            step = -(-metric.difficulty_step // unit) * unit
            name = "such lengths" if metric.schedule_type == DISCRETE else f"difficulty_step: {step}"
            yield Problem(SECTION, None, rule, f"write {name} in its entry, or trainer.cp=1")
        elif is_split and any(length % parts for length in lengths):
            divisor = sequence_parts(grid)
            rule = f"lengths {format_value(lengths)}: with sequence parallelism each must divide by {divisor}"
            step = -(-metric.difficulty_step // parts) * parts
            name = "lengths that divide" if metric.schedule_type == DISCRETE else f"difficulty_step: {step}"
            yield Problem(SECTION, None, rule, f"write {name} in its entry, or trainer.sp=false")


# Checks of the files, folders and packages that a config refers to.


Exists = Callable[[str], bool]
_CREDENTIALS = "set the provider's credentials in its environment variables or files"
TORCHAO = "0.18."
"""The version series in pyproject.toml; quantizers' names change between series."""


def check_paths(config: Config, exists: Exists) -> list[Problem]:
    """Return the problems of files, folders and packages that are missing or invalid."""
    return [
        *check_data(config, exists),
        *_quantizer(config),
        *_packages(config),
        *_checkpoint(config, exists),
        *_starting_weights(config, exists),
    ]


def check_data(config: Config, exists: Exists) -> list[Problem]:
    """Return the problems of missing datasets and tokenizers, which ``data.prepare`` can make."""
    if config.data.mock:
        return []
    return [replace(problem, machine_specific=config.data.prepare is not None) for problem in _data(config, exists)]


def _data(config: Config, exists: Exists) -> Iterator[Problem]:
    """Yield the problems of raw data files, datasets and the tokenizer."""
    data, records = config.data, raw_data_files(config.data)
    no_file = f"there is no such file (seen from {os.getcwd()})"
    for name, path in records:
        if is_url(path):
            rule = "is raw data in an object store, which a run does not prepare"
            yield Problem(name, path, rule, "prepare it with data_prep/sft.py, and write the dataset's URL")
        elif not exists(path):
            yield Problem(name, path, no_file, "write the path of a raw data file or a dataset")
    for name, path in list_paths(data):
        if is_url(path) and (problem := _store_problem(name, path, exists)):
            yield problem
        elif (name, path) not in records:
            yield from _dataset(data, name, path, exists)
            if data.kind == "sft" and exists(path + ".idx"):  # no second message if the dataset is missing
                yield from _dataset(data, name, path + MASK_SUFFIX, exists)
    if data.tokenizer is not None and not exists(data.tokenizer):
        is_made = data.prepare and not all(exists(path + ".idx") for _, path in list_paths(data))
        instead = f"make it with: {data.prepare}" if is_made else "write data.tokenizer=null, or its path"
        yield Problem("data.tokenizer", data.tokenizer, no_file, instead + hub.download_hint(data.tokenizer))


def _store_problem(name: str, path: str, exists: Exists) -> Problem | None:
    """Return the problem of an object store that cannot be read; None for a missing object."""
    try:
        if exists(str(RemotePath(path)) + ".bin"):
            return None
    except ValueError as error:
        return Problem(name, path, str(error), f"{_CREDENTIALS}, and write the URL without them")
    if reason := missing_package(path):
        return Problem(name, path, *reason, machine_specific=True)
    try:
        RemotePath(path + ".bin").facts()
    except FileNotFoundError:
        return None
    except OSError as error:
        return Problem(name, path, f"cannot be read: {error.strerror}", _CREDENTIALS, machine_specific=True)
    return None


def _dataset(data: DataConfig, name: str, path: str, exists: Exists) -> Iterator[Problem]:
    """Yield the problem of an indexed dataset that lacks one of its two files."""
    missing = [suffix for suffix in (".bin", ".idx") if not exists(path + suffix)]
    if not missing:
        return
    seen = "" if is_url(path) else f" (seen from {os.getcwd()})"
    rule = f"there is no {path}{' and no '.join(missing)}{seen}"
    stem, suffix = os.path.splitext(path)
    if suffix in (".bin", ".idx"):
        instead = f"write {name}=[{stem}], without {suffix}"
    elif data.prepare and (path in data.prefixes or f" {os.path.dirname(path)}/" in data.prepare):
        instead = f"make it with: {data.prepare}"
    elif (advice := suggest_for_data(path, name)) and (data.kind == "pretrain" or datasets_named(path)):
        rule = "is raw data, not an indexed dataset (.bin and .idx)" if advice.startswith("prepare") else rule
        instead = advice
    elif data.kind == "sft":
        instead = "make it with python data_prep/sft.py: docs/guides/data/sft_data.md"
        instead += "" if path.endswith(MASK_SUFFIX) else hub.download_hint(path, hub.DATASET)
    else:
        instead = "write the path of an indexed dataset without .bin and .idx, or data=mock for random tokens"
    yield Problem(name, path, rule, instead)


def _starting_weights(config: Config, exists: Exists) -> Iterator[Problem]:
    if (folder := config.init_from) is None:
        return
    if not exists(folder):
        yield replace(hf_config.missing_folder(folder), machine_specific=True)
        return
    if not exists(os.path.join(folder, "config.json")):
        if is_foreign(folder):
            if config.finetune.method == "lora" or NewTokens.of(config.data):
                reader = "finetune.method=lora needs" if config.finetune.method == "lora" else "new tokens need"
                rule = f"is a checkpoint of another program, and {reader} a Hugging Face folder"
                instead = "start once with trainer.steps=0 and checkpoint.export_hf=true, and write the exported folder"
                yield Problem("init_from", folder, rule, instead)
            return
        rule = "has no config.json, so it is not a Hugging Face model folder"
        yield Problem("init_from", folder, rule, hf_config.folder_hint(folder))
        return
    if not os.path.isfile(os.path.join(folder, "config.json")):
        return  # this plan is for another machine
    ours = {**asdict(config.model), "num_key_value_heads": kv_heads(config.model), "head_dim": head_dim(config.model)}
    try:
        content = hf_config.read_hf_config(folder)
    except ValueError as error:
        yield Problem("init_from", folder, str(error), hf_config.folder_hint(folder))
        return
    if clauses := hf_config.unsupported_architecture(content):
        yield Problem("init_from", folder, f"is not supported: {'; '.join(clauses)}", "write another model's folder")
        return
    different = hf_config.compare_shapes(ours, content)
    if NewTokens.of(config.data) and ours["vocab_size"] > content.get("vocab_size", 0):
        different.pop("vocab_size", None)
    if len(different) > 1 and config.model.name != hub.short_name(folder):
        rule = f"has another shape than model={config.model.name}: {', '.join(different)} differ"
        instead = f"write model={hf_config.FROM_HF}, which takes the shape from this folder"
        yield Problem("init_from", folder, rule, instead)
    elif different:
        clauses = [f"{key} is {format_value(b)}, not {format_value(a)}" for key, (a, b) in different.items()]
        rule = f"has another shape than model={config.model.name}: {', '.join(clauses)}"
        instead = " ".join(shlex.quote(f"model.{key}={format_value(theirs)}") for key, (_, theirs) in different.items())
        instead = f"write {instead}, or model={hf_config.FROM_HF}, which has the folder's shape"
        yield Problem("init_from", folder, rule, instead)


def _checkpoint(config: Config, exists: Exists) -> Iterator[Problem]:
    resume = config.checkpoint.resume
    if resume in ("auto", "never") or is_plain_url(resume):  # rank 0 asks the store
        return
    if not exists(resume) or (os.path.isfile(resume) and os.path.basename(resume) not in ("latest", "best")):
        near = recognize(Path(resume).parent)
        newest = shlex.quote(str(near.folder)) if near and near.format == OURS else None
        advice = closest_match(resume, ("auto", "never")) or newest or "auto, never, or the path of a checkpoint"
        rule = "must be auto, never or the path of a checkpoint" + ", without credentials" * is_url(resume)
        yield Problem("checkpoint.resume", resume, rule, f"write checkpoint.resume={advice}")
    elif os.path.isdir(resume):
        yield from _resumed_folder(Path(resume))


def _resumed_folder(folder: Path) -> Iterator[Problem]:
    """Yield the problem of a folder from which no run can resume, with its content."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        yield Problem("checkpoint.resume", str(folder), rule, "make it readable, or name another checkpoint")
        return
    recognized, in_run = recognize(folder), recognize(folder / "checkpoints")
    if recognized is None and in_run is not None and in_run.format == OURS:
        recognized = in_run
    if recognized is None:
        content = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "nothing"
        rule = f"is no checkpoint of a known format: the folder contains {content}"
        formats = ", ".join(label for kind, label in LABELS.items() if kind not in WEIGHTS_ONLY)
        yield Problem("checkpoint.resume", str(folder), rule, f"name one of these: {formats}")
    elif recognized.format in WEIGHTS_ONLY:
        rule = f"is {LABELS[recognized.format]}, which is read for its weights only"
        yield Problem("checkpoint.resume", str(folder), rule, f"write init_from={shlex.quote(str(folder))}")
    elif recognized.format == OURS and recognized.folder != folder:
        rule = "is a folder of checkpoints, not a checkpoint"
        instead = f"write checkpoint.resume={shlex.quote(str(recognized.folder))}"
        yield Problem("checkpoint.resume", str(folder), rule, instead)


def _quantizer(config: Config) -> Iterator[Problem]:
    """Check for torchao, which quantizes frozen weights, without importing it, which takes seconds."""
    kind = config.finetune.frozen_dtype
    if config.finetune.method != "lora" or kind not in QUANTIZED_BITS:
        return
    try:
        version = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if not version.startswith(TORCHAO):
        rule = f"needs torchao {TORCHAO}x, and {f'torchao {version}' if version else 'no torchao'} is installed"
        advice = f"{pip_install(extra='quantize')}, or write finetune.frozen_dtype=bf16"
        yield Problem("finetune.frozen_dtype", kind, rule, advice, machine_specific=True)


def _packages(config: Config) -> Iterator[Problem]:
    """Check for packages of trackers and of the schedule without importing them, which takes a second.

    Checking the schedule's class would import torch too.
    """
    for name, off in (("wandb", "off"), ("trackio", None), ("mlflow", None)):
        value = getattr(config.logging, name)
        if value != off and find_spec(name) is None:
            advice = f"{pip_install(extra=name)}, or write logging.{name}={format_value(off)}"
            rule = f"the package {name} is not installed"
            yield Problem(f"logging.{name}", value, rule, advice, machine_specific=True)
    target = str(config.optim.schedule.get("_target_") or "megatron_llama")
    package = target.partition(".")[0]
    if find_spec(package) is None:
        advice = "install it, or write optim=cosine, linear, constant or wsd"
        yield Problem("optim.schedule._target_", target, f"the package {package} is not installed", advice)
