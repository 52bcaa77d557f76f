"""Opens tokenizers: a sentencepiece model, or the tokenizer.json of a Hugging Face folder.

Training, generation, evaluation, export and data preparation all open theirs here. Libraries are imported when a
tokenizer is opened. A sentencepiece model becomes the tokenizer.json of fast encoders here.
"""
from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_llama.config.hf_config import download_hint
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import read_json, read_whole, sha256_file

SETTINGS, FAST_JSON, PIECES = "tokenizer_config.json", "tokenizer.json", "tokenizer.model"


class TokenizerError(UserError):
    """A file or folder that can't be used as a tokenizer."""

    def __init__(self, path: Path, rule: str) -> None:
        super().__init__(f"{path} {rule}")
        self.rule = rule
        """What is wrong, without the path."""


@dataclass(frozen=True)
class Spans:
    """The tokens of a text, and the characters [start, end) of each."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


class TextTokenizer(ABC):
    """Text to ids and back: what the preparation of plain text needs."""

    library: str
    """``sentencepiece``, ``huggingface`` or ``tiktoken``."""
    package: str
    """The Python package that defines the ids."""
    path: Path
    """A model's file, or a Hugging Face folder."""
    file: Path
    """The file that decides the ids: ``path``, or tokenizer.json in it."""
    end: int | None
    """The id that ends a text."""
    size: int
    """All ids are below this."""

    @abstractmethod
    def encode_text(self, text: str) -> list[int]:
        """Ids of a text without BOS. None is a control id: the text "</s>" is encoded as its characters."""

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ids. sentencepiece and tiktoken have one way to write control tokens."""

    @cached_property
    def sha256(self) -> str:
        """Of ``file``."""
        return sha256_file(self.file)


class Tokenizer(TextTokenizer):
    """A tokenizer that encodes prompts and conversations too."""

    bos: int | None
    adds_bos: bool
    """Whether its makers put ``bos`` before every text, and ``encode`` does."""
    control_tokens: list[str]
    """Names of the control tokens that must not occur in a turn's text."""
    added_tokens: list[str]
    """These and all other tokens that were added to the vocabulary: an answer may end with any of them."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text that a model is to continue, as the makers of the tokenizer encode it."""

    @abstractmethod
    def spans(self, text: str, parse_special: bool) -> Spans:
        """A text's tokens, without BOS. With ``parse_special`` the names of control tokens in it become these."""

    @abstractmethod
    def control(self, name: str) -> int | None:
        """A control token's id; None where the tokenizer has none of that name."""


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model, run by sentencepiece itself, which defines the ids. It never makes control ids of text."""

    library = package = "sentencepiece"

    def __init__(self, file: Path, *, adds_bos: bool = False) -> None:
        """Raises TokenizerError."""
        self.path = self.file = file
        self._processor = read_sentencepiece(file)
        bos, end = self._processor.bos_id(), self._processor.eos_id()  # -1: there is none
        self.bos = bos if bos >= 0 else None
        self.end = end if end >= 0 else None
        self.size = self._processor.vocab_size()
        self.adds_bos = adds_bos and self.bos is not None
        self.control_tokens, self.added_tokens = [], []

    def encode_text(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode(self, text: str) -> list[int]:
        return ([self.bos] if self.adds_bos and self.bos is not None else []) + self.encode_text(text)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._processor.decode(list(ids))

    def spans(self, text: str, parse_special: bool) -> Spans:
        if hasattr(self._processor, "encode_as_offset_mapping"):  # from 0.2.2 on
            mapping = self._processor.encode_as_offset_mapping(text)
            offsets = mapping["offsets"]
            return Spans(list(mapping["ids"]), [start for start, _ in offsets], [end for _, end in offsets])
        found = self._processor.encode(text, out_type="immutable_proto").pieces
        return Spans([p.id for p in found], [p.begin for p in found], [p.end for p in found])

    def control(self, name: str) -> int | None:
        return self._special.get(name)

    @cached_property
    def _special(self) -> dict[str, int]:
        return special_pieces(read_model(self.file))


class HuggingFaceTokenizer(Tokenizer):
    """A folder with tokenizer.json, or that file, read by the package ``tokenizers``."""

    library, package = "huggingface", "tokenizers"

    def __init__(self, path: Path) -> None:
        """Raises TokenizerError."""
        self.path, self.file = path, path / FAST_JSON if path.is_dir() else path
        self._tokenizer = read_tokenizer_json(self.file)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.control_tokens = [token.content for token in added if token.special]
        self.added_tokens = [token.content for token in added if token.content.strip()]
        self.end = self._find_end(self.file.parent)
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        with_special = self._run(self._tokenizer, "x", True).ids
        plain = self._run(self._tokenizer, "x", False).ids
        self.adds_bos = len(with_special) > len(plain) and with_special[1 : 1 + len(plain)] == plain
        self.bos = int(with_special[0]) if self.adds_bos else None

    def encode_text(self, text: str) -> list[int]:
        return self._encode_plainly(text, False).ids

    def encode(self, text: str) -> list[int]:
        return self._run(self._tokenizer, text, True).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def spans(self, text: str, parse_special: bool) -> Spans:
        found = self._encode_plainly(text, parse_special)
        return Spans(list(found.ids), [start for start, _ in found.offsets], [end for _, end in found.offsets])

    def control(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)

    def _encode_plainly(self, text: str, parse_special: bool) -> Any:
        self._plain.encode_special_tokens = not parse_special
        return self._run(self._plain, text, False)

    def _run(self, tokenizer: Any, text: str, add_special_tokens: bool) -> Any:
        try:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises a bare Exception, as where unk_token is not in its vocabulary
            raise TokenizerError(self.file, f"can't encode a text: {error}") from None

    @cached_property
    def _plain(self) -> Any:
        """Without the post-processor. It would trim spaces off the spans, which hides that a token crosses a border."""
        from tokenizers import processors

        tokenizer = read_tokenizer_json(self.file)
        tokenizer.post_processor = processors.Sequence([])
        return tokenizer

    def _find_end(self, folder: Path) -> int | None:
        """eos_token in tokenizer_config.json, else eos_token_id in generation_config.json or config.json."""
        token = (read_settings(folder / SETTINGS) or {}).get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and self._tokenizer.token_to_id(content) is not None:
            return int(self._tokenizer.token_to_id(content))
        for name in ("generation_config.json", "config.json"):
            try:
                end = read_json(folder / name)["eos_token_id"]
                return int(end[0] if isinstance(end, list) else end)
            except (OSError, ValueError, LookupError, TypeError):
                continue
        return None


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a file, or in a folder (tokenizer.json, else tokenizer.model).

    Whether BOS goes before every text of a sentencepiece model is what tokenizer_config.json beside it says by
    ``add_bos_token``, which Llama's tokenizers turn on unless it is there. A folder without that file is Llama's own
    release, which adds BOS; a model named by its file does not. Raises TokenizerError.
    """
    file = tokenizer_file(path)
    if not file.is_file():
        missing = f"has neither {FAST_JSON} nor {PIECES}" if path.is_dir() else "is no such file or folder"
        raise TokenizerError(path, missing + download_hint(str(path)))
    if file.suffix == ".json":
        return HuggingFaceTokenizer(path)
    settings = read_settings(file.parent / SETTINGS)
    adds_bos = path.is_dir() if settings is None else bool(settings.get("add_bos_token", True))
    return SentencePieceTokenizer(file, adds_bos=adds_bos)


