"""Pieces of a rendered conversation to token ids, with a mask that is exact at the borders.

A text is encoded whole, as at inference. Where a token would cross the border of an answer, the two sides are encoded
apart: the prompt ends there at inference, so the model could never have produced that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from megatron_llama.text.chat_template import END, Piece
from megatron_llama.text.conversation import Bad
from megatron_llama.text.tokenizer import Tokenizer

# Prefixes with which a text is encoded as the middle of another; the first that shares no token with it is taken.
ANCHORS = ("\n", "0", "|", ".")


def encode_pieces(
    pieces: Sequence[Piece], tokenizer: Tokenizer, parse_special: bool = False
) -> tuple[list[int], list[bool]]:
    """(ids, whether each is learned) of a rendered conversation.

    ``parse_special`` is for the pieces of a tokenizer's own template, which are text with the names of control tokens
    in it. Raises Bad.
    """
    ids: list[int] = []
    learn: list[bool] = []
    for control, group in groupby(pieces, lambda piece: _control_id(piece, tokenizer)):
        run = list(group)
        if control is None:
            found, marks = _encode_run(run, tokenizer, parse_special)
        else:
            found, marks = [control] * len(run), [piece.learn for piece in run]
        ids += found
        learn += marks
    return ids, learn


def _control_id(piece: Piece, tokenizer: Tokenizer) -> int | None:
    """The id of a control token, None for text. A template's control token is text to a tokenizer that has none of
    that name; the end of text has an id in any tokenizer."""
    if not piece.control:
        return None
    number = tokenizer.control(piece.text)
    return tokenizer.end if number is None and piece.text == END else number


def _encode_run(run: Sequence[Piece], tokenizer: Tokenizer, parse_special: bool) -> tuple[list[int], list[bool]]:
    """(ids, whether each is learned) of pieces of text that follow one another."""
    text = "".join(piece.text for piece in run)
    if not text:
        return [], []
    borders: list[int] = []  # the first characters of stretches that are learned or not
    learn: list[bool] = []
    position = 0
    for piece in run:
        if not learn or learn[-1] != piece.learn:
            borders.append(position)
            learn.append(piece.learn)
        position += len(piece.text)
    spans = tokenizer.spans(text, parse_special)
    starts, ends = np.array(spans.starts), np.array(spans.ends)
    if not any(((starts < border) & (ends > border)).any() for border in borders[1:]):
        return spans.ids, np.array(learn)[np.searchsorted(borders, starts, side="right") - 1].tolist()
    ids: list[int] = []
    marks: list[bool] = []
    for start, stop, is_learned in zip(borders, [*borders[1:], len(text)], learn, strict=True):
        part = _encode_part(text[start:stop], tokenizer, parse_special, is_continued=start > 0)
        ids += part
        marks += [is_learned] * len(part)
    return ids, marks


def _encode_part(text: str, tokenizer: Tokenizer, parse_special: bool, is_continued: bool) -> list[int]:
    """The ids of a text; ``is_continued``: in the middle of another, where no space is added before it."""
    if not is_continued:
        return tokenizer.spans(text, parse_special).ids
    for anchor in ANCHORS:
        before, both = (tokenizer.spans(one, parse_special).ids for one in (anchor, anchor + text))
        if both[: len(before)] == before:
            return both[len(before) :]
    raise Bad("template_refuses", "no token ends where an answer begins")
