"""Only slow ranks are reported, although all ranks have equal step times."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron_llama.devices import get_device
from megatron_llama.devices.base import FAULT_METRICS, FaultCounts
from megatron_llama.system import phase
from megatron_llama.system.phase import PhaseFile
from megatron_llama.train import loop, stragglers, waits
from megatron_llama.train.metrics import MetricsLogger
from megatron_llama.train.metrics_file import read_metrics
from megatron_llama.train.stragglers import WINDOW_STEPS, Stragglers, StragglerWatch
from tests.launch.small_runs import SMALL
from tests.oracle import CPU
from tests.processes import plan_of, run_train_py
from tests.ranks import run_ranks


def changes(watch: Stragglers, *windows: Sequence[float]) -> list[tuple[list[int], list[int]]]:
    """Return the ranks that become slow and that recover, per window."""
    verdicts = [watch.update(busy) for busy in windows]
    return [(verdict.started, verdict.ended) for verdict in verdicts]


def test_straggler_is_reported_once_and_when_it_recovers() -> None:
    even, slow = [1.0, 1.1, 0.9, 1.0], [1.0, 1.1, 1.8, 1.0]
    watch = Stragglers([0] * 4)
    assert changes(watch, even, slow, even, slow, slow, slow, slow, even, even) == [
        *[([], [])] * 4,  # one slow window is not enough
        ([2], []),
        *[([], [])] * 2,
        ([], [2]),
        ([], []),
    ]
    verdict = watch.update(slow)
    assert verdict.slowest == 2 and verdict.ratio == pytest.approx(1.8)


def test_ranks_are_compared_with_their_peers_or_their_history() -> None:
    """The slower of two ranks is named; the last stage, with the output head, is compared with itself."""
    assert changes(Stragglers([0, 0]), [1.0, 2.0], [1.0, 2.0])[-1] == ([1], [])
    assert changes(Stragglers([0, 0, 1, 1]), *[[1.0, 1.0, 3.0, 3.0]] * 3)[-1] == ([], [])
    assert changes(Stragglers([0, 0, 1, 1]), *[[1.0, 1.0, 3.0, 5.0]] * 2)[-1] == ([3], [])
    before, after = [1.0, 3.0], [1.0, 6.0]
    watch = Stragglers([0, 1])
    assert changes(watch, before, before, after, after)[-1] == ([1], [])
    assert changes(watch, *[after] * 30)[-1] == ([], []), "slow windows are not added to the history"
    assert changes(watch, before)[-1] == ([], [1])


class FakeTime:
    """A simulated clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def watch_of(ranks: int, clock: FakeTime, **device_methods: Any) -> StragglerWatch:
    """Return the watch of data-parallel ranks with a simulated clock."""
    device, stragglers.time = get_device("cpu"), clock  # type: ignore[assignment]
    for name, method in {"record_event": clock.perf_counter, **device_methods}.items():
        setattr(device, name, method)
    return StragglerWatch(plan_of(ranks), device, cast(Any, SimpleNamespace(device=CPU)))


def train_with_a_slow_rank(rank: int, slow: int | None) -> tuple[list[dict[str, float]], list[str], set[str], str]:
    """Run steps of 0.3 s: the slow rank works 0.3 s, the others work 0.1 s and wait 0.2 s."""
    clock, lines, awaited = FakeTime(), list[str](), set[str]()
    waits.axis_of = lambda group: "dp"
    wait = dist.Work.wait

    def waiting(work: Any, *more: Any) -> Any:
        awaited.add(phase.awaited())
        clock.now += 0.0 if rank == slow else 0.2
        return wait(work, *more)

    dist.Work.wait = waiting  # type: ignore[method-assign,assignment]
    watch = watch_of(3, clock)
    logger = SimpleNamespace(print_lines=lines.extend) if rank == 0 else None
    logged = []
    with watch.watching():
        for step in range(1, 4 * WINDOW_STEPS + 1):
            with watch.step():
                clock.now += 0.3 if rank == slow else 0.1
                dist.all_reduce(torch.zeros(1))
            metrics = {"step": float(step)}
            watch.after_step(step, metrics, cast(MetricsLogger, logger))
            if len(metrics) > 1:
                logged.append(metrics)
    return logged, lines, awaited, phase.awaited()


def test_waiting_ranks_are_not_slow() -> None:
    (logged, lines, awaited, after), *others = run_ranks(train_with_a_slow_rank, 3, 1)
    assert [metrics["step"] for metrics in logged] == [10, 20, 30, 40]
    assert all(metrics["slowest_rank"] == 1 for metrics in logged)
    assert logged[-1]["slowest_rank_ratio"] == pytest.approx(3.0, rel=1e-3)
    (line,) = lines
    where = f"step 20: rank 1 on {os.uname().nodename}"
    assert line.startswith(f"{where} is slow: works 0.3 s per step, 3.0 times its peers' 0.1 s")
    assert "dp all_reduce" in awaited and after == ""
    assert [other[0] for other in others] == [logged] * 2, "all ranks have the same verdict"
    logged, lines, _, _ = run_ranks(train_with_a_slow_rank, 3, None)[0]
    assert not lines and all(metrics["slowest_rank_ratio"] == pytest.approx(1.0) for metrics in logged)


