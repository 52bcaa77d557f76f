"""Parts and checks: they run one after the other until the time ends, and a failure does not stop the rest."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar


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
    """A check found a fault. ``values`` are as in ``Outcome``."""

    def __init__(self, detail: str, values: dict[str, Any] | None = None) -> None:
        super().__init__(detail)
        self.values = values or {}


class NotRun(Exception):
    """A check does not apply to this machine, or has no time; the message is the reason."""


Context = TypeVar("Context")


class Check(NamedTuple, Generic[Context]):
    """A check: a name, and a function that returns an outcome or raises CheckFailed or NotRun."""

    name: str
    run: Callable[[Context], Outcome]


class Part(NamedTuple, Generic[Context]):
    """Checks with a common subject."""

    name: str
    title: str
    """One sentence for the page."""
    share: float
    """Share of the time, relative to the other parts. Unused time goes to the parts that follow."""
    checks: Callable[[Context], Sequence[Check[Context]]]


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
        failed, not_run = self.named(Status.FAILED), self.named(Status.NOT_RUN)
        if self.results and len(not_run) == len(self.results) and len({result.detail for result in not_run}) == 1:
            return not_run[0].detail
        passed = self.named(Status.PASSED)
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
    """Time of the whole command and of the current part.

    Args:
        seconds: Time of all parts together.
        now: Returns monotonic seconds.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self.start = now, now()
        self.end = self.start + seconds
        self.part_end = self.end

    @property
    def left(self) -> float:
        """Seconds until the end of the command, at least 0."""
        return max(0.0, self.end - self.now())

    def begin_part(self, share: float, shares_left: float) -> None:
        """Give the next part its share of the time left."""
        self.part_end = self.now() + self.left * share / shares_left


Earlier = Mapping[tuple[str, str], Result]
"""Results of an interrupted command, by the names of part and check."""
LEAST_SECONDS = 5.0
"""No check starts with less time left: a Python process with torch needs it for its imports."""


def run_parts(
    parts: Sequence[Part[Context]],
    context: Context,
    clock: Clock,
    progress: Callable[[str], None] = lambda text: None,
    save: Callable[[PartResult], None] = lambda part: None,
    earlier: Earlier | None = None,
) -> Iterator[PartResult]:
    """Run all parts, yielding each result. An interrupt ends the iteration after the current part's result.

    Args:
        save: Receives the part with the results so far, after each check.
        earlier: Checks that do not run again.
    """
    for number, part in enumerate(parts):
        clock.begin_part(part.share, sum(other.share for other in parts[number:]))
        results: list[Result] = []
        show = partial(lambda number, text: progress(f"{number}/{len(parts)} {text}"), number + 1)
        try:
            for result in _run_checks(part, context, clock, show, earlier or {}):
                results.append(result)
                save(PartResult(part.name, part.title, tuple(results)))
        except KeyboardInterrupt:
            results.append(Result("interrupted", Status.NOT_RUN, "stopped by a signal"))
            yield PartResult(part.name, part.title, tuple(results))
            raise
        yield PartResult(part.name, part.title, tuple(results))


def _run_checks(
    part: Part[Context], context: Context, clock: Clock, progress: Callable[[str], None], earlier: Earlier
) -> Iterator[Result]:
    """Run the checks of a part that fit into its time; at least one runs, if the command has time at all."""
    start, longest = clock.now(), 0.0
    try:
        checks = part.checks(context)
    except Exception as error:
        yield _result_of(part.name, error)
        return
    for number, check in enumerate(checks):
        if (result := earlier.get((part.name, check.name))) is not None:
            yield result
            continue
        is_late = number > 0 and clock.now() + longest > clock.part_end
        if is_late or clock.left < LEAST_SECONDS:
            yield Result(check.name, Status.NOT_RUN, "no time left: use a larger --minutes")
            continue
        progress(f"{part.name}: {check.name} ({number + 1}/{len(checks)})")
        begin = clock.now()
        try:
            outcome = check.run(context)
            result = Result(check.name, Status.PASSED, outcome.detail, values=outcome.values)
        except Exception as error:
            result = _result_of(check.name, error)
        seconds = clock.now() - begin
        longest = max(longest, (clock.now() - start) / (number + 1) if seconds else 0.0)
        yield replace(result, seconds=seconds)


def _result_of(name: str, error: Exception) -> Result:
    """Return the result of a check that raised. A fault of this program must not stop the other checks."""
    if isinstance(error, CheckFailed):
        return Result(name, Status.FAILED, str(error), values=error.values)
    if isinstance(error, NotRun):
        return Result(name, Status.NOT_RUN, str(error))
    values = {"traceback": "".join(traceback.format_exception(error))}
    return Result(name, Status.FAILED, f"{type(error).__name__}: {error}", values=values)
