"""The check of streams finds memory that two streams use without an order. Mistakes in a step are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.harness import Runtime
from tests.cuda.in_process import ACCESSES, FAULT
from tests.cuda.log import Call, ProcessLog
from tests.cuda.streams import conflicts

ZERO_3 = ("trainer.zero=3",)
WRITE = "FILL bytes=8 written=0x1000 stream=1"
READ = "COPY from=device to=device bytes=8 read=0x1000 written=0x9000 stream=2"
RECORD, WAIT = "RECORD event=5 stream=1", "WAIT event=5 stream=2"
ORDERED = {
    "event": (WRITE, RECORD, WAIT, READ),
    "wait of the host": (WRITE, "SYNC kind=stream stream=1", READ),
    "finished event": (WRITE, RECORD, "QUERY kind=event event=5 done=1", READ),
    "other memory": (WRITE, READ.replace("0x1000", "0x2000")),
    "two reads": (READ, READ.replace("stream=2", "stream=3").replace("0x9000", "0x7000")),
    "communicator": (
        "NCCL name=all_reduce comm=a bytes=8 read=0x1000,8 written=0x1000,8 stream=1",
        "NCCL name=all_reduce comm=a bytes=8 read=0x1000,8 written=0x1000,8 stream=2",
    ),
}
UNORDERED = {
    "no event": (WRITE, READ),
    "event too early": (RECORD, WRITE, WAIT, READ),
    "wait too late": (WRITE, RECORD, READ, WAIT),
    "unfinished event": (WRITE, RECORD, "QUERY kind=event event=5 done=0", READ),
    "write after a read": (READ, WRITE),
    "part of the memory": (WRITE.replace("bytes=8", "bytes=4096"), READ.replace("0x1000", "0x1800")),
}


def process(*lines: str) -> ProcessLog:
    return ProcessLog(0, tuple(Call.parse(f"0.0 1 {line}") for line in lines))


@pytest.mark.parametrize("name", ORDERED)
def test_order(name: str) -> None:
    assert not conflicts(process(*ORDERED[name]))


@pytest.mark.parametrize("name", UNORDERED)
def test_no_order(name: str) -> None:
    assert len(conflicts(process(*UNORDERED[name]))) == 1


def test_a_thread_that_only_watches_orders_nothing() -> None:
    watching = Call.parse("0.0 2 QUERY kind=event event=5 done=1")
    calls = process(WRITE, RECORD).calls + (watching,) + process(READ).calls
    assert len(conflicts(ProcessLog(0, calls))) == 1


@pytest.mark.slow
def test_a_missing_event_is_found(runtime: Runtime, tmp_path: Path) -> None:
    sharded = (*ZERO_3, "trainer.steps=2")
    correct = runtime.train(tmp_path, *sharded, devices=2, **{ACCESSES: "1"}).check()
    for log in correct.logs:
        assert len(log.named("ACCESS")) > 400
        assert not conflicts(log)
    run = runtime.train(tmp_path / "fault", *sharded, devices=2, **{ACCESSES: "1", FAULT: "missing event"}).check()
    for log in run.logs:
        assert any("all_gather" in line for line in conflicts(log))


@pytest.mark.slow
def test_memory_that_is_reused_too_early_is_found(runtime: Runtime, tmp_path: Path) -> None:
    """One rank with ZeRO 3 adds gradients on a second stream, and records the buffer (parallel/data_parallel.py)."""
    sharded = (*ZERO_3, "trainer.steps=2")
    correct = runtime.train(tmp_path, *sharded, **{ACCESSES: "1"}).check()
    assert not conflicts(correct.logs[0])
    run = runtime.train(tmp_path / "fault", *sharded, **{ACCESSES: "1", FAULT: "early reuse"}).check()
    lines = conflicts(run.logs[0])
    assert any(line.startswith("add_ on stream") and "(write)" in line for line in lines), lines[:3]


@pytest.mark.slow
def test_a_read_of_the_host_is_found(runtime: Runtime, tmp_path: Path) -> None:
    run = runtime.train(tmp_path, "trainer.steps=2", **{FAULT: "host read"}).check()
    assert [call.fields["kind"] for call in run.logs[0].steps[2] if call.name == "SYNC"] == ["stream", "stream"]


STOPPED: dict[str, tuple[int, tuple[str, ...]]] = {
    "tensor on the CPU": (1, ("Expected all tensors to be on the same device",)),
    "other order": (2, ("rank 0 calls all_reduce of 4 numbers", "rank 1 calls broadcast of 4")),
    "other size": (2, ("rank 0 calls all_reduce of 4 numbers", "rank 1 calls all_reduce of 5 n")),
}
"""Ranks and messages of a run with a fault."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", STOPPED)
def test_a_fault_stops_the_run(runtime: Runtime, tmp_path: Path, fault: str) -> None:
    ranks, messages = STOPPED[fault]
    run = runtime.train(tmp_path, "trainer.steps=1", f"trainer.tp={ranks}", devices=ranks, **{FAULT: fault})
    assert run.status and all(message in run.output for message in messages), run.output[-2000:]


@pytest.mark.slow
def test_an_update_during_a_copy_in_memory_is_found(runtime: Runtime, tmp_path: Path) -> None:
    settings = ("checkpoint.memory_every_steps=1", "trainer.steps=3")
    correct = runtime.train(tmp_path, *settings, **{ACCESSES: "1"}).check()
    assert not conflicts(correct.logs[0])
    run = runtime.train(tmp_path / "fault", *settings, **{ACCESSES: "1", FAULT: "early update"}).check()
    lines = conflicts(run.logs[0])
    assert any("adam" in line and "copy" in line for line in lines), lines[:3]
