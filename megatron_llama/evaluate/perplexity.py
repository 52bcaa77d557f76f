"""Perplexity on an indexed dataset."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron_llama.config import Config, ConfigError, DataConfig, ModelConfig
from megatron_llama.data.checks import check_dataset
from megatron_llama.generate.generator import Generator

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
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return np.memmap(prefix + ".bin", dtype=IndexedDataset(prefix).index.dtype, mode="r")


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
    mean = total / (len(ids) - 1)
    return Perplexity(len(ids) - 1, len(spans), length, mean, math.exp(mean) if mean < 700 else math.inf)
