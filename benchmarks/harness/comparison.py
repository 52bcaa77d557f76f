"""Comparison of training programs: the check that they do equal work; statistics and tables of their measurements.

Values are medians over rounds. Ratios are computed per round, so that changes of the machine affect both programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median

from benchmarks.harness.environments import OURS
from benchmarks.harness.task import Facts, TrainingTask, checksum

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
LOSS_TOLERANCE = 0.1
"""Relative tolerance of the first loss, on random tokens, around log(vocabulary size); more is a different loss."""
MIB = 2**20


def find_mismatches(task: TrainingTask, facts: Facts, first_loss: float, torch_version: str) -> list[str]:
    """Return a message for each difference between a program's work and its task."""
    tokens = task.text(1)[:, :-1]
    checks: dict[str, tuple[object, object]] = {
        "parameters": (facts.parameters, task.parameters),
        "weight dtype": (facts.weight_dtype, "float32"),
        "matmul dtype": (facts.compute_dtype, DTYPES[task.precision]),
        "tokens per step": (facts.tokens_per_step, tokens.numel()),
        "checksum of the first tokens": (facts.tokens_checksum, checksum(tokens)),
        "gradient clipping": (facts.clip, task.optimizer["clip"]),
        "torch": (facts.versions.get("torch"), torch_version),
    }
    mismatches = [
        f"{name}: {actual}, not {expected}" for name, (actual, expected) in checks.items() if actual != expected
    ]
    expected = math.log(task.model["vocab_size"])
    if not abs(first_loss - expected) < LOSS_TOLERANCE * expected:
        mismatches.append(f"first loss: {first_loss:.4f}, not within {LOSS_TOLERANCE:.0%} of {expected:.4f}")
    return mismatches


@dataclass
class TurnMeasurement:
    """Measurements of one program's turn, in which no other program runs."""

    step_seconds: list[float]
    """Wall time of each step."""
    processor_seconds: float
    """User and system time per step, summed over ranks."""
    peak_bytes: int
    """Peak resident memory (on accelerators: peak allocated memory), summed over ranks."""
    peak_flops: float
    """Matmul FLOP/s on the idle machine, mean of before and after the turn."""
    loss: float
    """Loss of the last step."""


@dataclass
class StartupTime:
    """Time from a program's start to the end of its first step, in seconds."""

    seconds: float
    graphs: int
    """Compiled graphs, without cache hits."""


