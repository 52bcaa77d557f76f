"""LoRA adapters on disk, in PEFT's names and format, and the frozen base model that they are added to.

A checkpoint of a LoRA run holds the trained tensors and their optimizer states. The frozen weights stay in the folder
that init_from names; the checkpoint has a fingerprint of them, so that they can't be mistaken for others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_llama.arch.names import PEFT_PREFIX, Shape, hf_shapes, is_lora, is_saved_module, lora_name, lora_shapes
from megatron_llama.checkpoint.hf_folder import SafetensorsFiles, list_tensors, open_hf_folder, open_safetensors
from megatron_llama.checkpoint.manifest import Manifest
from megatron_llama.checkpoint.storage import CheckpointTensors
from megatron_llama.checkpoint.stored_tensors import CorruptFile, Rectangles, Stored, StoredTensor
from megatron_llama.config import ConfigError, FinetuneConfig, ModelConfig, Problem
from megatron_llama.config.hf_config import ADAPTER_WEIGHTS

_SAMPLES, _SAMPLE_BYTES = 16, 4096


def trained_shapes(model: ModelConfig, finetune: FinetuneConfig) -> dict[str, Shape]:
    """The tensors that LoRA trains: A and B under PEFT's names, modules_to_save under Hugging Face's."""
    whole = {name: shape for name, shape in hf_shapes(model).items() if is_saved_module(name, finetune)}
    return {**lora_shapes(model, finetune), **whole}


def fingerprint(files: SafetensorsFiles) -> str:
    """A digest of names, shapes, dtypes, and of up to 64 KiB from all over each tensor.

    Cheap for any size: it tells another model, or the same one trained further, from this one, and does not look for
    damage. Raises CorruptFile.
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
    """A PEFT adapter's tensors under the names that ``trained_shapes`` gives them. Reads the header only.

    ``finetune`` is what its adapter_config.json says. Raises ConfigError where it has other tensors, and CorruptFile.
    """
    shapes = trained_shapes(model, finetune)
    found = list_tensors(folder / ADAPTER_WEIGHTS)
    tensors = {name if is_lora(name) else name.removeprefix(PEFT_PREFIX): tensor for name, tensor in found.items()}
    wrong = [name for name, shape in shapes.items() if name not in tensors or tensors[name].shape != shape]
    if wrong or tensors.keys() - shapes.keys():
        name = (wrong or sorted(tensors.keys() - shapes.keys()))[0]
        there = f"in the shape {list(tensors[name].shape)}" if name in tensors else "not there"
        wanted = f"this run has it as {list(shapes[name])}" if name in shapes else "this run has no such tensor"
        rule = f"{name} is {there}, and {wanted}"
        raise ConfigError([Problem("finetune.adapter", str(folder), rule, "name an adapter of this model")])
    return SafetensorsFiles(folder, tensors)


def finetune_of(manifest: Manifest) -> FinetuneConfig:
    """The finetune settings of the run that saved a checkpoint. Raises CorruptFile where they are not valid."""
    try:
        return FinetuneConfig(**manifest.state.settings.get("finetune", {}))
    except TypeError as error:
        raise CorruptFile(f"{manifest.stored.folder}: its finetune settings are not valid ({error})") from error


def open_base(manifest: Manifest, model: ModelConfig, folder: Path | None) -> SafetensorsFiles:
    """The frozen weights of a LoRA run, in ``folder`` or where the run had them. Raises ConfigError for others."""
    where = folder or (None if manifest.state.hf_folder is None else Path(manifest.state.hf_folder))
    if where is None:
        rule = "its run began from random weights, which are in no folder: there is nothing to merge with"
        instead = "name a checkpoint of a run with init_from; scripts/export_hf.py without --merge exports the adapter"
        raise ConfigError([Problem("CHECKPOINT", str(manifest.stored.folder), rule, instead)])
    instead = "write --base FOLDER, with the model of init_from"
    if not where.exists():
        raise ConfigError([Problem("--base", str(where), "there is no such folder", instead)])
    try:
        stored = open_hf_folder(where, model)
    except ConfigError as error:
        raise ConfigError([replace(p, field="--base", instead=instead) for p in error.problems]) from None
    if fingerprint(stored) != manifest.state.base:
        rule = "does not hold the weights that this run was trained on"
        raise ConfigError([Problem("--base", str(where), rule, instead)])
    return stored


@dataclass(frozen=True)
class MergedTensors(Stored):
    """The tensors of a model with its LoRA adapter merged: W + alpha / rank · B A (Hu et al. 2021, arXiv:2106.09685).

    Sums and products are fp32. They are rounded once, where they are stored in another dtype.
    """

    base: Stored
    """The frozen weights."""
    adapter: Stored
    """A and B under PEFT's names, and modules_to_save under Hugging Face's."""
    finetune: FinetuneConfig

    @staticmethod
    def of(base: Stored, adapter: Stored, finetune: FinetuneConfig) -> MergedTensors:
        """The sum of two; its folder is that of ``base``."""
        tensors = dict(base.tensors)
        for name, tensor in base.tensors.items():
            if name in adapter.tensors:
                tensors[name] = adapter.tensors[name]
            elif lora_name(name, "lora_A") in adapter.tensors:
                tensors[name] = StoredTensor(torch.float32, tensor.shape)
        return MergedTensors(base.folder, tensors, base, adapter, finetune)

    @torch.no_grad()
    def load_into(self, wanted: Mapping[str, Rectangles]) -> int:
        """Fills the rectangles. One matrix at a time is summed beside its target; nothing else is held twice."""
        sums = {name for name in wanted if lora_name(name, "lora_A") in self.adapter.tensors}
        whole = {name for name in wanted if name in self.adapter.tensors}
        read = self.adapter.load_into({name: wanted[name] for name in whole})
        read += self.base.load_into({name: wanted[name] for name in wanted.keys() - sums - whole})
        for name in sorted(sums):
            for offset, target in wanted[name].parts:
                read += self._sum(name, offset, target)
        return read

    def _sum(self, name: str, offset: Shape, target: torch.Tensor) -> int:
        (first_row, first_column), (rows, columns), rank = offset, target.shape, self.finetune.lora_rank
        a_name, b_name = lora_name(name, "lora_A"), lora_name(name, "lora_B")
        sizes = (rows, columns), (rank, columns), (rows, rank)
        values, a, b = (target.new_empty(size, dtype=torch.float32) for size in sizes)
        read = self.base.load_into({name: Rectangles(self.base.tensors[name].shape, [(offset, values)])})
        factors = {a_name: ((0, first_column), a), b_name: ((first_row, 0), b)}
        read += self.adapter.load_into({n: Rectangles(self.adapter.tensors[n].shape, [f]) for n, f in factors.items()})
        target.copy_(values.add_(torch.matmul(b, a).mul_(self.finetune.lora_alpha / rank)))
        return read


def trained_tensors(manifest: Manifest, model: ModelConfig, finetune: FinetuneConfig) -> CheckpointTensors:
    """The tensors that LoRA trained, without the optimizer states. Raises CorruptFile where one is missing."""
    shapes = trained_shapes(model, finetune)
    manifest.check_tensors(shapes)
    return replace(manifest.stored, tensors={name: manifest.stored.tensors[name] for name in shapes})


def adapter_config(finetune: FinetuneConfig, base: str | None) -> dict[str, Any]:
    """The content of adapter_config.json; keys that it lacks have PEFT's defaults."""
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
