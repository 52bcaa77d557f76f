"""Runs the parts until the time ends: rows side by side where a part permits it. A failure stops nothing."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

from megatron_llama.tools.prove_gpu.checks import CheckFailed, NotRun, Outcome, PartResult, Result, Row, Status
from megatron_llama.tools.prove_gpu.session import Session


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


Earlier = Mapping[tuple[str, str], Result]
"""Results of an interrupted command, by the names of part and check."""
LEAST_SECONDS = 5.0
"""No check starts with less time left: a Python process with torch needs it for its imports."""


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
    finished: list[PartResult] = []
    remaining = sum(part.minutes for part in parts)
    # Each part that runs alone is a group.
    for _, members in groupby(enumerate(parts), lambda pair: pair[0] if pair[1].alone else -1):
        group = [_RunningPart(part, session, earlier or {}) for _, part in members]
        minutes = sum(running.part.minutes for running in group)
        end = session.clock.now() + session.clock.left * minutes / remaining
        remaining -= minutes
        try:
            for _ in _run_group(group, session, end, progress):
                save([*finished, *(running.result for running in group if running.results)])
        except BaseException as error:
            for running in group:
                if isinstance(error, KeyboardInterrupt) and len(running.results) < len(running.rows):
                    running.results[len(running.rows)] = Result("interrupted", Status.NOT_RUN, "stopped by a signal")
            yield from (running.result for running in group if running.results)
            raise
        for running in group:
            finished.append(running.result)
            yield running.result


def _run_group(group: Sequence[_RunningPart], session: Session, end: float, progress: Any) -> Iterator[None]:
    """Run the rows of the parts round-robin, yielding after each."""
    turns = zip_longest(*([(running, number) for number in range(len(running.rows))] for running in group))
    queue = [pair for turn in turns for pair in turn if pair is not None]
    pool = ThreadPoolExecutor(1 if group[0].part.alone else session.jobs)
    try:
        futures = [pool.submit(running.run, number, end, progress) for running, number in queue]
        for future in as_completed(futures):
            future.result()
            yield
    finally:
        if not all(future.done() for future in futures):
            session.stopping.set()
        pool.shutdown(cancel_futures=True)


class _RunningPart:
    """A part while its checks run, in several threads."""

    def __init__(self, part: Part, session: Session, earlier: Earlier) -> None:
        self.part, self.session, self.earlier = part, session, earlier
        self.results: dict[int, Result] = {}
        self.longest = 0.0
        self.tried_variants = False
        self.rows = [row for row in part.rows if row.ranks <= session.ranks]

    @property
    def result(self) -> PartResult:
        """The results so far, in the order of the rows."""
        return PartResult(self.part.name, self.part.title, tuple(self.results[i] for i in sorted(self.results)))

    def run(self, number: int, end: float, progress: Callable[[str], None]) -> None:
        """Run a row, if it fits into the time until ``end``; the first runs if the command has time at all."""
        row, clock = self.rows[number], self.session.clock
        if (result := self.earlier.get((self.part.name, row.name))) is None:
            is_late = number > 0 and clock.now() + self.longest > end
            if is_late or clock.left < LEAST_SECONDS:
                result = Result(row.name, Status.NOT_RUN, "no time left: use a larger --minutes")
            else:
                progress(f"{self.part.name}: {row.name} ({number + 1}/{len(self.rows)})")
                result = self._measure(row, self.session)
                self.longest = max(self.longest, result.seconds)
                if result.status == Status.FAILED and self.part.repeats and not self.tried_variants:
                    self.tried_variants = True
                    result = self._with_variants(row, result)
        self.results[number] = result

    def _measure(self, row: Row, session: Session) -> Result:
        begin = session.clock.now()
        try:
            outcome = self.part.check(session, row)
            result = Result(row.name, Status.PASSED, outcome.detail, values=outcome.values)
        except NotRun as error:
            result = Result(row.name, Status.NOT_RUN, str(error))
        except CheckFailed as error:
            result = Result(row.name, Status.FAILED, str(error), values=error.values)
        except Exception as error:  # a fault of this program must not stop the other checks
            values = {"traceback": "".join(traceback.format_exception(error))}
            result = Result(row.name, Status.FAILED, f"{type(error).__name__}: {error}", values=values)
        return replace(result, seconds=session.clock.now() - begin)

    def _with_variants(self, row: Row, failed: Result) -> Result:
        """Repeat a failed row with each of the device's variants, side by side; report the passing variants."""
        variants = self.session.variants()
        if not variants:
            return failed
        if self.session.clock.left < 2 * failed.seconds:
            return replace(failed, detail=f"{failed.detail}; no time for variants")
        with ThreadPoolExecutor(self.session.jobs) as pool:
            results = dict(zip(variants, pool.map(lambda one: self._measure(row, one), variants.values()), strict=True))
        passed = [name for name, result in results.items() if result.status == Status.PASSED]
        text = f"passes {', '.join(passed)}" if passed else f"fails also {', '.join(results)}"
        values = failed.values | {"variants": {name: result.detail for name, result in results.items()}}
        return replace(failed, detail=f"{failed.detail}; {text}", values=values)
