"""Spans of a rendered conversation, and their token ids with an exact loss mask.

The text is encoded as a whole, as at inference. If a token crosses the boundary of an answer, the two sides are encoded
separately: at inference the prompt ends there, so the model cannot produce that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from megatron_llama.text.conversation import RecordError
from megatron_llama.text.tokenizer import Tokenizer

END = "<|endoftext|>"
"""The tokenizer's end-of-text token if it has no token of this name."""
# Prefixes for encoding a text as a continuation; the first one that shares no token with the text is used.
ANCHORS = ("\n", "0", "|", ".")


@dataclass(frozen=True)
class TextSpan:
    """A span of the rendered text."""

    text: str
    learn: bool
    """Whether the span has loss."""
    control: bool = False
    """Whether ``text`` is a control token's name."""


def encode_spans(
    spans: Sequence[TextSpan], tokenizer: Tokenizer, parse_special: bool = False
) -> tuple[list[int], list[bool]]:
    """Return (ids, whether each has loss) of a rendered conversation.

    ``parse_special`` is for spans of a tokenizer's template, whose text contains names of control tokens.
    Raises RecordError.
    """
    ids: list[int] = []
    learn: list[bool] = []
    for control, group in groupby(spans, lambda span: _control_id(span, tokenizer)):
        run = list(group)
        if control is None:
            tokens, marks = _encode_run(run, tokenizer, parse_special)
        else:
            tokens, marks = [control] * len(run), [span.learn for span in run]
        ids += tokens
        learn += marks
    return ids, learn


def _control_id(span: TextSpan, tokenizer: Tokenizer) -> int | None:
    """Return the id of a control token; None for text and for control tokens that the tokenizer does not have."""
    if not span.control:
        return None
    number = tokenizer.control(span.text)
    return tokenizer.end if number is None and span.text == END else number


def control_text(span: TextSpan, tokenizer: Tokenizer) -> str:
    """Return the text of a span; for a control token, the name of its id."""
    number = _control_id(span, tokenizer)
    return span.text if number is None else tokenizer.token_name(number)


def _encode_run(run: Sequence[TextSpan], tokenizer: Tokenizer, parse_special: bool) -> tuple[list[int], list[bool]]:
    """Return (ids, whether each has loss) of successive text spans."""
    text = "".join(span.text for span in run)
    if not text:
        return [], []
    boundaries: list[int] = []  # first characters of parts with and without loss
    learn: list[bool] = []
    position = 0
    for span in run:
        if not learn or learn[-1] != span.learn:
            boundaries.append(position)
            learn.append(span.learn)
        position += len(span.text)
    spans = tokenizer.spans(text, parse_special)
    starts, ends = np.array(spans.starts), np.array(spans.ends)
    if not any(((starts < boundary) & (ends > boundary)).any() for boundary in boundaries[1:]):
        return spans.ids, np.array(learn)[np.searchsorted(boundaries, starts, side="right") - 1].tolist()
    ids: list[int] = []
    marks: list[bool] = []
    for start, stop, is_learned in zip(boundaries, [*boundaries[1:], len(text)], learn, strict=True):
        part = _encode_part(text[start:stop], tokenizer, parse_special, is_continued=start > 0)
        ids += part
        marks += [is_learned] * len(part)
    return ids, marks


def _encode_part(text: str, tokenizer: Tokenizer, parse_special: bool, is_continued: bool) -> list[int]:
    """Return the ids of a text; ``is_continued``: without the space that begins a text."""
    if not is_continued:
        return tokenizer.spans(text, parse_special).ids
    for anchor in ANCHORS:
        before, both = (tokenizer.spans(one, parse_special).ids for one in (anchor, anchor + text))
        if both[: len(before)] == before:
            return both[len(before) :]
    raise RecordError("template_refuses", "no token ends where an answer begins")
