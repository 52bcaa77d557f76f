"""Encoders of text to token ids: sentencepiece, or a faster encoder that returns the same ids.

Control tokens are never parsed from documents: the text "</s>" is encoded as its characters.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_llama.config.data_settings import NewTokens
from megatron_llama.config.hub import download_hint
from megatron_llama.system.errors import MachineError, UserError
from megatron_llama.system.files import read_whole
from megatron_llama.system.missing_packages import pip_install
from megatron_llama.text import tokenizer as text_tokenizer
from megatron_llama.text.tokenizer import SENTENCEPIECE_MODEL, SentencePieceTokenizer, TextTokenizer, TokenizerError

Encode = Callable[[str], Any]
LIBRARIES = ("sentencepiece", "huggingface", "tiktoken")
# Fast encoders, fastest first
FAST = ("gigatoken", "kitoken")
# Searching each text for up to this many pieces costs less than gigatoken saves.
MAX_USER_DEFINED = 64

# Texts for which some fast encoder returned wrong ids.
PROBES = (
    "", " ", "  ", "\n", "\t\t \n", "a", " a", "a ", "   leading", "trailing   ", "a  b   c    d", "\u2581", "a\u2581b",
    "<s>", "</s>", "<unk>", "x</s>y", "</s></s>", "<s>[INST] hello [/INST]</s>", "<0x0A>", "<|endoftext|>",
    "\x00", "a\x00b", "\r\n\r\n", "caf\u00e9 cafe\u0301", "\u4f60\u597d\uff0c\u4e16\u754c", "\U0001f600\U0001f468\u200d"
    "\U0001f469\u200d\U0001f467", "\u0645\u0631\u062d\u0628\u0627", "\ufeffBOM inside", "\u00a0nbsp\u00a0",
    "\u2028\u2029", "1234567890", "3.14159265", "0" * 300, "=" * 300, " " * 300, "\n" * 300, "ab" * 400,
    "\ufffd\ufffe\U0010ffff",
    "def f(x):\n        return x ** 2\n",
    "http://example.org/a?b=c&d=%20#e", "$\\frac{a}{b}$ \\begin{align}",
)  # fmt: skip


class EncoderMismatch(MachineError):
    """The ids of a fast encoder differ from the reference."""


class Encoder:
    """Tokenizer and the encoder that computes its ids."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.reference: Encode = tokenizer.encode_text
        """Encoder of the tokenizer's library."""
        self.encode: Encode = self.reference
        """Encoder of the package ``name``; returns the same ids."""
        self.name = tokenizer.package
        self.notes: list[str] = []
        """Messages about the selected encoder."""

    @property
    def is_fast(self) -> bool:
        """Whether ``encode`` is not the reference."""
        return self.name in FAST


def load_encoder(
    library: str,
    path: str,
    choice: str = "auto",
    sample: Sequence[str] = (),
    new_tokens: NewTokens = text_tokenizer.NO_TOKENS,
) -> Encoder:
    """Load a tokenizer. ``choice`` auto selects the fastest encoder that passes the self-check.

    Raises UserError if the tokenizer is missing or invalid, or ``choice`` does not support it.
    """
    if library not in LIBRARIES:
        raise UserError(f"--tokenizer-library {library}: write {', '.join(LIBRARIES)}")
    if choice in FAST and library != "sentencepiece":
        raise UserError(f"--encoder {choice} supports only sentencepiece models: write --encoder auto")
    if new_tokens:
        return Encoder(text_tokenizer.open_tokenizer(Path(path), new_tokens))
    if library == "tiktoken":
        return Encoder(TiktokenTokenizer(Path(path)))
    file = text_tokenizer.tokenizer_file(path) if library == "huggingface" else Path(path)
    if library == "huggingface" and not file.is_file():
        message = f"{path}: expected a Hugging Face folder with {text_tokenizer.FAST_JSON} or {SENTENCEPIECE_MODEL}"
        raise UserError(message + download_hint(path))
    if library == "huggingface" and file.name != SENTENCEPIECE_MODEL:
        return Encoder(text_tokenizer.HuggingFaceTokenizer(Path(path)))
    adds_bos = False
    if library == "huggingface":  # only a folder has the setting
        settings = text_tokenizer.read_settings(file.parent / text_tokenizer.SETTINGS) or {}
        adds_bos = bool(settings.get("add_bos_token", True))
    return _choose_fast(SentencePieceTokenizer(file, adds_bos=adds_bos), choice, sample)