@dataclass
class ProgramResult:
    """Measurements of one program."""

    name: str
    task: TrainingTask
    facts: Facts
    first_loss: float
    starts: list[StartupTime] = field(default_factory=list)
    turns: list[TurnMeasurement] = field(default_factory=list)
    live_bytes: int = 0
    """Peak bytes of live tensors in a step, summed over ranks."""

    @property
    def peak_bytes(self) -> int:
        return max(turn.peak_bytes for turn in self.turns)


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum."""

    median_value: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median_value:.2f} ({self.minimum:.2f} to {self.maximum:.2f})"


@dataclass
class ComparisonCell:
    """Results of all programs for one model in one precision."""

    flops_per_token: float
    """FLOPs of forward and backward pass with causal attention."""
    results: list[ProgramResult]

    @property
    def task(self) -> TrainingTask:
        """The first program's task; the others differ only in mode, layout and this project's settings."""
        return self.results[0].task

    @property
    def title(self) -> str:
        """Model, precision and size of a step."""
        task = self.task
        return (
            f"{task.preset}, {task.precision}: {task.parameters:,} parameters, "
            f"{task.batch_size} x {task.seq_length} tokens per step"
        )

    def speeds(self, result: ProgramResult) -> list[float]:
        """Return tokens per second of each turn."""
        tokens = self.task.batch_size * self.task.seq_length
        return [tokens * len(turn.step_seconds) / sum(turn.step_seconds) for turn in result.turns]

    def peak_shares(self, result: ProgramResult) -> list[float]:
        """Return the share of the matmul peak in each turn."""
        return [
            speed * self.flops_per_token / turn.peak_flops
            for speed, turn in zip(self.speeds(result), result.turns, strict=True)
        ]

    def ratio(self, result: ProgramResult, other: ProgramResult) -> Spread:
        """Return the speed of ``result`` relative to ``other``, computed per round."""
        return Spread.of([a / b for a, b in zip(self.speeds(result), self.speeds(other), strict=True)])

    def one_process(self, ours: bool) -> list[ProgramResult]:
        """Return the results with one process, of this project or of the peers."""
        return [r for r in self.results if (r.name.split()[0] == OURS) == ours and r.task.layout.ranks == 1]


HEAD = (
    *("program", "tokens/s", "GFLOP/s", "of peak", "CPU s/step", "resident MiB", "live MiB"),
    *("first step, cold cache", "warm"),
)


def speed_rows(cell: ComparisonCell) -> Iterator[list[str]]:
    """Yield rows of HEAD, the fastest program first."""
    for result in sorted(cell.results, key=lambda result: -median(cell.speeds(result))):
        speed = median(cell.speeds(result))
        cold = [start.seconds for start in result.starts if start.graphs]
        warm = [start.seconds for start in result.starts if not start.graphs]
        yield [
            result.name,
            f"{speed:,.0f}",
            f"{speed * cell.flops_per_token / 1e9:,.1f}",
            f"{median(cell.peak_shares(result)):.1%}",
            f"{median(turn.processor_seconds for turn in result.turns):.2f}",
            f"{result.peak_bytes / MIB:,.0f}",
            f"{result.live_bytes / MIB:,.0f}",
            f"{cold[0]:.1f} s" if cold else "",
            f"{warm[-1]:.1f} s" if warm else "",
        ]


def _memory_settings(result: ProgramResult) -> tuple[int, int, str]:
    """Return the settings of this project that reduce memory."""
    return result.task.zero, result.task.state_bits, result.task.recompute


def summary_lines(cell: ComparisonCell) -> Iterator[str]:
    """Yield list items that compare this project's speed and memory with the peers'."""
    alone, peers = cell.one_process(ours=True), cell.one_process(ours=False)
    if not alone or not peers:
        return
    ours, fastest = (max(results, key=lambda result: median(cell.speeds(result))) for results in (alone, peers))
    ratio = cell.ratio(ours, fastest)
    yield f"* {ours.name} is {ratio} times as fast as the fastest peer, {fastest.name}."
    for peer in peers:
        if peer is not fastest:
            yield f"* {ours.name} is {cell.ratio(ours, peer)} times as fast as {peer.name}."
    for result in [ours, *(r for r in alone if _memory_settings(r) != _memory_settings(ours))]:
        if result is not ours:
            ratio = cell.ratio(result, fastest)
            yield f"* {result.name} is {ratio} times as fast as the fastest peer, {fastest.name}."
        for kind, memory in (("resident", attrgetter("peak_bytes")), ("live", attrgetter("live_bytes"))):
            smallest = min(peers, key=memory)
            if memory(smallest) and memory(result):
                share = memory(result) / memory(smallest)
                yield f"* {result.name}: peak {kind} memory is {share:.0%} of {smallest.name}, the smallest peer."


def layout_rows(cell: ComparisonCell) -> Iterator[list[str]]:
    """Yield rows of LAYOUT_HEAD: each layout relative to one process of the same mode on the same cores."""
    for result in cell.results:
        layout = result.task.layout
        alone = [r for r in cell.results if r.task.mode == result.task.mode and r.task.layout.ranks == 1]
        alone = [r for r in alone if _memory_settings(r) == _memory_settings(result)]
        alone = [r for r in alone if r.name.split()[0] == result.name.split()[0]]
        if layout.ranks == 1 or not alone:
            continue
        ratio = cell.ratio(result, alone[0])
        # A pipeline of p stages with m micro batches is busy in m of m + p - 1 slots.
        micro_batches = result.task.batch_size // (layout.dp * result.task.micro_batch_size)
        bound = 1.0 if layout.pp == 1 else micro_batches / (micro_batches + layout.pp - 1)
        yield [result.name, str(ratio), f"{bound:.2f}", f"{ratio.median_value / bound:.1%}"]


LAYOUT_HEAD = ("layout", "times one process", "upper bound", "share of bound")


FACTS_HEAD = ("program", "optimizer", "attention", "weights", "matmuls")


def fact_rows(cells: Sequence[ComparisonCell]) -> list[tuple[str, ...]]:
    """Return rows of FACTS_HEAD: the facts that the programs report, without duplicates."""
    programs = [(result.name, result.facts) for cell in cells for result in cell.results]
    return sorted({(name, f.optimizer, f.attention, f.weight_dtype, f.compute_dtype) for name, f in programs})