def tokenizer_file(path: str | Path) -> Path:
    """The file that is the tokenizer: ``path`` itself, or in a folder tokenizer.json, else tokenizer.model."""
    folder = Path(path)
    if not folder.is_dir():
        return folder
    return folder / (FAST_JSON if (folder / FAST_JSON).is_file() else PIECES)


def vocabulary_size(path: str | Path) -> int | None:
    """The highest id of a tokenizer, plus 1; None where there is none or it can't be read. Needs no ``tokenizers``."""
    file = tokenizer_file(path)
    try:
        if file.suffix != ".json":
            return int(read_sentencepiece(file).vocab_size())
        content = read_json(file)
        vocabulary = content["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return max([*ids, *(token["id"] for token in content.get("added_tokens") or [])]) + 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def read_sentencepiece(file: Path) -> Any:
    """A sentencepiece model as a SentencePieceProcessor. Raises TokenizerError."""
    import sentencepiece

    try:
        content = read_whole(file)
        if not content:  # sentencepiece takes it for a model without pieces
            raise TokenizerError(file, "is not a sentencepiece model: the file is empty")
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except OSError as error:
        raise TokenizerError(file, f"can't be read: {error.strerror}{download_hint(str(file))}") from None
    except RuntimeError as error:
        raise TokenizerError(file, f"is not a sentencepiece model: {str(error).splitlines()[-1]}") from None
    except UnicodeDecodeError:  # of sentencepiece's own message, which quotes the file
        raise TokenizerError(file, "is not a sentencepiece model: it is damaged") from None


def read_model(file: Path) -> Any:
    """A sentencepiece model as a ModelProto; protobuf takes 0.15 s to import. Raises TokenizerError."""
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]  # made at import

    try:
        return ModelProto.FromString(read_whole(file))
    except (OSError, DecodeError) as error:
        raise TokenizerError(file, f"is not a sentencepiece model: {error}") from None


def read_tokenizer_json(file: Path) -> Any:
    """A tokenizer.json as a ``tokenizers.Tokenizer`` that neither truncates nor pads. Raises TokenizerError."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads don't survive the fork of workers and ranks
    tokenizers = import_package("tokenizers", file)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(read_whole(file).decode())
    except OSError as error:
        raise TokenizerError(file, f"can't be read: {error.strerror}") from None
    except Exception as error:  # the library raises a bare Exception
        raise TokenizerError(file, f"is not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def import_package(name: str, path: Path) -> Any:
    """An optional package, imported. Raises TokenizerError where it is not installed."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise TokenizerError(path, f"needs the Python package {name}: pip install {name}") from None


def read_settings(file: Path) -> dict[str, Any] | None:
    """tokenizer_config.json or a file beside it; None where there is none. Raises TokenizerError."""
    try:
        return dict(read_json(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise TokenizerError(file, f"can't be read: {error}") from None


# A sentencepiece model as the tokenizer.json that gigatoken reads, where gigatoken knows all that the model uses.
# ``model`` is sentencepiece's own protocol buffer, ModelProto (sentencepiece_model.proto).

# ModelProto.SentencePiece.Type and TrainerSpec.ModelType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
BPE = 2
SPACE = "\u2581"


def fast_encoder_obstacle(model: Any) -> str | None:
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
