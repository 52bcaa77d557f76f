"""Pieces of a rendered conversation to token ids, with a mask that is exact at the borders.

A text is encoded whole, as at inference. Where a token would cross the border of an answer, the two sides are encoded
apart: the prompt ends there at inference, so the model could never have produced that token.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_llama.system.errors import UserError
from megatron_llama.text.chat_template import END, Piece
from megatron_llama.text.conversation import Bad
from megatron_llama.text.encoders import Encoder, load_encoder
from megatron_llama.text.sentencepiece_model import read_model, special_pieces
from megatron_llama.text.tokenizer import (
    huggingface_bos,
    need_package,
    read_sentencepiece,
    read_tokenizer_json,
    sentencepiece_adds_bos,
    tokenizer_file,
)

# Prefixes with which a text is encoded as the middle of another; the first that shares no token with it is taken.
ANCHORS = ("\n", "0", "|", ".")


@dataclass(frozen=True)
class Spans:
    """The tokens of a text, and the characters [start, end) of each."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


class ChatTokenizer(Protocol):
    """A tokenizer that encodes conversations."""

    encoder: Encoder
    bos: int | None
    adds_bos: bool
    """Whether its makers put ``bos`` before every text (``Tokenizer.adds_bos``)."""
    control_tokens: list[str]
    """Names of the control tokens that must not occur in a turn's text."""
    added_tokens: list[str]
    """These and all other tokens that were added to the vocabulary: an answer may end with any of them."""

    def spans(self, text: str) -> Spans:
        """A text's tokens. For a tokenizer with a template of its own, control tokens in it count as such."""
        ...

    def control(self, name: str) -> int | None:
        """A control token's id; None where the tokenizer has none of that name."""
        ...


class SentencePiece:
    """A sentencepiece model."""

    def __init__(self, path: str) -> None:
        self.encoder = load_encoder("sentencepiece", path, "sentencepiece")
        self._processor = read_sentencepiece(Path(path))
        self.bos = self._processor.bos_id() if self._processor.bos_id() >= 0 else None
        self.adds_bos = self.bos is not None and sentencepiece_adds_bos(Path(path).parent, default=False)
        self.control_tokens: list[str] = []  # sentencepiece never makes one of text
        self.added_tokens: list[str] = []
        self._named = special_pieces(read_model(Path(path)))

    def spans(self, text: str) -> Spans:
        if hasattr(self._processor, "encode_as_offset_mapping"):  # from 0.2.2 on
            mapping = self._processor.encode_as_offset_mapping(text)
            offsets = mapping["offsets"]
            return Spans(list(mapping["ids"]), [start for start, _ in offsets], [end for _, end in offsets])
        found = self._processor.encode(text, out_type="immutable_proto").pieces
        return Spans([p.id for p in found], [p.begin for p in found], [p.end for p in found])

    def control(self, name: str) -> int | None:
        return self._named.get(name)


class HuggingFace:
    """A folder with tokenizer.json. ``in_text``: whether names of control tokens in a text are control tokens."""

    def __init__(self, path: str, in_text: bool) -> None:
        self.encoder = load_encoder("huggingface", path)
        if self.encoder.library != "huggingface":
            raise UserError(f"{path} has no tokenizer.json; name its tokenizer.model as --tokenizer-model")
        self._tokenizer = read_tokenizer_json(tokenizer_file(path))
        self._tokenizer.encode_special_tokens = not in_text
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.control_tokens = [token.content for token in added if token.special]
        self.added_tokens = [token.content for token in added if token.content.strip()]
        self.bos = huggingface_bos(self._tokenizer)
        self.adds_bos = self.bos is not None
        # The post-processor also trims spaces off the spans, which would hide that a token crosses a border.
        self._tokenizer.post_processor = need_package("tokenizers", Path(path)).processors.Sequence([])

    def spans(self, text: str) -> Spans:
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return Spans(list(found.ids), [start for start, _ in found.offsets], [end for _, end in found.offsets])

    def control(self, name: str) -> int | None:
        number = self._tokenizer.token_to_id(name)
        return None if number is None else int(number)


def load_chat_tokenizer(path: str, own: bool) -> ChatTokenizer:
    """A sentencepiece .model file, or a Hugging Face folder; ``own``: its own template will be used.

    Raises:
        UserError: it is neither, or can't be read.
    """
    if os.path.isdir(path) or path.endswith(".json"):
        return HuggingFace(path, in_text=own)
    if own:
        raise UserError(f"{path} is a sentencepiece model, which has no chat template: write --chat-template NAME")
    return SentencePiece(path)


def encode_pieces(pieces: Sequence[Piece], tokenizer: ChatTokenizer) -> tuple[list[int], list[bool]]:
    """(ids, whether each is learned) of a rendered conversation. Raises Bad."""
    ids: list[int] = []
    learn: list[bool] = []
    run: list[Piece] = []

    def close() -> None:
        found, marks = _encode_run(run, tokenizer)
        ids.extend(found)
        learn.extend(marks)
        run.clear()

    for piece in pieces:
        number = _control(piece.text, tokenizer) if piece.control else None
        if number is None:
            run.append(piece)
            continue
        close()
        ids.append(number)
        learn.append(piece.learn)
    close()
    return ids, learn


def _control(name: str, tokenizer: ChatTokenizer) -> int | None:
    """The id of a template's control token, None where it is text: the tokenizer has none of that name. The end of text
    has an id in any tokenizer."""
    number = tokenizer.control(name)
    return tokenizer.encoder.eod if number is None and name == END else number


def _encode_run(run: Sequence[Piece], tokenizer: ChatTokenizer) -> tuple[list[int], list[bool]]:
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
    spans = tokenizer.spans(text)
    starts, ends = np.array(spans.starts), np.array(spans.ends)
    if not any(((starts < border) & (ends > border)).any() for border in borders[1:]):
        return spans.ids, np.array(learn)[np.searchsorted(borders, starts, side="right") - 1].tolist()
    ids: list[int] = []
    marks: list[bool] = []
    for start, stop, is_learned in zip(borders, [*borders[1:], len(text)], learn, strict=True):
        part = _continued(text[start:stop], tokenizer) if start else tokenizer.spans(text[:stop]).ids
        ids += part
        marks += [is_learned] * len(part)
    return ids, marks


def _continued(text: str, tokenizer: ChatTokenizer) -> list[int]:
    """The ids of a text in the middle of another, where no space is added before it."""
    for anchor in ANCHORS:
        before, both = tokenizer.spans(anchor).ids, tokenizer.spans(anchor + text).ids
        if both[: len(before)] == before:
            return both[len(before) :]
    raise Bad("template_refuses", "no token ends where an answer begins")
