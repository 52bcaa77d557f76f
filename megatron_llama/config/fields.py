"""The settings as a flat table, read from the dataclasses: ``trainer.tp`` -> its type, default and limit."""

from __future__ import annotations

import copy
import functools
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from megatron_llama.config.limits import Limit
from megatron_llama.config.problems import Problem, nearest, shown, typed
from megatron_llama.config.settings import Config

# The one section whose keys are not ours: the arguments of whatever schedule class it names.
FREE_DICT = "optim.schedule"
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping",
}
EXAMPLES = {int: "1", float: "0.1", bool: "true", str: "name", list: "[...]", dict: "{...}"}
TOO_LARGE = 1e18
"""No setting is meant to be so large: it is a typing error, or infinity."""


@dataclass(frozen=True)
class Setting:
    """One setting."""

    name: str
    kind: type
    item_kind: type | None
    """Type of a list's items."""
    optional: bool
    default: Any
    limit: Limit | None

    @property
    def kind_in_words(self) -> str:
        """What a value must be."""
        of = f" of {KINDS[self.item_kind].split(' ', 1)[1]}s" if self.item_kind in (int, float) else ""
        return KINDS[self.kind] + of + (" (or null)" if self.optional else "")

    def advice(self, value: Any) -> str:
        """What to write instead of ``value``, which has the wrong type."""
        if self.kind is int and isinstance(value, float) and value.is_integer():
            return f"write {self.name}={int(value)}"
        if self.kind is list and not isinstance(value, (list, dict)):
            return f"write {self.name}=[{shown(value)}]"
        example = EXAMPLES[self.kind] if self.default in (None, [], {}) else shown(self.default)
        return f"write {self.kind_in_words}, such as {self.name}={example}"

    def has_type(self, value: Any) -> bool:
        """Whether ``value``, which is not null, is of the setting's type; a whole number is one with a fraction too."""
        return type(value) is self.kind or (self.kind is float and type(value) is int)

    def problem(self, value: Any) -> Problem | None:
        """What is wrong with ``value``, which has the right type; None where nothing is."""
        if self.limit is None or (value is None and self.optional):
            return None
        too_large = self.kind in (int, float) and abs(value) >= TOO_LARGE
        if self.limit.holds(value) and not too_large:
            return None
        example = self.limit.example if self.default in (None, []) else typed(self.default)
        example = nearest(str(value), self.limit.choices) or example
        rule = f"must be below {TOO_LARGE:.0g}" if too_large else self.limit.rule
        return Problem(self.name, value, rule, f"write {self.name}={example}")


@dataclass(frozen=True)
class Section:
    """A group of settings, one dataclass."""

    name: str
    kind: type
    optional: bool


@functools.cache
def settings_by_name() -> dict[str, Setting]:
    """Every setting under its full name."""
    return {part.name: part for part in _walk(Config, "") if isinstance(part, Setting)}


def settings_of(owner: type, section: str) -> dict[str, Setting]:
    """The settings of a dataclass that is no part of ``Config``, under ``section``."""
    return {part.name: part for part in _walk(owner, f"{section}.") if isinstance(part, Setting)}


@functools.cache
def sections() -> dict[str, Section]:
    """Every section (``trainer``, ``model.rope_scaling``) under its full name."""
    return {part.name: part for part in _walk(Config, "") if isinstance(part, Section)}


def check_limits(config: Config) -> list[Problem]:
    """The settings whose value is impossible whatever the others are."""
    found = [
        setting.problem(get(config, name))
        for name, setting in settings_by_name().items()
        if get(config, name.rpartition(".")[0]) is not None  # a section that is null has no values
    ]
    return [problem for problem in found if problem is not None]


def with_defaults_for(config: Config, problems: Iterable[Problem]) -> Config:
    """A copy in which the settings that ``problems`` name have their default value."""
    config = copy.deepcopy(config)
    for problem in problems:
        section, _, key = problem.field.rpartition(".")
        setattr(get(config, section), key, copy.deepcopy(settings_by_name()[problem.field].default))
    return config


def get(config: Config, name: str) -> Any:
    """The value of a setting or section by its full name, the whole config for ""; None inside a section that is
    null."""
    value: Any = config
    for key in name.split(".") if name else ():
        value = getattr(value, key) if value is not None else None
    return value


def _walk(owner: type, prefix: str) -> Iterator[Setting | Section]:
    hints = typing.get_type_hints(owner, include_extras=True)
    for field in fields(owner):
        name = prefix + field.name
        hint, limit, optional = hints[field.name], None, False
        if typing.get_origin(hint) is typing.Annotated:
            hint, limit = typing.get_args(hint)
        if isinstance(hint, types.UnionType):
            (hint,) = [member for member in typing.get_args(hint) if member is not type(None)]
            optional = True
        kind: type = typing.get_origin(hint) or hint
        if is_dataclass(kind):
            yield Section(name, kind, optional)
            yield from _walk(kind, f"{name}.")
        else:
            (item_kind, *_) = typing.get_args(hint) if kind is list else (None,)
            default = field.default if field.default_factory is MISSING else field.default_factory()
            yield Setting(name, kind, item_kind, optional, default, limit)
