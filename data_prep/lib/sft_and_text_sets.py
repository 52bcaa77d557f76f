"""Build fine-tuning datasets (PREFIX_sft, PREFIX_sft_mask) and pretraining datasets (PREFIX_KEY_document)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_prep.lib.find_inputs import TEXT_SUFFIXES, InputFiles, detect_keys, find_sources, sample_texts
from data_prep.lib.input_readers import Source, header_of, with_array
from data_prep.lib.prepare_dataset import make_dataset
from data_prep.lib.run_options import ChatFormat, PrepareJob, RunOptions, reject
from data_prep.lib.tokenizer_backends import Encoder, load_encoder
from megatron_llama.config.data_settings import MASK_SUFFIX, TOKEN_SETTINGS, NewTokens, is_table, is_template_file
from megatron_llama.config.hub import resolve_hub_name
from megatron_llama.config.settings import CHAT_TEMPLATES, RENDERED
from megatron_llama.system.errors import UserError
from megatron_llama.text.chat_template import (
    NAMED_TEMPLATES,
    OTHERS,
    Jinja,
    NamedTemplate,
    RenderedText,
    TemplateError,
    TrainedTemplate,
)
from megatron_llama.text.conversation import LABELLED, variables_problems
from megatron_llama.text.tokenizer import open_tokenizer

KEYS = ("sft", "sft" + MASK_SUFFIX)
CHATML_END = "<|im_end|>"


@dataclass(frozen=True)
class ExampleOptions:
    """Options of examples: sft.py's flags of the same names."""

    tokenizer_model: str
    """Path of a sentencepiece model or a Hugging Face folder."""
    seq_length: int
    """Tokens per training sequence; an example has one more, used only as a label."""
    format: str = "auto"
    """One of record_formats.FORMATS."""
    template: str | None = None
    """One of LABEL_TEMPLATES: prompt of a labelled table's rows."""
    chat_template: str = "own"
    """One of CHAT_TEMPLATES, or a Jinja file."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of a Jinja template."""
    response_marker: str | None = None
    """``format=text``: text after which the last answer, with loss, begins. None: all tokens have loss."""
    too_long: str = "bad"
    """``bad``: examples with too many tokens are bad records. ``truncate``: they are truncated."""
    train_on_inputs: bool = False
    """Compute the loss on all tokens, not only on answers."""
    add_bos: bool | None = None
    """Whether a named template's examples start with BOS; None: as the tokenizer does."""
    add_tokens: Sequence[str] = ()
    """Tokens to add to the tokenizer."""
    add_special_tokens: Sequence[str] = ()
    """Special tokens to add to the tokenizer."""

    def __post_init__(self) -> None:
        """Validate the options. Raises UserError."""
        reject(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.seq_length < 1:
            yield "--seq-length must be at least 1"
        if self.chat_template not in CHAT_TEMPLATES and not is_template_file(self.chat_template):
            yield f"--chat-template {self.chat_template}: write {', '.join(CHAT_TEMPLATES)} or FILE.jinja"
        for rule in variables_problems(self.chat_template, self.chat_template_kwargs):
            yield f"--chat-template-kwargs: {rule}"
        if self.format == RENDERED and (self.chat_template != "own" or self.chat_template_kwargs or self.template):
            yield "--format text has rendered chats: omit --chat-template, --chat-template-kwargs and --template"
        if self.response_marker is not None and (self.format != RENDERED or not self.response_marker):
            yield f"--response-marker {self.response_marker!r}: write a text that begins an answer, with --format text"
        if self.response_marker is not None and self.train_on_inputs:
            yield "--response-marker has no effect with --train-on-inputs: omit one"

    def is_table(self, source: Source) -> bool:
        """Whether a file is a table with a header instead of JSON records."""
        return self.format == "tsv" or (self.format == "auto" and is_table(source.path))


def make_sft_set(
    paths: Sequence[str], examples: ExampleOptions, options: RunOptions, report: Callable[[str], None]
) -> dict[str, Any] | None:
    """Build a fine-tuning dataset; return its manifest, or None if other parts of the run are unfinished.

    Raises:
        UserError: The input, the tokenizer or a record is invalid.
        MachineError: The disk is full or a worker was killed.
        Stopped: A signal arrived; the same call resumes.
    """
    inputs = find_record_files(paths, examples, report)
    chat = build_chat_format(examples, inputs.sources)
    job = PrepareJob(inputs.sources, KEYS, options.max_line, chat=chat, not_taken=inputs.not_taken)
    return make_dataset(job, options, Encoder(chat.tokenizer), report)


def find_record_files(paths: Sequence[str], examples: ExampleOptions, report: Callable[[str], None]) -> InputFiles:
    """Find the input files. Raises UserError."""
    inputs = find_sources(paths, text_suffixes=(), arrays=True, tables=examples.template is not None)
    for note in inputs.notes():
        report(note)
    inputs.sources = [source if examples.is_table(source) else with_array(source) for source in inputs.sources]
    return inputs


def build_chat_format(examples: ExampleOptions, sources: Sequence[Source]) -> ChatFormat:
    """Build the conversion of these sources to examples.

    Raises UserError if tokenizer and template are incompatible, or a table's template is missing.
    """
    is_text = examples.format == RENDERED
    model, is_jinja = resolve_hub_name(examples.tokenizer_model), examples.chat_template not in NAMED_TEMPLATES
    tokenizer = open_tokenizer(Path(model), NewTokens.of(examples))
    trained = TrainedTemplate(examples.chat_template, variables=json.dumps({**examples.chat_template_kwargs}))
    template: RenderedText | NamedTemplate | Jinja
    if is_text:
        end = "" if tokenizer.end is None else tokenizer.token_name(tokenizer.end)
        template = RenderedText(examples.response_marker, end)
    else:
        template = trained.load(tokenizer.path, tokenizer.added_tokens)
    source = template.source if isinstance(template, Jinja) else repr(template)
    if not is_jinja:
        # The model must be trained on a token that ends an answer.
        name, lacks = examples.chat_template, f"which {model} does not have"
        if name == "chatml" and tokenizer.control(CHATML_END) is None:
            raise TemplateError(f"--chat-template chatml ends answers with {CHATML_END}, {lacks}", OTHERS)
        if name != "chatml" and tokenizer.end is None:
            raise UserError(f"--chat-template {name} needs an end-of-text token, {lacks}")
    if examples.add_bos and is_jinja and not is_text:
        raise UserError(
            "--add-bos: the tokenizer's chat template already writes the begin-of-text token. Remove --add-bos"
        )
    if examples.add_bos and tokenizer.bos is None:
        raise UserError(f"--add-bos: {model} has no begin-of-text token. Remove --add-bos")
    add_bos = bool(tokenizer.adds_bos and (is_text or not is_jinja) if examples.add_bos is None else examples.add_bos)
    # Manifests of older versions have neither variables of templates nor markers.
    later: dict[str, Any] = {"chat_template_kwargs": {}, "response_marker": None}
    decisive = {key: value for key, value in asdict(examples).items() if later.get(key, ...) != value}
    for name in ("tokenizer_model", *TOKEN_SETTINGS):  # part of the tokenizer's identity
        decisive.pop(name, None)
    if is_template_file(examples.chat_template):  # the file may move, but the trained model is asked with it
        decisive["chat_template_source"] = source
    return ChatFormat(
        tokenizer=tokenizer,
        render=template.render_spans,
        format=examples.format if examples.format != "tsv" else "auto",
        labelled=LABELLED[examples.template] if examples.template else None,
        columns=_columns(examples, sources),
        max_tokens=examples.seq_length + 1,
        truncate=examples.too_long == "truncate",
        train_on_inputs=examples.train_on_inputs,
        add_bos=add_bos,
        own_template=is_jinja,
        options={**decisive, "add_bos": add_bos, "chat_template_sha256": hashlib.sha256(source.encode()).hexdigest()},
    )


def _columns(examples: ExampleOptions, sources: Sequence[Source]) -> dict[int, list[str]]:
    """Return the header of each source that is a table. Raises UserError for a missing template or column."""
    headers: dict[int, list[str]] = {}
    for number, source in enumerate(sources):
        if not examples.is_table(source):
            continue
        if examples.template is None:
            raise UserError(f"{source.path} is a table: write --template with one of {', '.join(LABELLED)}")
        headers[number] = header_of(source).decode("utf-8", "replace").split("\t")
        template = LABELLED[examples.template]
        for name in template.fields:
            if name not in headers[number]:
                columns = ", ".join(headers[number])[:200]
                raise UserError(
                    f"{source.path}: --template {examples.template} needs a column {name}; the table has {columns}"
                )
    return headers


# Pretraining datasets, one per JSON key: ``PREFIX_KEY_document``.

TOKENIZER_TYPES = {
    **dict.fromkeys(
        ("sentencepiecetokenizer", "llama2tokenizer", "llama2", "gptsentencepiecetokenizer"), "sentencepiece"
    ),
    **dict.fromkeys(("huggingfacetokenizer", "huggingface"), "huggingface"),
    **dict.fromkeys(("tiktokenizer", "tiktoken", "llama3"), "tiktoken"),
}
"""Tokenizer types of Megatron and NeMo, in lower case, to the library."""


@dataclass(frozen=True)
class TextOptions:
    """Input and encoding options: preprocess.py's flags of the same names."""

    input: Sequence[str]
    tokenizer_model: str | None
    tokenizer_library: str | None = None
    tokenizer_type: str | None = None
    json_keys: Sequence[str] | None = None
    """None: detected from the first record."""
    text_suffixes: Sequence[str] = TEXT_SUFFIXES
    append_eod: bool = False
    prepend_bos: bool = False
    encoder: str = "auto"
    add_tokens: Sequence[str] = ()
    add_special_tokens: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Validate the options. Raises UserError."""
        reject(self._problems())

    def _problems(self) -> Iterator[str]:
        for key in self.json_keys or []:
            if not re.fullmatch(r"[\w.\- ]+", key):
                yield f"--json-keys {key!r}: the key is part of a file name, so use letters, digits, _ . - and spaces"
        if len(set(self.json_keys or [])) != len(self.json_keys or []):
            yield "--json-keys: a key is listed twice"

    @property
    def tokenizer_name(self) -> str:
        """Path or hub name of the tokenizer, as typed."""
        kind = self.tokenizer_type or ""
        return kind if kind and (os.path.exists(kind) or "/" in kind) else str(self.tokenizer_model)

    @property
    def tokenizer(self) -> tuple[str, str]:
        """(library, path) of the tokenizer, from Megatron's or NeMo's flags.

        Raises UserError if it is missing or its type is unknown.
        """
        kind, library, model = self.tokenizer_type or "", (self.tokenizer_library or "").lower(), self.tokenizer_model
        library = {"hf": "huggingface", "megatron": ""}.get(library, library)
        if kind and (os.path.exists(kind) or "/" in kind):
            # NeMo: --tokenizer-library huggingface --tokenizer-type FOLDER
            return library or "huggingface", resolve_hub_name(kind)
        if not library:
            if kind and kind.lower() not in TOKENIZER_TYPES:
                known = ", ".join(sorted(TOKENIZER_TYPES))
                raise UserError(f"--tokenizer-type {kind}: write a Hugging Face folder, or one of {known}")
            fallback = "huggingface" if model and os.path.isdir(resolve_hub_name(model)) else "sentencepiece"
            library = TOKENIZER_TYPES.get(kind.lower(), fallback)
        if library not in TOKENIZER_TYPES.values():
            raise UserError(f"--tokenizer-library {library}: write sentencepiece, huggingface or tiktoken")
        if not model:
            raise UserError("--tokenizer-model is missing: write a .model file or a Hugging Face folder")
        return library, resolve_hub_name(model)


def make_text_set(text: TextOptions, options: RunOptions, report: Callable[[str], None]) -> list[str]:
    """Build the pretraining datasets; print notes on the input and the encoder to stderr.

    Returns:
        The prefixes of the datasets, one per key; [] if other parts of the run are unfinished.

    Raises:
        UserError: The input, the tokenizer or a record is invalid.
        MachineError: The disk is full or a worker was killed.
        Stopped: A signal arrived; the same call resumes.
    """
    library, model = text.tokenizer
    inputs = find_sources(text.input, text.text_suffixes)
    for note in inputs.notes():
        sys.stderr.write(f"note: {note}\n")
    keys = text.json_keys or detect_keys(inputs.sources)
    encoder = load_encoder(library, model, text.encoder, sample_texts(inputs.sources, keys), NewTokens.of(text))
    if text.append_eod and encoder.tokenizer.end is None:
        raise UserError(f"--append-eod: the tokenizer {model} has no end-of-text token. Remove --append-eod")
    if text.prepend_bos and encoder.tokenizer.bos is None:
        raise UserError(f"--prepend-bos: the tokenizer {model} has no begin-of-text token. Remove --prepend-bos")
    if not text.prepend_bos and encoder.tokenizer.adds_bos:
        encoder.notes.append(
            "documents get no begin-of-text token, with which this tokenizer begins a prompt: for a model that expects "
            "it write --prepend-bos"
        )
    for note in encoder.notes:
        sys.stderr.write(f"note: {note}\n")
    ends = (text.append_eod, text.prepend_bos)
    job = PrepareJob(inputs.sources, tuple(keys), options.max_line, *ends, not_taken=inputs.not_taken)
    manifest = make_dataset(job, options, encoder, report)
    return [] if manifest is None else [f"{options.output_prefix}_{key}_document" for key in keys]
