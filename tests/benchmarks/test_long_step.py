"""The step of a long sequence under a memory limit, with 8,192 tokens."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.verify import long_step


def test_live_bytes_follow_tensors() -> None:
    before = long_step.live_bytes()
    tensor = torch.ones(16 << 20)
    assert abs(long_step.live_bytes() - before - tensor.nbytes) < 1 << 20


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (1, "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", True),
        (1, "RuntimeError: Connection closed by peer", False),
        (0, "MemoryError", False),
    ],
)
def test_only_a_refused_allocation_is_out_of_memory(status: int, output: str, expected: bool) -> None:
    assert long_step.out_of_memory(status, output) is expected


@pytest.mark.slow
def test_one_process_needs_more_memory_than_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert long_step.main(["--length", "8192", "--window", "1024", "--limit-mib", "1250"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[0])
    assert result["planned"] == pytest.approx(result["rehearsed"], rel=0.1)
    # The sampler misses peaks of some milliseconds.
    assert max(result["peaks"]) == pytest.approx(result["rehearsed"], rel=0.2)
