"""Printed pages, refusals and exit statuses of the tools, compared with golden files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_llama.tools.compile.cli import main as compile_ahead
from megatron_llama.tools.doctor.cli import main as doctor
from megatron_llama.tools.pipeline.cli import main as pipeline
from megatron_llama.tools.plan.cli import main as plan
from megatron_llama.tools.profile.cli import main as profile
from megatron_llama.tools.rehearse.cli import main as rehearse
from megatron_llama.tools.sweep.cli import main as sweep
from megatron_llama.tools.traffic.cli import main as traffic
from megatron_llama.tools.tune import objectives, trial
from megatron_llama.tools.tune.cli import main as tune
from tests.golden import GoldenFiles

ON_H100 = "cluster.device=h100 data.mock=true data.prefixes=[] trainer.precision=bf16"
LLAMA_70B = f"{ON_H100} model=llama70b data.seq_length=4096 trainer.tp=8 trainer.pp=4 trainer.global_batch_size=512"
SHORT_70B = "model=llama70b trainer.global_batch_size=8 data.seq_length=256"
LARGE = f"{ON_H100} model=llama3_8b data.seq_length=8192 trainer.micro_batch_size=8 trainer.zero=3"
LLAMA_7B = "model=llama7b trainer.precision=bf16 data.seq_length=4096 trainer.global_batch_size=32 trainer.vpp=1"
H100 = f"{LLAMA_7B} cluster.device=h100 device.memory_gib=80 tune.name=best"
FEWEST = f"{H100} objective=min_devices trainer.recompute=full trainer.zero=3"
LONGEST = f"{H100} objective=max_seq_len cluster.devices_per_node=4 trainer.recompute=full trainer.cp=1"
CPU_15M = "model=llama_15m data=mock device=cpu trainer.global_batch_size=8 data.seq_length=256"
TINY = "model=llama_2m data=mock device=cpu"
PAGES: dict[str, tuple[Callable[[Sequence[str]], int], str, int]] = {
    "plan/llama70b": (plan, f"{LLAMA_70B} cluster.nodes=16 cluster.price=2 cluster.tokens=2e12", 0),
    "plan/does_not_fit": (plan, f"{LARGE} trainer.global_batch_size=64 cluster.nodes=1", 1),
    "plan/devices": (plan, "--devices", 0),
    "plan/refused": (plan, "cluster.device=h10 cluster.nodes=0 cluster.nods=2 cluster.tokens=many trainer.tpp=2", 2),
    "plan/refused_layout": (plan, f"{LLAMA_70B} cluster.nodes=3", 2),
    "traffic/llama70b_512_ranks": (traffic, f"{ON_H100} {SHORT_70B} trainer.tp=8 trainer.pp=16 trainer.dp=4", 0),
    "traffic/lora": (traffic, "+experiment=llama2_70b_lora_gaudi trainer.tp=2 trainer.dp=4", 0),
    "traffic/refused": (traffic, "trainer.tp=3 optim.lrr=1", 2),
    "tune/two_nodes": (tune, f"{H100} cluster.nodes=2 trainer.recompute=none", 0),
    "tune/longest": (tune, LONGEST, 0),
    "tune/fewest_devices": (tune, FEWEST, 0),
    "tune/fewest_devices_in_60_days": (tune, f"{FEWEST} cluster.tokens=1e12 tune.days=60", 0),
    "tune/too_few_days": (tune, f"{FEWEST} cluster.nodes=1 cluster.tokens=1e13 tune.days=1", 1),
    "tune/nothing_fits": (tune, f"{H100} cluster.devices_per_node=1", 1),
    "tune/refused": (
        tune,
        "objective=fastest cluster.device=h10 cluster.nodes=0 tune.trails=2 trainer.tpp=2 tune.steps=0 tune.name=a/b",
        2,
    ),
    "tune/refused_layout": (tune, f"{H100} trainer.tp=4 cluster.devices_per_node=2", 2),
    "tune/refused_jobs": (tune, f"{CPU_15M} tune.jobs=true", 2),
    "rehearse/refused": (rehearse, "trainer.tp=3 optim.lrr=1", 2),
    "rehearse/refused_ranks": (rehearse, f"{CPU_15M} trainer.tp=2 --ranks 0,2,x", 2),
    "pipeline/refused": (pipeline, "trainer.pp=1 --out x.pdf", 2),
    "pipeline/refused_device": (pipeline, "trainer.pp=2 cluster.device=abacus optim.lrr=1", 2),
    "profile/refused": (profile, "model=llama_2", 2),
    "profile/refused_steps": (profile, f"{TINY} trainer.profile=[3,1]", 2),
    "doctor/refused": (doctor, "trainer.tpp=2", 2),
    "compile/refused": (compile_ahead, f"--one-per-stage {TINY} trainer.tp=2 trainer.async_tp=true", 2),
    "sweep/dry_run": (sweep, f"--dry-run -m {TINY} optim.lr=1e-3,1e-4 run.dir=s", 0),
    "sweep/refused": (
        sweep,
        "-m data=mock model=llama_2m,no_such trainer.micro_batch_size=1,-1 optim.lrr=1 run.dir=s",
        2,
    ),
}
SLOW = ("tune/longest", "tune/fewest_devices")


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in PAGES]
)
def test_pages(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    program, words, status = PAGES[page]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no calibration of this machine
    for module in (trial, objectives):
        monkeypatch.setattr(module, "experiment_path", lambda name: Path(f"{name}.yaml"))
    assert program(words.split()) == status
    printed = capfd.readouterr()
    text = printed.out + (f"--- stderr\n{printed.err}" if printed.err else "")
    assert status != 2 or not list(tmp_path.iterdir())
    if (experiment := Path("best.yaml")).exists():
        text += f"\n{experiment.name}:\n{experiment.read_text()}"
    GoldenFiles.check(f"tools/{page}.txt", text, hidden={r"(?<=# )\d{4}-\d\d-\d\d\.": "TODAY."})
