"""What LoRA has trained, as PEFT's adapters have it; and the model that it was added to, which a checkpoint only names.

A checkpoint of a LoRA run holds what is trained and its moments. The frozen weights stay in the folder that init_from
names; the checkpoint keeps a fingerprint of them, so that they can't be mistaken for others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from megatron_llama.checkpoint.hf_folder import open_hf_folder
from megatron_llama.checkpoint.manifest import Manifest
from megatron_llama.checkpoint.rectangles import Rectangles
from megatron_llama.checkpoint.state import weights
from megatron_llama.checkpoint.storage import load_into, rows_of
from megatron_llama.checkpoint.stored_tensors import CorruptFile, Stored, StoredTensor, read_safetensors_header
from megatron_llama.config import ConfigError, FinetuneConfig, ModelConfig, Problem
from megatron_llama.config.hf_config import ADAPTER_WEIGHTS
from megatron_llama.model.names import (
    PEFT_PREFIX,
    Piece,
    Shape,
    hf_shapes,
    is_lora,
    is_saved_module,
    lora_name,
    lora_shapes,
)
from megatron_llama.parallel import Shard

Rows = Callable[[str, int, int], torch.Tensor]
"""Rows [first, last) of a tensor."""
_SAMPLES, _SAMPLE_BYTES = 16, 4096


@dataclass(frozen=True)
class Trained:
    """What LoRA has trained, as it lies on disk."""

    stored: Stored
    """A and B under PEFT's names, and what was trained whole under Hugging Face's."""
    finetune: FinetuneConfig


def trained_shapes(model: ModelConfig, finetune: FinetuneConfig) -> dict[str, Shape]:
    """All that LoRA trains: what it adds, under PEFT's names, and what it trains whole, under Hugging Face's."""
    whole = {name: shape for name, shape in hf_shapes(model).items() if is_saved_module(name, finetune)}
    return {**lora_shapes(model, finetune), **whole}


def fingerprint(stored: Stored) -> str:
    """A digest of names, shapes, dtypes, and of up to 64 KiB from all over each tensor.

    Cheap for any size: it tells another model, or the same one trained further, from this one, and does not look for
    damage.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(stored.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        for chunk in tensor.chunks:
            size = tensor.dtype.itemsize * torch.Size(chunk.size).numel()
            try:
                with (stored.folder / chunk.file).open("rb") as file:
                    for sample in range(_SAMPLES):
                        start = max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1)
                        file.seek(chunk.start + start)
                        digest.update(file.read(min(size, _SAMPLE_BYTES)))
            except OSError as error:
                raise CorruptFile(f"{stored.folder / chunk.file}: {error.strerror}") from error
    return digest.hexdigest()[:32]


def open_adapter(folder: Path, model: ModelConfig, finetune: FinetuneConfig) -> Stored:
    """A PEFT adapter's tensors under the names that ``trained_shapes`` gives them. Reads the head only.

    ``finetune`` is what its adapter_config.json asks for. Raises ConfigError where its tensors are others, and
    CorruptFile for a file that is truncated or invalid.
    """
    shapes = trained_shapes(model, finetune)
    found = read_safetensors_header(folder / ADAPTER_WEIGHTS)
    tensors = {name if is_lora(name) else name.removeprefix(PEFT_PREFIX): tensor for name, tensor in found.items()}
    wrong = [name for name, shape in shapes.items() if name not in tensors or tensors[name].shape != shape]
    if wrong or tensors.keys() - shapes.keys():
        name = (wrong or sorted(tensors.keys() - shapes.keys()))[0]
        there = f"in the shape {list(tensors[name].shape)}" if name in tensors else "not there"
        wanted = f"this run has it as {list(shapes[name])}" if name in shapes else "this run has no such tensor"
        rule = f"{name} is {there}, and {wanted}"
        raise ConfigError([Problem("finetune.adapter", str(folder), rule, "name an adapter of this model")])
    return Stored(folder, tensors)


def finetune_of(manifest: Manifest) -> FinetuneConfig:
    """How the run that saved a checkpoint trained; raises CorruptFile where that is not said as ours do."""
    try:
        return FinetuneConfig(**manifest.state.settings.get("finetune", {}))
    except TypeError as error:
        raise CorruptFile(f"{manifest.stored.folder}: its fine-tuning is not described as ours is ({error})") from error


def check_trained(manifest: Manifest, model: ModelConfig, finetune: FinetuneConfig) -> None:
    """Raises CorruptFile unless the checkpoint has all that LoRA trains."""
    for name, shape in trained_shapes(model, finetune).items():
        if name not in manifest.stored.tensors or manifest.stored.tensors[name].shape != shape:
            raise CorruptFile(f"{manifest.stored.folder}: {name} is not there in the shape {list(shape)}")


def open_base(manifest: Manifest, model: ModelConfig, folder: Path | None) -> Stored:
    """The frozen weights of a LoRA run: in ``folder``, or where they were; raises ConfigError where they are not."""
    where = folder or (None if manifest.state.hf_folder is None else Path(manifest.state.hf_folder))
    if where is None:
        rule = "its run began from random weights, which are in no folder: there is nothing to add to"
        instead = "name a checkpoint of a run with init_from; scripts/export_hf.py without --merge exports the adapter"
        raise ConfigError([Problem("CHECKPOINT", str(manifest.stored.folder), rule, instead)])
    stored = open_frozen(where, model)
    if fingerprint(stored) != manifest.state.base:
        rule = "does not hold the weights that this run was trained on"
        raise ConfigError([Problem("--base", str(where), rule, _BASE_ADVICE)])
    return stored


