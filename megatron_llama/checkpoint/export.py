"""Export of a checkpoint as a Hugging Face folder, in one process without a GPU, block by block."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_llama.arch.hf_tp_mapping import EMBEDDING, PEFT_PREFIX, Shape, hf_shapes, peft_name
from megatron_llama.arch.recognize_format import DCP
from megatron_llama.checkpoint.folder import older_checkpoints
from megatron_llama.checkpoint.lora_adapter import (
    MergedTensors,
    TrainedAdapter,
    adapter_config,
    finetune_of,
    open_base,
    trained_tensors,
)
from megatron_llama.checkpoint.manifest import NAME, Manifest, dtype_of, read_manifest
from megatron_llama.checkpoint.model_card import CARD, merged_card, model_card
from megatron_llama.checkpoint.tensor_source import (
    EXPORT_DTYPES,
    AveragedTensors,
    CorruptFile,
    Stored,
    cast_weights,
    safetensors_header,
)
from megatron_llama.config import ConfigError, ModelConfig, Problem
from megatron_llama.config.data_settings import NewTokens
from megatron_llama.config.hf_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    NO_HF_BLOCKS,
    changes_of_base,
    hf_config,
    read_hf_config,
)
from megatron_llama.config.hub import INDEX, SINGLE
from megatron_llama.config.problems import format_value
from megatron_llama.config.settings import MODEL_TYPES
from megatron_llama.system.files import FolderTaken, atomic_folder, sha256_file, write_synced
from megatron_llama.system.object_store import Location
from megatron_llama.text.chat_template import add_stop_token, write_trained_template
from megatron_llama.text.tokenizer import (
    FAST_JSON,
    NO_TOKENS,
    SENTENCEPIECE_MODEL,
    TOKENIZER_FILES,
    TokenizerError,
    open_tokenizer,
    read_sentencepiece,
    tokenizer_file,
)

HF_FOLDER = "hf"
MAX_SHARD_BYTES = 5 * 10**9
_BLOCK_BYTES = 64 << 20
GENERATION = "generation_config.json"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass
class Exported:
    """The result of an export."""

    folder: Path
    dtype: str
    files: list[str]
    bytes: int
    """Bytes of the weights."""
    tokenizer: bool
    """Whether the folder has a tokenizer."""


def export(
    checkpoint: Path,
    out: Path,
    dtype: str = "auto",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    kind: str = HF_FOLDER,
    merge: bool = False,
    base: Path | None = None,
    average: int = 1,
    decay: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write the folder ``out``, which appears when it is complete.

    A LoRA run's checkpoint becomes a PEFT adapter, or with ``merge`` the whole model. Both have the tokenizer.

    Args:
        out: A folder that does not exist or is empty.
        dtype: auto: dtype of the run's ``init_from`` folder, for an adapter its training dtype, otherwise float32.
        kind: hf: a Hugging Face folder; dcp: torchtitan's names; torch_dist: megatron-core's, in ``out/release``.
        merge: Merge the LoRA adapter into its base model.
        base: Folder of the base model; default: ``init_from`` of the run.
        average: Export the mean of this many checkpoints of the run: this one and the ones before it.
        decay: Weight of a checkpoint relative to the next newer one; 1: equal weights.
        progress: Called with the bytes of weights written and their total.

    Raises:
        ConfigError: The options do not match, ``out`` exists or is being written, or a weight exceeds ``dtype``.
        CorruptFile: The checkpoint is damaged.
    """
    manifest = read_manifest(checkpoint)
    model, finetune = model_of(manifest), finetune_of(manifest)
    is_adapter = finetune.method == "lora" and not merge
    _check_options(manifest, kind, merge, base, average)
    source, shapes = open_source(manifest, is_adapter, merge, base)
    older = _older(checkpoint, average, hf_shapes(model))
    if older:
        source = AveragedTensors.of(source, [open_source(each, False, merge, base)[0] for each in older], decay)
    if dtype == "auto":
        dtype = dtype_of(source) if is_adapter else manifest.state.dtype
    dtype, tokenizer = dtype if dtype in EXPORT_DTYPES else "float32", False
    with writing(out) as partial:
        if kind != HF_FOLDER:
            from megatron_llama.checkpoint.foreign.write import write_foreign  # most exports need no writer of DCP

            return Exported(out, dtype, *write_foreign(partial, kind, source, model, dtype, progress), tokenizer)
        token_ids, tokenizer = write_companions(manifest, partial)
        if is_adapter:
            files, single = [shapes], ADAPTER_WEIGHTS
            _write_json(partial / ADAPTER_CONFIG, adapter_config(finetune, model, manifest.state.hf_folder))
        else:
            files, single = split_into_files(shapes, EXPORT_DTYPES[dtype], max_shard_bytes), SINGLE
            _write_json(partial / "config.json", hf_config(model, dtype, token_ids))
        states = [manifest.state, *(each.state for each in older)]
        card = model_card(states, model, finetune, adapter=is_adapter, dtype=dtype, tokenizer=tokenizer)
        write_synced(partial / CARD, card.encode())
        names, size = _write_weights(source, files, EXPORT_DTYPES[dtype], partial, single, progress)
    return Exported(out, dtype, names, size, tokenizer)


