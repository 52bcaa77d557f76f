"""A sentencepiece model's file as Python values, and as the tokenizer.json that gigatoken reads.

The file is a protocol-buffers message; the few fields needed here are read by hand, which spares a dependency. Their
numbers are from sentencepiece's published schema (sentencepiece_model.proto).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"


@dataclass(frozen=True)
class Model:
    """What decides how a sentencepiece model encodes."""

    data: bytes
    """the file"""
    pieces: list[tuple[str, float, int]]
    """(piece, score, kind)"""
    is_bpe: bool
    byte_fallback: bool
    whitespace_as_suffix: bool
    has_character_map: bool
    """normalisation other than identity"""
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool


def read_model(data: bytes) -> Model:
    """Reads a .model file.

    Raises:
        ValueError: it is none.
    """
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for number, value in _fields(data):
            if number == 1:
                pieces.append(_piece(value))
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
    except (IndexError, KeyError, TypeError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"not a sentencepiece model: {error}") from None
    if not pieces:
        raise ValueError("not a sentencepiece model: it has no pieces")
    return Model(
        data=data,
        pieces=pieces,
        is_bpe=trainer.get(3, 1) == 2,
        byte_fallback=bool(trainer.get(35, 0)),
        whitespace_as_suffix=bool(trainer.get(24, 0)),
        has_character_map=bool(normalizer.get(2, b"")),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        escape_whitespaces=bool(normalizer.get(5, 1)),
    )


def _piece(data: bytes) -> tuple[str, float, int]:
    """One piece; nearly all have the same three short fields, which saves a quarter second for 32,000 of them."""
    length = data[1]
    if data[0] == 0x0A and length < 128 and data[2 + length : 3 + length] == b"\x15":
        kind = data[7 + length :]
        if not kind or (len(kind) == 2 and kind[0] == 0x18):
            (score,) = struct.unpack_from("<f", data, 3 + length)
            return data[2 : 2 + length].decode("utf-8"), score, kind[1] if kind else NORMAL
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", fields.get(2, b"\0\0\0\0"))
    return fields[1].decode("utf-8"), score, fields.get(3, NORMAL)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a message: integers, and bytes for everything that has a length."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        kind = key & 7
        if kind == 0:
            value: Any
            value, position = _varint(data, position)
        elif kind == 2:
            length, position = _varint(data, position)
            value, position = data[position : position + length], position + length
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
            value, position = data[position : position + length], position + length
        else:
            raise IndexError(f"wire type {kind}")
        yield key >> 3, value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7


def why_not_fast(model: Model) -> str | None:
    """Why this model is left to sentencepiece itself, or None where the fast encoder knows all that it asks for."""
    if not model.is_bpe:
        return "the model is no BPE"
    if not model.byte_fallback:
        return "the model has no byte fallback"
    if model.has_character_map or model.remove_extra_whitespaces:
        return "the model normalises text"
    if model.whitespace_as_suffix or not model.escape_whitespaces:
        return "the model treats spaces in an unusual way"
    if any(kind == UNUSED for _, _, kind in model.pieces):
        return "the model has unused pieces"
    return None


def user_defined(model: Model) -> list[str]:
    """The pieces that sentencepiece cuts out of the text before anything else."""
    return [piece for piece, _, kind in model.pieces if kind == USER_DEFINED]


def to_tokenizer_json(model: Model) -> str:
    """The model as a tokenizer.json for text without user-defined pieces.

    Unlike the usual conversion it has no added tokens, and control pieces take no part in merges: so the text "</s>"
    can never become id 2, as it never does in sentencepiece.
    """
    normalizers: list[dict[str, Any]] = []
    if model.add_dummy_prefix:
        normalizers.append({"type": "Prepend", "prepend": SPACE})
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    unknown = next(piece for piece, _, kind in model.pieces if kind == UNKNOWN)
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "BPE",
                "unk_token": unknown,
                "fuse_unk": True,
                "byte_fallback": True,
                "ignore_merges": False,
                "vocab": {piece: index for index, (piece, _, _) in enumerate(model.pieces)},
                "merges": _merges(model),
            },
        }
    )


def _merges(model: Model) -> list[tuple[str, str]]:
    """Every way to put a piece together from two, best score first: the order in which sentencepiece merges."""
    scores = {piece: score for piece, score, kind in model.pieces if kind == NORMAL}
    ranked = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in scores and piece[cut:] in scores:
                ranked.append((-score, -cut, left, piece[cut:]))
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]
