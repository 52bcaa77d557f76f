"""The arithmetic of the comparison, from recorded numbers: speeds, shares of the peak, memory, ratios with their
spread. Medians over the rounds; a ratio is taken in each round, so that a machine that changes changes both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness.runner import Result, Start, Turn, is_ours
from benchmarks.harness.task import Facts, Task

MIB = 2**20


@dataclass(frozen=True)
class Spread:
    """A median with the least and the most."""

    middle: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.least:.2f} to {self.most:.2f})"


@dataclass
class Cell:
    """One model in one precision."""

    flops_per_token: float
    """Forward and backward, attention counted where it is not masked."""
    results: list[Result]

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Cell:
        """The cell that ``dataclasses.asdict`` made ``fields`` of."""
        return cls(fields["flops_per_token"], [_result(result) for result in fields["results"]])

    @property
    def task(self) -> Task:
        """The task of any contestant; they differ in mode and layout."""
        return self.results[0].task

    @property
    def title(self) -> str:
        """What is trained."""
        task = self.task
        return (
            f"{task.preset}, {task.precision}: {task.parameters:,} parameters, "
            f"{task.batch_size} x {task.seq_length} tokens a step"
        )

    def speeds(self, result: Result) -> list[float]:
        """Tokens per second of each turn."""
        tokens = self.task.batch_size * self.task.seq_length
        return [tokens * len(turn.step_seconds) / sum(turn.step_seconds) for turn in result.turns]

    def shares(self, result: Result) -> list[float]:
        """Share of the matrix peak in each turn."""
        return [
            speed * self.flops_per_token / turn.peak_flops
            for speed, turn in zip(self.speeds(result), result.turns, strict=True)
        ]

    def ratio(self, result: Result, other: Result) -> Spread:
        """How many times as fast ``result`` is, round by round."""
        return Spread.of([a / b for a, b in zip(self.speeds(result), self.speeds(other), strict=True)])

    def fastest(self, ours: bool) -> Result | None:
        """The fastest contestant on one process, of this project or of the peers."""
        found = [r for r in self.results if is_ours(r.name) == ours and r.task.layout.ranks == 1]
        return max(found, key=lambda result: median(self.speeds(result)), default=None)


HEAD = (
    "contestant",
    "tokens/s",
    "GFLOP/s",
    "of peak",
    "processor s/step",
    "resident MiB",
    "live MiB",
    "first step, cold cache",
    "warm",
)


def speed_rows(cell: Cell) -> Iterator[list[str]]:
    """A row of HEAD for each contestant, the fastest first."""
    for result in sorted(cell.results, key=lambda result: -median(cell.speeds(result))):
        speed = median(cell.speeds(result))
        cold = [start.seconds for start in result.starts if start.graphs]
        warm = [start.seconds for start in result.starts if not start.graphs]
        yield [
            result.name,
            f"{speed:,.0f}",
            f"{speed * cell.flops_per_token / 1e9:,.1f}",
            f"{median(cell.shares(result)):.1%}",
            f"{median(turn.processor_seconds for turn in result.turns):.2f}",
            f"{max(turn.peak_bytes for turn in result.turns) / MIB:,.0f}",
            f"{result.live_bytes / MIB:,.0f}",
            f"{cold[0]:.1f} s" if cold else "",
            f"{warm[-1]:.1f} s" if warm else "",
        ]


def _saving(result: Result) -> tuple[int, int, str]:
    """What a contestant of this project does to need less memory."""
    return result.task.zero, result.task.state_bits, result.task.recompute


def verdict_lines(cell: Cell) -> Iterator[str]:
    """Sentences: ours against each peer and against the fastest, in speed and in memory."""
    ours, fastest = cell.fastest(ours=True), cell.fastest(ours=False)
    if ours is None or fastest is None:
        return
    ratio = cell.ratio(ours, fastest)
    yield f"{ours.name} is {ratio} times as fast as the fastest peer, {fastest.name}."
    peers = [r for r in cell.results if not is_ours(r.name) and r.task.layout.ranks == 1]
    for peer in peers:
        if peer is not fastest:
            yield f"{ours.name} is {cell.ratio(ours, peer)} times as fast as {peer.name}."
    alone = [r for r in cell.results if is_ours(r.name) and r.task.layout.ranks == 1]
    for result in [ours, *(r for r in alone if _saving(r) != _saving(ours))]:
        if result is not ours:
            ratio = cell.ratio(result, fastest)
            yield f"{result.name} is {ratio} times as fast as the fastest peer, {fastest.name}."
        for what, memory in (("resident", _resident), ("live", lambda result: result.live_bytes)):
            leanest = min(peers, key=memory)
            if memory(leanest) and memory(result):
                share = memory(result) / memory(leanest)
                yield f"Its peak of {what} memory is {share:.0%} of the leanest peer's, {leanest.name}."


def layout_rows(cell: Cell) -> Iterator[list[str]]:
    """Rows of LAYOUT_HEAD: each layout beside one process of the same mode on the same cores."""
    for result in cell.results:
        layout = result.task.layout
        alone = [r for r in cell.results if r.task.mode == result.task.mode and r.task.layout.ranks == 1]
        alone = [r for r in alone if _saving(r) == _saving(result)]
        alone = [r for r in alone if r.name.split()[0] == result.name.split()[0]]
        if layout.ranks == 1 or not alone:
            continue
        ratio = cell.ratio(result, alone[0])
        # A pipeline of p stages with m micro batches works m of m+p-1 slots.
        micro_batches = result.task.batch_size // (layout.dp * result.task.micro_batch_size)
        bound = 1.0 if layout.pp == 1 else micro_batches / (micro_batches + layout.pp - 1)
        yield [result.name, str(ratio), f"{bound:.2f}", f"{ratio.middle / bound:.1%}"]


LAYOUT_HEAD = ("layout", "times one process", "at best", "share of that")


def _resident(result: Result) -> int:
    return max(turn.peak_bytes for turn in result.turns)


def _result(fields: dict[str, Any]) -> Result:
    task = Task.from_fields(fields["task"])
    turns = [Turn(**turn) for turn in fields["turns"]]
    starts = [Start(**start) for start in fields["starts"]]
    return Result(**{**fields, "task": task, "facts": Facts(**fields["facts"]), "starts": starts, "turns": turns})


FACTS_HEAD = ("contestant", "optimizer", "attention", "weights", "products")


def fact_rows(cells: Sequence[Cell]) -> list[list[str]]:
    """Rows of FACTS_HEAD: what the contestants say about themselves, equal ones once."""
    rows = {}
    for cell in cells:
        for result in cell.results:
            facts = result.facts
            row = [result.name, facts.optimizer, facts.attention, facts.weight_dtype, facts.compute_dtype]
            rows[tuple(row)] = row
    return sorted(rows.values())
