"""What a rule is, and how all of them are applied to a config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megatron_llama.config.problems import Problem
from megatron_llama.config.settings import Config

Check = Callable[[Config, int], Iterator[Problem]]


@dataclass(frozen=True)
class Rule:
    """A condition on several settings: yields the problems of a config on a number of devices."""

    check: Check
    settings: frozenset[str]
    """The settings, or whole sections of them, that the check reads."""


def reads(*settings: str) -> Callable[[Check], Rule]:
    """Makes a rule of a function that reads these settings."""
    return lambda check: Rule(check, frozenset(settings))


def check_rules(
    rules: Iterable[Rule], config: Config, world_size: int, skip_fields: Iterable[str] = ()
) -> list[Problem]:
    """All problems that ``rules`` find. Rules that read one of ``skip_fields``, settings or whole sections, are left
    out: what is wrong with these is reported already, and what follows from it would be noise."""
    skipped = set(skip_fields)
    return [
        problem
        for rule in rules
        if not any(name in skipped or name.partition(".")[0] in skipped for name in rule.settings)
        for problem in rule.check(config, world_size)
    ]


def nearest_legal(name: str, wanted: int, legal: Iterable[int]) -> str:
    """``write name=4 or 8``: the nearest legal values on both sides of ``wanted``; empty where there are none."""
    values = sorted(set(legal) - {wanted})
    near = [value for value in values if value < wanted][-1:] + [value for value in values if value > wanted][:1]
    return f"write {name}=" + " or ".join(map(str, near)) if near else ""