def count_faults(rank: int) -> tuple[list[dict[str, float]], list[str]]:
    """Run 40 steps of 30 s; faults of rank 1's device grow in steps 15 and 35."""
    clock, lines, logged = FakeTime(), list[str](), list[dict[str, float]]()
    grown = [FaultCounts(), FaultCounts(2 * rank, rank), FaultCounts(2 * rank, rank, rank, 79 * rank)]

    def counters() -> FaultCounts:
        return grown[int(clock.now > 450) + int(clock.now > 1050)]

    watch = watch_of(2, clock, open_fault_counters=lambda: counters)
    logger = SimpleNamespace(print_lines=lines.extend) if rank == 0 else None
    for step in range(1, 41):
        with watch.step():
            clock.now += 30.0
        metrics = {"step": float(step)}
        watch.after_step(step, metrics, cast(MetricsLogger, logger))
        logged.append({name: value for name, value in metrics.items() if name in FAULT_METRICS})
    return logged, lines


def test_faults_of_devices_are_reported_when_they_grow() -> None:
    (logged, lines), (other, _) = run_ranks(count_faults, 2)
    node = os.uname().nodename
    assert lines == [
        f"step 20: rank 1 on {node}: device errors: 2 ECC corrected, 1 ECC uncorrected",
        f"step 40: rank 1 on {node}: device errors: 2 ECC corrected, 1 ECC uncorrected, 1 Xid (79)",
    ]
    sums = [dict(zip(FAULT_METRICS, counts, strict=True)) for counts in ((2, 1, 0), (2, 1, 1))]
    assert logged == other == [*[{}] * 19, *[sums[0]] * 20, sums[1]], "since the start"


@pytest.mark.parametrize(
    ("waits_of_step", "work"),
    [
        ([(0.0, 0.9), (0.1, 0.9)], 0.1),  # a gather and a scatter on two streams
        ([(0.5, 0.7), (0.1, 0.2), (0.15, 0.3)], 0.6),
        ([(0.0, 0.6), (0.3, 1.2)], 0.01),  # a side stream ends after the host's clock
        ([], 1.0),
    ],
)
def test_collectives_that_overlap_count_once(waits_of_step: list[tuple[float, float]], work: float) -> None:
    assert run_ranks(work_of_a_step, 1, waits_of_step) == [[pytest.approx(work)]]


def work_of_a_step(rank: int, waits_of_step: list[tuple[float, float]]) -> list[float]:
    """Return the work in a step of 1 s with these waits."""
    clock, marks = FakeTime(), iter([0.0, *[mark for span in waits_of_step for mark in span]])
    watch = watch_of(2, clock, record_event=lambda: next(marks))
    with watch.step():
        for _ in waits_of_step:
            with watch._waiting("dp all_gather"):
                pass
        clock.now += 1.0
    return watch._window


def test_launcher_reads_the_awaited_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_descriptor", "_shared_wait", "_awaited", "_current"):
        monkeypatch.setattr(phase, name, getattr(phase, name))
    file = PhaseFile()
    assert file.awaited == ""
    phase.share(os.dup(file.file.fileno()))
    phase.enter("step 7")
    phase.wait_for("tp reduce_scatter")
    assert file.awaited == "tp reduce_scatter" and file.read().name == "step 7"
    phase.wait_for("")
    assert file.awaited == "" and file.read().name == "step 7"


@pytest.mark.slow
def test_slow_rank_of_a_real_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of one of two ranks takes 1,000 s more by its clock."""
    inner, extra = loop.training_step, FakeTime()

    def slowed(step: int, *more: Any) -> dict[str, float]:
        extra.now += 1000.0 * (os.environ["RANK"] == "1")
        return inner(step, *more)

    monkeypatch.setattr(stragglers, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + extra.now))
    monkeypatch.setattr(loop, "training_step", slowed)  # the ranks are forks
    status, output = run_train_py(tmp_path / "run", *SMALL, f"trainer.steps={2 * WINDOW_STEPS}")
    assert status == 0, output
    (line,) = [line for line in output.splitlines() if "is slow: works" in line or "as fast as its peers" in line]
    assert line.startswith(f"step {2 * WINDOW_STEPS}: rank 1 on {os.uname().nodename} is slow: works ")
    assert [record["slowest_rank"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")[9::10]] == [1, 1]
