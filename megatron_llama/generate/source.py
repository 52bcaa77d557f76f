"""What a path holds that a model can be loaded from, whoever wrote it: its shape, its values, and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_llama.checkpoint.export import find_checkpoint, model_of
from megatron_llama.checkpoint.files import Damaged, Stored, read_json
from megatron_llama.checkpoint.huggingface import open_hf_folder
from megatron_llama.checkpoint.manifest import read_manifest
from megatron_llama.config import (
    Config,
    ConfigError,
    DataConfig,
    DeviceConfig,
    ModelConfig,
    Plan,
    Problem,
    TrainerConfig,
    resolve,
)
from megatron_llama.config.counting import head_dim, kv_heads
from megatron_llama.config.huggingface import other_than_llama, read_hf_config, shape_from_hf
from megatron_llama.config.settings import RopeScaling

ARGUMENT = "CHECKPOINT"
# auto: what is fast there. A CPU without bf16 units multiplies bf16 several times slower than fp32.
DTYPES = ("auto", "float32", "bfloat16")


@dataclass
class Source:
    """A model on disk."""

    folder: Path
    """The checkpoint's, or the Hugging Face folder."""
    model: ModelConfig
    stored: Stored
    tokenizer: Path | None
    """A sentencepiece model or a Hugging Face folder; None where it is not known."""
    token_ids: dict[str, Any]
    """What generation_config.json and config.json say of special tokens."""
    seq_length: int
    """Tokens of a sequence that it was trained on, or is meant for."""


def open_source(path: Path) -> Source:
    """The model at ``path``: a checkpoint, a run's folder (its newest checkpoint) or a Hugging Face folder.

    Reads headers only. Raises ConfigError for what is none of them, and Damaged for files that are not whole.
    """
    if (path / "config.json").is_file():
        return _hugging_face(path)
    if not path.exists():
        rule, instead = "there is no such folder", "write a checkpoint's, a run's or a Hugging Face model's folder"
        raise ConfigError([Problem(ARGUMENT, str(path), rule, instead)])
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    manifest.check_sizes()
    settings = manifest.state.settings
    named = settings.get("data", {}).get("tokenizer")
    origin = manifest.state.hf_folder
    tokenizer = next((Path(place) for place in (named, origin) if place and Path(place).exists()), None)
    return Source(
        folder,
        model_of(manifest),
        manifest.stored,
        tokenizer,
        _token_ids(Path(origin)) if origin else {},
        int(settings.get("data", {}).get("seq_length", 0)) or model_of(manifest).max_position_embeddings,
    )


def _hugging_face(folder: Path) -> Source:
    try:
        content = read_hf_config(str(folder))
    except ValueError as error:
        raise ConfigError([Problem(ARGUMENT, str(folder), str(error), "get the folder again")]) from None
    other = [f"is no Llama of this kind: {clause}" for clause in other_than_llama(content)]
    shape = shape_from_hf(content)
    scaling = shape.pop("rope_scaling")
    try:
        model = ModelConfig(**shape, rope_scaling=RopeScaling(**scaling) if scaling else None)
        model = replace(model, num_key_value_heads=kv_heads(model), head_dim=head_dim(model), name=folder.name)
    except (TypeError, ZeroDivisionError) as error:
        other.append(f"its config.json describes no Llama ({error})")
    if other:
        raise ConfigError([Problem(ARGUMENT, str(folder), rule, "name another folder") for rule in other])
    try:
        stored = open_hf_folder(folder, model)
    except ConfigError as error:
        raise ConfigError([replace(problem, field=ARGUMENT) for problem in error.problems]) from None
    return Source(folder, model, stored, folder, _token_ids(folder), min(model.max_position_embeddings, 2048))


def _token_ids(folder: Path) -> dict[str, Any]:
    """Special tokens by the folder's config.json, and by generation_config.json, which wins."""
    found: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        try:
            content = read_json(folder / name)
        except Damaged:
            continue
        if isinstance(content, dict):
            found |= {key: value for key, value in content.items() if key.endswith("_token_id") and value is not None}
    return found


def inference_plan(source: Source, tp: int, device: str, dtype: str = "auto") -> Plan:
    """The plan of ``tp`` ranks that hold the model for answering; raises ConfigError where it can't be cut so."""
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    config = Config(
        model=source.model,
        data=DataConfig(name="none", mock=True, seq_length=1),
        trainer=TrainerConfig(
            tp=tp,
            sp=False,  # one token can't be split along the sequence
            global_batch_size=1,
            steps=0,
            precision={"float32": "fp32", "bfloat16": "bf16_pure"}[dtype],
        ),
        device=DeviceConfig(name=device),
    )
    try:
        return resolve(config, tp)
    except ConfigError as error:
        raise ConfigError([_as_argument(problem) for problem in error.problems]) from None


def _as_argument(problem: Problem) -> Problem:
    """A problem in the words of a command line that has --tp."""
    rule, instead = (text.replace("trainer.tp=", "--tp ") for text in (problem.rule, problem.instead))
    return Problem(problem.field.replace("trainer.tp", "--tp"), problem.value, rule, instead)
