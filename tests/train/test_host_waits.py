"""How often the host waits for the device in a step, counted on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron_llama.devices.cpu.device import Cpu
from megatron_llama.plan import Plan
from megatron_llama.train.loop import read_scalars
from megatron_llama.train.run_rank import run_rank
from tests.oracle import make_plan
from tests.ranks import run_ranks


def test_scalars_are_read_exactly_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    floats = [0.1, float("inf"), float("nan"), -0.0, 1e-45]
    integers = [2**53 + 1, 0, -1]
    reads: list[torch.Tensor] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or tolist(tensor))
    values, counts = read_scalars([torch.tensor(x) for x in floats], [torch.tensor(x) for x in integers])
    assert len(reads) == 1
    assert counts == integers
    expected, got = torch.tensor(floats), torch.tensor(values)
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("world", [1, 2])
def test_steps_do_not_synchronize_with_the_whole_device(tmp_path: Path, world: int) -> None:
    few, many = (
        run_ranks(_calls, world, make_plan(world, f"trainer.steps={steps}", f"run.dir={tmp_path / str(steps)}"))
        for steps in (1, 4)
    )
    assert few == many


def _calls(rank: int, plan: Plan) -> int:
    """Return the number of calls of ``synchronize`` in a run."""
    os.environ["LOCAL_WORLD_SIZE"] = str(plan.world_size)
    calls = []
    Cpu.synchronize = lambda self: calls.append(1)  # type: ignore[method-assign]
    run_rank(plan)
    return len(calls)
