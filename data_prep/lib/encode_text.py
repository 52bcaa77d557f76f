"""What a worker does with a block: lines to texts, texts to tokens, and an account of every line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_prep.lib.blocks import Block, Slots, segment_lines
from data_prep.lib.job import BadRecord, Job, Result
from data_prep.lib.json_lines import BadLine, parse_line, parse_text
from megatron_llama.data.indexed_format import token_dtype
from megatron_llama.text.encoders import Encoder, check_same

# One document in this many is encoded by the reference too, when a faster encoder does the work.
CHECK_EVERY = 256
CHECK_MAX_CHARACTERS = 50_000


class TextEncoder:
    """Encodes blocks; lives in a worker."""

    def __init__(self, job: Job, encoder: Encoder, slots: Slots) -> None:
        self.job = job
        self.encoder = encoder
        self.slots = slots
        self.dtype = token_dtype(encoder.tokenizer.size)
        self.eod = encoder.tokenizer.end if job.append_eod else None

    def run(self, block: Block) -> Result:
        """Encodes a block.

        Raises:
            UserError: a source can't be read any more.
            MachineError: the fast encoder was caught giving other ids than the reference.
        """
        result = Result(block.number)
        documents: list[list[str]] = []
        for position, segment in enumerate(block.segments):
            source = self.job.sources[segment.source]
            lines = segment_lines(segment, source, self.slots, self.job.max_line)
            result.lines.append(len(lines))
            for number, line in enumerate(lines):
                if not source.is_text and (not line or line.isspace()):
                    continue
                result.documents_read += 1
                result.text_bytes += len(line)
                texts = self._texts(line, source.is_text)
                if isinstance(texts, BadLine):
                    max_line = self.job.max_line
                    result.bad.append(BadRecord.of(line, max_line, position, number, texts.reason, texts.detail))
                else:
                    documents.append(texts)
        for key in range(len(self.job.keys)):
            self._encode_key([texts[key] for texts in documents], block.number, result)
        return result

    def _texts(self, line: bytes, is_text: bool) -> list[str] | BadLine:
        if len(line) > self.job.max_line:
            return BadLine("line_too_long", f"more than {self.job.max_line:,} bytes")
        if not is_text:
            return parse_line(line, self.job.keys)
        text = parse_text(line)
        return text if isinstance(text, BadLine) else text * len(self.job.keys)

    def _encode_key(self, texts: list[str], seed: int, result: Result) -> None:
        checked = seed % CHECK_EVERY if self.encoder.is_fast else -1
        parts = []
        for number, text in enumerate(texts):
            ids = self._encode(text)
            if number % CHECK_EVERY == checked and len(text) <= CHECK_MAX_CHARACTERS:
                check_same(self.encoder, text, np.asarray(ids))
            parts.append(ids)
        lengths = np.fromiter((len(ids) for ids in parts), dtype="<i4", count=len(parts))
        if self.eod is not None:
            lengths += lengths > 0
        tokens = np.empty(int(lengths.sum(dtype=np.int64)), dtype=self.dtype)
        position = 0
        for ids in parts:
            if len(ids):
                end = position + len(ids)
                tokens[position:end] = ids
                if self.eod is not None:
                    tokens[end] = self.eod
                    end += 1
                position = end
        result.tokens.append(tokens.tobytes())
        result.lengths.append(lengths.tobytes())

    def _encode(self, text: str) -> Sequence[int]:
        if not text:
            return ()
        try:
            ids: Sequence[int] = self.encoder.encode(text)
        except Exception:
            # a fast encoder may refuse what the reference takes; the reference's own errors go up
            if not self.encoder.is_fast:
                raise
            ids = self.encoder.reference(text)
        return ids
