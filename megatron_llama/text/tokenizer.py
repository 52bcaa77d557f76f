"""Tokenizers: sentencepiece models, and tokenizer.json files of Hugging Face folders.

Libraries are imported when a tokenizer is opened. The conversion of a sentencepiece model to a tokenizer.json for fast
encoders is here too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_llama.config.data_settings import NewTokens, token_ids
from megatron_llama.config.hub import download_hint
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import read_json, read_whole, sha256_file
from megatron_llama.system.missing_packages import pip_install

NO_TOKENS = NewTokens()
SETTINGS, FAST_JSON, SENTENCEPIECE_MODEL = "tokenizer_config.json", "tokenizer.json", "tokenizer.model"
TOKENIZER_FILES: tuple[str, ...] = (FAST_JSON, SENTENCEPIECE_MODEL, SETTINGS, "special_tokens_map.json")
TOKENIZER_FILES += ("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json")
"""Names of a tokenizer's files in a Hugging Face folder: data, no code."""


class TokenizerError(UserError):
    """A file or folder that can't be used as a tokenizer."""

    def __init__(self, path: Path, rule: str) -> None:
        super().__init__(f"{path} {rule}")
        self.rule = rule
        """The problem, without the path."""


@dataclass(frozen=True)
class Spans:
    """Tokens of a text, and the characters [start, end) of each."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


class TextTokenizer(ABC):
    """Interface for plain text: text to ids and back."""

    library: str
    """``sentencepiece``, ``huggingface`` or ``tiktoken``."""
    package: str
    """Python package that defines the ids."""
    path: Path
    """Model file or Hugging Face folder."""
    file: Path
    """File that determines the ids: ``path``, or tokenizer.json in it."""
    end: int | None
    """End-of-text id."""
    bos: int | None
    """Begin-of-text id."""
    adds_bos: bool
    """Whether prompts begin with ``bos``."""
    size: int
    """Vocabulary size: all ids are smaller."""
    new_tokens = NO_TOKENS
    """Tokens that ``file`` lacks."""

    @abstractmethod
    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text without BOS and control ids: the text "</s>" is encoded as characters."""

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of ids. sentencepiece and tiktoken ignore ``skip_special``."""

    @cached_property
    def sha256(self) -> str:
        """sha256 of ``file`` with ``new_tokens``, hexadecimal."""
        return tokenizer_sha256(self.file, self.new_tokens)


class Tokenizer(TextTokenizer):
    """Tokenizer that also encodes prompts and conversations."""

    control_tokens: list[str]
    """Control tokens, which must not occur in a turn's text."""
    added_tokens: list[str]
    """Control tokens and other added tokens, any of which may end an answer."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, encoded with the tokenizer's defaults but without an end."""

    @abstractmethod
    def spans(self, text: str, parse_special: bool) -> Spans:
        """Return a text's tokens without BOS. With ``parse_special``, names of control tokens become control ids."""

    def missing_ids(self, count: int) -> list[int]:
        """Return the ids below ``count`` that the tokenizer lacks: gaps, and the padding of a vocabulary."""
        return [*range(self.size, count)]

    @abstractmethod
    def control(self, name: str) -> int | None:
        """Return a control token's id; None if the tokenizer has no such token."""

    @abstractmethod
    def token_name(self, number: int) -> str:
        """Return the name of a control token's id, the inverse of ``control``."""


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model, run by sentencepiece. Text never becomes control ids."""

    library = package = "sentencepiece"

    def __init__(self, file: Path, *, adds_bos: bool = False, folder: Path | None = None, legacy: bool = False) -> None:
        """``folder``: Hugging Face folder of the model, which may have a chat template. Raises TokenizerError."""
        self.path, self.file, self._legacy = folder or file, file, legacy
        self._processor = read_sentencepiece(file)
        bos, end = self._processor.bos_id(), self._processor.eos_id()  # -1: no such token
        self.bos = bos if bos >= 0 else None
        self.end = end if end >= 0 else None
        self.size = self._processor.vocab_size()
        self.adds_bos = adds_bos and self.bos is not None
        # A chat template's text has names of control tokens; without a template no text becomes a control id.
        self.control_tokens = [] if folder is None else [*self._special]
        self.added_tokens = [*self.control_tokens]

    def encode_text(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode(self, text: str) -> list[int]:
        return ([self.bos] if self.adds_bos and self.bos is not None else []) + self.encode_text(text)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._processor.decode(list(ids))

    def spans(self, text: str, parse_special: bool) -> Spans:
        return self._parsed_spans(text) if parse_special else self._plain_spans(text)

    def _parsed_spans(self, text: str) -> Spans:
        """Encode the text between names of control tokens as transformers' LlamaTokenizer does. Without ``legacy``
        only the beginning of the whole text gets the space that sentencepiece prepends."""
        result, position = Spans([], [], []), 0
        names = sorted(self._special, key=len, reverse=True)
        for part in re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]:
            if part in self._special:
                encoded = Spans([self._special[part]], [0], [len(part)])
            else:
                encoded = self._plain_spans(part) if self._legacy or not position else self._continued_spans(part)
            result.ids.extend(encoded.ids)
            result.starts.extend(position + start for start in encoded.starts)
            result.ends.extend(position + end for end in encoded.ends)
            position += len(part)
        return result

    def _continued_spans(self, text: str) -> Spans:
        """Encode a text that follows a control token, without a prepended space.

        As transformers' LlamaTokenizer (legacy=False): encode it after the text "<unk>", then remove these ids.
        """
        anchor = "<unk>"
        before, both = self._plain_spans(anchor), self._plain_spans(anchor + text)
        count = len(before.ids)
        if both.ids[:count] != before.ids:  # the model joins the anchor and the text
            return self._plain_spans(text)
        starts, ends = ([place - len(anchor) for place in places[count:]] for places in (both.starts, both.ends))
        return Spans(both.ids[count:], starts, ends)

    def _plain_spans(self, text: str) -> Spans:
        if hasattr(self._processor, "encode_as_offset_mapping"):  # from 0.2.2 on
            mapping = self._processor.encode_as_offset_mapping(text)
            offsets = mapping["offsets"]
            return Spans(list(mapping["ids"]), [start for start, _ in offsets], [end for _, end in offsets])
        tokens = self._processor.encode(text, out_type="immutable_proto").pieces
        return Spans([t.id for t in tokens], [t.begin for t in tokens], [t.end for t in tokens])

    def control(self, name: str) -> int | None:
        return self._special.get(name)

    def token_name(self, number: int) -> str:
        return str(self._processor.id_to_piece(number))

    @cached_property
    def _special(self) -> dict[str, int]:
        return special_pieces(read_model(self.file))


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, or a folder that contains one, read by the package ``tokenizers``."""

    library, package = "huggingface", "tokenizers"

    def __init__(self, path: Path, new_tokens: NewTokens = NO_TOKENS) -> None:
        """Raises TokenizerError."""
        self.path, self.file, self.new_tokens = path, tokenizer_file(path), new_tokens
        self._tokenizer = read_tokenizer_json(self.file, new_tokens)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.control_tokens = [token.content for token in added if token.special]
        self.added_tokens = [token.content for token in added if token.content.strip()]
        self.end = self._find_end(self.file.parent)
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        with_special = self._run(self._tokenizer, "x", True).ids
        plain = self._run(self._tokenizer, "x", False).ids
        self.adds_bos = len(with_special) > len(plain) and with_special[1 : 1 + len(plain)] == plain
        self.bos = int(with_special[0]) if self.adds_bos else None
        text = with_special[self.adds_bos :]
        self._appended = len(text) - len(plain) if text[: len(plain)] == plain else 0  # e.g. the end-of-text id

    def encode_text(self, text: str) -> list[int]:
        return self._encode_plainly(text, False).ids

    def encode(self, text: str) -> list[int]:
        return self._run(self._tokenizer, text, True).ids[: -self._appended or None]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def spans(self, text: str, parse_special: bool) -> Spans:
        encoding = self._encode_plainly(text, parse_special)
        return Spans(list(encoding.ids), [start for start, _ in encoding.offsets], [end for _, end in encoding.offsets])

    def control(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)

    def token_name(self, number: int) -> str:
        return str(self._tokenizer.id_to_token(number))

    def missing_ids(self, count: int) -> list[int]:
        return sorted({*range(count)}.difference(self._tokenizer.get_vocab(with_added_tokens=True).values()))

    def _encode_plainly(self, text: str, parse_special: bool) -> Any:
        self._plain.encode_special_tokens = not parse_special
        return self._run(self._plain, text, False)

    def _run(self, tokenizer: Any, text: str, add_special_tokens: bool) -> Any:
        try:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises a bare Exception, e.g. if unk_token is not in its vocabulary
            raise TokenizerError(self.file, f"cannot encode a text: {error}") from None

    @cached_property
    def _plain(self) -> Any:
        """The tokenizer without its post-processor, which would trim spaces off the spans of tokens."""
        from tokenizers import pre_tokenizers, processors

        tokenizer = read_tokenizer_json(self.file, self.new_tokens)
        tokenizer.post_processor = processors.Sequence([])
        settings = read_settings(self.file.parent / SETTINGS) or {}
        is_legacy = settings.get("legacy") and "LlamaTokenizer" in str(settings.get("tokenizer_class"))
        if is_legacy and isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Metaspace):
            tokenizer.pre_tokenizer.prepend_scheme = "always"  # as in transformers, whose other classes ignore the flag
        return tokenizer

    def _find_end(self, folder: Path) -> int | None:
        """Return eos_token of tokenizer_config.json, else eos_token_id of generation_config.json or config.json."""
        token = (read_settings(folder / SETTINGS) or {}).get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and self._tokenizer.token_to_id(content) is not None:
            return int(self._tokenizer.token_to_id(content))
        for name in ("generation_config.json", "config.json"):
            with suppress(OSError, ValueError, LookupError, TypeError):
                end = read_json(folder / name)["eos_token_id"]
                return int(end[0] if isinstance(end, list) else end)
        return None


