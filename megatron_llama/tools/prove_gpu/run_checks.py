"""Parts of the plan, the loop that runs their checks until the time ends, and the results. A failure stops nothing."""

from __future__ import annotations

import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from megatron_llama.tools.prove_gpu.session import CheckFailed, NotRun, Session

TABLE = tomllib.loads(Path(__file__).with_name("plan.toml").read_text(encoding="utf-8"))
LEAST_SECONDS = 5.0
"""No check starts with less time left: a Python process with torch needs it for its imports."""


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


def read_rows(part: str) -> list[Row]:
    """Return the rows of a part in ``plan.toml``: names, or lists of name, ranks, model, tolerances and settings."""
    lists = [(row, 1, "", "", []) if isinstance(row, str) else row for row in TABLE["rows"][part]]
    return [
        Row(name, tuple(settings), ranks, model, tuple(TABLE["tolerances"].get(tolerances, ())))
        for name, ranks, model, tolerances, settings in lists
    ]


class Part(NamedTuple):
    """Checks with a common subject."""

    name: str
    title: str
    """One sentence for the page."""
    minutes: float
    """Share of the time, relative to the other parts. Unused time goes to the parts that follow."""
    rows: Sequence[Row]
    check: Callable[[Session, Row], Outcome]
    """Runs a row. Raises CheckFailed or NotRun."""
    alone: bool = True
    """Whether no other check may run at the same time. Consecutive parts that are not alone run together."""
    repeats: bool = True
    """Whether the first failed row is repeated with the device's variants, each of which disables a feature."""


@dataclass(frozen=True)
class Result:
    """Result of a check."""

    name: str
    status: Status
    detail: str
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class PartResult:
    """Results of a part's checks, which several threads add."""

    name: str
    title: str
    by_row: dict[int, Result] = field(default_factory=dict)
    longest: float = 0.0
    """Seconds of the longest check of this command."""
    tried_variants: bool = False
    """Whether this command has repeated a failed row with variants."""

    @property
    def results(self) -> list[Result]:
        """The results so far, in the order of the rows."""
        return [self.by_row[number] for number in sorted(self.by_row)]

    def named(self, status: Status) -> list[Result]:
        """Return the results with this status."""
        return [result for result in self.results if result.status == status]

    @property
    def status(self) -> Status:
        """FAILED if a check failed, PASSED if one passed and none failed, else NOT_RUN."""
        return next((status for status in (Status.FAILED, Status.PASSED) if self.named(status)), Status.NOT_RUN)

    @property
    def seconds(self) -> float:
        return sum(result.seconds for result in self.results)

    @property
    def detail(self) -> str:
        """The only result; else a count with the largest error, the failures and the number of omitted checks."""
        details = list(dict.fromkeys(result.detail for result in self.results))
        passed, failed, not_run = map(self.named, Status)
        if len(self.results) == 1 or (not (passed or failed) and len(details) == 1):
            return details[0]
        sentences = [f"{len(passed)} of {len(self.results)} checks passed"]
        if len(passed) == len(self.results):
            worst = max(passed, key=lambda result: result.values.get("error", 0.0))
            sentences = [f"{len(passed)} checks; {worst.name}: {worst.detail}"]
        sentences += [f"{result.name}: {result.detail}" for result in failed[:2]]
        sentences += [f"{len(failed) - 2} more failed"] * (len(failed) > 2)
        # Names have commas. The page has all of them.
        sentences += [f"not run: {not_run[0].name}" if len(not_run) == 1 else f"{len(not_run)} not run"] * bool(not_run)
        return "; ".join(sentences)


Earlier = Mapping[tuple[str, str], Result]
"""Results of an interrupted command, by the names of part and check."""


