"""How many pieces a tokenizer has, from its files alone."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_llama.text.tokenizer import vocabulary_size


def pieces(path: str) -> int | None:
    """The number of pieces of a sentencepiece model or of a Hugging Face tokenizer's folder; None where it is not
    here or can't be read."""
    where = Path(path)
    try:
        if where.is_file() and where.suffix == ".model":
            return vocabulary_size(where)
        if (where / "config.json").is_file():
            # The embedding's rows, which is what a model has; tokenizers may have fewer.
            count = json.loads((where / "config.json").read_text(encoding="utf-8")).get("vocab_size")
            return count if isinstance(count, int) else None
        if (where / "tokenizer.model").is_file():
            return vocabulary_size(where / "tokenizer.model")
    except (OSError, ValueError, AttributeError):
        return None
    return None
