"""LoRA adapters in PEFT's file format, and the frozen base model.

A checkpoint of a LoRA run holds the trained tensors and their optimizer states. The frozen weights stay in the folder
of ``init_from``; the checkpoint stores their fingerprint, which a resume compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_llama.arch.hf_tp_mapping import (
    EMBEDDING,
    MAGNITUDE,
    PEFT_PREFIX,
    TOKEN_ROWS,
    Shape,
    hf_shapes,
    is_saved_module,
    lora_name,
    lora_shapes,
    peft_name,
)
from megatron_llama.arch.lora_targets import layer_adapters
from megatron_llama.checkpoint.hf_folder import SafetensorsFiles, list_tensors, open_hf_folder, open_safetensors
from megatron_llama.checkpoint.manifest import Manifest
from megatron_llama.checkpoint.rank_files import CheckpointTensors
from megatron_llama.checkpoint.tensor_source import CorruptFile, Rectangles, Stored, StoredTensor
from megatron_llama.config import ConfigError, FinetuneConfig, ModelConfig, Problem
from megatron_llama.config.data_settings import NewTokens
from megatron_llama.config.hf_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LORA_SETTINGS,
    TOKEN_INDICES,
    TYING,
    read_hf_config,
)

_SAMPLES, _SAMPLE_BYTES = 16, 4096
_WITH_TOKEN_ROWS = (
    *(".token_adapter.base_layer.weight", "lm_head.token_adapter.trainable_tokens_delta"),
    *("lm_head.original_module.weight", "lm_head.modules_to_save.weight"),
)


def trained_shapes(model: ModelConfig, finetune: FinetuneConfig) -> dict[str, Shape]:
    """Return the shapes of tensors that LoRA trains: LoRA's by PEFT name, modules_to_save by Hugging Face name."""
    whole = {name: shape for name, shape in hf_shapes(model).items() if is_saved_module(name, model, finetune)}
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


def adapter_rows(folder: Path, finetune: FinetuneConfig) -> int:
    """Return the vocabulary that a PEFT adapter trains: the rows of its tables. Raises CorruptFile."""
    stored = list_tensors(folder / ADAPTER_WEIGHTS)
    tables = (stored.get(PEFT_PREFIX + name) for name in (EMBEDDING, "lm_head.weight"))
    last = max(finetune.trainable_token_indices, default=-1)
    return max(last + 1, *(0 if table is None else table.shape[0] for table in tables))


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
    ours = {peft_name(name, model, finetune): name for name in shapes}
    tensors = {ours.get(name, name): tensor for name, tensor in stored.items()}
    if TOKEN_ROWS in shapes:  # with a grown vocabulary, PEFT also writes the tables that the base has
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(_WITH_TOKEN_ROWS)}
    if model.tie_word_embeddings and EMBEDDING in shapes:
        tensors.pop(f"{PEFT_PREFIX}lm_head.weight", None)  # PEFT writes tied embeddings twice
        if not read_hf_config(str(folder), ADAPTER_CONFIG).get(TYING):
            rule = f"trains {EMBEDDING} apart from the tied output head"
            instead = f"train it with PEFT's {TYING}=True, or write model.tie_word_embeddings=false"
            raise ConfigError([Problem("finetune.adapter", str(folder), rule, instead)])
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
        stored = open_hf_folder(where, model, grows=bool(NewTokens.of(manifest.state.settings.get("data", {}))))
    except ConfigError as error:
        raise ConfigError([replace(p, field="--base", instead=instead) for p in error.problems]) from None
    if fingerprint(stored) != manifest.state.base:
        rule = "has other weights than the base model of this run"
        raise ConfigError([Problem("--base", str(where), rule, instead)])
    return stored


