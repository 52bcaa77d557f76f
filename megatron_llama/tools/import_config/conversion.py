"""Conversion of another program's settings by tables of their keys, with a record of each key.

A source's YAML table has three parts. ``settings`` has keys with one setting here. ``values`` has keys with supported
values; others are a different model or training. ``ignored`` has patterns of keys without effect here. Keys that depend
on each other are converted by the methods of a ``Conversion``. A key in no part is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

import yaml

from megatron_llama.config.hf_config import read_hf_config
from megatron_llama.config.problems import ConfigError, Problem, format_value
from megatron_llama.config.settings import ModelConfig
from megatron_llama.text.tokenizer import vocabulary_size

UNKNOWN, MOST_UNKNOWN = "unknown key", 20
"""Reason for a key in no table, and the number of such keys that are listed."""


class Kind(StrEnum):
    """Kind of conversion of a key."""

    TAKEN = "taken"
    RENAMED = "renamed"
    MEANINGLESS = "without meaning here"
    SAME_TRAINING = "not supported: the training is the same"
    UNSUPPORTED = "not supported: the training will differ"


@dataclass(frozen=True)
class KeyConversion:
    """Conversion of one key."""

    key: str
    value: Any
    kind: Kind
    setting: str = ""
    """Resulting setting, in command-line syntax."""
    why: str = ""


@dataclass(frozen=True)
class KeyTables:
    """Tables of a source's keys."""

    settings: Mapping[str, str]
    """{key: setting} of equal meaning and value. Null means the default, which is equal here."""
    values: Mapping[str, tuple[Sequence[Any], str]]
    """{key or section: (supported values, reason)}."""
    ignored: Sequence[tuple[Sequence[str], str]]
    """(patterns of keys, reason). The first match counts."""
    defaults: Mapping[str, Any]
    """Settings for keys without a value whose default differs from ours."""
    notes: Sequence[str]
    """Differences of each run."""

    def convert_unread(self, key: str, value: Any) -> KeyConversion:
        """Convert a key that no subject has read: by supported values, without effect here, or unknown."""
        if key in self.values:
            allowed, why = self.values[key]
            if value is None or value in allowed:
                off = value in (None, False)
                return KeyConversion(key, value, Kind.MEANINGLESS, why="off" if off else "always so here")
            return KeyConversion(key, value, Kind.UNSUPPORTED, why=why)
        section = next((item for item in self.values if key.startswith(f"{item}.")), None)
        if section is not None:
            kind = Kind.UNSUPPORTED if value else Kind.MEANINGLESS
            return KeyConversion(key, value, kind, why=self.values[section][1])
        for patterns, why in self.ignored:
            if any(fnmatchcase(key, pattern) for pattern in patterns):
                return KeyConversion(key, value, Kind.MEANINGLESS, why=why)
        if value in (None, False, [], {}):
            return KeyConversion(key, value, Kind.MEANINGLESS, why="off")
        return KeyConversion(key, value, Kind.UNSUPPORTED, why=UNKNOWN)


def load_tables(name: str, prefix: str = "") -> KeyTables:
    """Return the tables in NAME.yaml. ``prefix`` precedes each key."""
    content = yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))
    return KeyTables(
        {prefix + key: setting for keys, setting in content["settings"].items() for key in keys.split()},
        {prefix + key: (allowed, why) for keys, allowed, why in content["values"] for key in keys.split()},
        [([prefix + pattern for pattern in patterns.split()], why) for patterns, why in content["ignored"]],
        content.get("defaults", {}),
        content.get("notes", ()),
    )


def find_open_reference(value: Any) -> str:
    """Return the first unresolved interpolation in a value, or an empty string."""
    if isinstance(value, list | Mapping):
        inner = value.values() if isinstance(value, Mapping) else value
        return next(filter(None, map(find_open_reference, inner)), "")
    return value if isinstance(value, str) and "${" in value else ""


