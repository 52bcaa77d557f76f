"""Is a dataset whole, and does it fit model and tokenizer? Reads headers, sizes and a sample of the ids; no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megatron_llama.config import Config, ConfigError, Problem
from megatron_llama.config.data_settings import MASK_SUFFIX, list_paths
from megatron_llama.corpus.epochs import SPLITS, split_range
from megatron_llama.corpus.indexed_format import CHUNK, MASK_DTYPE, Index, IndexedDataset, read_index
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import read_json, sha256_file
from megatron_llama.text.tokenizer import tokenizer_file, vocabulary_size

_SAMPLED_BYTES = 64 << 20  # ids checked at the start of a .bin


def check_data(config: Config) -> list[Problem]:
    """Everything that keeps the config's datasets from being trained on; nothing where the data is made up."""
    data, rows = config.data, config.model.vocab_size
    if data.mock:
        return []
    named = list_paths(data)
    tokenizer = None if data.tokenizer is None else tokenizer_file(data.tokenizer)
    pieces = None if tokenizer is None else vocabulary_size(tokenizer)
    problems = [] if tokenizer is None else _unfit_tokenizer(config, tokenizer, pieces)
    sha256 = None if tokenizer is None or problems else sha256_file(tokenizer)
    for name, prefix in named:
        try:
            dataset = IndexedDataset(prefix)
            largest = _largest_id(dataset)
        except (OSError, ValueError) as error:
            problems.append(Problem(name, prefix, f"can't be read: {error}", "make the dataset again"))
            continue
        if largest >= rows:
            rule = f"holds token id {largest}, and the model's vocabulary ends at {rows - 1}"
            advice = (
                f"write model.vocab_size={max(largest + 1, pieces or 0)}, or prepare the data with another tokenizer"
            )
            problems.append(Problem(name, prefix, rule, advice))
        if sha256 is not None:
            problems += _other_tokenizer(prefix, str(data.tokenizer), sha256)
        if data.kind == "sft":
            problems += _unfit_examples(config, name, prefix, dataset.index)
    return problems


