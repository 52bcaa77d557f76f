"""Open a saved model of any format: shape, weights and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_llama.arch.parameters import head_dim, kv_heads
from megatron_llama.checkpoint import lora_adapter
from megatron_llama.checkpoint.export import GENERATION, check_base, model_of
from megatron_llama.checkpoint.folder import find_checkpoint, local_model
from megatron_llama.checkpoint.hf_folder import open_hf_folder
from megatron_llama.checkpoint.lora_adapter import MergedTensors, TrainedAdapter
from megatron_llama.checkpoint.manifest import read_manifest
from megatron_llama.checkpoint.tensor_source import CorruptFile, Stored, read_json
from megatron_llama.config import Config, ConfigError, FinetuneConfig, ModelConfig, Problem
from megatron_llama.config.data_settings import NewTokens, read_token_ids
from megatron_llama.config.hf_config import (
    ADAPTER_CONFIG,
    fill_from_adapter,
    read_hf_config,
    shape_from_hf,
    unsupported_architecture,
)
from megatron_llama.config.hub import INDEX, SINGLE, download_hint, resolve_hub_name
from megatron_llama.config.settings_table import check_limits
from megatron_llama.plan.defaults_and_notes import choose_defaults
from megatron_llama.plan.rules import RULES
from megatron_llama.plan.rules.rule import check_rules
from megatron_llama.system.object_store import Location
from megatron_llama.text import tokenizer as text_tokenizer
from megatron_llama.text.chat_template import TrainedTemplate, trained_template
from megatron_llama.text.tokenizer import FAST_JSON, SENTENCEPIECE_MODEL, Tokenizer

ARGUMENT = "CHECKPOINT"


@dataclass
class SavedModel:
    """Model on disk."""

    folder: Path
    """Folder of the checkpoint, Hugging Face model or PEFT adapter."""
    model: ModelConfig
    stored: Stored
    """All weights. LoRA weights are merged while reading."""
    tokenizer: Path | None
    """Sentencepiece model or Hugging Face folder; None if unknown."""
    token_ids: dict[str, Any]
    """Special tokens (``*_token_id``) of config.json and generation_config.json."""
    generation: dict[str, Any]
    """Content of generation_config.json; empty if there is none."""
    seq_length: int
    """Tokens per sequence in training; a default for Hugging Face models."""
    trained_template: TrainedTemplate | None = None
    """Chat template of a fine-tuning run."""
    new_tokens: NewTokens = text_tokenizer.NO_TOKENS
    """Tokens that the run added to ``tokenizer``."""


def open_saved_model(path: Location, base: Path | None = None) -> SavedModel:
    """Open the model at a path; read only headers and samples for a fingerprint.

    Args:
        path: checkpoint, run folder (its newest checkpoint), Hugging Face folder, PEFT adapter, or the name of a hub
            model.
        base: base model of LoRA, if its folder has moved; a folder or hub name.

    Raises:
        ConfigError: the path is none of these.
        CorruptFile: a file is damaged.
    """
    path = Path(resolve_hub_name(str(local_model(path)), weights=True))
    base = None if base is None else Path(resolve_hub_name(str(base), weights=True))
    if (path / ADAPTER_CONFIG).is_file() and not any((path / name).is_file() for name in (INDEX, SINGLE)):
        return _open_adapter(path, base)
    if (path / "config.json").is_file():
        _refuse_base(base)
        return open_hf_model(path)
    if not path.exists():
        rule, instead = "folder not found", "write the folder of a checkpoint, run or Hugging Face model"
        raise ConfigError([Problem(ARGUMENT, str(path), rule, instead + download_hint(str(path)))])
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    manifest.check_sizes()
    model, finetune = model_of(manifest), lora_adapter.finetune_of(manifest)
    origin = manifest.state.hf_folder
    stored: Stored = manifest.stored
    if finetune.method == "lora":
        trained = lora_adapter.trained_tensors(manifest, model, finetune)
        whole = lora_adapter.open_base(manifest, model, base)
        stored = MergedTensors.of(whole, TrainedAdapter(trained, model, finetune))
        origin = str(stored.folder)
    else:
        _refuse_base(base)
    settings = manifest.state.settings
    named = manifest.locate(settings.get("data", {}).get("tokenizer"))
    tokenizer = next((Path(place) for place in (named, origin) if place and Path(place).exists()), None)
    return SavedModel(
        folder,
        model,
        stored,
        tokenizer,
        _token_ids(Path(origin)) if origin else {},
        _settings_in(Path(origin) / GENERATION) if origin else {},
        int(settings.get("data", {}).get("seq_length", 0)) or model.max_position_embeddings,
        trained_template(settings),
        NewTokens.of(settings.get("data", {})),
    )


def _refuse_base(base: Path | None) -> None:
    if base is not None:
        rule = "applies only to LoRA, and this model has complete weights"
        raise ConfigError([Problem("--base", str(base), rule, "remove --base")])


@contextmanager
def restated(restate: Callable[[Problem], Problem]) -> Iterator[None]:
    """Rewrite the problems of a ConfigError in the block, in terms of the user's arguments."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([restate(problem) for problem in error.problems]) from None


