"""Dataset checks: complete files, ids within the vocabulary, the same tokenizer. Reads headers and a sample of ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron_llama.config import Config, ConfigError, Problem
from megatron_llama.config.data_settings import (
    MASK_SUFFIX,
    PAIRS,
    PREFERENCE_FORMATS,
    REJECTED,
    UNPAIRED,
    NewTokens,
    list_paths,
    stored_format,
)
from megatron_llama.config.problems import format_value
from megatron_llama.config.settings import RENDERED
from megatron_llama.corpus.indexed_format import CHUNK, MASK_DTYPE, Index, IndexedDataset, read_index
from megatron_llama.corpus.splits import SPLITS, split_range
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import file_size, read_json
from megatron_llama.system.object_store import location
from megatron_llama.text.chat_template import OWN, own_template_sha256
from megatron_llama.text.tokenizer import SENTENCEPIECE_MODEL, tokenizer_file, tokenizer_sha256, vocabulary_size

_SAMPLED_BYTES = 64 << 20  # ids checked at the start of a .bin


def check_data(config: Config) -> list[Problem]:
    """Return all problems of the config's datasets. Empty for mock data."""
    data, rows = config.data, config.model.vocab_size
    if data.mock:
        return []
    named = list_paths(data)
    tokenizer = None if data.tokenizer is None else tokenizer_file(data.tokenizer)
    new = NewTokens.of(data)
    tokens = None if tokenizer is None else vocabulary_size(tokenizer, new)
    problems = [] if tokenizer is None else _tokenizer_problems(config, tokenizer, tokens)
    setting, path = ("data.tokenizer", data.tokenizer) if tokenizer else ("init_from", config.init_from)
    if path is not None and not problems:
        problems = [*tokenizer_mismatches([prefix for _, prefix in named], setting, path, new)]
    for name, prefix in named:
        try:
            dataset = IndexedDataset(prefix)
            largest = _largest_id(dataset)
        except (OSError, ValueError) as error:
            problems.append(Problem(name, prefix, f"cannot be read: {error}", "prepare the dataset again"))
            continue
        if largest >= rows:
            rule = f"contains token id {largest}, but the model's vocabulary ends at {rows - 1}"
            size = max(largest + 1, tokens or 0)
            fix = f"write model.vocab_size={size}, or prepare the data with another tokenizer"
            problems.append(Problem(name, prefix, rule, fix))
        if data.kind == "sft":
            problems += _example_problems(config, name, prefix, dataset.index)
    return problems if data.any_template or data.kind != "sft" or problems else [*_template_problems(config)]


def _template_problems(config: Config) -> Iterator[Problem]:
    """Yield the problem of each training set whose chat template is not the one of the exported folder.

    Exports get the template of the sets, or keep the tokenizer's.
    """
    folder, rendered = config.data.tokenizer or config.init_from, dict[str, str]()
    for name, prefix in list_paths(config.data):
        try:
            options = read_json(location(prefix + ".json"))["options"]
            sha256, is_own = str(options["chat_template_sha256"]), options["chat_template"] == OWN
        except (OSError, ValueError, LookupError, TypeError):  # the dataset of another program
            continue
        if name != "data.prefixes" or options.get("format") == RENDERED:
            continue
        fix = "prepare the dataset again, or write data.any_template=true"
        if rendered and sha256 not in rendered:
            rule = f"was rendered with another chat template than {[*rendered.values()][0]}; an export has only one"
            yield Problem(name, prefix, rule, fix)
        elif not rendered and is_own and folder is not None and tokenizer_file(folder).is_file():
            if own_template_sha256(Path(folder)) != sha256:
                rule = f"was rendered with another chat template than that in {folder}, which an export gets"
                yield Problem(name, prefix, rule, f"write data.tokenizer=FOLDER with its template, {fix}")
        rendered.setdefault(sha256, prefix)


