"""Files as the preprocessing writes them, made here byte by byte, so that reader and writer can't err alike."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from megatron_llama.plan import Plan, resolve
from tests.config.helpers import make

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