@dataclass(frozen=True)
class TrainedAdapter:
    """A trained adapter of a model."""

    tensors: Stored
    """LoRA's by PEFT name, modules_to_save and biases by Hugging Face name."""
    model: ModelConfig
    finetune: FinetuneConfig
    weight: float = 1.0
    """Weight of its change of the model."""
    path: str = ""
    """Folder or run, as the user names it."""

    def changes(self, name: str) -> bool:
        """Return whether the merged model has another value of this Hugging Face tensor."""
        key = TOKEN_ROWS if name == EMBEDDING else lora_name(name, "lora_A")
        return name in self.tensors.tensors or key in self.tensors.tensors

    def apply(self, name: str, base: torch.Tensor, offset: Shape) -> torch.Tensor:
        """Return the trained values of a rectangle, fp32; DoRA needs whole rows.

        Args:
            base: Frozen values of the rectangle, fp32.
            offset: Start of the rectangle in the tensor.
        """

        read = partial(self.tensors.read, dtype=base.dtype, device=base.device)
        if name in self.tensors.tensors:
            return read(name, offset, tuple(base.shape))
        if name == EMBEDDING:
            tokens, merged = self.finetune.trainable_token_indices, base.clone()
            trained = read(TOKEN_ROWS, (0, offset[1]), (len(tokens), base.shape[1]))
            for token, row in zip(tokens, trained, strict=True):
                if offset[0] <= token < offset[0] + len(base):
                    merged[token - offset[0]] = row
            return merged
        *_, layer, _, module, _ = name.split(".")
        adapter = layer_adapters(self.model, self.finetune, int(layer))[module]
        (first_row, first_column), (rows, columns) = offset, base.shape
        a = read(lora_name(name, "lora_A"), (0, first_column), (adapter.rank, columns))
        b = read(lora_name(name, "lora_B"), (first_row, 0), (rows, adapter.rank))
        merged = torch.matmul(b, a).mul_(adapter.scaling).add_(base)
        if self.finetune.use_dora:
            magnitude = read(lora_name(name, MAGNITUDE), (first_row,), (rows,))
            merged.mul_((magnitude / torch.linalg.vector_norm(merged, dim=1)).unsqueeze(1))
        return merged


@dataclass(frozen=True)
class MergedTensors(Stored):
    """Tensors of a model with merged LoRA adapters: W + scale · B A (Hu et al. 2021, arXiv:2106.09685).

    DoRA scales each row to the norm in ``lora_magnitude_vector``. Several adapters give the base W plus the weighted
    sum of their changes W_i - W, which is peft's add_weighted_adapter of kind cat.

    The arithmetic is fp32; the result is rounded once, to the dtype of the target.
    """

    base: Stored
    """Frozen weights."""
    adapters: Sequence[TrainedAdapter]

    @staticmethod
    def of(base: Stored, *adapters: TrainedAdapter) -> MergedTensors:
        """Merge ``adapters`` into ``base``; the folder is ``base.folder``."""
        tensors = dict(base.tensors)
        for name, tensor in base.tensors.items():
            if any(adapter.changes(name) for adapter in adapters):
                tensors[name] = StoredTensor(torch.float32, tensor.shape)
        return MergedTensors(base.folder, tensors, base, adapters)

    @torch.no_grad()
    def load_into(self, targets: Mapping[str, Rectangles]) -> None:
        """Fill the rectangles of ``targets``, one matrix at a time: two or three extra copies of it are in memory."""
        sums = {name for name in targets if any(adapter.changes(name) for adapter in self.adapters)}
        self.base.load_into({name: targets[name] for name in targets.keys() - sums})
        for name in sorted(sums):
            for offset, target in targets[name].parts:
                self._sum(name, offset, target)

    def _sum(self, name: str, offset: Shape, target: torch.Tensor) -> None:
        adapters = [adapter for adapter in self.adapters if adapter.changes(name)]
        shape, whole, size, columns = self.base.tensors[name].shape, offset, tuple(target.shape), slice(None)
        if len(size) > 1 and any(adapter.finetune.use_dora for adapter in adapters):  # norms need whole rows
            whole, size, columns = (offset[0], 0), (size[0], shape[1]), slice(offset[1], offset[1] + size[1])
        base = self.base.read(name, whole, size, torch.float32, target.device)
        total, is_sum = base, len(adapters) > 1 or adapters[0].weight != 1
        for adapter in adapters:
            values = adapter.apply(name, base, whole)
            total = total.add(values - base, alpha=adapter.weight) if is_sum else values
        target.copy_(total[..., columns])


def trained_tensors(manifest: Manifest, model: ModelConfig, finetune: FinetuneConfig) -> CheckpointTensors:
    """Return the tensors that LoRA trained, without optimizer states. Raises CorruptFile if one is missing."""
    shapes = trained_shapes(model, finetune)
    manifest.check_tensors(shapes)
    return replace(manifest.stored, tensors={name: manifest.stored.tensors[name] for name in shapes})


_NULL_IF_EMPTY = "modules_to_save", "exclude_modules", "layers_to_transform", TOKEN_INDICES


def adapter_config(finetune: FinetuneConfig, model: ModelConfig, base: str | None) -> dict[str, Any]:
    """Return the content of adapter_config.json; omitted keys have PEFT's defaults."""
    alpha = finetune.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **{theirs: getattr(finetune, ours) for theirs, ours in LORA_SETTINGS.items()},
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": finetune.lora_dropout,
        **{name: getattr(finetune, name) or None for name in _NULL_IF_EMPTY},
        **({TYING: True} if model.tie_word_embeddings and "embed_tokens" in finetune.modules_to_save else {}),
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
