"""What a worker does with a block: lines to documents, documents to tokens, and an account of every line."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from data_prep.lib.blocks import Block, Segment, Slots, segment_lines
from data_prep.lib.csv_records import bad_columns
from data_prep.lib.job import BadRecord, Chat, Job, Result
from data_prep.lib.json_lines import parse_line, parse_object, parse_text
from data_prep.lib.record_formats import turns_of
from megatron_llama.corpus.indexed_format import MASK_DTYPE, token_dtype
from megatron_llama.text.chat_tokenizer import encode_pieces
from megatron_llama.text.conversation import Bad, Template, labelled_turns
from megatron_llama.text.encoders import Encoder, check_same

# One document in this many is encoded by the reference too, when a faster encoder does the work.
CHECK_EVERY = 256
CHECK_MAX_CHARACTERS = 50_000
# What is wrong with one record must not end a run that leaves bad records out.
_FAULTS = (TypeError, ValueError, LookupError, AttributeError, RecursionError)
Document = TypeVar("Document")


class BlockEncoder(ABC, Generic[Document]):
    """Encodes blocks; lives in a worker."""

    def __init__(self, job: Job, encoder: Encoder, slots: Slots) -> None:
        self.job, self.encoder, self.slots = job, encoder, slots
        self.dtype = token_dtype(encoder.tokenizer.size)

    def run(self, block: Block) -> Result:
        """Encodes a block.

        Raises:
            UserError: a source can't be read any more.
            MachineError: the fast encoder was caught giving other ids than the reference.
        """
        result = Result()
        documents: list[Document] = []
        max_line = self.job.max_line
        for position, segment in enumerate(block.segments):
            source = self.job.sources[segment.source]
            begins_with_header = segment.start == 0 and self.job.is_table(segment.source)
            lines = segment_lines(segment, source, self.slots, max_line)
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
                        raise Bad("line_too_long", f"more than {max_line:,} bytes")
                    if source.kind == "csv" and (wrong := bad_columns(line)):
                        raise Bad("bad_columns", wrong)
                    documents.append(self.parse(line, segment, result))
                except Bad as bad:
                    raw = line[: BadRecord.KEEP_BAD_BYTES]
                    complete = len(raw) == len(line) <= max_line  # a longer line was cut where it was read
                    record = BadRecord(position, number, bad.reason, bad.detail, len(line), complete, raw)
                    result.bad.append(record)
        lines, line = [], b""  # their texts are enough
        self.write(documents, block, result)
        return result

    @abstractmethod
    def parse(self, line: bytes, segment: Segment, result: Result) -> Document:
        """A line of a segment to a document. Raises Bad."""

    @abstractmethod
    def write(self, documents: list[Document], block: Block, result: Result) -> None:
        """Adds the block's documents to its result, one entry of tokens and lengths for each output."""


class TextEncoder(BlockEncoder[list[str]]):
    """For pretraining: a document is its texts, one for each JSON key."""

    def parse(self, line: bytes, segment: Segment, result: Result) -> list[str]:
        if self.job.sources[segment.source].is_text:
            return [parse_text(line)] * len(self.job.keys)
        return parse_line(line, self.job.keys)

    def write(self, documents: list[list[str]], block: Block, result: Result) -> None:
        eod = self.encoder.tokenizer.end if self.job.append_eod else None
        checked = block.number % CHECK_EVERY if self.encoder.is_fast else -1
        end = b"" if eod is None else np.array(eod, dtype=self.dtype).tobytes()
        for key in range(len(self.job.keys)):
            parts: list[bytes] = []
            lengths = np.zeros(len(documents), dtype="<i4")
            for number, texts in enumerate(documents):
                ids: Any = self._encode(texts[key])
                if number % CHECK_EVERY == checked and len(texts[key]) <= CHECK_MAX_CHARACTERS:
                    check_same(self.encoder, texts[key], np.asarray(ids))
                texts[key] = ""  # of a block that is one long line, memory is what there is least of
                ids = np.asarray(ids, dtype=self.dtype)
                if len(ids):
                    lengths[number] = len(ids) + (eod is not None)
                    parts += (ids.tobytes(), end)
            ids = ()
            result.tokens.append(b"".join(parts))
            result.lengths.append(lengths.tobytes())

    def _encode(self, text: str) -> Sequence[int]:
        if not text:
            return ()
        try:
            return self.encoder.encode(text)
        except Exception:
            # a fast encoder may refuse what the reference takes; the reference's own errors go up
            if not self.encoder.is_fast:
                raise
            return self.encoder.reference(text)


