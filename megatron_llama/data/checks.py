"""Is a dataset whole, and does it fit model and tokenizer? Reads headers, sizes and a sample of the ids; no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from megatron_llama.config import Config, Problem
from megatron_llama.config.data_prefixes import MASK_SUFFIX, named_paths
from megatron_llama.data.indexed_format import MASK_DTYPE, Index, IndexedDataset, read_index
from megatron_llama.plan.epochs import SPLITS, parts_of
from megatron_llama.system.errors import UserError
from megatron_llama.text.tokenizer import tokenizer_file, vocabulary_size

_SAMPLED_BYTES = 64 << 20  # ids checked at the start of a .bin


def check_data(config: Config) -> list[Problem]:
    """Everything that keeps the config's data, of whatever kind, from being trained on; nothing of made-up data."""
    if config.data.mock:
        return []
    if config.data.kind == "sft":
        return check_sft(config, config.trainer.val_every_steps is not None)
    return check_dataset(config)


def check_dataset(config: Config) -> list[Problem]:
    """Everything that keeps the config's datasets from being trained on."""
    tokenizer, rows = config.data.tokenizer, config.model.vocab_size
    pieces = None if tokenizer is None else vocabulary_size(tokenizer)
    unfit = None if tokenizer is None else _unfit_tokenizer(config, tokenizer, pieces)
    problems = []
    for name, prefix in named_paths(config.data):
        try:
            largest = _largest_id(IndexedDataset(prefix))
        except (OSError, ValueError) as error:
            problems.append(Problem(name, prefix, f"can't be read: {error}", "make the dataset again"))
            continue
        if largest >= rows:
            rule = f"holds token id {largest}, and the model's vocabulary ends at {rows - 1}"
            advice = (
                f"write model.vocab_size={max(largest + 1, pieces or 0)}, or prepare the data with another tokenizer"
            )
            problems.append(Problem(name, prefix, rule, advice))
        if unfit is not None:
            problems.append(unfit)
        elif tokenizer is not None:
            problems += _other_tokenizer(prefix, tokenizer)
    return problems


def _largest_id(dataset: IndexedDataset) -> int:
    """The largest id in the first _SAMPLED_BYTES of a dataset; raises UserError if it is damaged."""
    lengths, itemsize = dataset.index.lengths, dataset.index.dtype.itemsize
    size, needed = dataset.bin_path.stat().st_size, int(lengths.sum(dtype=np.int64)) * itemsize
    if size != needed:
        raise UserError(f"{dataset.bin_path} has {size:,} bytes, but {dataset.idx_path} gives {needed:,}")
    if not needed:
        raise UserError(f"{dataset.bin_path} holds no tokens")
    return int(dataset.tokens[: _SAMPLED_BYTES // itemsize].max())


def _unfit_tokenizer(config: Config, tokenizer: str, pieces: int | None) -> Problem | None:
    """Why the tokenizer can't be used, whatever the dataset: its ids must be rows of the embedding, for example."""
    if pieces is None:
        rule, advice = "is no sentencepiece model, nor a folder with a tokenizer", "name the .model file of the dataset"
        return Problem("data.tokenizer", tokenizer, rule, f"{advice}, or the Hugging Face folder")
    if config.logging.sample_prompts and tokenizer_file(tokenizer).suffix == ".json":
        rule = f"samples need a sentencepiece model, and {tokenizer} holds another kind of tokenizer"
        advice = "write logging.sample_prompts=[], and let scripts/generate.py continue them"
        return Problem("logging.sample_prompts", config.logging.sample_prompts, rule, advice)
    if pieces > config.model.vocab_size:
        rule = f"has {pieces} pieces, and the model's vocabulary only {config.model.vocab_size}"
        return Problem("data.tokenizer", tokenizer, rule, f"write model.vocab_size={pieces}")
    return None


def _other_tokenizer(prefix: str, tokenizer: str) -> list[Problem]:
    """A problem where the dataset's manifest names another tokenizer; a dataset of another program has no manifest."""
    manifest = Path(prefix + ".json")
    if not manifest.exists():
        return []
    try:
        made_with = json.loads(manifest.read_text()).get("tokenizer_sha256")
    except (OSError, ValueError, AttributeError) as error:
        rule = f"its manifest {manifest} can't be read: {error}"
        return [Problem("data.prefixes", prefix, rule, "make the dataset again")]
    if made_with and made_with != hashlib.sha256(tokenizer_file(tokenizer).read_bytes()).hexdigest():
        rule = f"is not the tokenizer that made {prefix}: their sha256 differ"
        advice = "name the tokenizer that made the dataset, or prepare the data with this one"
        return [Problem("data.tokenizer", tokenizer, rule, advice)]
    return []


def check_sft(config: Config, validate: bool) -> list[Problem]:
    """Everything that keeps the config's fine-tuning sets from being trained on."""
    problems = check_dataset(config)
    if problems:
        return problems
    data = config.data
    for number in range(1 + validate):
        name = "data.validation_prefixes" if number and data.validation_prefixes else "data.prefixes"
        for prefix, (first, last) in parts_of(data, number):
            index = read_index(prefix)
            longest = int(index.lengths.max())
            if rule := broken_masks(prefix, index):
                problems.append(Problem(name, prefix, rule, "make the dataset again"))
            elif longest > data.seq_length + 1:
                need = f"data.seq_length={longest - 1}"
                rule = f"holds an example of {longest} tokens, which needs {need}; it is {data.seq_length}"
                advice = f"write {need}, or make the dataset again with --seq-length {data.seq_length}"
                problems.append(Problem(name, prefix, rule, advice))
            if first == last:
                rule = f"split {data.split} leaves none of its {len(index)} examples for {SPLITS[number]}"
                advice = "write another data.split, data.validation_prefixes, or trainer.val_every_steps=null"
                problems.append(Problem(name, prefix, rule, advice))
    return list(dict.fromkeys(problems))


def broken_masks(prefix: str, index: Index) -> str | None:
    """Why a fine-tuning set can't be used with its loss masks, whatever the model; None where it can."""
    lengths, mask_prefix = index.lengths, prefix + MASK_SUFFIX
    try:
        masks = read_index(mask_prefix)
        size = Path(mask_prefix + ".bin").stat().st_size
    except (OSError, ValueError) as error:
        return f"has no loss masks that can be read: {error}"
    if masks.dtype != MASK_DTYPE or not np.array_equal(masks.lengths, lengths):
        return f"{mask_prefix} is not its loss masks: types, counts or lengths differ"
    if size != int(lengths.sum(dtype=np.int64)):
        return f"{mask_prefix}.bin has {size} bytes where its index promises {lengths.sum()}"
    if lengths.min() < 2:
        return "holds an example of one token, which has no label"
    return None