def is_count(value: Any) -> bool:
    """Return whether a value is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


class Conversion:
    """Conversion of one source. Subclasses have its tables, and a method for each subject."""

    tables: KeyTables
    relevant: tuple[str, ...] = ("data.data_prefix", "model.ffn_hidden_size")
    """Keys in no table that would change the written file."""
    required: tuple[str, ...] = ("trainer.steps", "trainer.global_batch_size", "trainer.micro_batch_size")
    add = "{key}={value} after the file"
    """How the command line of this program completes the source."""
    reference = "refers to {first} of another file; write that value after the file"
    unset = "refers to another file"
    """Short form of ``reference``."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.source, self.name = values, name
        self.settings: dict[str, Any] = {"model.name": name}
        """{setting: value} of this project."""
        self.schedule = "cosine"
        """File of conf/optim/ with the schedule."""
        self.assumed: list[str] = []
        """Assumed values that the file does not define."""
        self.world_size: int | None = None
        """Number of devices in the file, or None."""
        self.conversions: list[KeyConversion] = []
        """All keys, after ``run``."""
        # Values that refer to another file, as in configs of the NeMo launcher, count as missing.
        self.values = {key: None if find_open_reference(value) else value for key, value in values.items()}
        self.by_key: dict[str, KeyConversion] = {}
        self.problems: list[Problem] = []
        self.latest = ""
        """The key that was read last."""

    def run(self) -> Self:
        """Convert all subjects, then the keys that no subject has read. Raises ConfigError with all problems."""
        try:
            self.subjects()
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:  # such as a list for a number
            rule = f"it, or a value that belongs to it, has the wrong type or size: {str(error)[:80]}"
            self.problems.append(Problem(self.latest, self.values.get(self.latest), rule, "write another value"))
        if self.problems:
            raise ConfigError(self.problems)
        # Write all settings of the model, so that none of the default preset remains.
        for name, value in asdict(ModelConfig()).items():
            self.settings.setdefault(f"model.{name}", value)
        listed = [self._convert_key(key, value) for key, value in self.source.items()]
        self.conversions = listed + [self.by_key[key] for key in self.by_key if key not in self.source]
        return self

    @property
    def unsupported(self) -> list[KeyConversion]:
        """Keys that are not supported and change the result."""
        return [item for item in self.conversions if item.kind == Kind.UNSUPPORTED]

    def subjects(self) -> None:
        """Convert all subjects."""
        raise NotImplementedError

    def _convert_key(self, key: str, value: Any) -> KeyConversion:
        """Return the conversion of a key. A relevant value in another file is reported as missing."""
        conversion = self.by_key.get(key) or self.tables.convert_unread(key, value)
        relevant = key in self.tables.settings or key in self.tables.values or key in self.relevant
        if self.values[key] is None and value is not None and (relevant or conversion.kind != Kind.MEANINGLESS):
            first = find_open_reference(value)
            name = f"model.{key}" if key.startswith("data.") else key
            rule = f"{name} is omitted: it {self.reference.format(first=first)}"
            self.assumed.append(f"{rule}, such as data_dir=PATH" if "${data_dir}" in first else rule)
            return KeyConversion(key, value, Kind.MEANINGLESS, why=self.unset)
        return replace(conversion, value=value)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; ``default`` if it is null or missing."""
        value, self.latest = self.values.get(key), key
        return default if value is None else value

    def is_on(self, key: str) -> bool:
        """Return whether a switch is on; NxDT writes some as '0' and '1'."""
        return str(self.values.get(key, False)).lower() in ("true", "1")

    def convert_key(self, keys: str, setting: str, value: Any, why: str = "") -> None:
        """Convert a key, or several with spaces between them, to one setting."""
        self.settings[setting] = value
        for key in keys.split():
            same = key.rpartition(".")[2].lstrip("-").replace("-", "_") == setting.rpartition(".")[2]
            self.record(key, Kind.TAKEN if same else Kind.RENAMED, f"{setting}={format_value(value)}", why)

    def record(self, keys: str, kind: Kind, setting: str = "", why: str = "") -> None:
        """Record the conversion of keys of the file, with spaces between them; the first record of a key counts."""
        for key in keys.split():
            if key in self.values:
                self.by_key.setdefault(key, KeyConversion(key, self.values[key], kind, setting, why))

    def record_defaults(self, value: Any, *keys: str) -> None:
        """Record keys that the source omits, and whose default is a different model or training."""
        for key in keys:
            if self.get(key) is None:
                why = f"its default; {self.tables.values[key][1]}"
                self.by_key.setdefault(key, KeyConversion(key, value, Kind.UNSUPPORTED, why=why))

    def dataset(self, key: str, prefixes: Sequence[Any], *, is_missing: bool = True) -> None:
        """Convert the prefixes of a dataset; without them the run does not use the default dataset."""
        self.settings |= {"data.prefixes": prefixes, "data.prepare": None, "data.tokenizer": None}
        if prefixes:
            self.settings["data.name"] = self.name
            self.convert_key(key, "data.prefixes", prefixes)
        elif is_missing:
            self.assumed.append("no dataset is given: write data.prefixes=[PATH], or data=mock for random tokens")

    def mask_documents(self, *switches: str) -> None:
        """Convert the switches that end attention and positions at documents, and together mask them."""
        if all(map(self.is_on, switches)):
            self.convert_key(" ".join(switches), "data.document_mask", True)
            self.settings.setdefault("data.eod_mask_loss", False)

    def require(self, key: str, example: str = "N") -> None:
        """Record a missing key as a problem, unless the key has one."""
        instead = f"write {self.add.format(key=key, value=example)}"
        if all(problem.field != key for problem in self.problems):
            self.problems.append(Problem(key, None, "is not given", instead))

    def one_to_one(self) -> None:
        """Convert the keys that have one setting each, and require the settings without a default."""
        for key, setting in self.tables.settings.items():
            if self.values.get(key) is not None and key not in self.by_key:
                self.convert_key(key, setting, self.values[key])
        for setting in self.required:
            if setting not in self.settings:
                self.require(next(key for key, item in self.tables.settings.items() if item == setting))


# Rows of the embedding, from the tokenizer or from its name.
LLAMA2_VOCAB_SIZE = 32000
# Words in the name or type of a tokenizer, and rows of the embedding in models with it.
ROWS_BY_NAME = (
    ("llama3", 128256),
    ("llama2", LLAMA2_VOCAB_SIZE),
    ("gpt2bpe", 50257),
    ("mistral", LLAMA2_VOCAB_SIZE),
    ("mixtral", LLAMA2_VOCAB_SIZE),
)


def embedding_rows(paths: Sequence[str]) -> tuple[int, str]:
    """Return (rows, "") if one of the tokenizers is on this machine, else (rows, basis of the assumption)."""
    for path in paths:
        try:
            size = read_hf_config(path).get("vocab_size")  # a Hugging Face folder may have more rows than ids
        except ValueError:
            size = vocabulary_size(path)
        if isinstance(size, int):
            return size, ""
    normalized = "".join(paths).lower().replace("-", "").replace("_", "")
    for word, size in ROWS_BY_NAME:
        if word in normalized:
            return size, f"from the name of the tokenizer ({word})"
    return LLAMA2_VOCAB_SIZE, "as in Llama 1 and 2"
