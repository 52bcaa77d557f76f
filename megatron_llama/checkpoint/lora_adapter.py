"""LoRA adapters in PEFT's file format, and the frozen base model.

A checkpoint of a LoRA run holds the trained tensors and their optimizer states. The frozen weights stay in the folder
of ``init_from``; the checkpoint stores their fingerprint, which a resume compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_llama.arch.names import (
    MAGNITUDE,
    PEFT_PREFIX,
    Shape,
    hf_shapes,
    is_lora,
    is_saved_module,
    lora_name,
    lora_shapes,
)
from megatron_llama.checkpoint.hf_folder import SafetensorsFiles, list_tensors, open_hf_folder, open_safetensors
from megatron_llama.checkpoint.manifest import Manifest
from megatron_llama.checkpoint.rank_files import CheckpointTensors
from megatron_llama.checkpoint.stored_tensors import CorruptFile, Rectangles, Stored, StoredTensor
from megatron_llama.config import ConfigError, FinetuneConfig, ModelConfig, Problem
from megatron_llama.config.hf_config import ADAPTER_WEIGHTS, LORA_SETTINGS

_SAMPLES, _SAMPLE_BYTES = 16, 4096


def trained_shapes(model: ModelConfig, finetune: FinetuneConfig) -> dict[str, Shape]:
    """Return the shapes of tensors that LoRA trains: A and B by PEFT name, modules_to_save by Hugging Face name."""
    whole = {name: shape for name, shape in hf_shapes(model).items() if is_saved_module(name, finetune)}
    return {**lora_shapes(model, finetune), **whole}


def fingerprint(files: SafetensorsFiles) -> str:
    """Return a digest of names, shapes, dtypes, and samples of up to 64 KiB per tensor.

    The cost does not depend on the model's size. The digest distinguishes models and training states; it does not
    detect damage. Raises CorruptFile.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(files.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        with open_safetensors(files.folder / tensor.file) as content:
            values = content.get_tensor(tensor.key).reshape(-1).view(torch.uint8)
            for sample in range(_SAMPLES):
                start = max(0, len(values) - _SAMPLE_BYTES) * sample // (_SAMPLES - 1)
                digest.update(values[start : start + _SAMPLE_BYTES].numpy().tobytes())
    return digest.hexdigest()[:32]


def open_adapter(folder: Path, model: ModelConfig, finetune: FinetuneConfig) -> SafetensorsFiles:
    """Return a PEFT adapter's tensors, with the names of ``trained_shapes``. Reads the header only.

    Args:
        finetune: The settings in the adapter's adapter_config.json.

    Raises:
        ConfigError: The adapter has other tensors or shapes.
        CorruptFile: The file cannot be read.
    """
    shapes = trained_shapes(model, finetune)
    stored = list_tensors(folder / ADAPTER_WEIGHTS)
    tensors = {name if is_lora(name) else name.removeprefix(PEFT_PREFIX): tensor for name, tensor in stored.items()}
    wrong = [name for name, shape in shapes.items() if name not in tensors or tensors[name].shape != shape]
    if wrong or tensors.keys() - shapes.keys():
        name = (wrong or sorted(tensors.keys() - shapes.keys()))[0]
        actual = f"has shape {list(tensors[name].shape)}" if name in tensors else "is missing"
        expected = f"this run expects {list(shapes[name])}" if name in shapes else "this run has no such tensor"
        rule = f"{name} {actual}; {expected}"
        raise ConfigError([Problem("finetune.adapter", str(folder), rule, "name an adapter of this model")])
    return SafetensorsFiles(folder, tensors)


def finetune_of(manifest: Manifest) -> FinetuneConfig:
    """Return the finetune settings of the run that saved a checkpoint. Raises CorruptFile if they are invalid."""
    try:
        return FinetuneConfig(**manifest.state.settings.get("finetune", {}))
    except TypeError as error:
        raise CorruptFile(f"{manifest.stored.folder}: invalid finetune settings ({error})") from error


def open_base(manifest: Manifest, model: ModelConfig, folder: Path | None) -> SafetensorsFiles:
    """Open the frozen weights of a LoRA run, in ``folder`` or the run's init_from. Raises ConfigError for others."""
    where = folder or (None if manifest.state.hf_folder is None else Path(manifest.state.hf_folder))
    if where is None:
        rule = "the run started from random weights, so no base model exists to merge with"
        instead = "name a checkpoint of a run with init_from, or omit --merge to export the adapter"
        raise ConfigError([Problem("CHECKPOINT", str(manifest.stored.folder), rule, instead)])
    instead = "write --base FOLDER with the model of init_from"
    if not where.exists():
        raise ConfigError([Problem("--base", str(where), "no such folder", instead)])
    try:
        stored = open_hf_folder(where, model)
    except ConfigError as error:
        raise ConfigError([replace(p, field="--base", instead=instead) for p in error.problems]) from None
    if fingerprint(stored) != manifest.state.base:
        rule = "has other weights than the base model of this run"
        raise ConfigError([Problem("--base", str(where), rule, instead)])
    return stored


@dataclass(frozen=True)
class MergedTensors(Stored):
    """Tensors of a model with a merged LoRA adapter: W + scale · B A (Hu et al. 2021, arXiv:2106.09685).

    DoRA scales each row to the norm in ``lora_magnitude_vector``.

    The arithmetic is fp32; the result is rounded once, to the dtype of the target.
    """

    base: Stored
    """Frozen weights."""
    adapter: Stored
    """A and B by PEFT name, modules_to_save by Hugging Face name."""
    finetune: FinetuneConfig

    @staticmethod
    def of(base: Stored, adapter: Stored, finetune: FinetuneConfig) -> MergedTensors:
        """Merge ``adapter`` into ``base``; the folder is ``base.folder``."""
        tensors = dict(base.tensors)
        for name, tensor in base.tensors.items():
            if name in adapter.tensors:
                tensors[name] = adapter.tensors[name]
            elif lora_name(name, "lora_A") in adapter.tensors:
                tensors[name] = StoredTensor(torch.float32, tensor.shape)
        return MergedTensors(base.folder, tensors, base, adapter, finetune)

    @torch.no_grad()
    def load_into(self, targets: Mapping[str, Rectangles]) -> int:
        """Fill the rectangles of ``targets``, one matrix at a time: one extra copy of a matrix is in memory."""
        sums = {name for name in targets if lora_name(name, "lora_A") in self.adapter.tensors}
        whole = {name for name in targets if name in self.adapter.tensors}
        read = self.adapter.load_into({name: targets[name] for name in whole})
        read += self.base.load_into({name: targets[name] for name in targets.keys() - sums - whole})
        for name in sorted(sums):
            for offset, target in targets[name].parts:
                read += self._sum(name, offset, target)
        return read

    def _sum(self, name: str, offset: Shape, target: torch.Tensor) -> int:
        (first_row, first_column), (rows, columns), rank = offset, target.shape, self.finetune.lora_rank
        a_name, b_name = lora_name(name, "lora_A"), lora_name(name, "lora_B")
        width = self.base.tensors[name].shape[1]
        if self.finetune.use_dora:  # norms need whole rows
            first_column, columns, target_columns = 0, width, slice(first_column, first_column + columns)
        sizes = (rows, columns), (rank, columns), (rows, rank)
        values, a, b = (target.new_empty(size, dtype=torch.float32) for size in sizes)
        held = Rectangles(self.base.tensors[name].shape, [((first_row, first_column), values)])
        read = self.base.load_into({name: held})
        factors = {a_name: ((0, first_column), a), b_name: ((first_row, 0), b)}
        read += self.adapter.load_into({n: Rectangles(self.adapter.tensors[n].shape, [f]) for n, f in factors.items()})
        values.add_(torch.matmul(b, a).mul_(self.finetune.lora_scaling))
        if self.finetune.use_dora:
            magnitude, key = target.new_empty(rows, dtype=torch.float32), lora_name(name, MAGNITUDE)
            held = Rectangles(self.adapter.tensors[key].shape, [((first_row,), magnitude)])
            read += self.adapter.load_into({key: held})
            values.mul_((magnitude / torch.linalg.vector_norm(values, dim=1)).unsqueeze(1))
            values = values[:, target_columns]
        target.copy_(values)
        return read


def trained_tensors(manifest: Manifest, model: ModelConfig, finetune: FinetuneConfig) -> CheckpointTensors:
    """Return the tensors that LoRA trained, without optimizer states. Raises CorruptFile if one is missing."""
    shapes = trained_shapes(model, finetune)
    manifest.check_tensors(shapes)
    return replace(manifest.stored, tensors={name: manifest.stored.tensors[name] for name in shapes})


def adapter_config(finetune: FinetuneConfig, base: str | None) -> dict[str, Any]:
    """Return the content of adapter_config.json; omitted keys have PEFT's defaults."""
    alpha = finetune.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **{theirs: getattr(finetune, ours) for theirs, ours in LORA_SETTINGS.items()},
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": finetune.lora_dropout,
        "modules_to_save": finetune.modules_to_save or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
