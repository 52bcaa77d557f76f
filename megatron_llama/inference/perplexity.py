"""Perplexity on an indexed dataset."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megatron_llama.config import Config, ConfigError, DataConfig, ModelConfig, Problem
from megatron_llama.data.checks import check_dataset
from megatron_llama.data.indexed_format import MASK_SUFFIX, IndexedDataset, read_index
from megatron_llama.inference.generator import Generator

_LOGIT_BYTES = 256 << 20  # of a rank's fp32 logits at a time
Progress = Callable[[int, int], None]
"""Called with what is done and what there is to do."""


@dataclass(frozen=True)
class Perplexity:
    """Over all tokens that have a token before them."""

    tokens: int
    """Predicted ones: all but the dataset's first."""
    windows: int
    seq_length: int
    loss: float
    """Mean negative log likelihood of a token, nats."""
    perplexity: float


def open_ids(prefix: str, model: ModelConfig) -> np.ndarray:
    """All ids of a dataset, document after document, memory-mapped; raises ConfigError for one that does not fit."""
    problems = check_dataset(Config(model=model, data=DataConfig(prefixes=[prefix], tokenizer=None)))
    if problems:
        raise ConfigError(problems)
    return IndexedDataset(prefix).tokens


def open_examples(prefix: str, model: ModelConfig) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """(ids, mask of what is learned) of each example of a fine-tuning set; None for a dataset of text.

    Raises ConfigError for a set that does not fit the model, or whose masks are not its own.
    """
    if not Path(prefix + MASK_SUFFIX + ".idx").is_file():
        return None
    open_ids(prefix, model)
    lengths = read_index(prefix).lengths
    if not np.array_equal(lengths, read_index(prefix + MASK_SUFFIX).lengths):
        rule = f"{prefix + MASK_SUFFIX} is not its loss masks: counts or lengths differ"
        raise ConfigError([Problem("--dataset", prefix, rule, "make the dataset again")])
    if int(lengths.max()) - 1 > model.max_position_embeddings:
        rule = (
            f"holds an example of {lengths.max()} tokens, and the model has {model.max_position_embeddings} positions"
        )
        raise ConfigError([Problem("--dataset", prefix, rule, "make it again with a smaller --seq-length")])
    tokens, masks = IndexedDataset(prefix), IndexedDataset(prefix + MASK_SUFFIX)
    return [(tokens.sequence(number), masks.sequence(number)) for number in range(len(lengths))]


def windows(count: int, length: int) -> Iterator[tuple[int, int]]:
    """(first input, first after the last input) of windows that predict every id but the first once; the last is
    shorter."""
    return ((start, min(start + length, count - 1)) for start in range(0, count - 1, length))


@torch.no_grad()
def perplexity(made: Generator, ids: np.ndarray, length: int, progress: Progress | None = None) -> Perplexity:
    """Cut ``ids`` into windows of ``length`` inputs, as training does, and weigh every token alike.

    A window's first tokens have little before them, in training too; documents follow each other without a mark but
    their own end.
    """
    spans = list(windows(len(ids), length))
    rows = max(1, _LOGIT_BYTES * made.plan.config.trainer.tp // (length * made.plan.padded_vocab_size * 4))
    total, done = 0.0, 0
    while done < len(spans):
        batch = spans[done : done + rows]
        if batch[-1][1] - batch[-1][0] < length and len(batch) > 1:
            batch = batch[:-1]  # the short one goes alone
        tokens = torch.stack([torch.from_numpy(ids[a : b + 1].astype(np.int64)) for a, b in batch]).to(made.device)
        losses = made.llama(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        total += losses.double().sum().item()
        done += len(batch)
        if progress is not None:
            progress(done, len(spans))
    return _of(total, len(ids) - 1, len(spans), length)


@torch.no_grad()
def learned_perplexity(
    made: Generator, examples: list[tuple[np.ndarray, np.ndarray]], progress: Progress | None = None
) -> Perplexity:
    """Of a fine-tuning set: each example alone, over the tokens that are to be learned, all weighed alike, as val_loss
    is. ``windows`` are the examples and ``seq_length`` is the longest one's."""
    order = sorted(range(len(examples)), key=lambda number: len(examples[number][0]))  # like with like: less padding
    longest = len(examples[order[-1]][0]) - 1
    total, count, done = 0.0, 0, 0
    while done < len(order):
        # Batches are cut by the length of their last example, the longest.
        room = _LOGIT_BYTES * made.plan.config.trainer.tp // (made.plan.padded_vocab_size * 4)
        rows = 1
        while done + rows < len(order) and (rows + 1) * (len(examples[order[done + rows]][0]) - 1) <= room:
            rows += 1
        batch = [examples[number] for number in order[done : done + rows]]
        length = len(batch[-1][0]) - 1
        tokens, labels, mask = (torch.zeros(rows, length, dtype=torch.int64) for _ in range(3))
        for row, (ids, learned) in enumerate(batch):
            tokens[row, : len(ids) - 1] = torch.from_numpy(ids[:-1].astype(np.int64))
            labels[row, : len(ids) - 1] = torch.from_numpy(ids[1:].astype(np.int64))
            mask[row, : len(ids) - 1] = torch.from_numpy(learned[1:].astype(np.int64))
        losses = made.llama(tokens.to(made.device), labels.to(made.device)).double().cpu()
        total += losses[mask.T.bool()].sum().item()  # [s, b]
        count += int(mask.sum())
        done += rows
        if progress is not None:
            progress(done, len(order))
    return _of(total, count, len(order), longest)


def _of(total: float, count: int, windows: int, length: int) -> Perplexity:
    """What losses of ``total`` nats over ``count`` ids come to."""
    mean = total / max(1, count)
    return Perplexity(count, windows, length, mean, math.exp(mean) if mean < 700 else math.inf)