def _choose_fast(tokenizer: SentencePieceTokenizer, choice: str, sample: Sequence[str]) -> Encoder:
    encoder = Encoder(tokenizer)
    if choice == "sentencepiece":
        return encoder
    model = text_tokenizer.read_model(tokenizer.file)
    # Probe texts: the model's special pieces and some of its longest ordinary pieces.
    special = list(text_tokenizer.special_pieces(model))[:64]
    longest = sorted((entry.piece for entry in model.pieces), key=len, reverse=True)[:32]
    probes = [*PROBES, *(text for token in special + longest for text in (token, f"x{token} y")), *sample]
    reasons = []
    unsupported = text_tokenizer.fast_encoder_obstacle(model)
    for name in FAST if choice == "auto" else (choice,):
        if unsupported:
            reasons.append(unsupported)
            break
        try:
            encode = _FAST_LOADERS[name](model, encoder.reference)
        except ImportError:
            reasons.append(f"{name} is not installed ({pip_install(name)})")
            continue
        except Exception as error:  # any exception of the library: sentencepiece is the fallback
            reasons.append(f"{name} cannot load this model: {error}")
            continue
        different = first_difference(encode, encoder.reference, probes)
        if different is None:
            encoder.name, encoder.encode = name, encode
            if reasons and choice == "auto":
                encoder.notes.append(f"encoding with {name}: {'; '.join(reasons)}")
            return encoder
        reasons.append(f"{name} returns other ids than sentencepiece, for example for {different[:60]!r}")
    if choice != "auto":
        raise UserError(f"--encoder {choice}: {'; '.join(reasons)}")
    encoder.notes.append(f"encoding with sentencepiece (slower): {'; '.join(reasons)}")
    return encoder


def first_difference(encode: Encode, reference: Encode, texts: Sequence[str]) -> str | None:
    """Return the first text for which ``encode`` fails or differs from ``reference``, else None."""
    for text in texts:
        try:
            ids = list(encode(text))
        except Exception:  # noqa: BLE001 - see above
            return text
        if ids != list(reference(text)):
            return text
    return None


def _load_gigatoken(model: Any, reference: Encode) -> Encode:
    """Load gigatoken. Texts with user-defined pieces use the reference, since gigatoken differs there."""
    import gigatoken

    encode: Encode = gigatoken.Tokenizer.from_json(text_tokenizer.to_tokenizer_json(model)).backend.encode
    special = list(text_tokenizer.special_pieces(model, (text_tokenizer.USER_DEFINED,)))
    if not special:
        return encode
    spaces = f"{text_tokenizer.SPACE} \n\t"
    if len(special) > MAX_USER_DEFINED or not all(token.strip(spaces) for token in special):
        raise ValueError("its user-defined pieces occur in nearly every text")
    has_special = re.compile("|".join(re.escape(token) for token in special)).search

    def route(text: str) -> Any:
        return reference(text) if has_special(text) else encode(text)

    return route


def _load_kitoken(model: Any, reference: Encode) -> Encode:
    import kitoken

    encode: Encode = kitoken.Kitoken.from_sentencepiece(model.SerializeToString()).encode
    return encode


_FAST_LOADERS: dict[str, Callable[[Any, Encode], Encode]] = {"gigatoken": _load_gigatoken, "kitoken": _load_kitoken}


# Split pattern and special token positions of Llama 3's published tokenizer.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL_TOKENS = 256
LLAMA3_END_OF_TEXT = 1


class TiktokenTokenizer(TextTokenizer):
    """Llama 3's tokenizer.model: one line per token with its bytes in base64 and its rank."""

    library = package = "tiktoken"

    def __init__(self, file: Path) -> None:
        """Raises UserError."""
        self.path = self.file = file
        tiktoken = text_tokenizer.import_package("tiktoken", file)
        try:
            pairs = (line.split() for line in read_whole(file).splitlines() if line)
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        except OSError as error:
            raise TokenizerError(file, f"can't be read: {error.strerror}") from None
        except ValueError:  # binascii.Error is one
            raise TokenizerError(file, "is not a tiktoken model (lines of base64 and rank)") from None
        if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
            raise TokenizerError(file, "is not a complete tiktoken model: its ranks have gaps")
        self.bos, self.adds_bos, self.end = len(ranks), True, len(ranks) + LLAMA3_END_OF_TEXT
        self.size = len(ranks) + LLAMA3_SPECIAL_TOKENS
        special = {"<|begin_of_text|>": self.bos, "<|end_of_text|>": self.end}
        self._encoding = tiktoken.Encoding(
            "llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )

    def encode_text(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._encoding.decode(ids)


def check_same(encoder: Encoder, text: str, ids: np.ndarray) -> None:
    """Compare a document's ids with the reference during a run. Raises EncoderMismatch if they differ."""
    expected = encoder.reference(text)
    if len(expected) != len(ids) or not np.array_equal(np.asarray(expected, dtype=np.int64), ids):
        raise EncoderMismatch(
            f"{encoder.name} returned other ids than sentencepiece for a document that starts with {text[:60]!r}. "
            "The run's files were removed: rerun with --encoder sentencepiece"
        )