def _older(checkpoint: Path, average: int, shapes: dict[str, Shape]) -> list[Manifest]:
    """Return the manifests of the checkpoints before this one that are averaged with it. Raises ConfigError."""
    older = [read_manifest(folder) for folder in older_checkpoints(checkpoint, average - 1)]
    for other in older:
        if hf_shapes(model_of(other)) != shapes:
            rule = f"{other.stored.folder} has other tensors or shapes than {checkpoint.name}"
            raise ConfigError([Problem("--average", average, rule, "write a smaller --average")])
    return older


def export_merged(
    base: Path,
    model: ModelConfig,
    merged: MergedTensors,
    out: Path,
    dtype: str,
    max_shard_bytes: int,
    source: Path,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write a model with merged adapters, the tokenizer in ``source``, and settings of the base model's folder.

    ``dtype`` auto is the base's. The model card names the ``path`` of each adapter. Raises as ``export``.
    """
    dtype = dtype_of(merged.base) if dtype == "auto" else dtype
    dtype = dtype if dtype in EXPORT_DTYPES else "float32"
    files = split_into_files(hf_shapes(model), EXPORT_DTYPES[dtype], max_shard_bytes)
    with writing(out) as partial:
        token_ids = _write_tokenizer(source, partial, is_run=False) | _write_base_settings(base, partial)
        _write_json(partial / "config.json", hf_config(model, dtype, token_ids))
        names, size = _write_weights(merged, files, EXPORT_DTYPES[dtype], partial, SINGLE, progress)
        tokenizer = (partial / "tokenizer_config.json").exists()
        weights = {adapter.path: adapter.weight for adapter in merged.adapters}
        write_synced(partial / CARD, merged_card(str(base), model, weights, dtype, tokenizer=tokenizer).encode())
    return Exported(out, dtype, names, size, tokenizer)


@contextmanager
def writing(out: Path) -> Iterator[Path]:
    """Yield the temporary folder of ``out``. Raises ConfigError if ``out`` exists, unless it is an empty folder."""
    if out.is_symlink():
        raise ConfigError([Problem("OUT", str(out), "is a link", f"write the path of a new folder, or remove {out}")])
    try:
        with atomic_folder(out) as partial:
            yield partial
    except FolderTaken:
        rule, instead = "another process is writing this folder", "wait until it ends, or write another folder"
        raise ConfigError([Problem("OUT", str(out), rule, instead)]) from None
    except FileExistsError as error:
        if error.filename != str(out):
            raise
        rule = "the folder exists and is not empty"
        raise ConfigError([Problem("OUT", str(out), rule, "write a new folder")]) from None


def open_source(
    manifest: Manifest, is_adapter: bool, merge: bool, base: Path | None
) -> tuple[Stored, dict[str, Shape]]:
    """Return the tensors to export and their shapes. Raises CorruptFile if a file has another size."""
    manifest.check_sizes()
    model, finetune = model_of(manifest), finetune_of(manifest)
    if is_adapter:  # the tensors that LoRA trained, by PEFT name
        trained = trained_tensors(manifest, model, finetune)
        peft = {peft_name(name, model, finetune): tensor for name, tensor in trained.tensors.items()}
        if model.tie_word_embeddings and EMBEDDING in trained.tensors:
            peft[f"{PEFT_PREFIX}lm_head.weight"] = trained.tensors[EMBEDDING]  # PEFT reads both names
        return replace(trained, tensors=peft), {name: tensor.shape for name, tensor in peft.items()}
    shapes = hf_shapes(model)
    if merge:
        trained = trained_tensors(manifest, model, finetune)
        return MergedTensors.of(open_base(manifest, model, base), TrainedAdapter(trained, model, finetune)), shapes
    manifest.check_tensors(shapes)
    return manifest.stored, shapes


def _check_options(manifest: Manifest, kind: str, merge: bool, base: Path | None, average: int) -> None:
    """Raise ConfigError for options that do not match the checkpoint, and for models that the format does not have."""
    model, finetune, checkpoint = model_of(manifest), finetune_of(manifest), manifest.stored.folder
    if model.sparse_attention is not None:
        rule = f"was trained with model.sparse_attention: {NO_HF_BLOCKS}"
        raise ConfigError([Problem("CHECKPOINT", str(checkpoint), rule, "generate and evaluate from the checkpoint")])
    if merge and finetune.method != "lora":
        rule = "the checkpoint has no LoRA adapter to merge"
        raise ConfigError([Problem("--merge", None, rule, "omit --merge")])
    if average > 1 and finetune.method == "lora" and not merge:
        rule = "the mean of adapters is not the adapter of the mean"
        raise ConfigError([Problem("--average", average, rule, "add --merge to export the whole model")])
    if base is not None and not merge:
        rule = "is only used with --merge"
        raise ConfigError([Problem("--base", str(base), rule, "omit --base, or add --merge for a LoRA run")])
    if kind != HF_FOLDER and finetune.method == "lora" and not merge:
        rule = "is a LoRA checkpoint, and this format has no adapters"
        raise ConfigError([Problem("--format", kind, rule, "add --merge, or write --format hf")])
    if kind == DCP and model.model_type != MODEL_TYPES[0]:
        rule = f"writes torchtitan's Llama, and this model is a {model.model_type}"
        raise ConfigError([Problem("--format", kind, rule, "write --format hf or torch_dist")])
    if finetune.method == "lora" and not merge:
        check_base(checkpoint, model, manifest.state.hf_folder)


def check_base(checkpoint: Location, model: ModelConfig, folder: str | None) -> None:
    """Raise ConfigError if the run changed settings of its base: an adapter has only tensors."""
    try:
        changed = {} if folder is None else changes_of_base(model, read_hf_config(folder))
    except ValueError:  # the base is not on this machine
        return
    if changed:
        settings = " and ".join(f"model.{name}={format_value(value)}" for name, value in changed.items())
        rule = f"was trained with {settings}, which its base does not have and an adapter cannot store"
        raise ConfigError([Problem("CHECKPOINT", str(checkpoint), rule, "add --merge to export the whole model")])


def model_of(manifest: Manifest) -> ModelConfig:
    """Return the model config of a checkpoint. Raises CorruptFile if its settings are invalid."""
    try:
        model = ModelConfig.of(manifest.state.settings["model"])
        hf_shapes(model)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFile(f"{manifest.stored.folder / NAME}: invalid model settings ({error})") from error
    return model


def split_into_files(shapes: dict[str, Shape], dtype: torch.dtype, max_bytes: int) -> list[dict[str, Shape]]:
    """Split the tensors, in order, into files of at most ``max_bytes``; a larger tensor gets a separate file."""
    files: list[dict[str, Shape]] = [{}]
    size = 0
    for name, shape in shapes.items():
        more = math.prod(shape) * dtype.itemsize
        if files[-1] and size + more > max_bytes:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += more
    return files


def _write_weights(
    source: Stored,
    files: list[dict[str, Shape]],
    dtype: torch.dtype,
    folder: Path,
    single: str,
    progress: Callable[[int, int], None] | None,
) -> tuple[list[str], int]:
    """Write the file ``single``, or several with an index; return the file names and the bytes of all values."""
    names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    names = [single] if len(files) == 1 else names
    size = sum(math.prod(shape) * dtype.itemsize for shapes in files for shape in shapes.values())
    written = 0
    for name, shapes in zip(names, files, strict=True):
        header, _ = safetensors_header({tensor: (dtype, shape) for tensor, shape in shapes.items()})
        with (folder / name).open("xb") as file:
            file.write(header)
            for tensor, shape in shapes.items():
                count = max(1, _BLOCK_BYTES // (math.prod(shape[1:]) * 4))
                for first in range(0, shape[0], count):
                    block = cast_weights(tensor, source.rows(tensor, first, min(first + count, shape[0])), dtype)
                    file.write(memoryview(block.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
                    written += block.numel() * dtype.itemsize
                    if progress is not None:
                        progress(written, size)
            file.flush()
            os.fsync(file.fileno())
    if len(files) > 1:
        weight_map = {tensor: name for name, shapes in zip(names, files, strict=True) for tensor in shapes}
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return names, size


def write_companions(manifest: Manifest, folder: Path) -> tuple[dict[str, int], bool]:
    """Write the run's tokenizer, or its base model's, and the generation config.

    Returns the ids of special tokens, and whether the folder has a tokenizer.
    """
    base = None if manifest.state.hf_folder is None else Path(manifest.state.hf_folder)
    named = manifest.locate(manifest.state.settings.get("data", {}).get("tokenizer"))
    tokenizer = Path(named) if named is not None and Path(named).exists() else base
    token_ids: dict[str, int] = {}
    if tokenizer is not None:
        new_tokens = NewTokens.of(manifest.state.settings.get("data", {}))
        token_ids = _write_tokenizer(tokenizer, folder, tokenizer != base, new_tokens)
    if base is not None:
        one, other = tokenizer_file(tokenizer or base), tokenizer_file(base)
        if one == other or (other.is_file() and sha256_file(one) == sha256_file(other)):
            token_ids |= _write_base_settings(base, folder)
    end = write_trained_template(manifest.state.settings, folder)
    if not (folder / GENERATION).exists():
        _write_json(folder / GENERATION, {"_from_model_config": True, **token_ids})
    if end is not None:
        add_stop_token(folder / GENERATION, end)
    return token_ids, (folder / "tokenizer_config.json").exists()


def _write_base_settings(base: Path, folder: Path) -> dict[str, int]:
    """Copy the generation config of the base model; return the token ids of its config.json."""
    if (base / GENERATION).is_file():
        shutil.copyfile(base / GENERATION, folder / GENERATION)
    try:
        content = read_hf_config(str(base))
    except ValueError:
        return {}
    return {name: content[name] for name in _TOKEN_IDS if content.get(name) is not None}


def _write_tokenizer(source: Path, folder: Path, is_run: bool, new_tokens: NewTokens = NO_TOKENS) -> dict[str, int]:
    """Copy a tokenizer, and write the tokenizer_config.json that transformers needs. Return the token ids.

    Args:
        source: A Hugging Face folder, its tokenizer.json, or a sentencepiece model.
        is_run: Whether it is the tokenizer of the run's data, not the one in its base model's folder.
    """
    file = tokenizer_file(source)
    if source.is_dir() or file.suffix == ".json":
        for name in TOKENIZER_FILES:
            if (file.parent / name).is_file():
                shutil.copyfile(file.parent / name, folder / name)
    if not file.is_file():
        return {}
    has_settings = (folder / "tokenizer_config.json").exists()
    if file.suffix != ".json":
        # Llama's original release has only tokenizer.model, and its prompts begin with BOS. Training data has no BOS.
        return {} if has_settings else _write_sentencepiece(file, folder, add_bos=not is_run)
    if new_tokens:
        for name in (FAST_JSON, SENTENCEPIECE_MODEL):  # without the tokens
            (folder / name).unlink(missing_ok=True)
        write_synced(folder / FAST_JSON, new_tokens.grow(file))
    try:
        tokenizer = open_tokenizer(source, new_tokens)
    except TokenizerError:
        return {}
    ids = {kind: number for kind, number in (("bos", tokenizer.bos), ("eos", tokenizer.end)) if number is not None}
    if not has_settings:
        names = {f"{kind}_token": tokenizer.token_name(number) for kind, number in ids.items()}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        _write_json(folder / "tokenizer_config.json", settings | names)
    return {f"{kind}_token_id": number for kind, number in ids.items()}


def _write_sentencepiece(path: Path, folder: Path, add_bos: bool) -> dict[str, int]:
    """Write the run's sentencepiece model as a Llama tokenizer, if the file can be read. Return its token ids.

    The encoder of transformers 5 differs from sentencepiece in two cases: text with leading spaces gets one "▁" less,
    and the text "</s>" becomes the control id.
    """
    try:
        processor = read_sentencepiece(path)
    except TokenizerError:
        return {}
    shutil.copyfile(path, folder / "tokenizer.model")
    ids = {name: getattr(processor, f"{name}_id")() for name in ("bos", "eos", "pad", "unk")}
    ids = {kind: number for kind, number in ids.items() if number >= 0}
    content: dict[str, Any] = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": add_bos,  # the training data has no BOS
        "add_eos_token": False,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
        **{f"{kind}_token": processor.id_to_piece(number) for kind, number in ids.items()},
    }
    _write_json(folder / "tokenizer_config.json", content)
    return {f"{kind}_token_id": number for kind, number in ids.items() if kind != "unk"}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_synced(path, (json.dumps(content, indent=2) + "\n").encode())