class ExampleEncoder(BlockEncoder[tuple[list[int], list[bool]]]):
    """For fine-tuning: a document is (ids, whether each is learned); the two outputs are tokens and masks."""

    def __init__(self, job: Job, encoder: Encoder, slots: Slots, chat: Chat) -> None:
        super().__init__(job, encoder, slots)
        self.chat = chat

    def parse(self, line: bytes, segment: Segment, result: Result) -> tuple[list[int], list[bool]]:
        try:
            kind = self.job.sources[segment.source].kind
            asked = self.chat.labelled if kind in ("csv", "parquet", "arrow") else None
            example, notes = self._example(line, self.chat.columns.get(segment.source), asked)
        except _FAULTS as error:
            raise Bad("broken_record", f"{type(error).__name__}: {error}") from None
        result.notes.update(notes)
        return example

    def _example(
        self, line: bytes, columns: Sequence[str] | None, asked: Template | None
    ) -> tuple[tuple[list[int], list[bool]], list[str]]:
        """((ids, mask), notes) of a line; ``columns`` of a table's, ``asked`` of a row that is asked. Raises Bad."""
        chat = self.chat
        notes: list[str] = []
        if asked is not None:
            record = parse_object(line)
            texts = {name: "" if record.get(name) is None else str(record[name]) for name in asked.fields}
            turns = labelled_turns([*texts], [*texts.values()], asked)
        elif columns is None:
            turns, notes = turns_of(parse_object(line), chat.format)
        else:
            assert chat.labelled is not None, "sft.py asks for a template where there are tables"
            values = parse_text(line).removesuffix("\r").split("\t")
            turns = labelled_turns(columns, values, chat.labelled)
        if chat.own_template:
            for turn in turns:
                found = next((name for name in chat.tokenizer.control_tokens if name in turn.text), None)
                if found is not None:
                    raise Bad("control_token", f"the {turn.role}'s text holds {found}")
        ids, learn = encode_pieces(chat.pieces(turns), chat.tokenizer, parse_special=chat.own_template)
        if chat.add_bos and chat.tokenizer.bos is not None:
            ids, learn = [chat.tokenizer.bos, *ids], [False, *learn]
        if len(ids) > chat.max_tokens:
            if not chat.truncate:
                raise Bad("too_long", f"it has {len(ids)} tokens, and {chat.max_tokens} fit")
            ids, learn = ids[: chat.max_tokens], learn[: chat.max_tokens]
            if not any(learn[1:]):
                raise Bad("answer_cut_off", f"its first {chat.max_tokens} tokens hold nothing of an answer")
            notes.append("cut to the sequence's length")
        if not any(learn[1:]):
            raise Bad("no_assistant_turn", "the template leaves nothing of the answer")
        if chat.train_on_inputs:
            learn = [True] * len(ids)
        return (ids, learn), notes

    def write(self, documents: list[tuple[list[int], list[bool]]], block: Block, result: Result) -> None:
        lengths = np.array([len(ids) for ids, _ in documents], dtype="<i4").tobytes()
        ids = [number for numbers, _ in documents for number in numbers]
        learn = [mark for _, marks in documents for mark in marks]
        result.learned = sum(learn)
        result.tokens += [np.array(ids, dtype=self.dtype).tobytes(), np.array(learn, dtype=MASK_DTYPE).tobytes()]
        result.lengths += [lengths, lengths]
