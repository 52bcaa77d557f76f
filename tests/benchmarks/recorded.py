"""A recorded cell of a comparison, with round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.harness.comparison import ComparisonCell
from benchmarks.harness.runner import ProgramResult, StartupTime, TurnMeasurement, program_name
from benchmarks.harness.task import Facts, Layout, TrainingTask, checksum

TASK = TrainingTask(
    preset="tiny",
    model={"vocab_size": 1000},
    parameters=5000,
    seq_length=10,
    batch_size=4,
    micro_batch_size=4,
    precision="fp32",
    mode="eager",
    layout=Layout(),
    device="cpu",
    threads=2,
    optimizer={"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0},
    seed=1,
    cache="cache",
    started=0.0,
)
FACTS = Facts(
    parameters=5000,
    weight_dtype="float32",
    compute_dtype="float32",
    tokens_per_step=40,
    tokens_checksum=checksum(TASK.text(1)[:, :-1]),
    optimizer="AdamW, fused",
    clip=1.0,
    attention="sdpa",
    versions={"torch": "2.13.0"},
)
FIRST_LOSS = 6.95  # log(1000) is 6.908


def result(peer: str, seconds: list[float], live_bytes: int, **changed: Any) -> ProgramResult:
    """Return turns of one step of ``seconds`` each; the peak is 1000 FLOP/s in the first round and 2000 afterwards."""
    task = replace(TASK, **changed)
    turns = [
        TurnMeasurement([second], 2 * second, 10 * live_bytes + number, 1000.0 if number == 0 else 2000.0, 6.9)
        for number, second in enumerate(seconds)
    ]
    starts = [StartupTime(30.0, {"imports": 5.0, "built": 1.0, "first_step": 24.0}, graphs=2)]
    starts += [StartupTime(8.0, {"imports": 5.0, "built": 1.0, "first_step": 2.0}, graphs=0)]
    return ProgramResult(program_name(peer, task), task, FACTS, FIRST_LOSS, starts, turns, live_bytes)


def cell() -> ComparisonCell:
    """Return a cell: ours takes 1, 2 and 1 s, peer ``fast`` 2, 2 and 4 s, peer ``lean`` 10 s, two layouts 2 s."""
    return ComparisonCell(
        flops_per_token=10.0,
        results=[
            result("ours", [1.0, 2.0, 1.0], 60 << 20),
            result("fast", [2.0, 2.0, 4.0], 200 << 20, mode="compiled"),
            result("lean", [10.0, 10.0, 10.0], 100 << 20),
            result("ours", [2.0, 2.0, 2.0], 1 << 20, layout=Layout(pp=2), micro_batch_size=1),
            result("ours", [2.0, 2.0, 2.0], 1 << 20, layout=Layout(dp=2), micro_batch_size=2),
        ],
    )
