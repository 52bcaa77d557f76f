"""Files as the preprocessing writes them, made here byte by byte, so that reader and writer can't err alike.

The samples of megatron-core's datasets are the oracle.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sentencepiece
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from megatron_llama.corpus.blend import MEGATRON, BlendSegment
from megatron_llama.corpus.splits import planned_timeline
from megatron_llama.data.batches import build_data
from megatron_llama.data.pretraining_samples import EndlessDataset, SampleStream
from megatron_llama.data.resume_record import Record, make_record
from megatron_llama.plan import Plan, resolve
from megatron_llama.plan.data_schedules import RunPosition
from tests.config.helpers import make
from tests.ranks import run_ranks

MAGIC = b"MMIDIDX\x00\x00"
CODES = {"B": 1, "H": 8, "i": 4}  # struct's letters for uint8, uint16 and int32, and Megatron's


def write_indexed(prefix: Path, documents: Sequence[Sequence[int]], kind: str = "H") -> str:
    """An indexed dataset, one sequence per document; returns its prefix as a config names it."""
    width = struct.calcsize(kind)
    lengths = [len(document) for document in documents]
    starts = [sum(lengths[:number]) * width for number in range(len(documents))]
    counts = struct.pack("<QBQQ", 1, CODES[kind], len(documents), len(documents) + 1)
    index = struct.pack(f"<{len(documents)}i", *lengths) + struct.pack(f"<{len(documents)}q", *starts)
    index += struct.pack(f"<{len(documents) + 1}q", *range(len(documents) + 1))
    prefix.with_suffix(".idx").write_bytes(MAGIC + counts + index)
    prefix.with_suffix(".bin").write_bytes(b"".join(struct.pack(f"<{len(d)}{kind}", *d) for d in documents))
    return str(prefix)


def numbered(count: int, first_id: int = 1) -> list[list[int]]:
    """Documents of many lengths whose ids are consecutive, so that an id is the position in the file."""
    documents, position = [], first_id
    for number in range(count):
        length = 1 + (number * 37) % 61
        documents.append(list(range(position, position + length)))
        position += length
    return documents


def data_plan(prefixes: list[Any], world: int = 1, **changes: Any) -> Plan:
    """A plan that trains on these datasets, with sequences of 32 tokens."""
    settings = {"data.mock": False, "data.prefixes": prefixes, "data.seq_length": 32, "model.vocab_size": 20000}
    return resolve(make(**{**settings, "data.split": "80,20,0", **changes}), world)


def stream_of(plan: Plan) -> SampleStream:
    """A plan's training samples, without ranks."""
    timeline = planned_timeline(plan.config.data)
    prefixes = {prefix for segment in timeline.segments for prefix in segment.weights}
    return SampleStream(timeline, {prefix: EndlessDataset(plan, prefix, 0) for prefix in prefixes})


def train_tokenizer(path: Path, size: int = 300) -> Path:
    """A small sentencepiece model, from a text of a few KB."""
    stems, endings = ("walk", "talk", "jump", "learn", "paint", "open"), ("s", "ed", "ing", "er")
    words = [stem + ending for stem in stems for ending in endings]
    text = [" ".join(words[(7 * line + 5 * word * word) % len(words)] for word in range(12)) for line in range(80)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=model,
        vocab_size=size,
        model_type="bpe",
        byte_fallback=True,
        num_threads=1,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    path.write_bytes(model.getvalue())
    return path


class Ids:
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
    config = config_of(data.length, plan.config.trainer.seed, cache, blend=blend, split=data.split)
    splits = BlendedMegatronDatasetBuilder(GPTDataset, [*counts, 0], lambda: True, config).build()
    return [[text(split[number]) for number in range(count)] for split, count in zip(splits, counts, strict=False)]


Part = tuple[Plan, Record | None, int, int]
"""A run: its plan, the record of the checkpoint from which it resumes, consumed samples, and samples to read."""


class Reading(NamedTuple):
    """Training samples of a run, its levels of difficulty, its record after these samples, and validation samples."""

    samples: list[list[int]]
    levels: list[tuple[int, dict[str, int]]]
    record: Record
    validation: list[list[int]]


def read(*parts: Part) -> list[Reading]:
    """Read samples of runs that start or resume, one after another."""
    return run_ranks(_read, 1, parts)[0]


def _read(rank: int, parts: Sequence[Part]) -> list[Reading]:
    readings = []
    for plan, record, consumed, count in parts:
        data = build_data(plan, plan.topology(rank), torch.device("cpu"))
        if record is not None:
            data.resume(record, RunPosition(consumed // 8, consumed))
        samples = [text(data.train.samples[consumed + number]) for number in range(count)]
        levels = [(level.samples, dict(level.difficulties)) for level in data.train.levels]
        validation = [text(each.samples[number]) for each in data.validation.values() for number in range(8)]
        readings.append(Reading(samples, levels, json.loads(json.dumps(data.record(consumed + count))), validation))
    return readings
