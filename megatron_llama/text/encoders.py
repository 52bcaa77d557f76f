"""Text to token ids: sentencepiece's own, or a faster encoder's where it is proven to give the same.

Nothing in a document ever becomes a control id: the text "</s>" is encoded as the characters it consists of.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_llama.system.errors import MachineError, UserError
from megatron_llama.text import sentencepiece_model

Encode = Callable[[str], Any]
LIBRARIES = ("sentencepiece", "huggingface", "tiktoken")
# The two fast encoders, faster first
FAST = ("gigatoken", "kitoken")
# Looking for this many in each text costs less than what gigatoken wins
MAX_USER_DEFINED = 64

# What has been seen to go wrong in one fast encoder or another, and what real documents begin with.
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
    """A fast encoder was caught giving other ids than the reference."""


@dataclass
class Encoder:
    """A tokenizer as the preprocessing needs it."""

    name: str
    """what encodes"""
    encode: Encode
    """text to a sequence of ids, without BOS and EOS"""
    reference: Encode
    """the same by the library that defines the ids"""
    decode: Callable[[list[int]], str]
    vocab_size: int
    eod: int | None
    """the id that ends a document"""
    library: str
    path: str
    sha256: str
    notes: list[str] = field(default_factory=list)
    """what a user should know about the choice"""

    @property
    def is_fast(self) -> bool:
        return self.name in FAST


def load_encoder(library: str, path: str, choice: str = "auto", sample: Sequence[str] = ()) -> Encoder:
    """Loads a tokenizer; with `choice` auto the fastest encoder that passes the self-check.

    Raises:
        UserError: the tokenizer is not there, is none, or the chosen encoder can't be used for it.
    """
    if library == "sentencepiece":
        return _choose_fast(*_load_sentencepiece(path), choice, sample)
    if choice in FAST:
        raise UserError(f"--encoder {choice} works for sentencepiece models only")
    if library == "huggingface":
        return _load_huggingface(path)
    if library == "tiktoken":
        return _load_tiktoken(path)
    raise UserError(f"--tokenizer-library {library}: known are {', '.join(LIBRARIES)}")


def _read_tokenizer(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"can't read the tokenizer {path}: {error.strerror}") from None


def _need(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"this tokenizer needs the Python package {module}: pip install {module}") from None


def _load_sentencepiece(path: str) -> tuple[Encoder, sentencepiece_model.Model]:
    data = _read_tokenizer(path)
    sentencepiece = _need("sentencepiece")
    try:
        model = sentencepiece_model.read_model(data)  # sentencepiece itself takes some foreign files for empty models
        processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{path} is not a sentencepiece model: {str(error).splitlines()[-1]}") from None
    eod = processor.eos_id()
    encoder = Encoder(
        name="sentencepiece",
        encode=processor.encode,
        reference=processor.encode,
        decode=processor.decode,
        vocab_size=processor.vocab_size(),
        eod=eod if eod >= 0 else None,
        library="sentencepiece",
        path=path,
        sha256=hashlib.sha256(data).hexdigest(),
    )
    return encoder, model


def _choose_fast(encoder: Encoder, model: sentencepiece_model.Model, choice: str, sample: Sequence[str]) -> Encoder:
    if choice == "sentencepiece":
        return encoder
    reasons = []
    unfit = sentencepiece_model.why_not_fast(model)
    for name in FAST if choice == "auto" else (choice,):
        if unfit:
            reasons.append(unfit)
            break
        try:
            encode = _FAST_LOADERS[name](model, encoder.reference)
        except ImportError:
            reasons.append(f"{name} is not installed (pip install {name})")
            continue
        except Exception as error:  # a foreign library's own: whatever it is, the way back is sentencepiece
            reasons.append(f"{name} can't load this model: {error}")
            continue
        different = first_difference(encode, encoder.reference, [*PROBES, *_piece_probes(model), *sample])
        if different is None:
            encoder.name, encoder.encode = name, encode
            if reasons and choice == "auto":
                encoder.notes.append(f"encoding with {name}: {'; '.join(reasons)}")
            return encoder
        reasons.append(f"{name} gives other ids than sentencepiece, for example for {different[:60]!r}")
    if choice != "auto":
        raise UserError(f"--encoder {choice}: {'; '.join(reasons)}")
    encoder.notes.append(f"encoding with sentencepiece itself, exact but slower: {'; '.join(reasons)}")
    return encoder


def _piece_probes(model: sentencepiece_model.Model) -> list[str]:
    """Text that looks like the model's own special pieces, and some of its longest ordinary ones."""
    special = [
        piece
        for piece, _, kind in model.pieces
        if kind in (sentencepiece_model.CONTROL, sentencepiece_model.USER_DEFINED)
    ]
    longest = sorted((piece for piece, _, _ in model.pieces), key=len, reverse=True)[:32]
    return [f"{before}{piece}{after}" for piece in special[:64] + longest for before, after in (("", ""), ("x", " y"))]