def open_tokenizer(path: Path, new_tokens: NewTokens = NO_TOKENS) -> Tokenizer:
    """Open the tokenizer in a file, or in a folder (tokenizer.json, else tokenizer.model), and add ``new_tokens``.

    A sentencepiece model adds BOS by ``add_bos_token`` of the tokenizer_config.json in its folder, true by default. A
    folder without that file (Llama's original release) adds BOS; a model file without it does not.

    Raises:
        TokenizerError: The tokenizer is missing or invalid, or cannot get the tokens.
    """
    file = tokenizer_file(path)
    if not file.is_file():
        missing = f"has neither {FAST_JSON} nor {SENTENCEPIECE_MODEL}" if path.is_dir() else "does not exist"
        raise TokenizerError(path, missing + download_hint(str(path)))
    if file.suffix == ".json" or new_tokens:
        return HuggingFaceTokenizer(path, new_tokens)
    settings = read_settings(file.parent / SETTINGS)
    adds_bos = path.is_dir() if settings is None else bool(settings.get("add_bos_token", True))
    legacy = bool((settings or {}).get("legacy", False))
    return SentencePieceTokenizer(file, adds_bos=adds_bos, folder=path if path.is_dir() else None, legacy=legacy)


def tokenizer_file(path: str | Path) -> Path:
    """Return the tokenizer's file: ``path``, or tokenizer.json, else tokenizer.model in the folder ``path``."""
    folder = Path(path)
    if not folder.is_dir():
        return folder
    return folder / (FAST_JSON if (folder / FAST_JSON).is_file() else SENTENCEPIECE_MODEL)


