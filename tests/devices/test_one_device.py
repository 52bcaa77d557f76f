"""Single-device tests on each device of this machine: train.py has the CPU's losses in fp32 and bf16, and a checkpoint
of one device resumes on another. On a machine with a GPU, run this file first."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

from megatron_llama.devices import get_device
from tests.oracle import SMALL
from tests.processes import losses, run_command

pytestmark = pytest.mark.slow
FP32 = 1e-4  # relative, over 20 steps
BF16 = 2e-2  # 8 bits, and another order of sums


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that is here."""
    try:
        return get_device(request.param).name
    except ValueError as error:
        pytest.skip(str(error))


def train(folder: Path, device: str, *overrides: str) -> list[float]:
    """The losses that train.py has logged in ``folder`` after a run of one rank there."""
    settings = (*SMALL, "optim=constant", "logging.tensorboard=false", f"run.dir={folder}", "trainer.dp=1")
    done = run_command(sys.executable, "train.py", *settings, *overrides, f"device={device}", timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return losses(folder)


@cache
def on_cpu(folder: Path, *overrides: str) -> list[float]:
    """The losses on the CPU, the reference of every other device."""
    return train(folder, "cpu", *overrides)


def furthest(actual: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.long
def test_losses(device: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected = on_cpu(tmp_path_factory.getbasetemp() / "on_cpu", "trainer.steps=25")
    assert expected[-1] < expected[0]
    actual = train(tmp_path / "fp32", device, "trainer.steps=20")
    assert furthest(actual, expected[:20]) <= FP32
    # Its checkpoint is every device's.
    assert furthest(train(tmp_path / "fp32", "cpu", "trainer.steps=25"), expected) <= FP32
    bf16 = train(tmp_path / "bf16", device, "trainer.steps=20", "trainer.precision=bf16")
    assert bf16 != actual and furthest(bf16, expected[:20]) <= BF16
