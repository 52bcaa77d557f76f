"""From files of text to indexed datasets for pretraining, one for each JSON key: ``PREFIX_KEY_document``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data_prep.lib.input_files import TEXT_SUFFIXES, find_sources
from data_prep.lib.input_sample import detect_keys, sample_texts
from data_prep.lib.job import Job, RunOptions
from data_prep.lib.make_dataset import make_dataset
from megatron_llama.config.hub import local_folder
from megatron_llama.system.errors import UserError
from megatron_llama.text.encoders import load_encoder

TOKENIZER_TYPES = {
    **dict.fromkeys(
        ("sentencepiecetokenizer", "llama2tokenizer", "llama2", "gptsentencepiecetokenizer"), "sentencepiece"
    ),
    **dict.fromkeys(("huggingfacetokenizer", "huggingface"), "huggingface"),
    **dict.fromkeys(("tiktokenizer", "tiktoken", "llama3"), "tiktoken"),
}
"""Megatron's and NeMo's names of tokenizers, in lower case, to the library that reads them."""


@dataclass(frozen=True)
class TextOptions:
    """What text is taken and how it is encoded; preprocess.py's flags of the same names."""

    input: Sequence[str]
    tokenizer_model: str | None
    tokenizer_library: str | None = None
    tokenizer_type: str | None = None
    json_keys: Sequence[str] | None = None
    """None: found in the first record."""
    text_suffixes: Sequence[str] = TEXT_SUFFIXES
    append_eod: bool = False
    encoder: str = "auto"

    def __post_init__(self) -> None:
        """Raises UserError for values that can't work."""
        for key in self.json_keys or []:
            if not re.fullmatch(r"[\w.\- ]+", key):
                raise UserError(f"--json-keys {key!r}: the key becomes part of a file name and must fit there")
        if len(set(self.json_keys or [])) != len(self.json_keys or []):
            raise UserError("--json-keys: a key is named twice")

    @property
    def tokenizer(self) -> tuple[str, str]:
        """(library, path), from flags as Megatron's or NeMo's users write them.

        Raises:
            UserError: none is named, or it is an unknown one.
        """
        kind, library, model = self.tokenizer_type or "", (self.tokenizer_library or "").lower(), self.tokenizer_model
        library = {"hf": "huggingface", "megatron": ""}.get(library, library)
        if kind and (os.path.exists(kind) or "/" in kind):
            # NeMo: --tokenizer-library huggingface --tokenizer-type FOLDER
            return library or "huggingface", local_folder(kind)
        if not library:
            if kind and kind.lower() not in TOKENIZER_TYPES:
                known = ", ".join(sorted(TOKENIZER_TYPES))
                raise UserError(f"--tokenizer-type {kind}: known are a Hugging Face folder, {known}")
            fallback = "huggingface" if model and os.path.isdir(local_folder(model)) else "sentencepiece"
            library = TOKENIZER_TYPES.get(kind.lower(), fallback)
        if library not in TOKENIZER_TYPES.values():
            raise UserError(f"--tokenizer-library {library}: known are sentencepiece, huggingface, tiktoken")
        if not model:
            raise UserError("--tokenizer-model is missing: the tokenizer's .model file, or a Hugging Face folder")
        return library, local_folder(model)


def make_text_set(text: TextOptions, options: RunOptions, say: Callable[[str], None]) -> None:
    """Makes the datasets. Notes on the input and the encoder go to stderr.

    Raises:
        UserError: the input, the tokenizer or a record can't be used.
        MachineError: the disk is full, a worker was killed.
        Stopped: a signal came; the same call goes on.
    """
    library, model = text.tokenizer
    found = find_sources(text.input, text.text_suffixes)
    for note in found.notes():
        sys.stderr.write(f"note: {note}\n")
    keys = text.json_keys or detect_keys(found.sources)
    encoder = load_encoder(library, model, text.encoder, sample_texts(found.sources, keys))
    if text.append_eod and encoder.tokenizer.end is None:
        raise UserError(f"--append-eod: the tokenizer {model} has no end-of-text token")
    for note in encoder.notes:
        sys.stderr.write(f"note: {note}\n")
    job = Job(found.sources, tuple(keys), options.max_line, text.append_eod, not_taken=found.not_taken)
    make_dataset(job, options, encoder, say)