def _open_adapter(folder: Path, base: Path | None) -> SavedModel:
    """Open a PEFT adapter on ``base``, or on the folder that its config names."""
    finetune = _settings_of_adapter(folder)
    if base is None:
        named = read_hf_config(str(folder), ADAPTER_CONFIG).get("base_model_name_or_path")
        named = resolve_hub_name(named, weights=True) if isinstance(named, str) else None
        if not named or not (Path(named) / "config.json").is_file():
            rule = f"the adapter's base_model_name_or_path {named!r} is not a model folder"
            raise ConfigError([Problem("--base", None, rule, "write --base FOLDER, with the adapter's base model")])
        base = Path(named)
    with restated(lambda problem: replace(problem, field="--base")):
        whole = open_hf_model(base)
        whole = _with_rows(whole, lora_adapter.adapter_rows(folder, finetune))
    merged = MergedTensors.of(whole.stored, _adapter_of(folder, finetune, whole.model))
    whole = replace(whole, folder=folder, stored=merged)
    if not has_tokenizer(folder):
        return whole
    token_ids, generation = whole.token_ids | _token_ids(folder), whole.generation | _settings_in(folder / GENERATION)
    return replace(whole, tokenizer=folder, token_ids=token_ids, generation=generation)


def _with_rows(whole: SavedModel, rows: int) -> SavedModel:
    """Return the model in a Hugging Face folder with at least this vocabulary, for new tokens."""
    if rows <= whole.model.vocab_size:
        return whole
    model = replace(whole.model, vocab_size=rows)
    return replace(whole, model=model, stored=open_hf_folder(whole.folder, model, grows=True))


def grow_for_adapters(whole: SavedModel, paths: Sequence[Path]) -> SavedModel:
    """Return the model in a Hugging Face folder with the rows and the tokenizer of PEFT adapters with new tokens.

    Raises ConfigError if an adapter with more rows has no tokenizer, or if two adapters have different new tokens.
    """
    known, added = read_token_ids(whole.folder / FAST_JSON), dict[str, int]()
    for path in paths:
        folder = Path(resolve_hub_name(str(path), weights=True))
        if not (folder / ADAPTER_CONFIG).is_file():
            continue
        ids = read_token_ids(folder / FAST_JSON)
        new = {token: number for token, number in ids.items() if known.get(token) != number}
        rows = max(lora_adapter.adapter_rows(folder, _settings_of_adapter(folder)), max(new.values(), default=-1) + 1)
        if rows > whole.model.vocab_size and not new:
            rule = f"trains {rows} rows, and the model has {whole.model.vocab_size}; its folder has no new tokens"
            raise ConfigError([Problem("--adapter", str(path), rule, f"copy its tokenizer.json to {folder}")])
        if new and added and new != added:
            rule = f"has other new tokens than the adapter in {whole.tokenizer}"
            raise ConfigError([Problem("--adapter", str(path), rule, "merge adapters of one tokenizer")])
        if new:
            whole, added = replace(_with_rows(whole, rows), tokenizer=folder), new
    return whole


def _about_adapter(folder: Path) -> AbstractContextManager[None]:
    """Restate the problems of a PEFT adapter's config and weights."""

    def of_adapter(problem: Problem) -> Problem:
        name = problem.field.partition(".")[2]
        about = "" if name == "adapter" else f"{name} {problem.value!r}: "
        return Problem(ARGUMENT, str(folder), about + problem.rule, "name a plain LoRA adapter of this base")

    return restated(of_adapter)


def _settings_of_adapter(folder: Path) -> FinetuneConfig:
    """Return the settings in a PEFT adapter's config."""
    problems: list[Problem] = []
    finetune = FinetuneConfig(method="lora")
    with _about_adapter(folder):
        fill_from_adapter(
            str(folder), set(), lambda name, value: setattr(finetune, name.partition(".")[2], value), problems
        )
        if problems:
            raise ConfigError(problems)
    return finetune


def _adapter_of(folder: Path, finetune: FinetuneConfig, model: ModelConfig) -> TrainedAdapter:
    """Open a PEFT adapter. Only the shapes of the base are checked, because PEFT stores no fingerprint."""
    with _about_adapter(folder):
        config, _ = choose_defaults(Config(model=model, finetune=finetune))
        problems = check_limits(config)
        problems += check_rules(RULES, config, 1, {problem.field for problem in problems})
        problems = [problem for problem in problems if problem.field.startswith("finetune.")]
        if problems:
            raise ConfigError(problems)
        return TrainedAdapter(lora_adapter.open_adapter(folder, model, finetune), model, finetune)


