"""Encoders of a block in a worker: lines to documents to tokens, with loss masks for fine-tuning, and line counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from data_prep.lib.blocks import BlockSegment, TextBlock, segment_lines
from data_prep.lib.parquet_csv import bad_columns
from data_prep.lib.record_formats import REPEATED_KEY, parse_line, parse_object, parse_record, parse_text, repeats_key
from data_prep.lib.run_options import BadRecord, BlockResult, ChatFormat, PrepareJob
from data_prep.lib.tokenizer_backends import Encoder, check_same
from megatron_llama.config.data_settings import REJECTED
from megatron_llama.config.settings import RENDERED
from megatron_llama.corpus.indexed_format import MASK_DTYPE, token_dtype
from megatron_llama.text import conversation
from megatron_llama.text.conversation import RecordError, TemplateContext, Turns
from megatron_llama.text.loss_spans import encode_spans

# With a fast encoder, one document in this many is also encoded by the reference.
CHECK_EVERY = 256
CHECK_MAX_CHARACTERS = 50_000
# Exceptions of a single record, which --on-bad-line skip must survive.
_FAULTS = (TypeError, ValueError, LookupError, AttributeError, RecursionError)
Document = TypeVar("Document")


class BlockEncoder(ABC, Generic[Document]):
    """Encoder of blocks in a worker."""

    def __init__(self, job: PrepareJob, encoder: Encoder) -> None:
        self.job, self.encoder = job, encoder
        self.dtype = token_dtype(encoder.tokenizer.size)

    def run(self, block: TextBlock) -> BlockResult:
        """Encode a block.

        Raises:
            UserError: A source is no longer readable.
            MachineError: The ids of the fast encoder differ from the reference.
        """
        result = BlockResult()
        documents: list[Document] = []
        max_line = self.job.max_line
        for position, segment in enumerate(block.segments):
            source = self.job.sources[segment.source]
            begins_with_header = segment.start == 0 and self.job.is_table(segment.source)
            lines = segment_lines(segment, source, max_line)
            result.lines.append(len(lines))
            for number, line in enumerate(lines):
                if number == 0 and begins_with_header:
                    continue
                if not source.is_text and (not line or line.isspace()):
                    continue
                result.documents_read += 1
                result.text_bytes += len(line)
                try:
                    if len(line) > max_line:
                        raise RecordError("line_too_long", f"more than {max_line:,} bytes")
                    if source.kind == "csv" and (wrong := bad_columns(line)):
                        raise RecordError("bad_columns", wrong)
                    documents.append(self.parse(line, segment, result))
                except RecordError as bad:
                    raw = line[: BadRecord.KEEP_BAD_BYTES]
                    complete = len(raw) == len(line) <= max_line  # longer lines were truncated when read
                    result.bad.append(BadRecord(position, number, bad.reason, bad.detail, len(line), complete, raw))
        lines, line = [], b""  # free memory: only the texts are needed
        self.write(documents, block, result)
        return result

    @abstractmethod
    def parse(self, line: bytes, segment: BlockSegment, result: BlockResult) -> Document:
        """Convert a line to a document. Raises RecordError."""

    @abstractmethod
    def write(self, documents: list[Document], block: TextBlock, result: BlockResult) -> None:
        """Append tokens and lengths of the documents to the result, one entry per output."""


class TextEncoder(BlockEncoder[list[str]]):
    """Encoder for pretraining. A document is a list of texts, one per JSON key."""

    def parse(self, line: bytes, segment: BlockSegment, result: BlockResult) -> list[str]:
        if self.job.sources[segment.source].is_text:
            return [parse_text(line)] * len(self.job.keys)
        texts = parse_line(line, self.job.keys)
        if repeats_key(line, self.job.keys):
            result.notes[REPEATED_KEY] += 1
        return texts

    def write(self, documents: list[list[str]], block: TextBlock, result: BlockResult) -> None:
        tokenizer, job = self.encoder.tokenizer, self.job
        bos, eod = tokenizer.bos if job.prepend_bos else None, tokenizer.end if job.append_eod else None
        checked = block.number % CHECK_EVERY if self.encoder.is_fast else -1
        begin, end = (b"" if each is None else np.array(each, dtype=self.dtype).tobytes() for each in (bos, eod))
        for key in range(len(self.job.keys)):
            parts: list[bytes] = []
            lengths = np.zeros(len(documents), dtype="<i4")
            for number, texts in enumerate(documents):
                ids: Any = self._encode(texts[key])
                if number % CHECK_EVERY == checked and len(texts[key]) <= CHECK_MAX_CHARACTERS:
                    check_same(self.encoder, texts[key], np.asarray(ids))
                texts[key] = ""  # free memory: a block may be one very long line
                ids = np.asarray(ids, dtype=self.dtype)
                if len(ids):
                    lengths[number] = len(ids) + (bos is not None) + (eod is not None)
                    parts += (begin, ids.tobytes(), end)
            ids = ()
            result.tokens.append(b"".join(parts))
            result.lengths.append(lengths.tobytes())

    def _encode(self, text: str) -> Sequence[int]:
        if not text:
            return ()
        try:
            return self.encoder.encode(text)
        except Exception:
            # A fast encoder may reject text that the reference accepts.
            if not self.encoder.is_fast:
                raise
            return self.encoder.reference(text)


class ExampleEncoder(BlockEncoder[tuple[list[int], list[int]]]):
    """Encoder for fine-tuning. A document is (ids, loss mask); the two outputs are tokens and masks.

    A pair is one document: the chosen answer's tokens, then the rejected one's, whose masks have REJECTED added.
    Masks of an answer with a label have its mark added (``parse_unpaired``).
    """

    def __init__(self, job: PrepareJob, encoder: Encoder, chat: ChatFormat) -> None:
        super().__init__(job, encoder)
        self.chat = chat

    def parse(self, line: bytes, segment: BlockSegment, result: BlockResult) -> tuple[list[int], list[int]]:
        try:
            has_columns = self.job.sources[segment.source].kind in ("csv", "parquet", "arrow")
            example, notes = self._example(line, self.chat.columns.get(segment.source), has_columns)
        except _FAULTS as error:
            raise RecordError("broken_record", f"{type(error).__name__}: {error}") from None
        result.notes.update({*notes})  # both sides of a pair may have one
        return example

    def _example(
        self, line: bytes, columns: Sequence[str] | None, has_columns: bool
    ) -> tuple[tuple[list[int], list[int]], list[str]]:
        """Return ((ids, mask), notes) of a line.

        Args:
            columns: Header of a .tsv table, for its lines.
            has_columns: Whether the line is a row of a CSV, Parquet or Arrow file, which a template always renders; it
                renders JSON records that have its fields.

        Raises:
            RecordError: The record is invalid.
        """
        conversations, context, notes = self._conversations(line, columns, has_columns)
        sides = [self._encode(turns, context, notes) for turns in conversations.values()]
        size, most = sum(len(ids) for ids, _ in sides), self.chat.max_tokens
        if size > most:
            if not self.chat.truncate:
                raise RecordError("too_long", f"{size} tokens; at most {most} fit")
            # Of a pair, an answer is cut if it is longer than half of the sequence.
            limit = most if len(sides) == 1 else max(most // 2, most - min(len(ids) for ids, _ in sides))
            sides = [(ids[:limit], learn[:limit]) for ids, learn in sides]
            if not all(any(learn[1:]) for _, learn in sides):
                raise RecordError("answer_cut_off", f"the first {limit} tokens have no answer")
            notes.append("cut to the sequence's length")
        if not all(any(learn[1:]) for _, learn in sides):
            raise RecordError("no_assistant_turn", "the chat template drops the answer")
        masks = [learn if not self.chat.train_on_inputs else [True] * len(learn) for _, learn in sides]
        marks = [mark + has_loss for mark, mask in zip(conversations, masks, strict=True) for has_loss in mask]
        return ([number for ids, _ in sides for number in ids], marks), notes

    def _conversations(
        self, line: bytes, columns: Sequence[str] | None, has_columns: bool
    ) -> tuple[dict[int, Turns], TemplateContext, list[str]]:
        """Return ``parse_record`` of a line; see ``_example``."""
        chat, template = self.chat, self.chat.labelled
        if columns is not None:
            assert template is not None, "sft.py requires --template for tables"
            values = parse_text(line).removesuffix("\r").split("\t")
            return {0: conversation.labelled_turns(columns, values, template)}, conversation.NO_CONTEXT, []
        record = parse_object(line)
        if template is not None and (has_columns or record.keys() >= {*template.fields}):
            texts = {name: "" if record.get(name) is None else str(record[name]) for name in template.fields}
            conversations = {0: conversation.labelled_turns([*texts], [*texts.values()], template)}
            context, notes = conversation.NO_CONTEXT, list[str]()
        else:
            conversations, context, notes = parse_record(record, chat.format)
        return conversations, context, [*notes, *([REPEATED_KEY] if repeats_key(line, record) else [])]

    def _encode(self, turns: Turns, context: TemplateContext, notes: list[str]) -> tuple[list[int], list[bool]]:
        """Return (ids, mask) of a conversation, and add to ``notes``. Raises RecordError."""
        chat = self.chat
        if chat.own_template and chat.format != RENDERED:
            conversation.check_control_tokens(turns, context, chat.tokenizer.control_tokens)
        ids, learn = encode_spans(chat.render(turns, context, notes), chat.tokenizer, parse_special=chat.own_template)
        if chat.add_bos and chat.tokenizer.bos is not None and ids[:1] != [chat.tokenizer.bos]:
            return [chat.tokenizer.bos, *ids], [False, *learn]
        return ids, learn

    def write(self, documents: list[tuple[list[int], list[int]]], block: TextBlock, result: BlockResult) -> None:
        lengths = np.array([len(ids) for ids, _ in documents], dtype="<i4").tobytes()
        ids = [number for numbers, _ in documents for number in numbers]
        learn = [mark for _, marks in documents for mark in marks]
        result.learned = sum(mark % REJECTED for mark in learn)
        result.tokens += [np.array(ids, dtype=self.dtype).tobytes(), np.array(learn, dtype=MASK_DTYPE).tobytes()]
        result.lengths += [lengths, lengths]
