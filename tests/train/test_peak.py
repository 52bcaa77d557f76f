"""Peak FLOP/s: measured once per run and host, shared cores divided."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_llama.devices import Device, Peak, device_named, processor
from megatron_llama.train import peak as module
from megatron_llama.train.peak import PEAK_FILE, find_peak
from tests.ranks import run_ranks
from tests.train.steps import log_steps, plan_of

CPU = torch.device("cpu")


def measuring(flops: float, **facts: str) -> Device:
    """A CPU whose measurement returns ``flops``."""

    class Measured(type(device_named("cpu"))):  # type: ignore[misc]
        def hardware(self) -> dict[str, str]:
            return {"processor": "A", **facts}

        def peak_flops(self, precision: str) -> Peak:
            return Peak(flops, "measured")

    return Measured()


def _starts(rank: int, folder: Path) -> list[float]:
    """Return the peaks of a first start and of later ones on a slower host state."""
    plan = plan_of(folder)
    first, busy, other = measuring(90e9), measuring(12e9), measuring(12e9, processor="B")
    return [find_peak(plan, device, CPU).flops for device in (first, busy, other)]


def test_a_resumed_run_keeps_its_measured_peak(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    share = _share()
    peaks = run_ranks(_starts, 2, tmp_path)
    assert peaks == [pytest.approx([share * 90e9, share * 90e9, share * 12e9])] * 2, "on all ranks"
    assert "MFU: measuring the peak again: processor A -> B" in capfd.readouterr().err
    assert json.loads((tmp_path / PEAK_FILE).read_text())["conditions"]["processor"] == "B"


def _share() -> float:
    """Return the share of a core that each of two ranks with one thread has here."""
    return min(1.0, len(module.usable_cores()) / 2)


def _fifty(rank: int, folder: Path) -> list[float]:
    return [find_peak(plan_of(folder), measuring(50e9), CPU).flops]


@pytest.mark.parametrize("text", ["", "[1", "{}", '{"flops": -1, "source": "x", "conditions": {}}', '{"flops": "x"}'])
def test_a_damaged_file_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / PEAK_FILE).write_text(text)
    assert run_ranks(_fifty, 2, tmp_path) == [[pytest.approx(_share() * 50e9)]] * 2


def test_a_peak_below_a_step_of_the_run_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(_low, 2, tmp_path)
    log_steps(plan_of(tmp_path), last=2)
    assert run_ranks(_fifty, 2, tmp_path) == [[pytest.approx(_share() * 50e9)]] * 2
    assert "GFLOP/s was saved" in capfd.readouterr().err


def _low(rank: int, folder: Path) -> float:
    return find_peak(plan_of(folder), measuring(1e6), CPU).flops


def _shared(rank: int, folder: Path) -> Peak:
    module.usable_cores = lambda: [0, 1]
    torch.set_num_threads(2)
    return find_peak(plan_of(folder), measuring(80e9), CPU)


def test_ranks_that_share_cores_share_their_flops(tmp_path: Path) -> None:
    (one, other) = run_ranks(_shared, 2, tmp_path)
    assert one == other == Peak(pytest.approx(40e9), "measured, 4 threads on 2 cores")


def _set(rank: int, folder: Path) -> Peak:
    plan = plan_of(folder, "device.peak_tflops=2")
    assert dist.is_initialized()
    return find_peak(plan, measuring(1.0), CPU)


def test_a_set_peak_is_not_measured(tmp_path: Path) -> None:
    assert run_ranks(_set, 2, tmp_path) == [Peak(2e12, "device.peak_tflops")] * 2
    assert not (tmp_path / PEAK_FILE).exists()


def test_interrupted_measurements_do_not_lower_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([10e9, 11e9, 60e9, 12e9, 95e9, 20e9, 30e9, 40e9, 94e9, 12e9, *[1.0] * 99])
    monkeypatch.setattr(processor, "matmul_rate", lambda *_: next(rates))
    rate, size = processor.best_matmul_rate((512, 1024), torch.float32)
    assert (rate, size) == (95e9, 512), "measured until two rounds agree"
