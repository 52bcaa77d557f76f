"""Checks and their results."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple


class Status(StrEnum):
    """Result of a check or a part."""

    PASSED = "passed"
    FAILED = "FAILED"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Outcome:
    """Result of a successful check."""

    detail: str
    """One sentence for the page."""
    values: dict[str, Any] = field(default_factory=dict)
    """Numbers for the JSON file."""


class CheckFailed(Exception):
    """A check detected a fault. ``values`` are as in ``Outcome``."""

    def __init__(self, detail: str, values: dict[str, Any] | None = None) -> None:
        super().__init__(detail)
        self.values = values or {}


class NotRun(Exception):
    """A check does not apply to this machine, or has no time; the message is the reason."""


class Row(NamedTuple):
    """A check of a part."""

    name: str
    settings: tuple[str, ...] = ()
    """Overrides of its runs, or arguments of its program."""
    ranks: int = 1
    model: str = ""
    tolerances: tuple[float, ...] = ()

    @property
    def folder(self) -> str:
        """The name as a folder's name."""
        return self.name.replace(",", "").replace(" ", "_")


TABLE = tomllib.loads(Path(__file__).with_name("plan.toml").read_text(encoding="utf-8"))


def read_rows(part: str) -> list[Row]:
    """Return the rows of a part in ``plan.toml``: names, or lists of name, ranks, model, tolerances and settings."""
    lists = [(row, 1, "", "", []) if isinstance(row, str) else row for row in TABLE["rows"][part]]
    return [
        Row(name, tuple(settings), ranks, model, tuple(TABLE["tolerances"].get(tolerances, ())))
        for name, ranks, model, tolerances, settings in lists
    ]


@dataclass(frozen=True)
class Result:
    """Result of a check."""

    name: str
    status: Status
    detail: str
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PartResult:
    """Results of a part's checks."""

    name: str
    title: str
    results: tuple[Result, ...]

    @property
    def status(self) -> Status:
        """FAILED if a check failed, PASSED if one passed and none failed, else NOT_RUN."""
        present = {result.status for result in self.results}
        return next((status for status in (Status.FAILED, Status.PASSED) if status in present), Status.NOT_RUN)

    @property
    def seconds(self) -> float:
        return sum(result.seconds for result in self.results)

    def named(self, status: Status) -> list[Result]:
        """Return the results with this status."""
        return [result for result in self.results if result.status == status]

    @property
    def detail(self) -> str:
        """The only result; else a count with the largest error, the failures and the number of omitted checks."""
        if len(self.results) == 1:
            return self.results[0].detail
        passed, failed, not_run = map(self.named, Status)
        if len(not_run) == len(self.results) and len({result.detail for result in not_run}) == 1:
            return not_run[0].detail
        sentences = [f"{len(passed)} of {len(self.results)} checks passed"]
        if not failed and len(passed) == len(self.results):
            worst = max(passed, key=lambda result: result.values.get("error", 0.0))
            sentences = [f"{len(passed)} checks; {worst.name}: {worst.detail}"]
        sentences += [f"{result.name}: {result.detail}" for result in failed[:2]]
        sentences += [f"{len(failed) - 2} more failed"] * (len(failed) > 2)
        # Names have commas. The page has all of them.
        sentences += [f"not run: {not_run[0].name}" if len(not_run) == 1 else f"{len(not_run)} not run"] * bool(not_run)
        return "; ".join(sentences)


class Clock:
    """Time of the whole command, ``seconds``. ``now`` returns monotonic seconds."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self.end, self.seconds = now, now() + seconds, seconds

    @property
    def left(self) -> float:
        """Seconds until the end of the command, at least 0."""
        return max(0.0, self.end - self.now())


def attempt(measure: Callable[[], float]) -> float | str:
    """Return a measurement, or the error as text: an error of a driver or a library is a result."""
    try:
        return measure()
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
