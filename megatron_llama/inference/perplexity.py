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
from megatron_llama.data.checks import broken_masks, check_dataset
from megatron_llama.data.indexed_format import IndexedDataset
from megatron_llama.inference.generator import Generator

_LOGIT_BYTES = 256 << 20  # fp32 logits of a rank in one batch
Progress = Callable[[int, int], None]
"""Called with the number of windows or records that are done, and of all."""


@dataclass(frozen=True)
class Perplexity:
    """Over all tokens that have a token before them in the dataset."""

    tokens: int
    """Predicted tokens: all but the dataset's first."""
    windows: int
    seq_length: int
    loss: float
    """Mean negative log likelihood of a token, in nats."""
    perplexity: float


def open_ids(prefix: str, model: ModelConfig) -> np.ndarray:
    """All ids of a dataset, document after document, memory-mapped. Raises ConfigError where they do not fit."""
    problems = check_dataset(Config(model=model, data=DataConfig(prefixes=[prefix], tokenizer=None)))
    if problems:
        raise ConfigError(problems)
    return IndexedDataset(prefix).tokens


def is_fine_tuning_set(prefix: str) -> bool:
    """Whether a dataset has loss masks."""
    return Path(prefix + MASK_SUFFIX + ".idx").is_file()


def open_examples(prefix: str, model: ModelConfig) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """(ids, loss mask) of each example of a fine-tuning set, memory-mapped; None for a dataset of text.

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


@torch.no_grad()
def perplexity(generator: Generator, ids: np.ndarray, length: int, progress: Progress | None = None) -> Perplexity:
    """The loss on windows of ``length`` inputs, cut as training cuts them; every token of ``ids`` has the same weight.

    A window's first tokens have little context, as in training, and documents follow each other as they are stored.
    All ranks must call it.
    """
    spans = list(windows(len(ids), length))
    rows = max(1, _LOGIT_BYTES * generator.plan.config.trainer.tp // (length * generator.plan.padded_vocab_size * 4))
    total, done = 0.0, 0
    while done < len(spans):
        batch = spans[done : done + rows]
        if batch[-1][1] - batch[-1][0] < length and len(batch) > 1:
            batch = batch[:-1]  # the shorter last one is a batch of its own
        tokens = torch.stack([torch.from_numpy(ids[a : b + 1].astype(np.int64)) for a, b in batch]).to(generator.device)
        losses = generator.llama(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        total += losses.double().sum().item()
        done += len(batch)
        if progress is not None:
            progress(done, len(spans))
    return _of(total, len(ids) - 1, len(spans), length)


@torch.no_grad()
def example_perplexity(
    generator: Generator, examples: list[tuple[np.ndarray, np.ndarray]], progress: Progress | None = None
) -> Perplexity:
    """The loss on a fine-tuning set, as val_loss is: each example alone, over its learned tokens, all of equal weight.

    In the result ``windows`` counts examples, and ``seq_length`` is that of the longest. All ranks must call it.
    """
    examples = sorted(examples, key=lambda example: len(example[0]))  # similar lengths in a batch: less padding
    longest = len(examples[-1][0]) - 1
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
        losses = generator.llama(tokens.to(generator.device), labels.to(generator.device)).double().cpu()
        total += losses[mask.T.bool()].sum().item()  # [s, b]
        count += int(mask.sum())
        done += rows
        if progress is not None:
            progress(done, len(examples))
    return _of(total, count, len(examples), longest)


def _of(total: float, count: int, windows: int, length: int) -> Perplexity:
    """From the sum of the losses of ``count`` ids, in nats."""
    mean = total / max(1, count)
    return Perplexity(count, windows, length, mean, math.exp(mean) if mean < 700 else math.inf)
