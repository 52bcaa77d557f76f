"""Checks of the texts of a config: control characters, names that no file system has, and ``${...}`` references.

Recipes come from other people. A control character in one could change what a terminal shows of the plan; a null byte
or an overlong name is valid in YAML but not in a path. References are checked before any is resolved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import reduce
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_llama.config.problems import Problem, shorten
from megatron_llama.system.object_store import is_url
from megatron_llama.system.wrapping import CONTROL

# Limits on ``${...}``: a few short lines that refer to each other twice can expand to gigabytes, or never end. The size
# is computed before anything is resolved. References must therefore be setting names or ``oc.env:VARIABLE``. Other
# forms of OmegaConf (names that contain references, functions) are rejected.
MOST_CHARACTERS = 1 << 22
"""Limit on the total size of all expanded values; a value that is not text counts as one character."""
MOST_STEPS = 8
"""Maximum length of a chain of references."""
_REFERENCE = re.compile(r"\$\{\s*([^${}]*?)\s*\}")
_NAME = re.compile(r"[\w.\[\]/-]+")
_VARIABLE = re.compile(r"oc\.env:[^\0]*")
_SECRET = re.compile(
    r"(?:.*_)?(?:KEY|TOKEN|SECRET|JWT|CREDENTIALS?)(?:_.*)?|.*(?:APIKEY|PASSWORD|PASSPHRASE).*", re.IGNORECASE
)
"""Names of variables that hold secrets, such as WANDB_API_KEY or HF_TOKEN. TOKENIZERS_PARALLELISM is none."""
_FUNCTION = re.compile(r"(?!oc\.)[\w.]+:.*", re.DOTALL)
_INSTEAD = "write the value itself"
_MISSING = "???"  # OmegaConf's mark
_Keys = tuple[str, ...]
"""Path from the root to a value."""
LONGEST_NAME = 255
"""Bytes in a file's name, on every common file system."""
LONGEST_PATH = 4095
NOT_UTF8 = "has bytes that are not UTF-8", "write it in UTF-8; rename a file or folder with such a name"
_NO_PATHS = re.compile(r"logging\.sample_prompts|data\.prepare|launch\.|allow_targets|hook\.|optim\.")
_LOCAL = re.compile(r"run\.dir|data\.cache_dir|trainer\.compile_cache|checkpoint\.fallback_dir|logging\.prometheus")