def vocabulary_size(path: str | Path, new_tokens: NewTokens = NO_TOKENS) -> int | None:
    """Return the highest id of a tokenizer plus 1; None if it cannot be read. Does not import ``tokenizers``."""
    file = tokenizer_file(path)
    try:
        if file.suffix != ".json":
            return int(read_sentencepiece(file).vocab_size())
        return max(token_ids(read_json(file)).values()) + 1 + len(new_tokens)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def read_sentencepiece(file: Path) -> Any:
    """Read a sentencepiece model as a SentencePieceProcessor. Raises TokenizerError."""
    import sentencepiece

    try:
        content = read_whole(file)
        if not content:  # sentencepiece would return a model with an empty vocabulary
            raise TokenizerError(file, "is not a sentencepiece model: the file is empty")
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except OSError as error:
        raise TokenizerError(file, f"cannot be read: {error.strerror}{download_hint(str(file))}") from None
    except (RuntimeError, UnicodeDecodeError):  # the message names sentencepiece's source, and may quote the file
        raise TokenizerError(file, "is not a sentencepiece model, or it is damaged") from None


def read_model(file: Path) -> Any:
    """Read a sentencepiece model as a ModelProto; importing protobuf takes 0.15 s. Raises TokenizerError."""
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]  # made at import

    try:
        return ModelProto.FromString(read_whole(file))
    except (OSError, DecodeError) as error:
        raise TokenizerError(file, f"is not a sentencepiece model: {error}") from None


