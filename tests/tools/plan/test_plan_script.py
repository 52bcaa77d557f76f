"""Report, JSON and error messages of ``scripts/plan.py``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_llama.tools.forecast.step_time import goodput
from megatron_llama.tools.plan.cli import main
from megatron_llama.tools.plan.forecast_run import forecast_run
from tests.cpu import children_cpu_seconds
from tests.paths import ROOT

LLAMA_70B = (
    "model=llama70b data.mock=true data.prefixes=[] data.seq_length=4096 trainer.precision=bf16 trainer.tp=8 "
    "trainer.pp=4 trainer.global_batch_size=512"
).split()


def test_numbers_are_consistent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA_70B, "cluster.nodes=16", "cluster.price=2", "cluster.tokens=2e12", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    times = page["step_time_s"]
    assert sum(part for name, part in times.items() if name != "total") == pytest.approx(times["total"])
    assert page["tokens_per_second"] == pytest.approx(512 * 4096 / times["total"])
    days = 2e12 / page["tokens_per_second"] / 86400 / page["goodput"]["useful"]
    assert page["days"] == pytest.approx(days) and page["cost"] == pytest.approx(days * 24 * 128 * 2)
    assert page["mfu"]["full"] / page["mfu"]["causal"] == pytest.approx(444.49 / 428.39, rel=1e-3)
    for stage in page["memory_bytes"]["stages"]:
        assert stage["peak"] == sum(
            stage[part] for part in ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
        )
    assert page["memory_bytes"]["stages"][0]["peak"] > page["memory_bytes"]["stages"][2]["peak"], "more in flight"
    assert main([*LLAMA_70B, "cluster.nodes=16", "trainer.micro_batch_size=8", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_trainium_nodes_have_32_ranks() -> None:
    """Check dp on 1, 2 and 4 nodes of the Trainium recipe, whose published table has 4 for each."""
    llama_7b = ["model=llama7b", "data.mock=true", "data.prefixes=[]", "trainer.tp=8", "trainer.global_batch_size=256"]
    sizes = [forecast_run([*llama_7b, "cluster.device=trn1", f"cluster.nodes={nodes}"]).job.dp for nodes in (1, 2, 4)]
    assert sizes == [4, 8, 16]


def test_plan_for_16_384_devices_takes_two_seconds() -> None:
    """Time the whole process with its imports; its work does not depend on the number of ranks."""
    overrides = [*LLAMA_70B, "trainer.pp=16", "trainer.global_batch_size=2048", "cluster.nodes=2048"]
    script = ROOT / "scripts" / "plan.py"
    with children_cpu_seconds(2.0):
        done = subprocess.run([sys.executable, str(script), *overrides, "--json"], capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["devices"] == 16_384, done.stderr
    forecast = forecast_run(overrides)
    assert forecast.devices == 16_384 and forecast.job.dp == 128
    assert len(forecast.scaling) == 1 and forecast.goodput.failures_a_day == pytest.approx(7.86, abs=0.01)


def test_goodput_decreases_with_devices_and_the_interval_is_optimal() -> None:
    def useful(devices: int, interval: float | None = None) -> float:
        options = {"failure_hours": 50_000.0, "restart_seconds": 600.0, "write_seconds": 60.0}
        return goodput(devices, 1e10, interval=interval, **options).useful

    assert 1 > useful(128) > useful(1024) > useful(16_384) > 0.9
    best = goodput(16_384, 1e10, failure_hours=50_000, restart_seconds=600, write_seconds=60).interval
    assert all(useful(16_384) >= useful(16_384, best * factor) for factor in (0.3, 0.7, 1.5, 4))
