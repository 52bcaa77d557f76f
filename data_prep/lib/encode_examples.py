"""What a worker does with a block of a fine-tuning set: records to conversations, conversations to tokens and masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_prep.lib.blocks import Block, Slots, segment_lines
from data_prep.lib.job import BadRecord, Chat, Job, Result
from data_prep.lib.json_lines import BadLine, parse_object
from data_prep.lib.record_formats import turns_of
from megatron_llama.data.indexed_format import token_dtype
from megatron_llama.text.chat_tokenizer import encode_pieces
from megatron_llama.text.conversation import Bad, Turns, labelled_turns

# What is wrong with one record must not end a run that leaves bad records out.
_FAULTS = (Bad, TypeError, ValueError, LookupError, AttributeError, RecursionError)
MASK_DTYPE = np.dtype("u1")


class ExampleEncoder:
    """Encodes blocks; lives in a worker."""

    def __init__(self, job: Job, chat: Chat, slots: Slots) -> None:
        self.job, self.chat, self.slots = job, chat, slots
        self.dtype = token_dtype(chat.tokenizer.size)

    def run(self, block: Block) -> Result:
        """Encodes a block; the result's two outputs are tokens and masks."""
        result = Result(block.number)
        examples: list[tuple[list[int], list[bool]]] = []
        for position, segment in enumerate(block.segments):
            source = self.job.sources[segment.source]
            columns = self.chat.columns.get(segment.source)
            lines = segment_lines(segment, source, self.slots, self.job.max_line)
            result.lines.append(len(lines))
            for number, line in enumerate(lines):
                is_header = columns is not None and segment.start == 0 and number == 0
                if is_header or not line or line.isspace():
                    continue
                result.documents_read += 1
                result.text_bytes += len(line)
                try:
                    example, notes = self._example(line, columns)
                except _FAULTS as error:
                    bad = error if isinstance(error, Bad) else Bad("broken_record", f"{type(error).__name__}: {error}")
                    reason, detail = bad.line.reason, bad.line.detail
                    result.bad.append(BadRecord.of(line, self.job.max_line, position, number, reason, detail))
                    continue
                examples.append(example)
                for note in notes:
                    result.notes[note] = result.notes.get(note, 0) + 1
        self._write(examples, result)
        return result

    def _example(self, line: bytes, columns: Sequence[str] | None) -> tuple[tuple[list[int], list[bool]], list[str]]:
        """((ids, mask), notes) of a line; raises Bad."""
        chat = self.chat
        turns, notes = self._turns(line, columns)
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

    def _turns(self, line: bytes, columns: Sequence[str] | None) -> tuple[Turns, list[str]]:
        if len(line) > self.job.max_line:
            raise Bad("line_too_long", f"more than {self.job.max_line:,} bytes")
        if columns is not None:
            assert self.chat.labelled is not None, "sft.py asks for a template where there are tables"
            try:
                text = line.decode("utf-8").removesuffix("\r")
            except UnicodeDecodeError as error:
                raise Bad("bad_utf8", f"byte {line[error.start]:#04x} at {error.start}: {error.reason}") from None
            return labelled_turns(columns, text.split("\t"), self.chat.labelled), []
        record = parse_object(line)
        if isinstance(record, BadLine):
            raise Bad(record.reason, record.detail)
        return turns_of(record, self.chat.format)

    def _write(self, examples: list[tuple[list[int], list[bool]]], result: Result) -> None:
        lengths = np.array([len(ids) for ids, _ in examples], dtype="<i4").tobytes()
        ids = [number for numbers, _ in examples for number in numbers]
        learn = [mark for _, marks in examples for mark in marks]
        result.learned = sum(learn)
        result.tokens += [np.array(ids, dtype=self.dtype).tobytes(), np.array(learn, dtype=MASK_DTYPE).tobytes()]
        result.lengths += [lengths, lengths]