def run_parts(
    parts: Sequence[Part],
    session: Session,
    progress: Callable[[str], None] = lambda text: None,
    save: Callable[[Sequence[PartResult]], object] = lambda results: None,
    earlier: Earlier | None = None,
) -> Iterator[PartResult]:
    """Run all parts, yielding the result of each. After an interrupt, yields incomplete parts before it raises.

    Args:
        save: Receives the results so far, after each check.
        earlier: Checks that do not run again.
    """
    results: list[PartResult] = []
    remaining = sum(part.minutes for part in parts)
    # Each part that runs alone is a group.
    for _, members in groupby(enumerate(parts), lambda pair: pair[0] if pair[1].alone else -1):
        group = [(_fitting(part, session.ranks), PartResult(part.name, part.title)) for _, part in members]
        results += [result for _, result in group]
        minutes = sum(part.minutes for part, _ in group)
        end = session.clock.now() + session.clock.left * minutes / remaining
        remaining -= minutes
        try:
            for _ in _run_group(group, session, end, progress, earlier or {}):
                save([result for result in results if result.by_row])
        except BaseException as error:
            for part, result in group:
                if isinstance(error, KeyboardInterrupt) and len(result.by_row) < len(part.rows):
                    result.by_row[len(part.rows)] = Result("interrupted", Status.NOT_RUN, "stopped by a signal")
            yield from (result for _, result in group if result.by_row)
            raise
        yield from (result for _, result in group)


def _fitting(part: Part, ranks: int) -> Part:
    return part._replace(rows=[row for row in part.rows if row.ranks <= ranks])


def _run_group(
    group: Sequence[tuple[Part, PartResult]], session: Session, end: float, progress: Any, earlier: Earlier
) -> Iterator[None]:
    """Run the rows of the parts round-robin, yielding after each."""
    queue = [(number, part, result) for part, result in group for number in range(len(part.rows))]
    queue.sort(key=lambda item: item[0])
    pool = ThreadPoolExecutor(1 if group[0][0].alone else session.jobs)
    try:
        futures = [
            pool.submit(_run_row, part, number, result, session, end, progress, earlier)
            for number, part, result in queue
        ]
        for future in as_completed(futures):
            future.result()
            yield
    finally:
        if not all(future.done() for future in futures):
            session.stopping.set()
        pool.shutdown(cancel_futures=True)


def _run_row(
    part: Part, number: int, results: PartResult, session: Session, end: float, progress: Any, earlier: Earlier
) -> None:
    """Run a row, if it fits into the time until ``end``; the first runs if the command has time at all."""
    row, clock, by_row = part.rows[number], session.clock, results.by_row
    if (part.name, row.name) in earlier:
        by_row[number] = earlier[part.name, row.name]
        return
    if clock.left < LEAST_SECONDS or (number > 0 and clock.now() + results.longest > end):
        by_row[number] = Result(row.name, Status.NOT_RUN, "no time left: use a larger --minutes")
        return
    progress(f"{part.name}: {row.name} ({number + 1}/{len(part.rows)})")
    result = _measure(part, row, session)
    results.longest = max(results.longest, result.seconds)
    if result.status == Status.FAILED and part.repeats and not results.tried_variants:
        results.tried_variants = True
        result = _with_variants(part, row, session, result)
    by_row[number] = result  # complete, with its variants: a resumed command does not run it again


def _measure(part: Part, row: Row, session: Session) -> Result:
    begin = session.clock.now()
    try:
        outcome = part.check(session, row)
        result = Result(row.name, Status.PASSED, outcome.detail, values=outcome.values)
    except NotRun as error:
        result = Result(row.name, Status.NOT_RUN, str(error))
    except CheckFailed as error:
        result = Result(row.name, Status.FAILED, str(error), values=error.values)
    except Exception as error:  # a fault of this program must not stop the other checks
        values = {"traceback": "".join(traceback.format_exception(error))}
        result = Result(row.name, Status.FAILED, f"{type(error).__name__}: {error}", values=values)
    return replace(result, seconds=session.clock.now() - begin)


def _with_variants(part: Part, row: Row, session: Session, failed: Result) -> Result:
    """Repeat a failed row with each of the device's variants, side by side; report the passing variants."""
    variants = session.variants()
    if not variants:
        return failed
    if session.clock.left < 2 * failed.seconds:
        return replace(failed, detail=f"{failed.detail}; no time for variants")
    with ThreadPoolExecutor(session.jobs) as pool:
        results = dict(zip(variants, pool.map(lambda one: _measure(part, row, one), variants.values()), strict=True))
    passed = [name for name, result in results.items() if result.status == Status.PASSED]
    text = f"passes {', '.join(passed)}" if passed else f"fails also {', '.join(results)}"
    values = failed.values | {"variants": {name: result.detail for name, result in results.items()}}
    return replace(failed, detail=f"{failed.detail}; {text}", values=values)