def first_difference(encode: Encode, reference: Encode, texts: Sequence[str]) -> str | None:
    """The first text for which two encoders differ (an encoder that fails counts as different), else None."""
    for text in texts:
        try:
            ids = list(encode(text))
        except Exception:  # noqa: BLE001 - see above
            return text
        if ids != list(reference(text)):
            return text
    return None


def _load_gigatoken(model: sentencepiece_model.Model, reference: Encode) -> Encode:
    """gigatoken, which gives other ids around user-defined pieces: text that has one goes to the reference."""
    import gigatoken

    encode: Encode = gigatoken.Tokenizer.from_json(sentencepiece_model.to_tokenizer_json(model)).backend.encode
    special = sentencepiece_model.user_defined(model)
    if not special:
        return encode
    spaces = f"{sentencepiece_model.SPACE} \n\t"
    if len(special) > MAX_USER_DEFINED or not all(piece.strip(spaces) for piece in special):
        raise ValueError("its user-defined pieces are in nearly every text")
    has_special = re.compile("|".join(re.escape(piece) for piece in special)).search

    def route(text: str) -> Any:
        return reference(text) if has_special(text) else encode(text)

    return route


def _load_kitoken(model: sentencepiece_model.Model, reference: Encode) -> Encode:
    import kitoken

    encode: Encode = kitoken.Kitoken.from_sentencepiece(model.data).encode
    return encode


_FAST_LOADERS: dict[str, Callable[[sentencepiece_model.Model, Encode], Encode]] = {
    "gigatoken": _load_gigatoken,
    "kitoken": _load_kitoken,
}


def _load_huggingface(path: str) -> Encoder:
    """A folder with tokenizer.json, as `save_pretrained` writes it, or that file; else its tokenizer.model."""
    folder = Path(path)
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    if not file.is_file():
        if (folder / "tokenizer.model").is_file():
            return _choose_fast(*_load_sentencepiece(str(folder / "tokenizer.model")), "auto", ())
        raise UserError(f"{path}: a Hugging Face tokenizer is a local folder with tokenizer.json (or tokenizer.model)")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads don't survive the fork of our workers
    tokenizers = _need("tokenizers")
    data = _read_tokenizer(str(file))
    try:
        tokenizer = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the library raises a bare Exception
        raise UserError(f"{file} is not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # without this the text "</s>" would become the control id
    tokenizer.encode_special_tokens = True

    def encode(text: str) -> Any:
        return tokenizer.encode(text, add_special_tokens=False).ids

    return Encoder(
        name="tokenizers",
        encode=encode,
        reference=encode,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        eod=_huggingface_eos(file.parent, tokenizer),
        library="huggingface",
        path=path,
        sha256=hashlib.sha256(data).hexdigest(),
    )


def _huggingface_eos(folder: Path, tokenizer: Any) -> int | None:
    """The end-of-text id that the folder's own files name."""
    try:
        token = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and tokenizer.token_to_id(content) is not None:
            return int(tokenizer.token_to_id(content))
    except (OSError, ValueError):
        pass
    for name in ("generation_config.json", "config.json"):
        try:
            eos = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError):
            continue
        if isinstance(eos, list):
            eos = eos[0] if eos else None
        if isinstance(eos, int):
            return eos
    return None


# Llama 3's split pattern and its special tokens' place, from its published tokenizer.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL_TOKENS = 256
LLAMA3_END_OF_TEXT = 1


def _load_tiktoken(path: str) -> Encoder:
    """Llama 3's tokenizer.model: a line per token, its bytes in base64 and its rank."""
    import base64
    import binascii

    tiktoken = _need("tiktoken")
    data = _read_tokenizer(path)
    try:
        pairs = (line.split() for line in data.splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error):
        raise UserError(f"{path} is not a tiktoken model (lines of base64 and rank)") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise UserError(f"{path} is not a complete tiktoken model: its ranks have gaps")
    special = {"<|begin_of_text|>": len(ranks), "<|end_of_text|>": len(ranks) + LLAMA3_END_OF_TEXT}
    encoding = tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    return Encoder(
        name="tiktoken",
        encode=encoding.encode_ordinary,
        reference=encoding.encode_ordinary,
        decode=encoding.decode,
        vocab_size=len(ranks) + LLAMA3_SPECIAL_TOKENS,
        eod=len(ranks) + LLAMA3_END_OF_TEXT,
        library="tiktoken",
        path=path,
        sha256=hashlib.sha256(data).hexdigest(),
    )


def check_same(encoder: Encoder, text: str, ids: np.ndarray) -> None:
    """Checks one document's ids against the reference, in the middle of a run.

    Raises:
        EncoderMismatch: they differ.
    """
    expected = encoder.reference(text)
    if len(expected) != len(ids) or not np.array_equal(np.asarray(expected, dtype=np.int64), ids):
        raise EncoderMismatch(
            f"{encoder.name} gave other ids than sentencepiece for a document that begins {text[:60]!r}. "
            "Nothing of this run was kept; start again with --encoder sentencepiece"
        )
