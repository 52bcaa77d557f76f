"""From files of records to one fine-tuning set: ``PREFIX_sft`` (tokens) and ``PREFIX_sft_mask`` (loss masks)."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.lib.dataset import make_dataset
from data_prep.lib.encoders import Encoder, load_encoder
from data_prep.lib.input_files import TEXT_SUFFIXES, InputFiles, detect_keys, find_sources, sample_texts
from data_prep.lib.job import ChatFormat, PrepareJob, RunOptions
from data_prep.lib.sources import Source, header_of, with_array
from megatron_llama.config.data_settings import MASK_SUFFIX, is_table
from megatron_llama.config.hf_config import resolve_hub_name
from megatron_llama.system.errors import UserError
from megatron_llama.text.chat_template import NAMED_TEMPLATES, load_own_template
from megatron_llama.text.conversation import LABELLED
from megatron_llama.text.tokenizer import FAST_JSON, open_tokenizer

KEYS = ("sft", "sft" + MASK_SUFFIX)
CHATML_END = "<|im_end|>"


@dataclass(frozen=True)
class ExampleOptions:
    """How records become examples; sft.py's flags of the same names."""

    tokenizer_model: str
    """A sentencepiece model's file, or a Hugging Face folder."""
    seq_length: int
    """Tokens of a training sequence; an example has one more, which is only a label."""
    format: str = "auto"
    """One of record_formats.FORMATS."""
    template: str | None = None
    """One of LABEL_TEMPLATES: the question that is asked of a table's lines."""
    chat_template: str = "own"
    """One of CHAT_TEMPLATES."""
    too_long: str = "bad"
    """What happens to an example with too many tokens: it is a ``bad`` record, or ``truncate``."""
    train_on_inputs: bool = False
    """Loss on all tokens, not on answers alone."""
    add_bos: bool | None = None
    """Whether a named template's examples begin with BOS; None: where the tokenizer does so."""

    def __post_init__(self) -> None:
        """Raises UserError for values that can't work."""
        if self.seq_length < 1:
            raise UserError("--seq-length must be at least 1")

    def is_table(self, source: Source) -> bool:
        """Whether a file is a table with a header, rather than one record a line."""
        return self.format == "tsv" or (self.format == "auto" and is_table(source.path))


def make_sft_set(
    inputs: Sequence[str], examples: ExampleOptions, options: RunOptions, report: Callable[[str], None]
) -> dict[str, Any] | None:
    """Makes the set; returns the manifest of its tokens, None where other parts of the run are still to be done.

    Raises:
        UserError: the input, the tokenizer or a record can't be used.
        MachineError: the disk is full, a worker was killed.
        Stopped: a signal came; the same call goes on.
    """
    found = find_record_files(inputs, examples, report)
    chat = build_chat_format(examples, found.sources)
    job = PrepareJob(found.sources, KEYS, options.max_line, chat=chat, not_taken=found.not_taken)
    return make_dataset(job, options, Encoder(chat.tokenizer), report)


def find_record_files(inputs: Sequence[str], examples: ExampleOptions, report: Callable[[str], None]) -> InputFiles:
    """The input's files. Raises UserError."""
    found = find_sources(inputs, text_suffixes=(), arrays=True, tables=examples.template is not None)
    for note in found.notes():
        report(note)
    found.sources = [source if examples.is_table(source) else with_array(source) for source in found.sources]
    return found


def build_chat_format(examples: ExampleOptions, sources: Sequence[Source]) -> ChatFormat:
    """How the options make examples of these sources.

    Raises:
        UserError: tokenizer and template don't fit, or a table's template is missing.
    """
    model, own = resolve_hub_name(examples.tokenizer_model), examples.chat_template == "own"
    tokenizer = open_tokenizer(Path(model))
    if tokenizer.library == "sentencepiece" and Path(model).is_dir():
        raise UserError(f"{model} has no {FAST_JSON}; name its tokenizer.model as --tokenizer-model")
    if own:
        jinja = load_own_template(tokenizer.path, tokenizer.added_tokens)
        pieces, source = jinja.render_spans, jinja.source
    else:
        named = NAMED_TEMPLATES[examples.chat_template]
        pieces, source = named.render_spans, repr(named)
        # A model that never learns to end an answer never ends one.
        if examples.chat_template == "chatml":
            if tokenizer.control(CHATML_END) is None:
                raise UserError(
                    f"{model} has no token {CHATML_END}, with which --chat-template chatml ends an answer: the model "
                    "would not stop. Write prompter, dialogue or plain"
                )
        elif tokenizer.end is None:
            raise UserError(f"{model} has no end-of-text token, with which --chat-template ends an answer")
    if examples.add_bos and own:
        raise UserError("--add-bos is for named templates; the tokenizer's own writes its begin-of-text token itself")
    if examples.add_bos and tokenizer.bos is None:
        raise UserError(f"--add-bos: {model} has no begin-of-text token")
    add_bos = bool(tokenizer.adds_bos and not own if examples.add_bos is None else examples.add_bos)
    decisive = {key: value for key, value in asdict(examples).items() if key != "tokenizer_model"}
    return ChatFormat(
        tokenizer=tokenizer,
        pieces=pieces,
        format=examples.format if examples.format != "tsv" else "auto",
        labelled=LABELLED[examples.template] if examples.template else None,
        columns=_columns(examples, sources),
        max_tokens=examples.seq_length + 1,
        truncate=examples.too_long == "truncate",
        train_on_inputs=examples.train_on_inputs,
        add_bos=add_bos,
        own_template=own,
        options={
            **decisive,
            "add_bos": add_bos,
            "chat_template_sha256": hashlib.sha256(source.encode()).hexdigest(),
        },
    )


def _columns(examples: ExampleOptions, sources: Sequence[Source]) -> dict[int, list[str]]:
    """The header of each source that is a table. Raises UserError where its template or a column is missing."""
    found = {}
    for number, source in enumerate(sources):
        if not examples.is_table(source):
            continue
        if examples.template is None:
            raise UserError(
                f"{source.path} is a table: give --template, how its lines are asked ({', '.join(LABELLED)})"
            )
        found[number] = header_of(source).decode("utf-8", "replace").split("\t")
        template = LABELLED[examples.template]
        for name in template.fields:
            if name not in found[number]:
                raise UserError(f"{source.path} has no column {name}; it has {', '.join(found[number])[:200]}")
    return found


# From files of text to indexed datasets for pretraining, one for each JSON key: ``PREFIX_KEY_document``.


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
            return library or "huggingface", resolve_hub_name(kind)
        if not library:
            if kind and kind.lower() not in TOKENIZER_TYPES:
                known = ", ".join(sorted(TOKENIZER_TYPES))
                raise UserError(f"--tokenizer-type {kind}: known are a Hugging Face folder, {known}")
            fallback = "huggingface" if model and os.path.isdir(resolve_hub_name(model)) else "sentencepiece"
            library = TOKENIZER_TYPES.get(kind.lower(), fallback)
        if library not in TOKENIZER_TYPES.values():
            raise UserError(f"--tokenizer-library {library}: known are sentencepiece, huggingface, tiktoken")
        if not model:
            raise UserError("--tokenizer-model is missing: the tokenizer's .model file, or a Hugging Face folder")
        return library, resolve_hub_name(model)


def make_text_set(text: TextOptions, options: RunOptions, report: Callable[[str], None]) -> None:
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
    job = PrepareJob(found.sources, tuple(keys), options.max_line, text.append_eod, not_taken=found.not_taken)
    make_dataset(job, options, encoder, report)
