"""The check of streams finds memory that two streams use without an order. Mistakes in a step are found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cuda.harness import Runtime
from tests.cuda.in_process import ACCESSES, FAULT
from tests.cuda.log import Call, ProcessLog
from tests.cuda.streams import conflicts

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


@pytest.mark.parametrize("name", ORDERED | UNORDERED)
def test_order(name: str) -> None:
    assert len(conflicts(process(*(ORDERED | UNORDERED)[name]))) == (name in UNORDERED)


def test_a_thread_that_only_watches_orders_nothing() -> None:
    watching = Call.parse("0.0 2 QUERY kind=event event=5 done=1")
    assert len(conflicts(ProcessLog(0, process(WRITE, RECORD).calls + (watching,) + process(READ).calls))) == 1


MISSED: dict[str, tuple[int, str, str]] = {
    "missing_event": (2, "trainer.zero=3", "all_gather"),
    # One rank with ZeRO 3 adds gradients on a second stream, and records the buffer (parallel/data_parallel.py).
    "early_reuse": (1, "trainer.zero=3", r"^add_ on stream .*\(write\)"),
    "early_update": (1, "checkpoint.memory_every_steps=1", "adam.*copy|copy.*adam"),
}
"""Ranks, setting, and a conflict of a run with a fault."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", MISSED)
def test_memory_that_is_used_without_an_order_is_found(runtime: Runtime, tmp_path: Path, fault: str) -> None:
    ranks, setting, conflict = MISSED[fault]
    settings = (setting, f"trainer.steps={3 if fault == 'early_update' else 2}")
    correct = runtime.train(tmp_path, *settings, devices=ranks, **{ACCESSES: "1"}).check()
    for log in correct.logs:
        assert len(log.named("ACCESS")) > 400
        assert not conflicts(log)
    run = runtime.train(tmp_path / "fault", *settings, devices=ranks, **{ACCESSES: "1", FAULT: fault}).check()
    for log in run.logs:
        lines = conflicts(log)
        assert any(re.search(conflict, line) for line in lines), lines[:3]


@pytest.mark.slow
def test_a_read_of_the_host_is_found(runtime: Runtime, tmp_path: Path) -> None:
    run = runtime.train(tmp_path, "trainer.steps=2", **{FAULT: "host_read"}).check()
    assert [call.fields["kind"] for call in run.logs[0].steps[2] if call.name == "SYNC"] == ["stream", "stream"]


STOPPED: dict[str, tuple[int, tuple[str, ...]]] = {
    "tensor_on_the_cpu": (1, ("Expected all tensors to be on the same device",)),
    "other_order": (2, ("rank 0 calls all_reduce of 4 numbers", "rank 1 calls broadcast of 4")),
    "other_size": (2, ("rank 0 calls all_reduce of 4 numbers", "rank 1 calls all_reduce of 5 n")),
}
"""Ranks and messages of a run with a fault."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", STOPPED)
def test_a_fault_stops_the_run(runtime: Runtime, tmp_path: Path, fault: str) -> None:
    ranks, messages = STOPPED[fault]
    run = runtime.train(tmp_path, "trainer.steps=1", f"trainer.tp={ranks}", devices=ranks, **{FAULT: fault})
    assert run.status and all(message in run.output for message in messages), run.output[-2000:]
