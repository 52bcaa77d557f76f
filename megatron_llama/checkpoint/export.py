"""Writes a checkpoint as a Hugging Face folder, without a GPU or ranks, one block of rows in memory at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_llama.arch.names import PEFT_PREFIX, Shape, hf_shapes, is_lora
from megatron_llama.checkpoint.adapter import MergedTensors, adapter_config, finetune_of, open_base, trained_tensors
from megatron_llama.checkpoint.hf_folder import INDEX, SINGLE
from megatron_llama.checkpoint.manifest import NAME, Manifest, dtype_of, read_manifest
from megatron_llama.checkpoint.stored_tensors import CorruptFile, Stored, safetensors_header
from megatron_llama.config import ConfigError, FinetuneConfig, ModelConfig, Problem
from megatron_llama.config.hf_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, NO_HF_BLOCKS, hf_config, read_hf_config
from megatron_llama.system.files import sync_folder, write_synced
from megatron_llama.text.chat_template import add_stop_token, write_trained_template
from megatron_llama.text.tokenizer import TokenizerError, read_sentencepiece

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_SHARD_BYTES = 5 * 10**9
_BLOCK_BYTES = 64 << 20
# Files of a tokenizer or of generation. Only these are copied from a folder: all are data, none is code.
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass
class Exported:
    """The result of an export."""

    folder: Path
    dtype: str
    files: list[str]
    bytes: int
    """Size of the weights."""
    tokenizer: bool
    """Whether a tokenizer is in the folder."""


def export(
    checkpoint: Path,
    out: Path,
    dtype: str = "auto",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    merge: bool = False,
    base: Path | None = None,
) -> Exported:
    """Writes the folder ``out``, which must not exist yet; it appears when it is complete.

    A LoRA run's checkpoint becomes a PEFT adapter; with ``merge`` the whole model, its frozen weights taken from the
    folder that the run started from, or from ``base`` where that has moved. ``auto`` is the dtype of that folder, for
    an adapter the dtype it was trained in, else float32. Raises ConfigError for what can't be done, CorruptFile where
    the checkpoint's values are not what was written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError([Problem("OUT", str(out), "is there already", "write a folder that is not there yet")])
    manifest = read_manifest(checkpoint)
    manifest.check_sizes()
    model, finetune = model_of(manifest), finetune_of(manifest)
    is_adapter = finetune.method == "lora" and not merge
    _refuse_what_cannot_be(checkpoint, model, finetune, merge, base)
    source, shapes = _adapter_source(manifest, model, finetune) if is_adapter else (manifest.stored, hf_shapes(model))
    if merge:
        trained = trained_tensors(manifest, model, finetune)
        source = MergedTensors.of(open_base(manifest, model, base), trained, finetune)
    elif not is_adapter:
        manifest.check_tensors(shapes)
    if dtype == "auto":
        dtype = dtype_of(source) if is_adapter else manifest.state.dtype
    dtype = dtype if dtype in DTYPES else "float32"
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        tokenizer = False
        if is_adapter:
            files = [shapes]
            _write_json(aside / ADAPTER_CONFIG, adapter_config(finetune, manifest.state.hf_folder))
        else:
            files = split_into_files(shapes, DTYPES[dtype], max_shard_bytes)
            token_ids, tokenizer = _write_companions(manifest, aside)
            _write_json(aside / "config.json", hf_config(model, dtype, token_ids))
        names, size = _write_weights(source, files, DTYPES[dtype], aside, ADAPTER_WEIGHTS if is_adapter else SINGLE)
        sync_folder(aside)
        if out.exists():
            out.rmdir()
        os.rename(aside, out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return Exported(out, dtype, names, size, tokenizer)


def _refuse_what_cannot_be(
    checkpoint: Path, model: ModelConfig, finetune: FinetuneConfig, merge: bool, base: Path | None
) -> None:
    """Raises ConfigError for options that do not fit the checkpoint, and for a model that no folder can hold."""
    if model.sparse_attention is not None:
        rule = f"was trained with model.sparse_attention: {NO_HF_BLOCKS}"
        raise ConfigError([Problem("CHECKPOINT", str(checkpoint), rule, "generate and evaluate from the run itself")])
    if merge and finetune.method != "lora":
        rule = "the checkpoint's weights are whole: there is nothing to merge into them"
        raise ConfigError([Problem("--merge", None, rule, "leave --merge out")])
    if base is not None and not merge:
        rule = "is read to merge into it, and nothing is merged"
        raise ConfigError([Problem("--base", str(base), rule, "leave --base out, or add --merge for a LoRA run")])


def _adapter_source(
    manifest: Manifest, model: ModelConfig, finetune: FinetuneConfig
) -> tuple[Stored, dict[str, Shape]]:
    """The tensors that LoRA trained, and their shapes, under the names of PEFT's files."""
    trained = trained_tensors(manifest, model, finetune)
    peft = {name if is_lora(name) else PEFT_PREFIX + name: tensor for name, tensor in trained.tensors.items()}
    return replace(trained, tensors=peft), {name: tensor.shape for name, tensor in peft.items()}


def model_of(manifest: Manifest) -> ModelConfig:
    """The shape of the model in a checkpoint. Raises CorruptFile where its settings are not valid."""
    try:
        model = ModelConfig.of(manifest.state.settings["model"])
        hf_shapes(model)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFile(f"{manifest.stored.folder / NAME}: its model settings are not valid ({error})") from error
    return model


def split_into_files(shapes: dict[str, Shape], dtype: torch.dtype, max_bytes: int) -> list[dict[str, Shape]]:
    """The tensors in their order, in files of at most ``max_bytes``; a larger tensor gets a file of its own."""
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
    source: Stored, files: list[dict[str, Shape]], dtype: torch.dtype, folder: Path, single: str
) -> tuple[list[str], int]:
    """The file ``single``, or several with their index; returns the files' names and the bytes of all values."""
    names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    names = [single] if len(files) == 1 else names
    for name, shapes in zip(names, files, strict=True):
        header, _ = safetensors_header({tensor: (dtype, shape) for tensor, shape in shapes.items()})
        with (folder / name).open("xb") as file:
            file.write(header)
            for tensor, shape in shapes.items():
                count = max(1, _BLOCK_BYTES // (math.prod(shape[1:]) * 4))
                for first in range(0, shape[0], count):
                    block = source.rows(tensor, first, min(first + count, shape[0])).to(dtype)
                    file.write(memoryview(block.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
    size = sum(math.prod(shape) * dtype.itemsize for shapes in files for shape in shapes.values())
    if len(files) > 1:
        weight_map = {tensor: name for name, shapes in zip(names, files, strict=True) for tensor in shapes}
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return names, size


def _write_companions(manifest: Manifest, folder: Path) -> tuple[dict[str, int], bool]:
    """Tokenizer and generation config, where the run knew of any; returns the special tokens' ids and if there is
    one."""
    source = manifest.state.hf_folder
    token_ids: dict[str, int] = {}
    if source is not None:
        for name in _COMPANIONS:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, folder / name)
        try:
            content = read_hf_config(source)
        except ValueError:
            content = {}
        token_ids = {name: content[name] for name in _TOKEN_IDS if content.get(name) is not None}
    tokenizer = manifest.state.settings.get("data", {}).get("tokenizer")
    if not (folder / "tokenizer_config.json").exists() and tokenizer is not None:
        token_ids |= _write_sentencepiece(Path(tokenizer), folder)
    end = write_trained_template(manifest.state.settings, folder)
    if not (folder / "generation_config.json").exists():
        _write_json(folder / "generation_config.json", {"_from_model_config": True, **token_ids})
    if end is not None:
        add_stop_token(folder / "generation_config.json", end)
    return token_ids, (folder / "tokenizer_config.json").exists()


def _write_sentencepiece(path: Path, folder: Path) -> dict[str, int]:
    """The run's sentencepiece model as a Llama tokenizer; nothing where it is gone or is none.

    transformers 5 reads it with its own encoder, which differs from sentencepiece in two places: text that begins
    with spaces gets one "▁" less, and the text "</s>" becomes the control id.
    """
    try:
        pieces = read_sentencepiece(path)
    except TokenizerError:
        return {}
    shutil.copyfile(path, folder / "tokenizer.model")
    ids = {"bos": pieces.bos_id(), "eos": pieces.eos_id(), "pad": pieces.pad_id(), "unk": pieces.unk_id()}
    ids = {kind: number for kind, number in ids.items() if number >= 0}
    content: dict[str, Any] = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": False,  # the data that it was trained on has none
        "add_eos_token": False,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
        **{f"{kind}_token": pieces.id_to_piece(number) for kind, number in ids.items()},
    }
    _write_json(folder / "tokenizer_config.json", content)
    return {f"{kind}_token_id": number for kind, number in ids.items() if kind != "unk"}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_synced(path, (json.dumps(content, indent=2) + "\n").encode())
