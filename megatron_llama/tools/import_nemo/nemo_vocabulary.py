"""Rows of the embedding: of the tokenizer that a file names, or by that tokenizer's name."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_llama.config.hf_config import read_hf_config
from megatron_llama.text.tokenizer import vocabulary_size

LLAMA2_VOCAB_SIZE = 32000
# Words in a tokenizer's name or type, and the rows that models with it have.
BY_NAME = (
    ("llama3", 128256),
    ("llama2", LLAMA2_VOCAB_SIZE),
    ("gpt2bpe", 50257),
    ("mistral", LLAMA2_VOCAB_SIZE),
    ("mixtral", LLAMA2_VOCAB_SIZE),
)


def rows_of_tokenizer(paths: Sequence[str]) -> tuple[int, str]:
    """(rows, "") where one of the tokenizers is on this machine, else (rows, what they are assumed by)."""
    for path in paths:
        if (size := _rows(path)) is not None:
            return size, ""
    plain = "".join(paths).lower().replace("-", "").replace("_", "")
    for word, size in BY_NAME:
        if word in plain:
            return size, f"by the tokenizer's name ({word})"
    return LLAMA2_VOCAB_SIZE, "of Llama 1 and 2"


def _rows(path: str) -> int | None:
    """Rows of the embedding in a Hugging Face folder, which can be more than its tokenizer has ids; else the number of
    ids of a tokenizer; None where it is not here."""
    try:
        rows = read_hf_config(path).get("vocab_size")
    except ValueError:
        return vocabulary_size(path)
    return rows if isinstance(rows, int) else None
