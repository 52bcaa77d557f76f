"""``train.py`` from end to end on Trainium and Gaudi, with stand-ins for their packages. Not run on hardware."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices.helpers import FAKES, gaudi, trainium
from tests.oracle import SMALL
from tests.paths import ROOT

PIPELINE = ("trainer.pp=2", "trainer.compile=true")
STEPS = 4
Events = list[dict[str, Any]]


def train(folder: Path, root: Path, *overrides: str, **variables: str) -> tuple[list[float], Events]:
    """Run ``python train.py ...`` in a new process; return its losses and the stand-ins' records."""
    _, events = run("train.py", folder, root, *overrides, **variables)
    metrics = (folder / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reduced_train_loss"] for line in metrics], events


def run(script: str, folder: Path, root: Path, *overrides: str, **variables: str) -> tuple[str, Events]:
    """Run a program in a new process with the driver's files in ``root``; return its output and the stand-ins'
    records."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.jsonl"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NEURON", "TORCH", "PT_"))}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(FAKES), str(ROOT)]),
        "STAND_IN_LOG": str(log),
        "STAND_IN_ROOT": str(root),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    precision = "trainer.precision=fp32"  # accelerators have another default
    arguments = [*SMALL, f"trainer.steps={STEPS}", "checkpoint.save_last=false", precision, f"run.dir={folder / 'run'}"]
    words = [sys.executable, str(ROOT / script), *arguments, *overrides]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, read(log)


def read(log: Path) -> Events:
    return [json.loads(line) for line in log.read_text().splitlines()]


def named(events: Events, name: str) -> Events:
    return [event for event in events if event["event"] == name]


def agree(losses: list[float], expected: list[float]) -> bool:
    pairs = zip(losses, expected, strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs) <= 1e-5


@pytest.fixture(scope="module")
def cpu_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the same run on the CPU, eager."""
    folder = tmp_path_factory.mktemp("cpu")
    losses, events = train(folder, folder, "trainer.pp=2", OMP_NUM_THREADS="1")
    assert len(set(losses)) == STEPS
    assert len(named(events, "import torch")) == 1, "once, in the parent that is forked"
    return losses


@pytest.mark.slow
def test_trainium(tmp_path: Path, cpu_losses: list[float]) -> None:
    root, cache_folder = trainium(tmp_path / "machine"), tmp_path / "neff"
    variables = {"NEURON_RT_NUM_CORES": "2", "TORCH_NEURONX_NEFF_CACHE_DIR": str(cache_folder)}
    losses, events = train(tmp_path / "first", root, "device=neuron", *PIPELINE, **variables)
    assert agree(losses, cpu_losses)

    # One graph forward and one backward, shared by all blocks and both stages; each compiled once.
    compiled = named(events, "compiled")
    graphs = {event["graph"] for event in compiled}
    assert len(graphs) == len(compiled) == len(list(cache_folder.rglob("*.neff"))) == 2
    for rank in ("0", "1"):
        seen = [e["graph"] for e in events if e["rank"] == rank and e["event"] in ("compiled", "cache hit")]
        assert sorted(seen) == sorted(graphs), "all ranks share the graphs, and each graph is compiled once"
    shapes = [shape for event in compiled for node in event["shapes"] for shape in node]
    assert shapes and all("s" not in shape.partition("]")[0] for shape in shapes)

    # The variables were set before torch was imported, and each process has one core.
    for event in [e for e in named(events, "import torch") if e["rank"]]:
        assert event["environment"]["TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION"] == "1"
        assert "NEURON_RT_STOCHASTIC_ROUNDING_EN" not in event["environment"]
    cores = [event["environment"]["NEURON_RT_VISIBLE_CORES"] for event in named(events, "import torch_neuronx")]
    assert sorted(cores) == ["0", "1"]
    assert [event["seed"] for event in named(events, "seed")] == [1234, 1234]

    # Between the stages nothing was sent: the probe was refused once, then the pairs carried it all, both ways.
    assert len(named(events, "send refused")) == len(named(events, "recv refused")) == 1
    microbatches = 4
    assert len(named(events, "activation or gradient by all-reduce")) == 2 * 2 * microbatches * STEPS


@pytest.mark.slow
@pytest.mark.long
def test_trainium_compiled_ahead_on_a_machine_without_one(tmp_path: Path, cpu_losses: list[float]) -> None:
    """Then the run finds every graph, and the user's variables are kept."""
    cache_folder, nothing = f"trainer.compile_cache={tmp_path / 'cache'}", tmp_path / "no chips"
    nothing.mkdir()
    variables = {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}
    requested = ("--one-per-stage", "device=neuron", *PIPELINE, cache_folder)
    _, events = run("scripts/compile.py", tmp_path / "ahead", nothing, *requested, **variables)
    assert len(named(events, "compiled")) == 2
    report = json.loads((tmp_path / "ahead/run/compile/compile.json").read_text())
    assert (report["total_graphs"], report["total_failed_compilations"], report["cache_misses"]) == (1, 0, 1)

    root = trainium(tmp_path / "machine")
    variables = {"NEURON_RT_NUM_CORES": "2", "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "0"}
    losses, events = train(tmp_path / "train", root, "device=neuron", *PIPELINE, cache_folder, **variables)
    assert agree(losses, cpu_losses)
    assert not named(events, "compiled") and len(named(events, "cache hit")) == 4
    report = json.loads((tmp_path / "train/run/compile.json").read_text())
    assert (report["cache_hits"], report["cache_misses"]) == (2, 0)
    for event in named(events, "import torch"):
        assert event["environment"]["TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION"] == "0"


@pytest.mark.slow
def test_gaudi_under_a_starter_that_shows_each_task_its_card(tmp_path: Path, cpu_losses: list[float]) -> None:
    root = gaudi(tmp_path / "machine")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    recipes = tmp_path / "recipes"
    place["PT_HPU_RECIPE_CACHE_CONFIG"] = f"{recipes},false,1024,false"
    losses, events = train(tmp_path / "run", root, "device=hpu", "trainer.compile=true", **place)
    assert agree(losses, cpu_losses)
    assert len(named(events, "compiled")) == len(list(recipes.rglob("*.recipe"))) == 2
    (imported,) = named(events, "import torch")
    assert imported["environment"]["PT_HPU_LAZY_MODE"] == "0", "the bridge reads it when torch is imported"
    (bridge,) = named(events, "import habana_frameworks")
    assert bridge["environment"]["HLS_MODULE_ID"] == "0", "rank 3 of its machine, but the only card it sees is its own"
    assert [event["seed"] for event in named(events, "seed")] == [1234]


def test_the_compiler_refuses_dynamic_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The test above would say little about shapes if the stand-in took any.
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log.jsonl"))
    from stand_in.compiler import register

    register("refusing", lambda: tmp_path, ".neff")

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(Exception, match="dynamic shapes are not supported"):
        torch.compile(double, backend="refusing", dynamic=True)(torch.ones(3, 4))
    torch._dynamo.reset()
    static = torch.compile(double, backend="refusing", dynamic=False)
    for rows in (3, 5, 3):
        assert torch.equal(static(torch.ones(rows, 4)), torch.full((rows, 4), 2.0))
    assert len(named(read(tmp_path / "log.jsonl"), "compiled")) == 2