def tokenizer_sha256(file: Path, new_tokens: NewTokens) -> str:
    """Return the sha256 of a tokenizer's file with new tokens, hexadecimal. Raises ValueError as ``NewTokens.grow``."""
    return hashlib.sha256(new_tokens.grow(file)).hexdigest() if new_tokens else sha256_file(file)


def read_tokenizer_json(file: Path, new_tokens: NewTokens = NO_TOKENS) -> Any:
    """Read a tokenizer.json as a ``tokenizers.Tokenizer`` without truncation and padding, and add ``new_tokens``.

    Raises TokenizerError.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive the fork of workers and ranks
    tokenizers = import_package("tokenizers", file)
    try:
        content = new_tokens.grow(file) if new_tokens else read_whole(file)
    except OSError as error:
        raise TokenizerError(file, f"can't be read: {error.strerror}") from None
    except ValueError as error:
        raise TokenizerError(file, f"cannot get new tokens: {error}") from None
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises a bare Exception
        raise TokenizerError(file, f"is not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def import_package(name: str, path: Path) -> Any:
    """Import an optional package. Raises TokenizerError if it is not installed."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise TokenizerError(path, f"needs the Python package {name}: {pip_install(name)}") from None


def read_settings(file: Path) -> dict[str, Any] | None:
    """Read tokenizer_config.json or another file in its folder; None if it is missing. Raises TokenizerError."""
    try:
        return dict(read_json(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise TokenizerError(file, f"can't be read: {error}") from None


# Conversion of a sentencepiece model to a tokenizer.json for gigatoken, if gigatoken supports the model's features.
# ``model`` is sentencepiece's protocol buffer ModelProto (sentencepiece_model.proto).

# ModelProto.SentencePiece.Type and TrainerSpec.ModelType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
BPE = 2
SPACE = "\u2581"


def fast_encoder_obstacle(model: Any) -> str | None:
    """Return why fast encoders do not support this model; None if they do."""
    if model.trainer_spec.model_type != BPE:
        return "the model is not BPE"
    if not model.trainer_spec.byte_fallback:
        return "the model has no byte fallback"
    normalizer = model.normalizer_spec
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        return "the model normalizes text"
    if model.trainer_spec.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        return "the model has a different handling of spaces"
    if any(entry.type == UNUSED for entry in model.pieces):
        return "the model has unused pieces"
    return None


def special_pieces(model: Any, kinds: tuple[int, ...] = (CONTROL, USER_DEFINED)) -> dict[str, int]:
    """Return the ids of control and user-defined pieces; sentencepiece matches user-defined ones first."""
    return {entry.piece: number for number, entry in enumerate(model.pieces) if entry.type in kinds}


def to_tokenizer_json(model: Any) -> str:
    """Return the model as a tokenizer.json for text without user-defined pieces.

    Unlike the usual conversion, the result has no added tokens, and merges exclude control pieces. So the text "</s>"
    never becomes id 2, as in sentencepiece.
    """
    normalizers: list[dict[str, Any]] = []
    if model.normalizer_spec.add_dummy_prefix:
        normalizers.append({"type": "Prepend", "prepend": SPACE})
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    unknown = next(entry.piece for entry in model.pieces if entry.type == UNKNOWN)
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
                "vocab": {entry.piece: index for index, entry in enumerate(model.pieces)},
                "merges": _merges(model),
            },
        }
    )


def _merges(model: Any) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, best score first, which is sentencepiece's merge order."""
    scores = {entry.piece: entry.score for entry in model.pieces if entry.type == NORMAL}
    ranked = sorted(
        (-score, -cut, text[:cut], text[cut:])
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    )
    return [(left, right) for _, _, left, right in ranked]