def _largest_id(dataset: IndexedDataset) -> int:
    """Return the largest id in the first _SAMPLED_BYTES of a dataset. Raises UserError if the files are damaged."""
    size, needed = dataset.bin_size, _check_index(dataset)
    if size != needed:
        raise UserError(f"{dataset.bin_path} has {size:,} bytes, but {dataset.idx_path} requires {needed:,}")
    if not needed:
        raise UserError(f"{dataset.bin_path} has no tokens")
    sampled = dataset.tokens[: _SAMPLED_BYTES // dataset.index.dtype.itemsize]
    if sampled.min() < 0:
        raise UserError(f"{dataset.bin_path} contains the negative token id {sampled.min()}")
    return int(sampled.max())


def _check_index(dataset: IndexedDataset) -> int:
    """Return the size of the .bin according to the index. Reads the whole index in chunks.

    Raises:
        UserError: the three sections of the index are inconsistent.
    """
    index, path, position = dataset.index, dataset.idx_path, 0
    for first in range(0, len(index), CHUNK):
        part = slice(first, first + CHUNK)
        sizes = index.lengths[part].astype(np.int64) * index.dtype.itemsize
        expected = position + np.cumsum(sizes) - sizes
        wrong = np.flatnonzero((index.pointers[part] != expected) | (sizes < 0))
        if len(wrong):
            number, start, right = first + int(wrong[0]), index.pointers[part][wrong[0]], expected[wrong[0]]
            length = index.lengths[number]
            raise UserError(
                f"{path} is damaged: sequence {number:,} has {length} tokens and begins at byte {start:,}, but the "
                f"previous sequence ends at {right:,}"
            )
        position += int(sizes.sum())
    boundaries = index.document_indices
    chunks = (boundaries[first : first + CHUNK + 1] for first in range(0, len(boundaries), CHUNK))
    decreases = any((chunk[1:] < chunk[:-1]).any() for chunk in chunks)
    if not len(boundaries) or boundaries[0] != 0 or boundaries[-1] != len(index) or decreases:
        raise UserError(f"{path} is damaged: its document boundaries do not match its {len(index):,} sequences")
    return position


def _tokenizer_problems(config: Config, file: Path, tokens: int | None) -> list[Problem]:
    """Return the problems of the tokenizer with ``tokens`` ids, regardless of the dataset."""
    tokenizer, prompts = config.data.tokenizer, config.logging.sample_prompts
    if tokens is None:
        rule = "is neither a sentencepiece model nor a folder with a tokenizer"
        fix = "name the .model file of the dataset, or the Hugging Face folder"
        return [Problem("data.tokenizer", tokenizer, rule, fix)]
    if prompts and file.suffix == ".json":
        rule = f"samples need a sentencepiece model, and {tokenizer} is another kind of tokenizer"
        fix = "write logging.sample_prompts=[], and run scripts/generate.py with the prompts"
        return [Problem("logging.sample_prompts", prompts, rule, fix)]
    if tokens > config.model.vocab_size:
        rule = f"has {tokens} tokens, but the model's vocabulary has {config.model.vocab_size}"
        return [Problem("data.tokenizer", tokenizer, rule, f"write model.vocab_size={tokens}")]
    return []


def tokenizer_mismatches(prefixes: Sequence[str], setting: str, path: str, new: NewTokens) -> Iterator[Problem]:
    """Yield a problem for each dataset whose manifest names another tokenizer than ``path`` with the tokens ``new``.

    A folder's tokenizer.json or sentencepiece model may be the dataset's. Datasets of other programs have no manifest.
    """
    files = [tokenizer_file(path), *([] if new else [Path(path, SENTENCEPIECE_MODEL)])]
    hashes = [tokenizer_sha256(file, new) for file in files if file.is_file()]
    flag = "--tokenizer " if setting.startswith("--") else "data.tokenizer="
    for prefix in prefixes if hashes else ():
        manifest = location(prefix + ".json")
        try:
            content = read_json(manifest) if manifest.is_file() else {}
            used, tokens = content.get("tokenizer"), NewTokens.of(content.get("options") or {})
        except (OSError, ValueError, AttributeError) as error:
            rule = f"its manifest {manifest} cannot be read: {error}"
            yield Problem("data.prefixes", prefix, rule, "prepare the dataset again")
            continue
        if content.get("tokenizer_sha256") not in (None, *hashes):
            rule = f"{prefix} was prepared with another tokenizer, {used} (the sha256 differ)"
            fix = f"prepare it with --tokenizer-model {path}, or write {flag}{used}"
            fix += " if that has the same ids" * (setting != "data.tokenizer")
            if tokens != new:
                rule = f"{prefix} was prepared with the new tokens {format_value([*tokens.plain, *tokens.special])}"
                fix = "write data.add_tokens and data.add_special_tokens of the dataset, or prepare it again"
            yield Problem(setting, path, rule, fix)


def _example_problems(config: Config, name: str, prefix: str, index: Index) -> Iterator[Problem]:
    """Yield the problems of a fine-tuning set's examples."""
    data, validates = config.data, bool(config.trainer.val_every_steps)
    if name == "data.validation_prefixes" and not validates:
        return
    longest = int(index.lengths.max())
    if rule := mask_problem(prefix, index):
        yield Problem(name, prefix, rule, "prepare the dataset again")
    elif format_problem := _format_problem(config, prefix):
        yield Problem(name, prefix, *format_problem)
    elif longest > data.length + 1:
        need = f"data.seq_length={longest - 1}"
        rule = f"has an example of {longest} tokens, which needs {need} (configured: {data.length})"
        fix = f"write {need}, or prepare the dataset again with --seq-length {data.length}"
        yield Problem(name, prefix, rule, fix)
    has_masks = rule is None
    parts = [(number, *split_range(data.split, number, len(index))) for number in range(1 + validates)]
    if data.validation_prefixes:
        parts = [(int(name == "data.validation_prefixes"), 0, len(index))]
    for number, first, last in parts:
        if first < last and has_masks and not has_labels(prefix, first, last):
            rule = f"{prefix + MASK_SUFFIX}.bin has no label for {SPLITS[number]}: each token is masked"
            yield Problem(name, prefix, rule, "prepare the dataset again, with answers that have loss")
        if first == last:
            rule = f"split {data.split} leaves none of its {len(index)} examples for {SPLITS[number]}"
            fix = "write another data.split, data.validation_prefixes, or trainer.val_every_steps=0"
            yield Problem(name, prefix, rule, fix)


_LACKS = {PAIRS: "no pairs of answers, which {} compares", UNPAIRED: "no labels of answers, which {} needs"}
_HAS = {
    PAIRS: "pairs of a chosen and a rejected answer, and {} would train on both",
    UNPAIRED: "answers with labels, and {} would also train on the undesirable ones",
}


def _format_problem(config: Config, prefix: str) -> tuple[str, str] | None:
    """Return (problem, remedy) of a set without the preferences that the objective needs."""
    objective = f"finetune.objective={config.finetune.objective}"
    stored = stored_format(IndexedDataset(prefix + MASK_SUFFIX).sequence(0)[-1])
    needed = PREFERENCE_FORMATS.get(config.finetune.objective)
    if needed is not None and stored != needed:
        other = next((name for name, format in PREFERENCE_FORMATS.items() if format == stored), "sft")
        instead = f"prepare it with data_prep/sft.py --format {needed}, or write finetune.objective={other}"
        return "has " + _LACKS[needed].format(objective), instead
    if stored is not None and needed is None:
        other = next(name for name, format in PREFERENCE_FORMATS.items() if format == stored)
        instead = (
            f"write finetune.objective={other}, or prepare the chosen answers (data_prep/sft.py --format preference)"
        )
        return "has " + _HAS[stored].format(objective), instead
    return None


def has_labels(prefix: str, first: int, last: int) -> bool:
    """Return whether a label of examples ``first`` to ``last`` (exclusive) has loss. An example's first token is none.

    Reads the masks up to the first label: all of them only if there is no label. They must be valid (mask_problem).
    """
    masks = IndexedDataset(prefix + MASK_SUFFIX)
    for begin in range(first, last, CHUNK):
        end = min(begin + CHUNK, last)
        start, size = int(masks.index.pointers[begin]), masks.index.tokens(begin, end)
        starts = masks.index.pointers[begin:end]
        for offset in range(start, start + size, _SAMPLED_BYTES):
            marks = masks.tokens[offset : min(offset + _SAMPLED_BYTES, start + size)]
            with_loss = offset + np.flatnonzero(marks % REJECTED)
            if len(with_loss) and not np.isin(with_loss, starts).all():
                return True
    return False


def check_ids(ids: np.ndarray, vocab_size: int, locate: Callable[[int], tuple[str, int, int]]) -> None:
    """Raise ConfigError for the first id outside the vocabulary. ``check_data`` checks a sample of the ids only.

    ``locate`` returns (prefix, sequence number, token number) of a position in ``ids``.
    """
    if not len(ids) or (ids.min() >= 0 and ids.max() < vocab_size):
        return
    position = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    prefix, sequence, token = locate(position)
    rule = (
        f"token {token:,} of sequence {sequence:,} has id {ids[position]}, but the model's vocabulary is 0 to "
        f"{vocab_size - 1}"
    )
    fix = "prepare the dataset again, or use the model of its tokenizer"
    raise ConfigError([Problem("data.prefixes", prefix, rule, fix)])


def check_mask(mask: np.ndarray, prefix: str, sequence: int, largest: int = 1) -> None:
    """Raise ConfigError for the first value of a loss mask above ``largest``: it would weight the loss."""
    if not len(mask) or mask.max() <= largest:
        return
    token = int(np.flatnonzero(mask > largest)[0])
    rule = f"token {token:,} of sequence {sequence:,} has the loss mask {mask[token]}, but masks are 0 to {largest}"
    raise ConfigError([Problem("data.prefixes", prefix, rule, "prepare the dataset again")])


def mask_problem(prefix: str, index: Index) -> str | None:
    """Return the problem of a fine-tuning set's loss masks, None if they are valid."""
    lengths, mask_prefix = index.lengths, prefix + MASK_SUFFIX
    try:
        masks = read_index(mask_prefix)
        size = file_size(location(mask_prefix + ".bin"))
    except (OSError, ValueError) as error:
        return f"has no readable loss masks: {error}"
    if masks.dtype != MASK_DTYPE or not np.array_equal(masks.lengths, lengths):
        return f"{mask_prefix} does not match the dataset: types, counts or lengths differ"
    if size != int(lengths.sum(dtype=np.int64)):
        return f"{mask_prefix}.bin has {size} bytes, but its index requires {lengths.sum()}"
    if lengths.min() < 2:
        return "has an example of one token, which has no label"
    return None
