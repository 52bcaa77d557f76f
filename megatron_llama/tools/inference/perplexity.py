"""Perplexity on an indexed dataset."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from megatron_llama.config import Config, ConfigError, DataConfig, ModelConfig, Problem
from megatron_llama.config.data_prefixes import MASK_SUFFIX
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.data.checks import broken_masks, check_data
from megatron_llama.tools.inference.generator import Generator

_LOGIT_BYTES = 256 << 20  # fp32 logits of a rank in one batch
Progress = Callable[[int, int], None]
"""Called with the number of windows or records that are done, and of all."""
Example = tuple[np.ndarray, np.ndarray]
"""(ids, loss mask) of a window or a fine-tuning example. Nothing predicts its first id."""


@dataclass(frozen=True)
class Perplexity:
    """Over all learned tokens that have a token before them."""

    tokens: int
    """Predicted tokens; of a dataset of text all but the first."""
    windows: int
    """Windows or examples."""
    seq_length: int
    """Inputs of the longest one."""
    loss: float
    """Mean negative log likelihood of a token, in nats."""
    perplexity: float


def open_ids(prefix: str, model: ModelConfig) -> np.ndarray:
    """All ids of a dataset, document after document, memory-mapped. Raises ConfigError where they do not fit."""
    problems = check_data(Config(model=model, data=DataConfig(prefixes=[prefix], tokenizer=None)))
    if problems:
        raise ConfigError(problems)
    return IndexedDataset(prefix).tokens


def is_fine_tuning_set(prefix: str) -> bool:
    """Whether a dataset has loss masks."""
    return Path(prefix + MASK_SUFFIX + ".idx").is_file()


def open_examples(prefix: str, model: ModelConfig) -> list[Example] | None:
    """The examples of a fine-tuning set, memory-mapped; None for a dataset of text.

    Raises ConfigError for a set that does not fit the model, or whose masks are not its own.
    """
    if not is_fine_tuning_set(prefix):
        return None
    open_ids(prefix, model)
    tokens = IndexedDataset(prefix)
    if rule := broken_masks(prefix, tokens.index):
        raise ConfigError([Problem("--dataset", prefix, rule, "make the dataset again")])
    masks = IndexedDataset(prefix + MASK_SUFFIX)
    longest, context = int(tokens.index.lengths.max()), model.max_position_embeddings
    if longest - 1 > context:
        rule = f"holds an example of {longest} tokens, and the model has {context} positions"
        raise ConfigError([Problem("--dataset", prefix, rule, "make it again with a smaller --seq-length")])
    return [(tokens.sequence(number), masks.sequence(number)) for number in range(len(tokens.index))]


def windows(count: int, length: int) -> Iterator[tuple[int, int]]:
    """(first input, first after the last input) of windows that predict every id but the first once; the last is
    shorter."""
    return ((start, min(start + length, count - 1)) for start in range(0, count - 1, length))


def open_windows(prefix: str, model: ModelConfig, length: int, max_tokens: int | None) -> list[Example]:
    """A dataset, or its first ``max_tokens`` ids, in windows of ``length`` inputs, cut as training cuts them.

    A window's first tokens have little context, as in training, and documents follow each other as they are stored.
    """
    ids, learned = open_ids(prefix, model)[:max_tokens], np.ones(length + 1, np.uint8)
    return [(ids[a : b + 1], learned[: b + 1 - a]) for a, b in windows(len(ids), length)]


@torch.no_grad()
def perplexity(generator: Generator, examples: list[Example], progress: Progress) -> Perplexity:
    """The loss on examples or windows, as val_loss is: each alone, over its learned tokens, all of equal weight.

    All ranks must call it.
    """
    examples = sorted(examples, key=lambda example: len(example[0]))  # similar lengths in a batch: less padding
    room = _LOGIT_BYTES * generator.plan.config.trainer.tp // (generator.plan.padded_vocab_size * 4)
    total, count, done = 0.0, 0, 0
    while done < len(examples):
        rows = 1
        while done + rows < len(examples) and (rows + 1) * (len(examples[done + rows][0]) - 1) <= room:
            rows += 1
        ids, learned = (
            pad_sequence([torch.from_numpy(row.astype(np.int64)) for row in column], batch_first=True)
            for column in zip(*examples[done : done + rows], strict=True)
        )
        tokens, labels, mask = ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), learned[:, 1:]
        batch = (column.to(generator.device) for column in (tokens, labels))
        total += generator.llama(*batch, loss_weights=mask.float().to(generator.device))[0].item()
        count += int(mask.sum())
        done += rows
        progress(done, len(examples))
    mean = total / max(1, count)
    longest = len(examples[-1][0]) - 1
    return Perplexity(count, len(examples), longest, mean, math.exp(mean) if mean < 700 else math.inf)
