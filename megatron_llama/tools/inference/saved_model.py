"""The model that a path holds, whatever wrote it: its shape, its weights and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_llama.arch.shapes import head_dim, kv_heads
from megatron_llama.checkpoint.adapter import MergedTensors, finetune_of, open_adapter, open_base, trained_tensors
from megatron_llama.checkpoint.export import model_of
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.hf_folder import INDEX, SINGLE, open_hf_folder
from megatron_llama.checkpoint.manifest import read_manifest
from megatron_llama.checkpoint.stored_tensors import CorruptFile, Stored, read_json
from megatron_llama.config import Config, ConfigError, FinetuneConfig, ModelConfig, Problem
from megatron_llama.config.fields import check_limits
from megatron_llama.config.hf_config import (
    ADAPTER_CONFIG,
    download_hint,
    fill_from_adapter,
    read_hf_config,
    resolve_hub_name,
    shape_from_hf,
    unsupported_architecture,
)
from megatron_llama.plan.choices import choose_defaults
from megatron_llama.plan.rules import RULES
from megatron_llama.plan.rules.rule import check_rules
from megatron_llama.text.chat_template import TrainedTemplate, trained_template
from megatron_llama.text.tokenizer import FAST_JSON, PIECES, Tokenizer, TokenizerError, open_tokenizer

ARGUMENT = "CHECKPOINT"


@dataclass
class SavedModel:
    """A model on disk."""

    folder: Path
    """The checkpoint's, the Hugging Face folder, or the PEFT adapter's."""
    model: ModelConfig
    stored: Stored
    """All weights; a LoRA run's or an adapter's are merged while they are read."""
    tokenizer: Path | None
    """A sentencepiece model or a Hugging Face folder; None where it is not known."""
    token_ids: dict[str, Any]
    """Special tokens (``..._token_id``) in config.json and generation_config.json."""
    seq_length: int
    """Tokens per sequence in training, or a usual number of them."""
    trained_template: TrainedTemplate | None = None
    """Of a fine-tuning run."""


def open_saved_model(path: Path, base: Path | None = None) -> SavedModel:
    """The model at ``path``: a checkpoint, a run's folder (its newest checkpoint), a Hugging Face folder or a PEFT
    adapter.

    ``base`` is the folder of the weights that LoRA was trained on, where it has moved. Reads headers, and samples for
    a fingerprint. Both may be names of the hub, whose models are in the local cache. Raises ConfigError for what is
    none of them, and CorruptFile.
    """
    path = Path(resolve_hub_name(str(path)))
    base = None if base is None else Path(resolve_hub_name(str(base)))
    if (path / ADAPTER_CONFIG).is_file() and not any((path / name).is_file() for name in (INDEX, SINGLE)):
        return _open_adapter(path, base)
    if (path / "config.json").is_file():
        _refuse_base(base)
        return _open_hf_folder(path)
    if not path.exists():
        rule, instead = "there is no such folder", "write a checkpoint's, a run's or a Hugging Face model's folder"
        raise ConfigError([Problem(ARGUMENT, str(path), rule, instead + download_hint(str(path)))])
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    manifest.check_sizes()
    model, finetune = model_of(manifest), finetune_of(manifest)
    origin = manifest.state.hf_folder
    stored: Stored = manifest.stored
    if finetune.method == "lora":
        trained = trained_tensors(manifest, model, finetune)
        stored = MergedTensors.of(open_base(manifest, model, base), trained, finetune)
        origin = str(stored.folder)
    else:
        _refuse_base(base)
    settings = manifest.state.settings
    named = settings.get("data", {}).get("tokenizer")
    tokenizer = next((Path(place) for place in (named, origin) if place and Path(place).exists()), None)
    return SavedModel(
        folder,
        model,
        stored,
        tokenizer,
        _token_ids(Path(origin)) if origin else {},
        int(settings.get("data", {}).get("seq_length", 0)) or model.max_position_embeddings,
        trained_template(settings),
    )


def _refuse_base(base: Path | None) -> None:
    if base is not None:
        rule = "is the model that LoRA was trained on, and these weights are whole"
        raise ConfigError([Problem("--base", str(base), rule, "leave --base out")])


@contextmanager
def restated(restate: Callable[[Problem], Problem]) -> Iterator[None]:
    """Raises the block's ConfigError with its problems restated, in terms of what the user wrote."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([restate(problem) for problem in error.problems]) from None


