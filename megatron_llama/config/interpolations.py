"""Bounds on ``${...}``: a few short lines that refer to each other twice can stand for gigabytes, or never end.

What a value stands for is counted before anything is resolved. That is possible because a reference is a setting's name
or ``oc.env:VARIABLE``; OmegaConf's other forms (names made of references, functions) are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from megatron_llama.config.problems import Problem

MOST_CHARACTERS = 1 << 22
"""Of all values together, written out; a value that is no text counts as one."""
MOST_STEPS = 8
"""From a value to one that it refers to, and so on."""
_REFERENCE = re.compile(r"\$\{\s*([^${}]*?)\s*\}")
_NAME = re.compile(r"[\w.\[\]/-]+")
_VARIABLE = re.compile(r"oc\.env:[^\0]*")
_FUNCTION = re.compile(r"(?!oc\.)[\w.]+:.*", re.DOTALL)
_INSTEAD = "write the value itself"
Path = tuple[str, ...]


def check_interpolations(config: DictConfig, *, functions: bool = False) -> list[Problem]:
    """Why a config's references must not be resolved; nothing where they may be. Resolves none.

    ``functions`` lets those of other programs pass, such as NeMo's ``${multiply:...}``, which nobody here resolves.
    """
    root = OmegaConf.to_container(config, resolve=False)
    known_forms = (_NAME, _VARIABLE, *([_FUNCTION] if functions else []))
    strange = [
        Problem(".".join(path), None, f"{_short(text)} is no reference that is read", "write ${a setting's name}")
        for path, text in _texts(root, ())
        if not all(any(form.fullmatch(name) for form in known_forms) for name in _names(text))
    ]
    if strange:
        return strange
    known: dict[Path, tuple[int, int]] = {}
    try:
        size = sum(_size(root, text, path, known)[0] for path, text in _texts(root, ()))
    except _Endless as error:
        name = ".".join(error.path)
        return [Problem(name, None, f"refers to itself, or through more than {MOST_STEPS} others", _INSTEAD)]
    if size > MOST_CHARACTERS:
        largest = ".".join(max((size, path) for path, size in known.items())[1])
        rule = f"the references stand for {size:,} characters once they are written out; {MOST_CHARACTERS:,} may be"
        return [Problem(largest, None, rule, _INSTEAD)]
    return []


class _Endless(Exception):
    """A chain of references is too long."""

    def __init__(self, path: Path) -> None:
        self.path = path


def _texts(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """(path, text) of each value inside that refers to others."""
    if isinstance(value, str) and "${" in value:
        yield path, value
    elif isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(item, (*path, str(key)))


def _names(text: str) -> list[str]:
    """What stands in each ``${...}``, inner ones first and as a zero in the outer; a text that has no end as it is."""
    names = []
    while found := _REFERENCE.findall(text):
        names += found
        text = _REFERENCE.sub("\0", text)
    return names + ([text] if "${" in text else [])


def _size(root: Any, value: Any, path: Path, known: dict[Path, tuple[int, int]], steps: int = 0) -> tuple[int, int]:
    """(characters that the value at ``path`` stands for, references one after the other on the way to them). Each path
    is looked at once, and counts as often as it is named."""
    if path not in known:
        parts: list[tuple[int, int]] = []
        size = 1
        if isinstance(value, (dict, list)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            parts = [_size(root, item, (*path, str(key)), known, steps) for key, item in items]
        elif isinstance(value, str):
            size = len(value)
            targets = [_target(name, path) for name in _names(value) if _NAME.fullmatch(name)]
            if targets and steps > MOST_STEPS:
                raise _Endless(path)
            found = [_size(root, _at(root, target), target, known, steps + 1) for target in targets]
            parts = [(characters, depth + 1) for characters, depth in found]
        known[path] = size + sum(part[0] for part in parts), max((part[1] for part in parts), default=0)
        if known[path][1] > MOST_STEPS:
            raise _Endless(path)
    return known[path]


def _target(name: str, path: Path) -> Path:
    """The path that a reference in the value at ``path`` names: from the root, or from beside it by dots before."""
    bare = name.lstrip(".")
    up = len(name) - len(bare)
    keys = tuple(key for key in re.split(r"[.\[\]]+", bare) if key)
    return (*path[: max(0, len(path) - up)], *keys) if up else keys


def _at(root: Any, path: Path) -> Any:
    """The value at a path; None where there is none, which OmegaConf reports."""
    for key in path:
        if isinstance(root, dict):
            root = next((item for name, item in root.items() if str(name) == key), None)
        elif isinstance(root, list) and key.isdecimal() and int(key) < len(root):
            root = root[int(key)]
        else:
            return None
    return root


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:56] + " ..."
