"""Printed pages, refusals and exit statuses of the tools, compared with golden files."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_llama.system.programs import program_files
from megatron_llama.tools.forecast.goodput import goodput
from megatron_llama.tools.plan.cli import main as plan
from megatron_llama.tools.plan.forecast_run import forecast_run
from megatron_llama.tools.tune import trial
from tests.golden import GoldenFiles
from tests.processes import environment

SLOW = ("tools/tune/longest.txt", "tools/tune/fewest_devices.txt")
TOOLS = "plan traffic tune rehearse pipeline profile doctor compile sweep".split()
PAGES = GoldenFiles.names("tools/*/*.txt", rf"\$ ({'|'.join(TOOLS)}) ")


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in PAGES]
)
def test_pages(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    (command,) = GoldenFiles.commands(page)
    words, _, status = command.partition("  # status ")
    program = importlib.import_module(f"megatron_llama.tools.{words.split()[0]}.cli")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no calibration of this machine
    monkeypatch.setattr(trial, "experiment_path", lambda name: Path(f"{name}.yaml"))
    assert program.main(words.split()[1:]) == int(status or 0)
    printed = capfd.readouterr()
    text = printed.out + (f"--- stderr\n{printed.err}" if printed.err else "")
    assert status != "2" or not list(tmp_path.iterdir())
    if (experiment := Path("best.yaml")).exists():
        text += f"\n{experiment.name}:\n{experiment.read_text()}"
    GoldenFiles.check(page, f"$ {command}\n{text}", hidden={r"(?<=# )\d{4}-\d\d-\d\d\.": "TODAY."})


PROGRAMS = program_files()
# Runs each program with --help in one new interpreter, without large packages.
RUN_ALL = """
import os, runpy, sys
folder, *programs = sys.argv[1:]
for path in programs:
    sys.argv = [path, "--help"]
    name = os.path.join(folder, os.path.basename(path))
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), 1)
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        sys.stdout.flush()
        with open(name + ".end", "w") as file:
            heavy = {"torch", "megatron", "matplotlib", "tensorboard"} & set(sys.modules)
            file.write(f"{end.code or 0} {sorted(heavy)}")
"""
# argparse formats options and wraps usages differently in other versions.
HELP_PYTHON = (3, 11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the page of each program, its exit status, and the large packages that were imported."""
    pages = tmp_path_factory.mktemp("help")
    command = [sys.executable, "-c", RUN_ALL, str(pages), *map(str, PROGRAMS.values())]
    done = subprocess.run(command, env=environment(COLUMNS="80"), capture_output=True, text=True, timeout=100)
    assert done.stderr == ""
    return pages


@pytest.mark.parametrize("program", PROGRAMS)
def test_help(program: str, folder: Path) -> None:
    path = folder / PROGRAMS[program].name
    assert path.with_suffix(".py.end").read_text() == "0 []"
    page = path.read_text()
    long = [line for line in page.splitlines() if len(line) > 79]
    assert not long or program == "sft" and len(long[0].split()) == 2, "a list of choices is one word"
    if sys.version_info[:2] == HELP_PYTHON:
        GoldenFiles.check(f"tools/help/{program}.txt", page)


WORDS_70B = (
    "model=llama70b data.mock=true data.prefixes=[] data.seq_length=4096 trainer.precision=bf16 trainer.tp=8 "
    "trainer.pp=4 trainer.global_batch_size=512"
).split()


def test_numbers_are_consistent(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan([*WORDS_70B, "cluster.nodes=16", "cluster.price=2", "cluster.tokens=2e12", "--json"]) == 0
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
    assert plan([*WORDS_70B, "cluster.nodes=16", "trainer.micro_batch_size=8", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_trainium_nodes_have_32_ranks() -> None:
    """Check dp on 1, 2 and 4 nodes of the Trainium recipe, whose published table has 4 for each."""
    llama_7b = ["model=llama7b", "data.mock=true", "data.prefixes=[]", "trainer.tp=8", "trainer.global_batch_size=256"]
    sizes = [forecast_run([*llama_7b, "cluster.device=trn1", f"cluster.nodes={nodes}"]).job.dp for nodes in (1, 2, 4)]
    assert sizes == [4, 8, 16]


def test_plan_for_16_384_devices() -> None:
    forecast = forecast_run([*WORDS_70B, "trainer.pp=16", "trainer.global_batch_size=2048", "cluster.nodes=2048"])
    assert forecast.devices == 16_384 and forecast.job.dp == 128
    assert len(forecast.scaling) == 1 and forecast.goodput.failures_a_day == pytest.approx(7.86, abs=0.01)


def test_goodput_decreases_with_devices_and_the_interval_is_optimal() -> None:
    def useful(devices: int, interval: float | None = None) -> float:
        options = {"failure_hours": 50_000.0, "restart_seconds": 600.0, "write_seconds": 60.0}
        return goodput(devices, 1e10, interval=interval, **options).useful

    assert 1 > useful(128) > useful(1024) > useful(16_384) > 0.9
    best = goodput(16_384, 1e10, failure_hours=50_000, restart_seconds=600, write_seconds=60).interval
    assert all(useful(16_384) >= useful(16_384, best * factor) for factor in (0.3, 0.7, 1.5, 4))
