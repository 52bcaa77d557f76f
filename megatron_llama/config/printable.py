"""Checks of all text settings: no control characters, no names that no file system has.

Recipes come from other people. A control character in one could change what a terminal shows of the plan; a null byte
or an overlong name is valid in YAML but not in a path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_llama.config.problems import CONTROL, Problem

LONGEST_NAME = 255
"""Bytes in a file's name, on every common file system."""
LONGEST_PATH = 4095
_NO_PATHS = re.compile(r"logging\.sample_prompts|data\.prepare|launch\.|allow_targets|optim\.")


def check_texts(config: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of all texts of a config, each with the name of its setting."""
    return [problem for name, text in _texts(config, "") if (problem := _problem(name, text)) is not None]


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield (setting, text) for each text; the name of a list's item is the list's."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, name)
    elif isinstance(value, str):
        yield name, value


def _problem(name: str, text: str) -> Problem | None:
    """Return the problem of a text, if any."""
    if control := CONTROL.search(text):
        rule = f"contains the control character {control.group()!r}"
        return Problem(name, text, rule, "remove the character")
    if _NO_PATHS.match(name):
        return None
    longest = max(len(part.encode()) for part in text.split("/"))
    if longest <= LONGEST_NAME and len(text.encode()) <= LONGEST_PATH:
        return None
    most = f"a file's name has at most {LONGEST_NAME} bytes, and a path {LONGEST_PATH:,}"
    return Problem(name, f"{text[:40]} ...", f"is longer than a path can be: {most}", "write a shorter one")
