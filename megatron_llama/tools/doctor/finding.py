"""Findings of the checks, and the observations of each node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_llama.config import Problem
from megatron_llama.config.problems import format_value

BREAKS, WARNS, NOTES = "breaks", "warns", "notes"
"""Severities: a run will fail; it may fail, be slow or be silently wrong; for information."""
SEVERITIES = (BREAKS, WARNS, NOTES)


@dataclass(frozen=True)
class Finding:
    """A problem found by a check."""

    check: str
    """Name of the check."""
    severity: str
    """One of SEVERITIES."""
    where: str
    """A node, a pair of nodes, a rank with its node."""
    what: str  # the JSON report has this key  prose: ok
    """The problem, a sentence without the final period."""
    remedy: str
    """The fix: if possible, a command or setting to type."""


@dataclass(frozen=True)
class NodeState:
    """Observations of a node by its first process."""

    number: int
    name: str
    address: str = ""
    """Address that the other nodes use; empty on a single node."""
    ranks: str = ""
    """Ranks on the node, such as 0-7."""
    seen: dict[str, Any] = field(default_factory=dict)
    """Observations by the name of the check."""


def highest_severity(findings: Sequence[Finding]) -> str | None:
    """Return the highest severity, or None without findings."""
    return min((finding.severity for finding in findings), key=SEVERITIES.index, default=None)


def finding_of_problem(check: str, problem: Problem, where: str) -> Finding:
    """Convert an error in the settings or the environment to a finding."""
    value = "" if problem.value is None else f" = {format_value(problem.value)}"
    return Finding(check, BREAKS, where, f"{problem.field}{value}: {problem.rule}", problem.instead)


def odd_ones(nodes: Sequence[NodeState], values: Sequence[Any]) -> Iterator[tuple[NodeState, Any, NodeState, Any]]:
    """Yield (node, its value, a node with the usual value, the usual value) of each node with a different value.

    The usual value is the most frequent one, the first if several are equally frequent.
    """
    if not values:
        return
    [(usual, _)] = Counter(values).most_common(1)
    like = nodes[values.index(usual)]
    for node, value in zip(nodes, values, strict=True):
        if value != usual:
            yield node, value, like, usual


def names(nodes: Sequence[NodeState]) -> str:
    """List the names of at most eight nodes."""
    listed = ", ".join(node.name for node in nodes[:8])
    return listed + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