_BASE_ADVICE = "write --base FOLDER, with the model of init_from"


def open_frozen(folder: Path, model: ModelConfig) -> Stored:
    """The weights that an adapter is added to; raises ConfigError, in the words of scripts that have --base, where the
    folder does not hold this model."""
    if not folder.exists():
        raise ConfigError([Problem("--base", str(folder), "there is no such folder", _BASE_ADVICE)])
    try:
        return open_hf_folder(folder, model)
    except ConfigError as error:
        raise ConfigError([replace(p, field="--base", instead=_BASE_ADVICE) for p in error.problems]) from None


def stored_rows(stored: Stored) -> Rows:
    """Rows as they are stored."""

    def rows(name: str, first: int, last: int) -> torch.Tensor:
        # One tensor's description at a time: torch plans over all that it is told of.
        alone = Stored(stored.folder, {name: stored.tensors[name]}, stored.block_bytes)
        return rows_of(alone, name, first, last)

    return rows


def merged_rows(trained: Stored, base: Stored, finetune: FinetuneConfig) -> Rows:
    """W + alpha / rank · B A in fp32, for every tensor of the model that LoRA was added to."""
    of_base, of_trained = stored_rows(base), stored_rows(trained)

    @lru_cache(maxsize=1)
    def whole(name: str) -> torch.Tensor:
        return of_trained(name, 0, trained.tensors[name].shape[0]).float()

    def rows(name: str, first: int, last: int) -> torch.Tensor:
        if name in trained.tensors:
            return of_trained(name, first, last)
        values, a = of_base(name, first, last).float(), lora_name(name, "lora_A")
        if a not in trained.tensors:
            return values
        b = of_trained(lora_name(name, "lora_B"), first, last).float()
        return _add_product(values, b, whole(a), finetune)

    return rows


def _add_product(values: torch.Tensor, b: torch.Tensor, a: torch.Tensor, finetune: FinetuneConfig) -> torch.Tensor:
    """Adds alpha / rank · B A to a rectangle of W, in place, all in fp32."""
    return values.add_(torch.matmul(b, a).mul_(finetune.lora_alpha / finetune.lora_rank))


@torch.no_grad()
def load_merged(shards: Iterable[Shard], base: Stored, trained: Trained) -> None:
    """Fill the shards of a plain model with what ``merged_rows`` gives of them.

    Each rank reads its own slices. One matrix at a time is summed in fp32 beside its place, and rounded once where the
    shard has another dtype; nothing else is held twice. Raises CorruptFile. Takes part in no collective.
    """
    shards, added = list(shards), trained.stored.tensors
    plain = weights(shards)
    for name in [name for name in plain if lora_name(name, "lora_A") in added]:
        del plain[name]
    whole = {name: plain.pop(name) for name in list(plain) if name in added}
    load_into(plain, base)
    load_into(whole, trained.stored)
    for shard in shards:
        for piece in shard.pieces:
            if lora_name(piece.name, "lora_A") in added:
                shard.local[piece.local_slices].copy_(_merged(piece, base, trained, shard.local.device))


def _merged(piece: Piece, base: Stored, trained: Trained, device: torch.device) -> torch.Tensor:
    """A rectangle of W + alpha / rank · B A, fp32."""
    (first_row, first_column), (rows, columns), rank = piece.offset, piece.size, trained.finetune.lora_rank

    def read(stored: Stored, name: str, offset: Shape, size: Shape) -> torch.Tensor:
        values = torch.empty(size, device=device)
        alone = Stored(stored.folder, {name: stored.tensors[name]}, stored.block_bytes)
        load_into({name: Rectangles(stored.tensors[name].shape, [(offset, values)])}, alone)
        return values

    values = read(base, piece.name, piece.offset, piece.size)
    a = read(trained.stored, lora_name(piece.name, "lora_A"), (0, first_column), (rank, columns))
    b = read(trained.stored, lora_name(piece.name, "lora_B"), (first_row, 0), (rows, rank))
    return _add_product(values, b, a, trained.finetune)


def adapter_tensors(trained: Stored) -> tuple[dict[str, Shape], Rows]:
    """Names and shapes in a PEFT adapter's file, and their rows."""
    sources = {name if is_lora(name) else PEFT_PREFIX + name: name for name in trained.tensors}
    rows = stored_rows(trained)
    shapes = {theirs: trained.tensors[name].shape for theirs, name in sources.items()}
    return shapes, lambda name, first, last: rows(sources[name], first, last)


def only_trained(manifest: Manifest, model: ModelConfig, finetune: FinetuneConfig) -> Stored:
    """A checkpoint's trained tensors, without the optimizer's."""
    check_trained(manifest, model, finetune)
    tensors: dict[str, StoredTensor] = {name: manifest.stored.tensors[name] for name in trained_shapes(model, finetune)}
    return Stored(manifest.stored.folder, tensors, manifest.stored.block_bytes)


def adapter_config(finetune: FinetuneConfig, base: str | None) -> dict[str, Any]:
    """adapter_config.json; what it does not say is PEFT's default."""
    alpha = finetune.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": finetune.lora_rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": finetune.lora_dropout,
        "target_modules": finetune.lora_target_modules,
        "modules_to_save": finetune.modules_to_save or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }
