"""Limits on single settings, and the reaction of a resumed run to a change. ``settings.py`` annotates with both:

    betas: Annotated[list[float], TWO_BETAS, OPTIM]

Rules on combinations of settings are in ``plan/rules/``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_llama.system.object_store import is_plain_url

FREE = "free"
"""A change is accepted: placement, speed, output, and settings that only the first start reads. The default."""
LOGGED = "logged"
"""A change is accepted and logged: results may differ."""
FIXED = "fixed"
"""A change is rejected: names, shapes and meaning of the tensors."""
DATA, BATCH, OPTIM = ALLOWED = ("data", "batch", "optim")
"""A change is rejected unless ``checkpoint.allow`` lists its group."""
MOST_NUMBERS = 8192
"""Length limit of a list of numbers. OmegaConf needs 40 microseconds for each item, several times."""


@dataclass(frozen=True)
class Limit:
    """A condition on one value."""

    holds: Callable[[Any], bool]
    rule: str
    """Condition in words."""
    example: str
    """Valid value for suggestions, as typed; used if the setting's default is null or empty."""
    choices: tuple[str, ...] = ()
    """All valid values, if they are words."""


def at_least(least: float) -> Limit:
    """Require a number of ``least`` or more."""
    return Limit(lambda value: value >= least, f"must be at least {least:g}", f"{least:g}")


def above_zero(example: str = "1") -> Limit:
    """Require a positive number."""
    return Limit(lambda value: value > 0, "must be above 0", example)


def between(least: float, most: float, example: str = "") -> Limit:
    """Require a number from ``least`` to ``most``, both included."""
    return Limit(lambda value: least <= value <= most, f"must be between {least} and {most}", example or f"{least}")


def one_of(*choices: Any, example: str = "", note: str = "", suffix: str = "") -> Limit:
    """Require one of the choices, or a file name with a suffix, if it is given."""
    words = tuple(choice for choice in choices if isinstance(choice, str))
    rule = f"must be one of {', '.join(map(str, choices))}{note}{f', or a {suffix} file' if suffix else ''}"
    return Limit(
        lambda value: value in choices or bool(suffix and value.endswith(suffix)),
        rule,
        example or str(choices[0]),
        words,
    )


def some_of(choices: tuple[str, ...]) -> Limit:
    """Require a list of some of the choices, each once."""
    rule = f"must be some of {', '.join(choices)}, each once"
    return Limit(lambda names: len(names) == len(set(names) & {*choices}), rule, f"[{choices[0]}]")


def module_endings(choices: tuple[str, ...], *, least: int = 0) -> Limit:
    """Require a list of at least ``least`` names, each once, whose last part is one of the choices."""

    def holds(names: list[str]) -> bool:
        return len(names) >= least and len(set(names)) == len(names) and {n.split(".")[-1] for n in names} <= {*choices}

    rule = f"must be some of {', '.join(choices)}, or longer names that end so, each once"
    return Limit(holds, rule, f"[{choices[0]}]")


def numbers_of(things: str) -> Limit:
    """Require different numbers of ``things``."""
    rule = f"must be numbers of {things}, counted from 0, each once"
    return Limit(lambda numbers: min(numbers, default=0) >= 0 and len(set(numbers)) == len(numbers), rule, "[0,1]")


def patterns(example: str, *, whole: bool = False) -> Limit:
    """Require a mapping from regular expressions to positive numbers, with ``whole`` to whole numbers."""

    def holds(mapping: dict[str, float]) -> bool:
        if len(mapping) > MOST_NUMBERS or not all(isinstance(pattern, str) for pattern in mapping):
            return False
        try:
            for pattern in mapping:
                re.compile(rf"(.*\.)?({pattern})$")  # as PEFT matches it
        except re.error:
            return False
        kinds = (int,) if whole else (int, float)
        return all(type(value) in kinds and 0 < value < 1e18 for value in mapping.values())

    numbers = "whole numbers" if whole else "numbers"
    return Limit(holds, f"must be a mapping from regular expressions to {numbers} above 0", example)


SHARE = Limit(lambda value: 0 <= value < 1, "must be at least 0 and below 1", "0")
TWO_BETAS = Limit(
    lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
    "must be two numbers, each at least 0 and below 1",
    "[0.9,0.95]",
)
FIRST_AND_LAST = Limit(
    lambda steps: len(steps) == 2 and 1 <= steps[0] <= steps[1],
    "must be two steps, [first, last] with 1 <= first <= last",
    "[3,5]",
)
POSITIVE_NUMBERS = Limit(  # a longer list is longer than half a head's dimensions can be
    lambda numbers: len(numbers) <= MOST_NUMBERS and all(0 < number < math.inf for number in numbers),
    f"must be finite numbers above 0, at most {MOST_NUMBERS:,}",
    "[1.0,1.0]",
)


def _are_three_shares(split: str) -> bool:
    shares = split.split(",")
    if len(shares) != 3 or not all(map(is_weight, shares)):
        return False
    return all(float(share) >= 0 for share in shares) and float(shares[0]) > 0


THREE_SHARES = Limit(
    _are_three_shares,
    "must be three shares, for training, validation and test, the first above 0",
    "'\"969,30,1\"'",
)


def _is_blend(prefixes: Sequence[Any]) -> bool:
    if not any(map(is_weight, prefixes)):
        return all(str(item).strip() for item in prefixes)
    pairs = zip(prefixes[::2], prefixes[1::2], strict=False)
    return len(prefixes) % 2 == 0 and all(
        is_weight(weight) and float(weight) > 0 and not is_weight(path) for weight, path in pairs
    )


BLEND = Limit(
    _is_blend,
    "must be paths only, or weight, path, weight, path, ... with weights above 0",
    "[0.7,path/one,0.3,path/two]",
)


def _is_blend_entry(entry: Any) -> bool:
    if not isinstance(entry, Mapping) or set(entry) != {"samples", "prefixes"}:
        return False
    samples, prefixes = entry["samples"], entry["prefixes"]
    return _are_counts([samples]) and isinstance(prefixes, Sequence) and len(prefixes) > 0 and _is_blend(prefixes)


BLEND_SCHEDULE = Limit(
    lambda entries: (
        all(map(_is_blend_entry, entries))
        and all(one["samples"] < other["samples"] for one, other in itertools.pairwise(entries))
    ),
    "must be entries {samples: N, prefixes: [weight, path, ...]}, N above 0 and ascending",
    "'[{samples:1000,prefixes:[0.7,one,0.3,two]}]'",
)


def _are_paths(entries: Any) -> bool:
    return isinstance(entries, Sequence) and all(isinstance(entry, str) and entry.strip() for entry in entries)


def _are_validation_sets(entries: Sequence[Any]) -> bool:
    if not all(isinstance(entry, Mapping) for entry in entries):
        return _are_paths(entries)
    sets = [(str(name), paths) for entry in entries for name, paths in entry.items()]
    names = {name.lower() for name, _ in sets if re.fullmatch(r"[A-Za-z0-9][\w.-]{0,39}", name, re.ASCII)}
    lists = [[paths] if isinstance(paths, str) else paths for _, paths in sets]
    return len(names) == len(sets) and all(bool(paths) and _are_paths(paths) for paths in lists)


VALIDATION_SETS = Limit(  # the names become parts of metric names
    _are_validation_sets,
    "must be paths, or sets under different names of up to 40 letters, digits, dots, dashes and underscores",
    "'[{wiki:path/one},{code:path/two}]'",
)
RISING_SAMPLES = Limit(
    lambda pairs: (
        all(isinstance(pair, (list, tuple)) and len(pair) == 2 and _are_counts(pair) for pair in pairs)
        and all(before[0] < after[0] for before, after in itertools.pairwise(pairs))
    ),
    "must be pairs [consumed samples, sequences per step], both above 0, the samples ascending",
    "[[100000,16],[300000,32]]",
)

PROM_FILE = Limit(lambda p: p.endswith(".prom"), "must be a .prom file: node exporter reads no other", "train.prom")


def not_blank(rule: str, example: str) -> Limit:
    """Require text that is not blank."""
    return Limit(lambda text: bool(text.strip()), rule, example)


def plain_url(example: str) -> Limit:
    """Require the URL of a folder in an object store."""
    rule = "must be the URL of a folder in an object store, without credentials"
    return Limit(lambda url: is_plain_url(url) and "/" in url.strip("/").partition("://")[2], rule, example)


def is_weight(item: object) -> bool:
    """Return whether an entry of data.prefixes is a weight rather than a path."""
    try:
        float(str(item))
    except ValueError:
        return False
    return "_" not in str(item)  # 2026_11_27 is a path


def _are_counts(items: Sequence[Any]) -> bool:
    """Return whether all items are whole numbers of at least 1."""
    return all(type(item) is int and item >= 1 for item in items)