def open_adapter_for(path: Path, whole: SavedModel) -> TrainedAdapter:
    """Open a PEFT adapter, or the adapter of a LoRA run, of the model in a Hugging Face folder.

    Raises:
        ConfigError: The path is neither, or the adapter is of another model.
        CorruptFile: A file is damaged.
    """
    path = Path(resolve_hub_name(str(path), weights=True))
    if (path / ADAPTER_CONFIG).is_file():
        return _adapter_of(path, _settings_of_adapter(path), whole.model)
    instead = f"name a LoRA run or a PEFT folder{download_hint(str(path))}"
    with restated(lambda problem: replace(problem, field="--adapter", instead=instead)):
        manifest = read_manifest(find_checkpoint(path))
    manifest.check_sizes()
    finetune = lora_adapter.finetune_of(manifest)
    if finetune.method != "lora":
        raise ConfigError([Problem("--adapter", str(path), "has no LoRA adapter", instead)])
    if NewTokens.of(manifest.state.settings.get("data", {})):
        instead = f"export the adapter (scripts/export_hf.py {path} FOLDER), and name that folder"
        raise ConfigError([Problem("--adapter", str(path), "is a run with new tokens", instead)])
    check_base(path, model_of(manifest), str(whole.folder))
    lora_adapter.open_base(manifest, whole.model, whole.folder)
    return TrainedAdapter(lora_adapter.trained_tensors(manifest, whole.model, finetune), whole.model, finetune)


def open_hf_model(folder: Path) -> SavedModel:
    """Open the model in a Hugging Face folder. Raises ConfigError."""
    try:
        content = read_hf_config(str(folder))
    except ValueError as error:
        instead = f"write the folder of a Hugging Face model{download_hint(str(folder))}"
        instead = "download the folder from scratch" if (folder / "config.json").exists() else instead
        raise ConfigError([Problem(ARGUMENT, str(folder), str(error), instead)]) from None
    rules = [f"unsupported Llama: {clause}" for clause in unsupported_architecture(content)]
    shape = shape_from_hf(content)
    try:
        model = ModelConfig.of(shape)
        model = replace(model, num_key_value_heads=kv_heads(model), head_dim=head_dim(model), name=folder.name)
    except (TypeError, ZeroDivisionError) as error:
        rules.append(f"config.json is not of a Llama ({error})")
    if rules:
        raise ConfigError([Problem(ARGUMENT, str(folder), rule, "name another folder") for rule in rules])
    with restated(lambda problem: replace(problem, field=ARGUMENT)):
        stored = open_hf_folder(folder, model)
    length = min(model.max_position_embeddings, 2048)
    return SavedModel(folder, model, stored, folder, _token_ids(folder), _settings_in(folder / GENERATION), length)


def _token_ids(folder: Path) -> dict[str, Any]:
    """Return the special tokens of config.json and generation_config.json; the latter has priority."""
    token_ids: dict[str, Any] = {}
    for name in ("config.json", GENERATION):
        named = {key: value for key, value in _settings_in(folder / name).items() if key.endswith("_token_id")}
        token_ids |= {key: value for key, value in named.items() if value is not None}
    return token_ids


def _settings_in(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty without the file. Raises CorruptFile."""
    content = read_json(file) if file.exists() else {}
    if not isinstance(content, dict):
        raise CorruptFile(f"{file}: not a JSON object")
    return content


def has_tokenizer(path: Path) -> bool:
    """Return whether a path is a file, or a folder with a tokenizer's file."""
    return path.is_file() or any((path / name).is_file() for name in (FAST_JSON, SENTENCEPIECE_MODEL))


def tokenizer_of(saved: SavedModel, given: Path | None = None) -> Tokenizer:
    """Return the given tokenizer or the model's; raise ConfigError if it is missing or does not fit."""
    path, instead = given or saved.tokenizer, "write --tokenizer PATH, a sentencepiece model or Hugging Face folder"
    if path is None:
        rule = "the model's tokenizer is unknown, or its path of training no longer exists"
        raise ConfigError([Problem("--tokenizer", None, rule, instead)])
    try:
        tokenizer = text_tokenizer.open_tokenizer(path, saved.new_tokens.unless_in(text_tokenizer.tokenizer_file(path)))
    except text_tokenizer.TokenizerError as error:
        raise ConfigError([Problem("--tokenizer", str(path), error.rule, instead)]) from None
    if tokenizer.size > saved.model.vocab_size:
        rule = f"has {tokenizer.size} ids, but the model's vocabulary has {saved.model.vocab_size}"
        instead = "write the tokenizer of the model's training"
        raise ConfigError([Problem("--tokenizer", str(path), rule, instead)])
    return tokenizer


def stop_ids(saved: SavedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end an answer. Raises ConfigError if the model's files name other values."""
    named = saved.token_ids.get("eos_token_id")
    ids = [number for number in (named if isinstance(named, list) else [named]) if number is not None]
    if not all(type(number) is int for number in ids):
        instead = f"correct it in {GENERATION} or config.json of {saved.folder}"
        raise ConfigError([Problem("eos_token_id", named, "must be a token id or a list of ids", instead)])
    return frozenset([*ids, *([] if tokenizer.end is None else [tokenizer.end])])
