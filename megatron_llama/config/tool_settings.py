"""Settings of single programs beside train.py (``cluster``, ``tune``): dataclasses that are no part of ``Config``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeVar

import yaml

from megatron_llama.config.fields import settings_of
from megatron_llama.config.problems import Problem, nearest

Owner = TypeVar("Owner")


def load_section(owner: type[Owner], section: str, overrides: Sequence[str]) -> tuple[Owner, list[str], list[Problem]]:
    """The ``section`` of a command line as an ``owner``, a dataclass; the overrides that are not of that section, and
    what is wrong with those that are."""
    settings = settings_of(owner, section)
    values: dict[str, Any] = {}
    rest, problems = [], []
    for text in overrides:
        name, equals, written = text.partition("=")
        if not name.startswith(section + ".") or not equals:
            rest.append(text)
            continue
        setting = settings.get(name)
        if setting is None:
            guess = nearest(name, list(settings))
            instead = f"write {guess}={written}" if guess else f"write one of {', '.join(settings)}"
            problems.append(Problem(name, written, "there is no setting of this name", instead))
            continue
        value = written if setting.kind is str and written != "null" else _read(written)
        if setting.kind is float and isinstance(value, str):  # YAML reads 2e12 as text
            with contextlib.suppress(ValueError):
                value = float(value)
        if not (setting.has_type(value) or (value is None and setting.optional)):
            problems.append(Problem(name, value, f"must be {setting.kind_in_words}", setting.advice(value)))
        elif problem := setting.problem(value):
            problems.append(problem)
        else:
            values[name.removeprefix(section + ".")] = setting.kind(value) if value is not None else None
    return owner(**values), rest, problems


def _read(written: str) -> Any:
    """What YAML reads; the text itself where it is none."""
    try:
        return yaml.safe_load(written)
    except yaml.YAMLError:
        return written
