"""The ``Rule`` class, and functions that apply rules to a config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megatron_llama.config.problems import Problem
from megatron_llama.config.settings import Config

Check = Callable[[Config, int], Iterator[Problem]]


@dataclass(frozen=True)
class Rule:
    """A condition on several settings."""

    check: Check
    settings: frozenset[str]
    """Settings, or whole sections, that the check reads."""


def reads(*settings: str) -> Callable[[Check], Rule]:
    """Decorate a check that reads these settings as a rule."""
    return lambda check: Rule(check, frozenset(settings))


def check_rules(
    rules: Iterable[Rule], config: Config, world_size: int, skip_fields: Iterable[str] = ()
) -> list[Problem]:
    """Return all problems that ``rules`` find.

    Args:
        skip_fields: Settings or sections with reported problems. Rules that read one of them are skipped, since they
            would only report consequences.
    """
    skipped = set(skip_fields)
    return [
        problem
        for rule in rules
        if not any(name in skipped or name.partition(".")[0] in skipped for name in rule.settings)
        for problem in rule.check(config, world_size)
    ]


def nearest_legal(name: str, value: int, legal: Iterable[int]) -> str:
    """Return ``write name=4 or 8``: the nearest legal values below and above ``value``; "" if there are none."""
    values = sorted(set(legal) - {value})
    near = [other for other in values if other < value][-1:] + [other for other in values if other > value][:1]
    return f"write {name}=" + " or ".join(map(str, near)) if near else ""
