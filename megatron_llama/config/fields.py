"""The settings as a flat table: ``trainer.tp`` -> its type and default, read from the dataclasses."""

from __future__ import annotations

import functools
import types
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from megatron_llama.config.problems import shown
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


@dataclass(frozen=True)
class Setting:
    """One setting: where it stands, what it may be, and what it is when nothing is said."""

    name: str
    kind: type
    item_kind: type | None
    optional: bool
    default: Any

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


@dataclass(frozen=True)
class Section:
    """A group of settings, one dataclass."""

    name: str
    kind: type
    optional: bool


@functools.cache
def settings_by_name() -> dict[str, Setting]:
    """Every setting under its full name."""
    return {setting.name: setting for setting in _walk(Config, "")}


@functools.cache
def sections() -> dict[str, Section]:
    """Every section (``trainer``, ``model.rope_scaling``) under its full name."""
    return {section.name: section for section in _sections(Config, "")}


def parts(hint: Any) -> tuple[type, type | None, bool]:
    """A field's type hint as (type, type of a list's items, may it be None)."""
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        assert len(members) == 1, f"settings have one type, or that and None; not {hint}"
        hint, optional = members[0], True
    arguments = typing.get_args(hint)
    item_type = arguments[0] if typing.get_origin(hint) is list and isinstance(arguments[0], type) else None
    return typing.get_origin(hint) or hint, item_type, optional


def _walk(owner: type, prefix: str) -> typing.Iterator[Setting]:
    hints = typing.get_type_hints(owner)
    for field in fields(owner):
        kind, item_type, optional = parts(hints[field.name])
        if is_dataclass(kind):
            yield from _walk(kind, f"{prefix}{field.name}.")
        else:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            yield Setting(prefix + field.name, kind, item_type, optional, default)


def _sections(owner: type, prefix: str) -> typing.Iterator[Section]:
    hints = typing.get_type_hints(owner)
    for field in fields(owner):
        kind, _, optional = parts(hints[field.name])
        if is_dataclass(kind):
            yield Section(prefix + field.name, kind, optional)
            yield from _sections(kind, f"{prefix}{field.name}.")
