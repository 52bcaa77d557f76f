"""Text and ids: a sentencepiece model, or the tokenizer of a Hugging Face folder. Libraries are imported when used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_llama.checkpoint.stored_tensors import CorruptFile, read_json
from megatron_llama.config import ConfigError, Problem
from megatron_llama.inference.load import Source

ARGUMENT = "--tokenizer"
_CONFIG, _FAST, _PIECES = "tokenizer_config.json", "tokenizer.json", "tokenizer.model"


class Text(ABC):
    """A tokenizer, as far as generation and evaluation need one."""

    path: Path

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text that a model is to continue: with what stands before every text (BOS), if anything."""

    @property
    @abstractmethod
    def adds_bos(self) -> bool:
        """Whether ``encode`` puts BOS before a text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Ids are below this."""

    @property
    @abstractmethod
    def end(self) -> int | None:
        """The id that ends a text."""


class Pieces(Text):
    """A sentencepiece model, exact; BOS only where the model's makers put it before every text."""

    def __init__(self, path: Path, bos: bool = False) -> None:
        self.path, self.bos = path, bos
        try:
            self._end = self._pieces.eos_id()
        except (OSError, RuntimeError) as error:
            raise ConfigError([_unusable(path, "is no sentencepiece model")]) from error

    @cached_property
    def _pieces(self) -> Any:
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_file=str(self.path))

    def encode(self, text: str) -> list[int]:
        bos = [self._pieces.bos_id()] if self.adds_bos else []
        return bos + self._pieces.encode(text)

    @property
    def adds_bos(self) -> bool:
        return self.bos and self._pieces.bos_id() >= 0

    def decode(self, ids: Sequence[int]) -> str:
        return self._pieces.decode(list(ids))

    @property
    def size(self) -> int:
        return self._pieces.vocab_size()

    @property
    def end(self) -> int | None:
        return self._end if self._end >= 0 else None


class HuggingFace(Text):
    """A folder with tokenizer.json, read by the library ``tokenizers``."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        try:
            self._settings = read_json(folder / _CONFIG) if (folder / _CONFIG).exists() else {}
            self._end = self._id_of(self._settings.get("eos_token"))
        except ImportError as error:
            raise ConfigError([_missing("tokenizers", folder)]) from error
        except ConfigError:
            raise
        except Exception as error:  # CorruptFile, or the library's own: it raises plain Exceptions
            raise ConfigError([_unusable(folder, f"its {_FAST} can't be read ({error})")]) from error

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.path / _FAST))

    def _id_of(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        return None if text is None else self._tokenizer.token_to_id(text)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    @property
    def adds_bos(self) -> bool:
        return self.encode("x")[0] != self._tokenizer.encode("x", add_special_tokens=False).ids[0]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    @property
    def size(self) -> int:
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def end(self) -> int | None:
        return self._end


def open_text(source: Source, given: Path | None = None) -> Text:
    """The tokenizer that is given, or else the one that belongs to the model; raises ConfigError where none fits."""
    path = given or source.tokenizer
    if path is None:
        rule = "the model's tokenizer is not known, or no longer where it was when it was trained"
        instead = "write --tokenizer tokenizer.model, or the folder of a Hugging Face tokenizer"
        raise ConfigError([Problem(ARGUMENT, None, rule, instead)])
    text = _opened(path)
    if text.size > source.model.vocab_size:
        rule = f"has {text.size} ids, and the model's vocabulary only {source.model.vocab_size}"
        raise ConfigError([Problem(ARGUMENT, str(path), rule, "name the tokenizer that the model was trained with")])
    return text


def stop_ids(source: Source, text: Text) -> frozenset[int]:
    """The ids that end an answer."""
    told = source.token_ids.get("eos_token_id")
    ids = set(told) if isinstance(told, list) else {told}
    return frozenset(i for i in (*ids, text.end) if isinstance(i, int))


def _opened(path: Path) -> Text:
    if path.is_dir():
        if (path / _FAST).is_file():
            return HuggingFace(path)
        if (path / _PIECES).is_file():
            return Pieces(path / _PIECES, bos=_adds_bos(path))
        raise ConfigError([_unusable(path, f"there is neither {_FAST} nor {_PIECES} in it")])
    if path.name == _FAST and path.is_file():
        return HuggingFace(path.parent)
    if path.is_file():
        return Pieces(path)
    raise ConfigError([_unusable(path, "there is no such file or folder")])


def _adds_bos(folder: Path) -> bool:
    """Whether BOS goes before every text; Llama's tokenizers do that unless told otherwise."""
    try:
        return bool(read_json(folder / _CONFIG).get("add_bos_token", True))
    except (CorruptFile, AttributeError):
        return True


def _unusable(path: Path, rule: str) -> Problem:
    return Problem(ARGUMENT, str(path), rule, "write --tokenizer tokenizer.model, or a Hugging Face tokenizer's folder")


def _missing(package: str, path: Path) -> Problem:
    return Problem(ARGUMENT, str(path), f"needs the package {package}", f"pip install {package}")