def _largest_id(dataset: IndexedDataset) -> int:
    """The largest id in the first _SAMPLED_BYTES of a dataset; raises UserError if it is damaged."""
    size, needed = dataset.bin_path.stat().st_size, _check_index(dataset)
    if size != needed:
        raise UserError(f"{dataset.bin_path} has {size:,} bytes, but {dataset.idx_path} gives {needed:,}")
    if not needed:
        raise UserError(f"{dataset.bin_path} holds no tokens")
    sampled = dataset.tokens[: _SAMPLED_BYTES // dataset.index.dtype.itemsize]
    if sampled.min() < 0:
        raise UserError(f"{dataset.bin_path} holds the negative token id {sampled.min()}")
    return int(sampled.max())


def _check_index(dataset: IndexedDataset) -> int:
    """The bytes that an index gives its .bin. Reads all of it, once, a chunk at a time.

    Raises UserError where its three sections contradict each other: reads would come from elsewhere.
    """
    index, path, position = dataset.index, dataset.idx_path, 0
    for first in range(0, len(index), CHUNK):
        part = slice(first, first + CHUNK)
        sizes = index.lengths[part].astype(np.int64) * index.dtype.itemsize
        expected = position + np.cumsum(sizes) - sizes
        wrong = np.flatnonzero((index.pointers[part] != expected) | (sizes < 0))
        if len(wrong):
            number, found, right = first + int(wrong[0]), index.pointers[part][wrong[0]], expected[wrong[0]]
            length = index.lengths[number]
            raise UserError(
                f"{path} is damaged: sequence {number:,} has {length} tokens and begins at byte {found:,}, and those "
                f"before it end at {right:,}"
            )
        position += int(sizes.sum())
    borders = index.document_indices
    stretches = (borders[first : first + CHUNK + 1] for first in range(0, len(borders), CHUNK))
    falls = any((stretch[1:] < stretch[:-1]).any() for stretch in stretches)
    if not len(borders) or borders[0] != 0 or borders[-1] != len(index) or falls:
        raise UserError(f"{path} is damaged: its documents are not its {len(index):,} sequences, in order")
    return position


def _unfit_tokenizer(config: Config, file: Path, pieces: int | None) -> list[Problem]:
    """Why the tokenizer can't be used, whatever the dataset: its ids must be rows of the embedding, for example."""
    tokenizer, prompts = config.data.tokenizer, config.logging.sample_prompts
    if pieces is None:
        rule, advice = "is no sentencepiece model, nor a folder with a tokenizer", "name the .model file of the dataset"
        return [Problem("data.tokenizer", tokenizer, rule, f"{advice}, or the Hugging Face folder")]
    if prompts and file.suffix == ".json":
        rule = f"samples need a sentencepiece model, and {tokenizer} holds another kind of tokenizer"
        advice = "write logging.sample_prompts=[], and let scripts/generate.py continue them"
        return [Problem("logging.sample_prompts", prompts, rule, advice)]
    if pieces > config.model.vocab_size:
        rule = f"has {pieces} pieces, and the model's vocabulary only {config.model.vocab_size}"
        return [Problem("data.tokenizer", tokenizer, rule, f"write model.vocab_size={pieces}")]
    return []


def _other_tokenizer(prefix: str, tokenizer: str, sha256: str) -> list[Problem]:
    """A problem where the dataset's manifest names another tokenizer; a dataset of another program has no manifest."""
    manifest = Path(prefix + ".json")
    if not manifest.exists():
        return []
    try:
        made_with = read_json(manifest).get("tokenizer_sha256")
    except (OSError, ValueError, AttributeError) as error:
        rule = f"its manifest {manifest} can't be read: {error}"
        return [Problem("data.prefixes", prefix, rule, "make the dataset again")]
    if made_with and made_with != sha256:
        rule = f"is not the tokenizer that made {prefix}: their sha256 differ"
        advice = "name the tokenizer that made the dataset, or prepare the data with this one"
        return [Problem("data.tokenizer", tokenizer, rule, advice)]
    return []


def _unfit_examples(config: Config, name: str, prefix: str, index: Index) -> Iterator[Problem]:
    """Why a fine-tuning set can't be trained, or validated, on."""
    data, validates = config.data, config.trainer.val_every_steps is not None
    if name == "data.validation_prefixes" and not validates:
        return
    longest = int(index.lengths.max())
    if rule := mask_problem(prefix, index):
        yield Problem(name, prefix, rule, "make the dataset again")
    elif longest > data.length + 1:
        need = f"data.seq_length={longest - 1}"
        rule = f"holds an example of {longest} tokens, which needs {need}; it is {data.length}"
        advice = f"write {need}, or make the dataset again with --seq-length {data.length}"
        yield Problem(name, prefix, rule, advice)
    for number in range(1 + validates) if not data.validation_prefixes else ():
        first, last = split_range(data.split, number, len(index))
        if first == last:
            rule = f"split {data.split} leaves none of its {len(index)} examples for {SPLITS[number]}"
            advice = "write another data.split, data.validation_prefixes, or trainer.val_every_steps=null"
            yield Problem(name, prefix, rule, advice)


def check_ids(ids: np.ndarray, vocab_size: int, locate: Callable[[int], tuple[str, int, int]]) -> None:
    """Raises ConfigError for the first of some ids that the model has no row for; a start reads a sample of them only.

    ``locate`` gives (prefix, number of the sequence, token of it) of a position in ``ids``.
    """
    if not len(ids) or (ids.min() >= 0 and ids.max() < vocab_size):
        return
    position = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    prefix, sequence, token = locate(position)
    rule = (
        f"token {token:,} of its sequence {sequence:,} is id {ids[position]}, and the model's vocabulary is 0 to "
        f"{vocab_size - 1}"
    )
    advice = "make the dataset again, or take the model whose tokenizer made it"
    raise ConfigError([Problem("data.prefixes", prefix, rule, advice)])


def mask_problem(prefix: str, index: Index) -> str | None:
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