def _open_adapter(folder: Path, base: Path | None) -> SavedModel:
    """A PEFT adapter on ``base``, or on the folder that it names itself.

    PEFT keeps no fingerprint of the base: only its shapes can be checked.
    """

    def of_adapter(problem: Problem) -> Problem:
        name = problem.field.partition(".")[2]
        about = "" if name == "adapter" else f"its {name} {problem.value!r}: "
        return Problem(ARGUMENT, str(folder), about + problem.rule, "name an adapter of plain LoRA, made for this base")

    problems: list[Problem] = []
    finetune = FinetuneConfig(method="lora")
    with restated(of_adapter):
        fill_from_adapter(
            str(folder), set(), lambda name, value: setattr(finetune, name.partition(".")[2], value), problems
        )
        if problems:
            raise ConfigError(problems)
    if base is None:
        named = read_hf_config(str(folder), ADAPTER_CONFIG).get("base_model_name_or_path")
        named = resolve_hub_name(named) if isinstance(named, str) else None
        if not named or not (Path(named) / "config.json").is_file():
            rule = f"the adapter's base_model_name_or_path is {named!r}, and no model's folder is there"
            raise ConfigError([Problem("--base", None, rule, "write --base FOLDER, with the model it was made for")])
        base = Path(named)
    with restated(lambda problem: replace(problem, field="--base")):
        whole = _open_hf_folder(base)
    with restated(of_adapter):
        config, _ = choose_defaults(Config(model=whole.model, finetune=finetune))
        problems = check_limits(config)
        problems += check_rules(RULES, config, 1, {problem.field for problem in problems})
        problems = [problem for problem in problems if problem.field.startswith("finetune.")]
        if problems:
            raise ConfigError(problems)
        adapter = open_adapter(folder, whole.model, finetune)
    own = any((folder / name).is_file() for name in (FAST_JSON, PIECES))
    merged = MergedTensors.of(whole.stored, adapter, finetune)
    return replace(whole, folder=folder, stored=merged, tokenizer=folder if own else whole.tokenizer)


def _open_hf_folder(folder: Path) -> SavedModel:
    try:
        content = read_hf_config(str(folder))
    except ValueError as error:
        raise ConfigError([Problem(ARGUMENT, str(folder), str(error), "get the folder again")]) from None
    rules = [f"is no Llama of this kind: {clause}" for clause in unsupported_architecture(content)]
    shape = shape_from_hf(content)
    try:
        model = ModelConfig.of(shape)
        model = replace(model, num_key_value_heads=kv_heads(model), head_dim=head_dim(model), name=folder.name)
    except (TypeError, ZeroDivisionError) as error:
        rules.append(f"its config.json describes no Llama ({error})")
    if rules:
        raise ConfigError([Problem(ARGUMENT, str(folder), rule, "name another folder") for rule in rules])
    with restated(lambda problem: replace(problem, field=ARGUMENT)):
        stored = open_hf_folder(folder, model)
    return SavedModel(folder, model, stored, folder, _token_ids(folder), min(model.max_position_embeddings, 2048))


def _token_ids(folder: Path) -> dict[str, Any]:
    """Special tokens by the folder's config.json, and by generation_config.json, which wins."""
    found: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        try:
            content = read_json(folder / name)
        except CorruptFile:
            continue
        if isinstance(content, dict):
            found |= {key: value for key, value in content.items() if key.endswith("_token_id") and value is not None}
    return found


def tokenizer_of(saved: SavedModel, given: Path | None = None) -> Tokenizer:
    """The tokenizer that is given, or else the one that belongs to the model. Raises ConfigError where none fits."""
    path, instead = given or saved.tokenizer, "write --tokenizer tokenizer.model, or a Hugging Face tokenizer's folder"
    if path is None:
        rule = "the model's tokenizer is not known, or no longer where it was in training"
        raise ConfigError([Problem("--tokenizer", None, rule, instead)])
    try:
        tokenizer = open_tokenizer(path)
    except TokenizerError as error:
        raise ConfigError([Problem("--tokenizer", str(path), error.rule, instead)]) from None
    if tokenizer.size > saved.model.vocab_size:
        rule = f"has {tokenizer.size} ids, and the model's vocabulary only {saved.model.vocab_size}"
        instead = "name the tokenizer that the model was trained with"
        raise ConfigError([Problem("--tokenizer", str(path), rule, instead)])
    return tokenizer


def stop_ids(saved: SavedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that end an answer."""
    named = saved.token_ids.get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    return frozenset(number for number in (*ids, tokenizer.end) if isinstance(number, int))
