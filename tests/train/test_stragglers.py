"""A rank that is slow is told of, and no other, however equal the steps of all are; a healthy run says nothing."""

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
from megatron_llama.plan import resolve
from megatron_llama.system import phase
from megatron_llama.system.phase import PhaseFile
from megatron_llama.train import loop, stragglers, waits
from megatron_llama.train.metrics import MetricsLogger
from megatron_llama.train.metrics_file import read_metrics
from megatron_llama.train.stragglers import WINDOW_STEPS, Stragglers, StragglerWatch
from tests.config.helpers import make
from tests.launch.small_run import SMALL
from tests.processes import run_train_py
from tests.ranks import run_ranks


def looks(watch: Stragglers, *windows: Sequence[float]) -> list[tuple[list[int], list[int]]]:
    """Who begins and who ends to be slow with each look."""
    verdicts = [watch.look(busy) for busy in windows]
    return [(verdict.begun, verdict.ended) for verdict in verdicts]


def test_an_episode_is_told_once_and_its_end() -> None:
    well, ill = [1.0, 1.1, 0.9, 1.0], [1.0, 1.1, 1.8, 1.0]
    watch = Stragglers([0] * 4)
    assert looks(watch, well, ill, well, ill, ill, ill, ill, well, well) == [
        *[([], [])] * 4,  # once is chance
        ([2], []),
        *[([], [])] * 2,
        ([], [2]),
        ([], []),
    ]
    verdict = watch.look(ill)
    assert verdict.slowest == 2 and verdict.ratio == pytest.approx(1.8)


def test_of_two_ranks_the_slower_one_is_named() -> None:
    assert looks(Stragglers([0, 0]), [1.0, 2.0], [1.0, 2.0])[-1] == ([1], [])


def test_stages_with_more_to_do_are_not_slow() -> None:
    """The last stage has the output head; its ranks are compared with one another."""
    busy = [1.0, 1.0, 3.0, 3.0]
    assert looks(Stragglers([0, 0, 1, 1]), *[busy] * 3)[-1] == ([], [])
    assert looks(Stragglers([0, 0, 1, 1]), *[[1.0, 1.0, 3.0, 5.0]] * 2)[-1] == ([3], [])


def test_a_rank_alone_with_its_stage_is_compared_with_its_past() -> None:
    before, after = [1.0, 3.0], [1.0, 6.0]
    watch = Stragglers([0, 1])
    assert looks(watch, before, before, after, after)[-1] == ([1], [])
    assert looks(watch, *[after] * 30)[-1] == ([], []), "it does not get used to it"
    assert looks(watch, before)[-1] == ([], [1])


class FakeTime:
    """A clock on which work and waits last as long as the test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def train_with_a_slow_rank(rank: int, slow: int | None) -> tuple[list[dict[str, float]], list[str], set[str], str]:
    """Steps of 0.3 s on all ranks: the slow one works throughout, the others for 0.1 s and then wait for it."""
    clock, lines, seen = FakeTime(), list[str](), set[str]()
    stragglers.time = clock  # type: ignore[assignment]
    plan = resolve(make(**{"trainer.dp": 3, "trainer.global_batch_size": 3}), 3)
    device = get_device("cpu")
    device.record_event = clock.perf_counter  # type: ignore[method-assign]
    waits.axis_of = lambda group: "dp"
    wait = dist.Work.wait

    def waiting(work: Any, *more: Any) -> Any:
        seen.add(phase.awaited())
        clock.now += 0.0 if rank == slow else 0.2
        return wait(work, *more)

    dist.Work.wait = waiting  # type: ignore[method-assign,assignment]
    model = cast(Any, SimpleNamespace(device=torch.device("cpu")))
    watch = StragglerWatch(plan, device, model)
    logger = SimpleNamespace(print_lines=lines.extend) if rank == 0 else None
    found = []
    with watch.watching():
        for step in range(1, 4 * WINDOW_STEPS + 1):
            with watch.step():
                clock.now += 0.3 if rank == slow else 0.1
                dist.all_reduce(torch.zeros(1))
            metrics = {"step": float(step)}
            watch.after_step(step, metrics, cast(MetricsLogger, logger))
            if len(metrics) > 1:
                found.append(metrics)
    return found, lines, seen, phase.awaited()


def test_ranks_that_wait_are_not_slow_and_the_one_that_works_is_named() -> None:
    (found, lines, seen, after), *others = run_ranks(train_with_a_slow_rank, 3, 1)
    assert [metrics["step"] for metrics in found] == [10, 20, 30, 40]
    assert all(metrics["slowest_rank"] == 1 for metrics in found)
    assert found[-1]["slowest_rank_ratio"] == pytest.approx(3.0, rel=1e-3)
    (line,) = lines
    assert line.startswith(f"step 20: rank 1 on {os.uname().nodename} is slow: it works 0.3 s of a step, 3.0 times")
    assert "dp all_reduce" in seen and after == ""
    assert [other[0] for other in others] == [found] * 2, "all ranks judge alike"


def test_a_healthy_run_says_nothing() -> None:
    found, lines, _, _ = run_ranks(train_with_a_slow_rank, 3, None)[0]
    assert not lines and all(metrics["slowest_rank_ratio"] == pytest.approx(1.0) for metrics in found)


def test_what_a_rank_waits_for_is_seen_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_real_rank_that_is_slow_is_named_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real run of two ranks that compute for milliseconds; one of them then does nothing for longer than any machine
    here lets the other wait for its turn."""
    inner = loop.training_step

    def slowed(step: int, *more: Any) -> dict[str, float]:
        if os.environ["RANK"] == "1":
            time.sleep(0.3)
        return inner(step, *more)

    monkeypatch.setattr(loop, "training_step", slowed)  # the ranks are forks
    status, said = run_train_py(tmp_path / "run", *SMALL, f"trainer.steps={2 * WINDOW_STEPS}")
    assert status == 0, said
    (line,) = [line for line in said.splitlines() if "is slow: it works" in line or "as fast as its peers" in line]
    assert line.startswith(f"step {2 * WINDOW_STEPS}: rank 1 on {os.uname().nodename} is slow: it works ")
    assert [record["slowest_rank"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")[9::10]] == [1, 1]
