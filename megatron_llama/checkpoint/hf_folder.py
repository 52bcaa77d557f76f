"""Hugging Face's folders, as something that can be read by rectangles: each rank reads its own slices and no others."""

from __future__ import annotations

from pathlib import Path

from megatron_llama.checkpoint.stored_tensors import (
    CorruptFile,
    Stored,
    StoredTensor,
    plain_name,
    read_json,
    read_safetensors_header,
)
from megatron_llama.config import ConfigError, ModelConfig, Problem
from megatron_llama.model.names import hf_shapes

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# What old exporters wrote although it follows from the config.
_DERIVED = ".rotary_emb.inv_freq"


def open_hf_folder(folder: Path, model: ModelConfig) -> Stored:
    """What the folder holds of ``model``. Reads headers only.

    Raises ConfigError where that is not exactly this model, and CorruptFile for files that are not whole or not sound.
    """
    tensors = _all_tensors(folder)
    shapes = hf_shapes(model)
    missing = [name for name in shapes if name not in tensors]
    other = [name for name, shape in shapes.items() if name in tensors and tensors[name].shape != shape]
    ignored = {"lm_head.weight"} if model.tie_word_embeddings else set()
    unknown = sorted(n for n in tensors if n not in shapes and n not in ignored and not n.endswith(_DERIVED))
    problems = []
    if missing:
        rule = f"lacks {len(missing)} of the model's {len(shapes)} tensors, {missing[0]} for one"
        tied = missing == ["lm_head.weight"]
        instead = "write model.tie_word_embeddings=true" if tied else "name a folder with all of a Llama's tensors"
        problems.append(Problem("init_from", str(folder), rule, instead))
    if other:
        found, wanted = list(tensors[other[0]].shape), list(shapes[other[0]])
        rule = f"{other[0]} is {found} there, and {wanted} in model={model.name}"
        problems.append(
            Problem("init_from", str(folder), rule, "write model=from_hf to take the shape from the folder")
        )
    if unknown:
        rule = f"holds {unknown[0]}{' and others' if len(unknown) > 1 else ''}, which this Llama does not have"
        problems.append(Problem("init_from", str(folder), rule, "name a folder of a Llama without it"))
    if problems:
        raise ConfigError(problems)
    return Stored(folder, {name: tensors[name] for name in shapes})


def _all_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's safetensors files."""
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX)
        places = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(places, dict):
            raise CorruptFile(f"{folder / INDEX}: has no weight_map")
        by_file = {name: read_safetensors_header(folder / plain_name(name)) for name in set(places.values())}
        absent = [name for name, file in places.items() if name not in by_file[file]]
        if absent:
            raise CorruptFile(f"{folder / places[absent[0]]}: does not hold {absent[0]}, which the index promises")
        return {name: by_file[file][name] for name, file in places.items()}
    if (folder / SINGLE).exists():
        return read_safetensors_header(folder / SINGLE)
    pickles = sorted(path.name for path in folder.glob("*.bin")) if folder.is_dir() else []
    rule = f"holds neither {SINGLE} nor {INDEX}"
    instead = "write the folder that holds config.json and the .safetensors files"
    if pickles:
        rule += f", only {pickles[0]}: a pickle, which can run any program when it is read"
        instead = "have transformers save it again: its save_pretrained writes safetensors"
    raise ConfigError([Problem("init_from", str(folder), rule, instead)])
