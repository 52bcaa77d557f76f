"""Is a dataset whole, and does it fit model and tokenizer? Reads headers, sizes and a sample of the ids; no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from megatron_llama.config import Config, Problem
from megatron_llama.config.data_prefixes import weights_and_paths
from megatron_llama.data.indexed_format import MASK_SUFFIX, IndexedDataset, read_index
from megatron_llama.plan.epochs import SPLITS, parts_of
from megatron_llama.system.errors import UserError
from megatron_llama.text.tokenizer import tokenizer_file, vocabulary_size

_SAMPLED_BYTES = 64 << 20  # ids checked at the start of a .bin


def check_dataset(config: Config) -> list[Problem]:
    """Everything that keeps the config's datasets from being trained on."""
    problems = []
    for name, prefix in [
        *(("data.prefixes", prefix) for prefix in weights_and_paths(config.data.prefixes)[1]),
        *(("data.validation_prefixes", prefix) for prefix in config.data.validation_prefixes),
    ]:
        try:
            largest = _check_files(prefix)
        except (OSError, ValueError) as error:
            problems.append(Problem(name, prefix, f"can't be read: {error}", "make the dataset again"))
            continue
        if largest >= config.model.vocab_size:
            rule = f"holds token id {largest}, and the model's vocabulary ends at {config.model.vocab_size - 1}"
            problems.append(Problem(name, prefix, rule, _vocabulary_advice(config, largest)))
        problems += _check_tokenizer(prefix, config)
    return problems


def check_data(config: Config) -> list[Problem]:
    """Everything that keeps the config's data, of whatever kind, from being trained on; nothing of made-up data."""
    if config.data.mock:
        return []
    if config.data.kind == "sft":
        return check_sft(config, config.trainer.val_every_steps is not None)
    return check_dataset(config)


def check_sft(config: Config, validate: bool) -> list[Problem]:
    """Everything that keeps the config's fine-tuning sets from being trained on."""
    problems = check_dataset(config)
    if problems:
        return problems
    data = config.data
    for number in range(1 + validate):
        for prefix, (first, last) in parts_of(data, number):
            name = "data.validation_prefixes" if number and data.validation_prefixes else "data.prefixes"
            problems += [Problem(name, prefix, *what) for what in _unfit(prefix, data.seq_length)]
            if first == last:
                count = len(read_index(prefix))
                rule = f"split {data.split} leaves none of its {count} examples for {SPLITS[number]}"
                advice = "write another data.split, data.validation_prefixes, or trainer.val_every_steps=null"
                problems.append(Problem(name, prefix, rule, advice))
    return list(dict.fromkeys(problems))


def broken_masks(prefix: str) -> str | None:
    """Why a fine-tuning set can't be used with its loss masks, whatever the model; None where it can."""
    lengths = read_index(prefix).lengths
    try:
        masks = read_index(prefix + MASK_SUFFIX)
        size = Path(prefix + MASK_SUFFIX + ".bin").stat().st_size
    except (OSError, ValueError) as error:
        return f"has no loss masks that can be read: {error}"
    if masks.dtype != np.uint8 or not np.array_equal(masks.lengths, lengths):
        return f"{prefix + MASK_SUFFIX} is not its loss masks: types, counts or lengths differ"
    if size != int(lengths.sum(dtype=np.int64)):
        return f"{prefix + MASK_SUFFIX}.bin has {size} bytes where its index promises {lengths.sum()}"
    if lengths.min() < 2:
        return "holds an example of one token, which has no label"
    return None


def _unfit(prefix: str, seq_length: int) -> list[tuple[str, str]]:
    """(rule, advice) for what is wrong with a fine-tuning set on its own."""
    if rule := broken_masks(prefix):
        return [(rule, "make the dataset again")]
    longest = int(read_index(prefix).lengths.max())
    if longest > seq_length + 1:
        rule = f"holds an example of {longest} tokens, which needs data.seq_length={longest - 1}; it is {seq_length}"
        advice = f"write data.seq_length={longest - 1}, or make the dataset again with --seq-length {seq_length}"
        return [(rule, advice)]
    return []


def _vocabulary_advice(config: Config, largest: int) -> str:
    tokenizer = config.data.tokenizer
    size = max(largest + 1, 0 if tokenizer is None else vocabulary_size(tokenizer) or 0)
    return f"write model.vocab_size={size}, or prepare the data with another tokenizer"


def _check_tokenizer(prefix: str, config: Config) -> list[Problem]:
    """The tokenizer that is named must be the one that made the dataset, and its ids must be rows of the embedding."""
    tokenizer = config.data.tokenizer
    if tokenizer is None:
        return []
    pieces = vocabulary_size(tokenizer)
    if pieces is None:
        advice = "name the .model file of the dataset, or the Hugging Face folder"
        return [
            Problem("data.tokenizer", tokenizer, "is no sentencepiece model, nor a folder with a tokenizer", advice)
        ]
    if config.logging.sample_prompts and tokenizer_file(tokenizer).suffix == ".json":
        rule = f"samples need a sentencepiece model, and {tokenizer} holds another kind of tokenizer"
        advice = "write logging.sample_prompts=[], and let scripts/generate.py continue them"
        return [Problem("logging.sample_prompts", config.logging.sample_prompts, rule, advice)]
    if pieces > config.model.vocab_size:
        rule = f"has {pieces} pieces, and the model's vocabulary only {config.model.vocab_size}"
        return [Problem("data.tokenizer", tokenizer, rule, f"write model.vocab_size={pieces}")]
    manifest = Path(prefix + ".json")
    if not manifest.exists():
        return []  # made by another program: no record of its tokenizer
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


def _check_files(prefix: str) -> int:
    """The largest id in the first _SAMPLED_BYTES of the dataset; raises OSError or ValueError if it is damaged."""
    dataset = IndexedDataset(prefix)
    lengths, itemsize = dataset.index.lengths, dataset.index.dtype.itemsize
    size, needed = dataset.bin_path.stat().st_size, int(lengths.sum(dtype=np.int64)) * itemsize
    if size != needed:
        raise UserError(f"{dataset.bin_path} has {size:,} bytes, but {dataset.idx_path} gives {needed:,}")
    if not needed:
        raise UserError(f"{dataset.bin_path} holds no tokens")
    return int(dataset.tokens[: _SAMPLED_BYTES // itemsize].max())
