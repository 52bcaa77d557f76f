"""What decides how a sentencepiece model encodes, and the model as the tokenizer.json that gigatoken reads.

``model`` is sentencepiece's own protocol buffer, ModelProto (sentencepiece_model.proto).
"""

from __future__ import annotations

import json
from typing import Any

# ModelProto.SentencePiece.Type and TrainerSpec.ModelType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
BPE = 2
SPACE = "\u2581"


def why_not_fast(model: Any) -> str | None:
    """Why this model is left to sentencepiece itself, or None where the fast encoders know all that it uses."""
    if model.trainer_spec.model_type != BPE:
        return "the model is no BPE"
    if not model.trainer_spec.byte_fallback:
        return "the model has no byte fallback"
    normalizer = model.normalizer_spec
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        return "the model normalises text"
    if model.trainer_spec.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        return "the model treats spaces in an unusual way"
    if any(piece.type == UNUSED for piece in model.pieces):
        return "the model has unused pieces"
    return None


def special_pieces(model: Any, kinds: tuple[int, ...] = (CONTROL, USER_DEFINED)) -> dict[str, int]:
    """Control pieces and user-defined ones, with their ids; sentencepiece cuts the latter out of the text before
    anything else."""
    return {piece.piece: number for number, piece in enumerate(model.pieces) if piece.type in kinds}


def to_tokenizer_json(model: Any) -> str:
    """The model as a tokenizer.json for text without user-defined pieces.

    Unlike the usual conversion it has no added tokens, and control pieces take no part in merges: so the text "</s>"
    can never become id 2, as it never does in sentencepiece.
    """
    normalizers: list[dict[str, Any]] = []
    if model.normalizer_spec.add_dummy_prefix:
        normalizers.append({"type": "Prepend", "prepend": SPACE})
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    unknown = next(piece.piece for piece in model.pieces if piece.type == UNKNOWN)
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
                "vocab": {piece.piece: index for index, piece in enumerate(model.pieces)},
                "merges": _merges(model),
            },
        }
    )


def _merges(model: Any) -> list[tuple[str, str]]:
    """Every way to put a piece together from two, best score first: the order in which sentencepiece merges."""
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == NORMAL}
    ranked = sorted(
        (-score, -cut, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    )
    return [(left, right) for _, _, left, right in ranked]
