"""Formats of checkpoint folders, recognized by the names of their files. Reads no content, needs no torch.

    ours          checkpoint.json
    hugging face  model.safetensors, or its index, and config.json
    trainer       the same with trainer_state.json: Hugging Face's Trainer
    torch_dist    .metadata with common.pt, or from megatron-core 0.19 on metadata.json: megatron-core's
                  dist_checkpointing (Megatron-LM, Megatron-Bridge, NeMo 2)
    ranks         mp_rank_00/model_optim_rng.pt: Megatron-LM's older files, one per rank
    fsdp          pytorch_model_fsdp_0/.metadata: accelerate's FSDP folder
    deepspeed     mp_rank_00_model_states.pt, or one per rank: ZeRO's files, or its universal layout with zero/
    meta          params.json and consolidated.00.pth
    litgpt        lit_model.pth
    dcp           .metadata without these files: torch.distributed.checkpoint (torchtitan)

A folder of several checkpoints contains a pointer to the newest one, ``latest_checkpointed_iteration.txt``
(Megatron-LM, Megatron-Bridge) or ``latest`` (DeepSpeed), or numbered folders, ``step-100`` (torchtitan) and
``checkpoint-100`` (Trainer).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_llama.system.files import read_whole

OURS, HF, TRAINER, TORCH_DIST = "megatron_llama", "hugging face", "trainer", "torch_dist"
RANKS, FSDP, DCP, DEEPSPEED, META, LITGPT = "ranks", "fsdp", "dcp", "deepspeed", "meta", "litgpt"
LABELS = {
    OURS: "megatron_llama's checkpoint",
    HF: "Hugging Face's model folder",
    TRAINER: "Hugging Face Trainer's checkpoint",
    TORCH_DIST: "Megatron's torch_dist checkpoint",
    RANKS: "Megatron's older checkpoint, one file per rank",
    FSDP: "accelerate's FSDP checkpoint",
    DEEPSPEED: "DeepSpeed's ZeRO checkpoint",
    META: "Meta's checkpoint, consolidated.*.pth",
    LITGPT: "litgpt's checkpoint",
    DCP: "torch.distributed.checkpoint's folder (torchtitan)",
}
"""Names of the formats in messages."""
WEIGHTS_ONLY = (HF, RANKS, META, LITGPT)
"""Formats that have no moments, or whose moments are not read."""
FOREIGN = (TRAINER, TORCH_DIST, RANKS, FSDP, DCP, DEEPSPEED, META, LITGPT)
"""Formats of other programs that have more than weights, or other names than Hugging Face's."""
POINTER = "latest_checkpointed_iteration.txt"
DEEPSPEED_POINTERS, UNIVERSAL = ("latest_universal", "latest"), "zero"
"""DeepSpeed's pointers to the newest folder, and the folder of the universal layout's tensors."""
META_FILE = re.compile(r"consolidated\.(\d{2})\.pth")
"""File of a tensor-parallel rank."""
_ZERO_FILE = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_\d{2}_model_states\.pt")
_MOST_POINTER_BYTES = 1024
FSDP_MODEL, FSDP_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
TRAINER_STATE, METADATA, COMMON, BACKEND = "trainer_state.json", ".metadata", "common.pt", "metadata.json"
RANK_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
"""Folder of a rank: tensor-parallel rank, and pipeline rank if there are stages."""
RANK_FILE = "model_optim_rng.pt"
_NUMBERED = re.compile(r"(?:(?:step|checkpoint|iter)[-_]|global_step)(\d+)")


@dataclass(frozen=True)
class Recognized:
    """A checkpoint folder and its format."""

    format: str
    folder: Path
    """Folder with the files; inside the given one if that one contains several checkpoints."""

    @property
    def is_foreign(self) -> bool:
        """Whether ``checkpoint/foreign`` reads it."""
        return self.format in FOREIGN


def recognize(folder: Path) -> Recognized | None:
    """Return the format of ``folder``, or of the newest checkpoint in it; None if it has no known format."""
    candidates = [folder, folder / "weights"]  # NeMo 2 has weights/ and context/
    for pointer in DEEPSPEED_POINTERS:  # a Trainer's folder with DeepSpeed has the pointer next to the weights in bf16
        name = _read_pointer(folder / pointer)
        if name and "/" not in name and name != ".." and _format_of(folder / name) == DEEPSPEED:
            return Recognized(DEEPSPEED, folder / name)
    text = _read_pointer(folder / POINTER)
    if text == "release" or (text.isdigit() and len(text) < 12):
        candidates.append(folder / (text if text == "release" else f"iter_{int(text):07d}"))
    elif os.path.isdir(folder):
        try:
            numbered = [(int(match[1]), name) for name in os.listdir(folder) if (match := _NUMBERED.fullmatch(name))]
        except OSError:
            numbered = []
        candidates += [folder / name for _, name in sorted(numbered, reverse=True)]
    for candidate in candidates:
        kind = _format_of(candidate)
        if kind is not None:
            return Recognized(kind, candidate)
    return None


def is_foreign(folder: str | Path) -> bool:
    """Return whether ``folder`` is a checkpoint of another program that ``checkpoint/foreign`` reads."""
    recognized = recognize(Path(folder))
    return recognized is not None and recognized.is_foreign


def rank_folders(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the files of Megatron's ranks by (tensor-parallel rank, pipeline rank)."""
    files = {}
    for name in os.listdir(folder):
        match = RANK_FOLDER.fullmatch(name)
        if match and (folder / name / RANK_FILE).is_file():
            files[int(match[1]), int(match[2] or 0)] = folder / name / RANK_FILE
    return files


def _read_pointer(path: Path) -> str:
    """Return the text of a pointer to the newest checkpoint; an empty one if it cannot be read."""
    try:
        return read_whole(path, _MOST_POINTER_BYTES).decode("ascii").strip()
    except (OSError, ValueError):
        return ""


def _format_of(folder: Path) -> str | None:
    def has(*names: str) -> bool:
        return any(os.path.isfile(folder / name) for name in names)  # Path.is_file may raise

    if has("checkpoint.json"):
        return OURS
    if has(f"{FSDP_MODEL}/{METADATA}"):
        return FSDP
    if has(METADATA):
        return TORCH_DIST if has(COMMON, BACKEND) else DCP
    if has("model.safetensors", "model.safetensors.index.json"):
        return TRAINER if has(TRAINER_STATE) else HF
    if has("lit_model.pth"):
        return LITGPT
    try:
        names = os.listdir(folder) if folder.is_dir() else []
        if any(map(_ZERO_FILE.fullmatch, names)):
            return DEEPSPEED
        if "params.json" in names and any(map(META_FILE.fullmatch, names)):
            return META
        return RANKS if names and rank_folders(folder) else None
    except OSError:
        return None
