"""Samples of megatron-core's datasets, the oracle of the tests."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from megatron_llama.corpus.blend import MEGATRON, BlendSegment
from megatron_llama.data.record import Record, make_record
from megatron_llama.plan import Plan
from tests.ranks import run_ranks


class Ids:
    """A tokenizer of ids."""

    vocab_size, eod, pad = 20000, -1, -2
    unique_identifiers: dict[str, Any] = {"class": "ids"}
    special_tokens_dict: dict[str, int] = {}


def config_of(length: int, seed: Any, cache: Path, **more: Any) -> GPTDatasetConfig:
    flags = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
    options = {"random_seed": seed, "sequence_length": length, "path_to_cache": str(cache), "tokenizer": Ids()}
    return GPTDatasetConfig(**{**options, "split": "1,0,0", **dict.fromkeys(flags, False), **more})


def megatron_record(plan: Plan, consumed_samples: int) -> Record:
    """The record of a run in megatron-core's order: all samples of ``trainer.steps`` are shuffled together."""
    trainer, record = plan.config.trainer, make_record(plan)
    weights = record["segments"][0]["weights"]
    segment = BlendSegment(0, weights, {}, MEGATRON, trainer.steps * trainer.global_batch_size)
    return {**record, "order": MEGATRON, "consumed_samples": consumed_samples, "segments": [asdict(segment)]}


def text(sample: Any) -> list[int]:
    """The tokens of a sample and its last label."""
    return [*sample["tokens"].tolist(), int(sample["labels"][-1])]


def epoch_texts(prefix: str, span: tuple[int, int], length: int, seed: Any, cache: Path) -> list[list[int]]:
    """The samples of one epoch of some documents, GPTDataset's."""
    config = config_of(length, seed, cache)
    low = GPTDataset.build_low_level_dataset(prefix, config)
    theirs = GPTDataset(low, prefix, np.arange(*span, dtype=np.int32), None, Split.train, config)
    return [text(theirs[number]) for number in range(len(theirs))]


def run_texts(
    plan: Plan, weights: dict[str, float] | None, samples: int, validation: int, cache: Path
) -> list[list[list[int]]]:
    """(training, validation) samples of a run of so many, in the order that runs had before: its builder's, which
    shuffles all of a dataset's epochs together. ``weights``: None for one dataset."""
    return run_ranks(_run_texts, 1, plan, weights, (samples, validation), cache)[0]


def _run_texts(rank: int, plan: Plan, weights: dict[str, float] | None, counts: tuple[int, int], cache: Path) -> list:
    data = plan.config.data
    blend = (list(weights), list(weights.values())) if weights else (data.prefixes, None)
    config = config_of(data.seq_length, plan.config.trainer.seed, cache, blend=blend, split=data.split)
    splits = BlendedMegatronDatasetBuilder(GPTDataset, [*counts, 0], lambda: True, config).build()
    return [[text(split[number]) for number in range(count)] for split, count in zip(splits, counts, strict=False)]