def check_texts(config: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of all texts of a config, each with the name of its setting."""
    return [problem for path, text in _texts(config) if (problem := _problem_of_text(_setting(path), text))]


def _texts(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield (path, text) of each text; the path has an item's number in a list."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping | list):
        for key, item in enumerate(value) if isinstance(value, list) else value.items():
            yield from _texts(item, (*path, key if isinstance(value, list) else str(key)))


def _setting(path: tuple[str | int, ...]) -> str:
    """Return the name of a setting; the name of a list's item is the list's."""
    return ".".join(key for key in path if isinstance(key, str))


def _problem_of_text(name: str, text: str) -> Problem | None:
    """Return the problem of a text, if any."""
    if control := CONTROL.search(text):
        rule = f"contains the control character {control.group()!r}", "remove the character"
        return Problem(name, text, *(NOT_UTF8 if control.group() >= "\ud800" else rule))
    if _NO_PATHS.match(name):
        return None
    if text.startswith("~/") and name not in ("trainer.compile_cache", "data.cache_dir"):  # which expand it
        return Problem(name, text, "begins with ~, which only a shell replaces", f"write {os.path.expanduser(text)}")
    if _LOCAL.fullmatch(name) and is_url(text):
        both = f", and checkpoint.dir={text}" * (name == "run.dir")
        return Problem(name, text, "must be a local path", f"write a local path{both}")
    if max(map(len, text.encode().split(b"/"))) <= LONGEST_NAME and len(text.encode()) <= LONGEST_PATH:
        return None
    most = f"a file's name has at most {LONGEST_NAME} bytes, and a path {LONGEST_PATH:,}"
    return Problem(name, f"{text[:40]} ...", f"is longer than a path can be: {most}", "write a shorter one")


def check_interpolations(config: DictConfig, *, functions: bool = False) -> list[Problem]:
    """Return the problems of a config's references, without resolving any reference.

    ``functions`` accepts resolvers of other programs, such as NeMo's ``${multiply:...}``, which stay unresolved, and
    variables that hold secrets.
    """
    root = OmegaConf.to_container(config, resolve=False)
    texts = [(tuple(map(str, path)), text) for path, text in _texts(root) if "${" in text]
    known_forms = (_NAME, _VARIABLE, *([_FUNCTION] if functions else []))
    unsupported = [
        Problem(".".join(path), None, f"{shorten(text, 60)} is not a supported reference", "write ${a setting's name}")
        for path, text in texts
        if not all(any(form.fullmatch(name) for form in known_forms) for name in _names(text))
    ]
    if unsupported:
        return unsupported
    if secrets := [] if functions else list(_secrets(texts)):
        return secrets
    known: dict[_Keys, tuple[int, int]] = {}
    try:
        size = sum(_size(root, text, path, known)[0] for path, text in texts)
    except _Endless as error:
        name = ".".join(error.args[0])
        return [Problem(name, None, f"refers to itself, or through more than {MOST_STEPS} others", _INSTEAD)]
    if size > MOST_CHARACTERS:
        largest = ".".join(max((size, path) for path, size in known.items())[1])
        rule = f"references expand to {size:,} characters; the limit is {MOST_CHARACTERS:,}"
        return [Problem(largest, None, rule, _INSTEAD)]
    return []


def check_kinds(config: DictConfig) -> list[Problem]:
    """Return the problems of ``???``, and of sections, lists and mappings that are references to another kind of value.

    OmegaConf checks the types of values only. ``check_interpolations`` must have accepted the config. References to
    names that do not exist are not reported here.
    """
    texts = list(_texts(OmegaConf.to_container(config, resolve=False)))
    rule = "means that a value is missing"
    problems = [Problem(_setting(path), text, rule, "write the value") for path, text in texts if text == _MISSING]
    kinds = {DictConfig: "a section or mapping", ListConfig: "a list"}
    for path, text in texts:
        written = reduce(lambda node, key: cast(Any, node)._get_node(key), path, config) if "${" in text else None
        if isinstance(written, (DictConfig, ListConfig)):
            name = _setting(path)
            with suppress(OmegaConfBaseException):
                if (value := OmegaConf.select(config, name)) is not None and not isinstance(value, type(written)):
                    rule = f"must be {kinds[type(written)]}, and refers to a value that is not"
                    problems.append(Problem(name, text, rule, _INSTEAD))
    return problems


def names_secret(variable: str) -> bool:
    """Whether the environment variable probably holds a secret, which must not get into a file or log."""
    return _SECRET.fullmatch(variable) is not None


def _secrets(texts: Iterable[tuple[_Keys, str]]) -> Iterator[Problem]:
    """Yield a problem for each reference to an environment variable that probably holds a secret."""
    for path, text in texts:
        for name in filter(_VARIABLE.fullmatch, _names(text)):
            variable = name.partition(":")[2].partition(",")[0].strip(" '\"")
            if names_secret(variable):
                rule = f"{variable} is the name of a secret, and settings are written to checkpoints and logs"
                instead = "omit it: wandb reads its key from the environment. For other values, use another variable"
                yield Problem(".".join(path), shorten(text, 60), rule, instead)


class _Endless(Exception):
    """Too long chain of references to the path."""


def _names(text: str) -> list[str]:
    """Return the text of each ``${...}``, inner ones first and as "\\0" in the outer; unclosed text unchanged."""
    names = []
    while inner := _REFERENCE.findall(text):
        names += inner
        text = _REFERENCE.sub("\0", text)
    return names + ([text] if "${" in text else [])


def _size(root: Any, value: Any, path: _Keys, known: dict[_Keys, tuple[int, int]], steps: int = 0) -> tuple[int, int]:
    """Return (characters of the expanded value at ``path``, length of its longest chain of references).

    Each path is visited once and counts once per reference.
    """
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
            sizes = [_size(root, _at(root, target), target, known, steps + 1) for target in targets]
            parts = [(characters, depth + 1) for characters, depth in sizes]
        known[path] = size + sum(part[0] for part in parts), max((part[1] for part in parts), default=0)
        if known[path][1] > MOST_STEPS:
            raise _Endless(path)
    return known[path]


def _target(name: str, path: _Keys) -> _Keys:
    """Return the path that a reference in the value at ``path`` names; leading dots make it relative."""
    bare = name.lstrip(".")
    up = len(name) - len(bare)
    keys = tuple(key for key in re.split(r"[.\[\]]+", bare) if key)
    return (*path[: max(0, len(path) - up)], *keys) if up else keys


def _at(root: Any, path: _Keys) -> Any:
    """Return the value at a path; None if it is missing, which OmegaConf reports."""
    for key in path:
        if isinstance(root, dict):
            root = next((item for name, item in root.items() if str(name) == key), None)
        elif isinstance(root, list) and key.isdecimal() and int(key) < len(root):
            root = root[int(key)]
        else:
            return None
    return root
