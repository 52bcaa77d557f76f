"""Opens tokenizers: a sentencepiece model, or the tokenizer.json of a Hugging Face folder.

Training, generation, evaluation, export and data preparation all open theirs here. Libraries are imported when a
tokenizer is opened.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_llama.system.errors import UserError

SETTINGS, FAST_JSON, PIECES = "tokenizer_config.json", "tokenizer.json", "tokenizer.model"


class TokenizerError(UserError):
    """A file or folder that can't be used as a tokenizer."""

    def __init__(self, path: Path, rule: str) -> None:
        super().__init__(f"{path} {rule}")
        self.rule = rule
        """What is wrong, without the path."""


class Tokenizer(ABC):
    """Text to ids and back, as the makers of the tokenizer do it."""

    path: Path
    """A sentencepiece model's file, or a Hugging Face folder."""
    adds_bos: bool
    """Whether ``encode`` puts BOS before a text."""
    end: int | None
    """The id that ends a text."""
    size: int
    """All ids are below this."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text that a model is to continue, BOS included where the tokenizer adds it."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model, run by sentencepiece itself, which defines the ids."""

    def __init__(self, file: Path, *, adds_bos: bool = False) -> None:
        """``adds_bos`` is for a model without tokenizer_config.json beside it. Raises TokenizerError."""
        self.path = file
        self._processor = read_sentencepiece(file)
        self._bos = self._processor.bos_id()
        end = self._processor.eos_id()
        self.end = end if end >= 0 else None
        self.size = self._processor.vocab_size()
        self.adds_bos = self._bos >= 0 and sentencepiece_adds_bos(file.parent, adds_bos)

    def encode(self, text: str) -> list[int]:
        return ([self._bos] if self.adds_bos else []) + self._processor.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(ids))


class HuggingFaceTokenizer(Tokenizer):
    """A folder with tokenizer.json, read by the package ``tokenizers``."""

    def __init__(self, folder: Path) -> None:
        """Raises TokenizerError."""
        self.path = folder
        self._tokenizer = read_tokenizer_json(folder / FAST_JSON)
        self.end = huggingface_end(folder, self._tokenizer)
        self.size = huggingface_size(self._tokenizer)
        self.adds_bos = huggingface_bos(self._tokenizer) is not None

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a file, or in a folder (tokenizer.json, else tokenizer.model). Raises TokenizerError."""
    file = tokenizer_file(path)
    if not file.is_file():
        missing = f"has neither {FAST_JSON} nor {PIECES}" if path.is_dir() else "is no such file or folder"
        raise TokenizerError(path, missing)
    if file.name == FAST_JSON:
        return HuggingFaceTokenizer(file.parent)
    return SentencePieceTokenizer(file, adds_bos=path.is_dir())  # a folder without settings is Llama's own release


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
        content = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return max([*ids, *(token["id"] for token in content.get("added_tokens") or [])]) + 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def read_sentencepiece(file: Path) -> Any:
    """A sentencepiece model as a SentencePieceProcessor. Raises TokenizerError."""
    import sentencepiece

    try:
        content = file.read_bytes()
        if not content:  # sentencepiece takes it for a model without pieces
            raise TokenizerError(file, "is not a sentencepiece model: the file is empty")
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except OSError as error:
        raise TokenizerError(file, f"can't be read: {error.strerror}") from None
    except RuntimeError as error:
        raise TokenizerError(file, f"is not a sentencepiece model: {str(error).splitlines()[-1]}") from None


def read_tokenizer_json(file: Path) -> Any:
    """A tokenizer.json as a ``tokenizers.Tokenizer`` that neither truncates nor pads. Raises TokenizerError."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads don't survive the fork of workers and ranks
    tokenizers = need_package("tokenizers", file)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TokenizerError(file, f"can't be read: {error.strerror}") from None
    except Exception as error:  # the library raises a bare Exception
        raise TokenizerError(file, f"is not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def need_package(name: str, path: Path) -> Any:
    """An optional package, imported. Raises TokenizerError where it is not installed."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise TokenizerError(path, f"needs the Python package {name}: pip install {name}") from None


def sentencepiece_adds_bos(folder: Path, default: bool) -> bool:
    """Whether BOS goes before every text of the sentencepiece model in ``folder``.

    tokenizer_config.json decides, by ``add_bos_token``, which Llama's tokenizers turn on unless it is there;
    ``default`` is for a model without that file. Raises TokenizerError.
    """
    settings = _read_settings(folder)
    return default if settings is None else bool(settings.get("add_bos_token", True))


def huggingface_bos(tokenizer: Any) -> int | None:
    """The id that a ``tokenizers.Tokenizer`` puts before every text."""
    with_special = tokenizer.encode("x", add_special_tokens=True).ids
    plain = tokenizer.encode("x", add_special_tokens=False).ids
    begins = len(with_special) > len(plain) and with_special[1 : 1 + len(plain)] == plain
    return int(with_special[0]) if begins else None


def huggingface_size(tokenizer: Any) -> int:
    """The highest id of a ``tokenizers.Tokenizer``, plus 1."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def huggingface_end(folder: Path, tokenizer: Any) -> int | None:
    """The end-of-text id that a folder names: eos_token, else generation_config.json's or config.json's eos_token_id.

    Raises TokenizerError where tokenizer_config.json can't be read.
    """
    token = (_read_settings(folder) or {}).get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if isinstance(content, str) and tokenizer.token_to_id(content) is not None:
        return int(tokenizer.token_to_id(content))
    for name in ("generation_config.json", "config.json"):
        try:
            end = json.loads((folder / name).read_text(encoding="utf-8"))["eos_token_id"]
            return int(end[0] if isinstance(end, list) else end)
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return None


def _read_settings(folder: Path) -> dict[str, Any] | None:
    """tokenizer_config.json, or None where there is none."""
    file = folder / SETTINGS
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise TokenizerError(file, f"can't be read: {error}") from None
