"""Forecasts for this machine from a recorded calibration.

Nothing here depends on the machine's speed; benchmarks/plan.py compares forecasts with real steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_llama import cli
from megatron_llama.plan import Plan, resolve
from megatron_llama.tools.forecast.this_machine import (
    COLLECTIVES,
    Calibration,
    NotCalibrated,
    calibration_path,
    filled,
    fit_gemms,
    fit_line,
    load_calibration,
    local_step_time,
)
from megatron_llama.tools.plan import measure_machine
from megatron_llama.tools.plan.cli import main

RECORDED = Path(__file__).with_name("recorded_machine.json")
SMALL = ("model=llama_15m", "trainer.micro_batch_size=2", "trainer.global_batch_size=4", "data.seq_length=256")


def recorded() -> dict[str, Any]:
    """Return a calibration of one and two ranks of one thread each, in CPU time, and steps timed after it."""
    content: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return content


def machine(**changes: Any) -> Calibration:
    return Calibration(**{**recorded()["machine"], **changes})


def plan_of(*overrides: str, ranks: int = 1) -> Plan:
    words = [*overrides, "data.mock=true", "data.prefixes=[]", "device=cpu", "dry_run=true"]
    return resolve(cli.parse_overrides(words), ranks)


def test_fit_line() -> None:
    assert fit_line([(size, 3e-5 + size * 2e-9) for size in (4e3, 1e5, 1e7)]) == pytest.approx((3e-5, 2e-9))
    assert fit_line([(1.0, 5.0), (2.0, 4.0)])[1] == 0, "the slope is not negative"
    start, each = fit_line([(1.0, 1.0), (2.0, 2.4), (4.0, 5.6)])
    assert start == 0 and each == pytest.approx(1.2, rel=0.15), "the start is not negative"


def test_fit_gemms_returns_rate_and_tile_size() -> None:
    shapes = ((256, 288, 864), (512, 768, 288), (2048, 1376, 512))
    assert fit_gemms([(*shape, filled(40, *shape) / 80e9) for shape in shapes]) == pytest.approx((80e9, 40))
    alike = [(*shape, filled(0, *shape) / 80e9) for shape in shapes]
    assert fit_gemms(alike) == pytest.approx((80e9, 0))


@pytest.mark.parametrize("job", recorded()["steps"], ids=lambda job: job["name"])
def test_recorded_steps_are_forecast_within_20_percent(job: dict[str, Any]) -> None:
    plan = plan_of(*job["overrides"], ranks=job["ranks"])
    assert local_step_time(plan, machine()).total == pytest.approx(job["seconds"], rel=0.20)


def test_each_measurement_affects_its_component() -> None:
    """Double one measurement: only the components that depend on it get longer."""
    base = local_step_time(plan_of(*SMALL), machine())

    def slower(change: str) -> dict[str, float]:
        by_ranks = recorded()["machine"]["by_ranks"]
        of_form = by_ranks["1"]["fp32"]
        if change == "adam":
            by_ranks["1"]["adam"] *= 2
        elif change == "loss":
            of_form["loss"][-1] *= 2
        else:
            of_form[change] = [[*shape, 2 * seconds] for *shape, seconds in of_form[change]]
        parts = local_step_time(plan_of(*SMALL), machine(by_ranks=by_ranks)).parts()
        return {name: parts[name] / seconds for name, seconds in base.parts().items() if seconds}

    assert slower("products")["matmul"] == pytest.approx(2)
    assert slower("attention")["attention"] == pytest.approx(2) and slower("attention")["matmul"] == pytest.approx(1)
    assert slower("pieces")["memory_bound"] > 1.5 and slower("pieces")["attention"] == pytest.approx(1)
    assert slower("loss")["head"] > 1.2 and slower("loss")["matmul"] == pytest.approx(1)
    assert slower("adam")["optimizer"] > 1 and slower("adam")["attention"] == pytest.approx(1)


def test_float8_is_emulated_in_fp32() -> None:
    fp32 = local_step_time(plan_of(*SMALL), machine())
    emulated = local_step_time(plan_of(*SMALL, "trainer.float8=tensorwise"), machine())
    assert emulated.matmul == fp32.matmul and emulated.memory_bound > fp32.memory_bound


def test_collectives_add_to_the_step() -> None:
    """Use two ranks as fast as one, whose collectives take 1 ms and 1 ns per byte."""
    one = recorded()["machine"]["by_ranks"]["1"]
    sizes = (2**12, 2**20, 2**23)
    collectives = {
        mode: {kind: [[size, 1e-3 + size * 1e-9] for size in sizes] for kind in kinds}
        for mode, kinds in COLLECTIVES.items()
    }
    two = {**one, "collectives": collectives}
    both = machine(by_ranks={"1": one, "2": two})
    replicas = local_step_time(plan_of(*SMALL, "trainer.dp=2", "trainer.zero=0", ranks=2), both)
    parameters = 15_191_712
    # Seven units: six blocks, and the rest of the model.
    assert replicas.data_parallel == pytest.approx(4 * parameters * 1e-9 + 7e-3, rel=0.01)
    assert replicas.tensor == replicas.pipeline == replicas.bubble == 0
    halves = local_step_time(plan_of(*SMALL, "trainer.tp=2", ranks=2), both)
    assert halves.matmul < 0.6 * local_step_time(plan_of(*SMALL), both).matmul and halves.tensor > 0
    stages = local_step_time(plan_of(*SMALL, "trainer.pp=2", ranks=2), both)
    assert stages.pipeline > 0 and stages.bubble > 0
    more = local_step_time(plan_of(*SMALL, "trainer.dp=4", "trainer.micro_batch_size=1", ranks=4), both)
    one = local_step_time(plan_of(*SMALL), both)
    assert more.matmul == pytest.approx(one.matmul / 4 * 2, rel=0.1), "4 ranks, 2 cores"


def test_cluster_device_cpu_needs_a_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [*SMALL, "cluster.device=cpu"]
    with pytest.raises(NotCalibrated):
        load_calibration()
    assert main(command) == 2
    assert "scripts/plan.py --calibrate" in capsys.readouterr().err
    calibration_path().parent.mkdir(parents=True)
    calibration_path().write_text("{")
    assert main(command) == 2, "an incomplete file is rejected"
    capsys.readouterr()
    calibration_path().write_text(json.dumps(recorded()["machine"]))
    assert main(command) == 0
    text = capsys.readouterr().out
    assert recorded()["machine"]["date"] in text and "attention" in text and "between nodes" not in text
    lora = [*command, "finetune=lora", "init_from=x"]
    assert main([*command, "cluster.nodes=2"]) == 2
    assert "this machine alone" in capsys.readouterr().err
    assert main(lora) == main([*lora, "trainer.tp=2"]) == 0
    assert main(["--calibrate", "trainer.tp=2"]) == 2


def test_the_operations_of_a_calibration_run() -> None:
    seconds = [measure_machine._gemm(8, 16, 16, torch.float32), measure_machine._attention(1, 8, torch.bfloat16)]
    seconds += [measure_machine._loss(8, torch.float32), measure_machine._adam(64)]
    assert all(each > 0 for each in seconds)
