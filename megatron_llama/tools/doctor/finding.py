"""What a check finds, and what it judges from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_llama.config import Problem
from megatron_llama.config.problems import shown

BREAKS, WARNS, NOTES = "breaks", "warns", "notes"
"""How bad it is: a run is sure to fail; it may fail, be slow or go wrong unseen; good to know."""
SEVERITIES = (BREAKS, WARNS, NOTES)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    check: str
    """The check's name."""
    severity: str
    """One of SEVERITIES."""
    where: str
    """A node, a pair of nodes, a rank with its node."""
    what: str
    """What is wrong, as a sentence without its full stop."""
    remedy: str
    """What to do, ready to type where that is possible."""


@dataclass(frozen=True)
class Node:
    """A machine, as its first process saw it."""

    number: int
    name: str
    address: str = ""
    """As the other nodes know it; empty where there are none."""
    ranks: str = ""
    """Its ranks, such as 0-7."""
    seen: dict[str, Any] = field(default_factory=dict)
    """What each check has observed, by its name."""


def severest(findings: Sequence[Finding]) -> str | None:
    """How bad the worst of some findings is; None where there are none."""
    return min((finding.severity for finding in findings), key=SEVERITIES.index, default=None)


def of_problem(check: str, problem: Problem, where: str) -> Finding:
    """A mistake in the settings or the environment, as a finding."""
    value = "" if problem.value is None else f" = {shown(problem.value)}"
    return Finding(check, BREAKS, where, f"{problem.field}{value}: {problem.rule}", problem.instead)


def majority(values: Sequence[Any]) -> Any:
    """The most frequent of some values, at least one; the first of several that are."""
    return Counter(values).most_common(1)[0][0]


def names(nodes: Sequence[Node]) -> str:
    """The names of some nodes, the first eight of them."""
    listed = ", ".join(node.name for node in nodes[:8])
    return listed + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
