"""The Trainium and Gaudi devices on machines that consist of their drivers' files. Not run on hardware."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_llama.config import ConfigError
from megatron_llama.devices import get_device, hpu
from megatron_llama.devices.neuron import device as neuron
from megatron_llama.plan import resolve
from tests import processes
from tests.config.helpers import make
from tests.devices.helpers import FAKES, gaudi, trainium, write
from tests.oracle import SMALL
from tests.paths import ROOT, TRAIN_PY

TRAINIUM, GAUDI = neuron.DEVICE, hpu.DEVICE
VARIABLES = (
    *("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "NEURON_LOGICAL_NC_CONFIG", "NEURON_PLATFORM_TARGET_OVERRIDE"),
    *("TORCH_NEURONX_COMPILE_ONLY", "HABANA_VISIBLE_MODULES", "HLS_MODULE_ID"),
)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose drivers' files are under a folder; none yet."""
    for module in (neuron, hpu):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that a test that sets it restores it
        monkeypatch.delenv(name)
    return tmp_path


def test_a_missing_device_is_reported_without_an_import(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gaudi(machine, cards=0)  # an accelerator of another make
    reasons = {
        "neuron": "this machine has no Neuron device (/dev/neuron0)",
        "hpu": "this machine has no Intel Gaudi driver or card",
    }
    for name, reason in reasons.items():
        with pytest.raises(ValueError) as refused:
            get_device(name)
        assert f"device={name} is unavailable on this host: {reason}" in str(refused.value)
    monkeypatch.syspath_prepend(FAKES)
    assert {"neuron": TRAINIUM.probe(), "hpu": GAUDI.probe()} == reasons
    assert "torch_neuronx" not in sys.modules


def test_packages_and_their_sources(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gaudi(machine)
    assert (GAUDI.probe() or "").startswith("habana_frameworks is not installed; install it from Intel's own package")
    trainium(machine)
    assert TRAINIUM.probe() == (
        "torch_neuronx is not installed; install it from AWS's own package index (AWS Neuron documentation, setup "
        "guide for PyTorch)"
    )
    monkeypatch.syspath_prepend(FAKES)
    assert GAUDI.probe() is None and TRAINIUM.probe() is None
    assert get_device("auto").name == "neuron"
    (machine / "dev/neuron0").unlink()
    assert get_device("auto").name == "hpu"
    # The launcher sets variables before torch is imported with the packages.
    assert not {"torch_neuronx", "habana_frameworks.torch"} & set(sys.modules)


@pytest.mark.parametrize("device_is_there", [True, False])
def test_a_placeholder_is_no_package(device_is_there: bool, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if device_is_there:
        trainium(machine)
    line = 'raise ImportError("WRONG PACKAGE. Please install the package from Neuron Repository")\n'
    write(machine / "site/torch_neuronx/__init__.py", line)
    monkeypatch.syspath_prepend(machine / "site")
    reason = TRAINIUM.probe() or ""
    assert "torch_neuronx is PyPI's placeholder; install the real package from" in reason
    assert "AWS's own package index" in reason and ("no Neuron device" in reason) is not device_is_there


@pytest.mark.parametrize(
    ("variables", "cores"),
    [
        ({}, 8),
        ({"NEURON_LOGICAL_NC_CONFIG": "1"}, 16),
        ({"NEURON_RT_NUM_CORES": "6"}, 6),
        ({"NEURON_RT_VISIBLE_CORES": "3"}, 1),
        ({"NEURON_RT_VISIBLE_CORES": "0-2,5", "NEURON_RT_NUM_CORES": "6"}, 4),
    ],
)
def test_cores(variables: dict[str, str], cores: int, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainium(machine, chips=2)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert TRAINIUM.count() == cores


def test_cores_of_a_smaller_chip(machine: Path) -> None:
    assert TRAINIUM.count() == 0
    trainium(machine, cores=4)
    assert TRAINIUM.count() == 2


@pytest.mark.parametrize("variable", [*VARIABLES[:3], "HABANA_VISIBLE_MODULES"])
@pytest.mark.parametrize("text", ["all", "-1", "0-"])
def test_invalid_numbers_are_rejected(variable: str, text: str, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gaudi(trainium(machine))
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=variable):
        (GAUDI if variable.startswith("HABANA") else TRAINIUM).count()


@pytest.mark.parametrize(
    ("variables", "local_rank", "name", "expected"),
    [
        ({}, 3, "NEURON_RT_VISIBLE_CORES", "3"),  # torchrun, or this program's start: one of all
        ({"NEURON_RT_VISIBLE_CORES": "4-7"}, 2, "NEURON_RT_VISIBLE_CORES", "6"),  # the user keeps some for others
        ({"NEURON_RT_VISIBLE_CORES": "5"}, 3, "NEURON_RT_VISIBLE_CORES", "5"),  # srun gave this task one core
        ({}, 3, "HLS_MODULE_ID", "3"),
        ({"HABANA_VISIBLE_MODULES": "4,5,6,7"}, 1, "HLS_MODULE_ID", "5"),
        ({"HABANA_VISIBLE_MODULES": "6"}, 3, "HLS_MODULE_ID", "6"),
        ({"HLS_MODULE_ID": "2"}, 3, "HLS_MODULE_ID", "2"),
    ],
)
def test_each_process_takes_one_core_or_card(
    variables: dict[str, str], local_rank: int, name: str, expected: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaudi(trainium(machine, chips=2), cards=8)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    package = "habana_frameworks.torch"
    for module in ("habana_frameworks", package, f"{package}.core", f"{package}.distributed"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    for module in (f"{package}.distributed.hccl", "torch_neuronx"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    for device in (hpu, neuron):
        monkeypatch.setattr(device, "torch_device", lambda: "its device")
    assert (GAUDI if name.startswith("HLS") else TRAINIUM).enter(local_rank, 4) == "its device"
    assert os.environ[name] == expected


def test_more_ranks_than_cores_or_cards_is_rejected(machine: Path) -> None:
    gaudi(trainium(machine), cards=4)
    for device in (TRAINIUM, GAUDI):
        with pytest.raises(ConfigError, match=r"local\s+rank\s+4\s+has\s+no\s+device:\s+4\s+are\s+visible"):
            device.enter(4, 5)


@pytest.mark.parametrize(
    ("name", "gibibytes", "bf16", "fp32"),
    [("GAUDI2", 96, 432.0, 0.0), ("GAUDI2D", 96, 432.0, 0.0), ("GAUDI3", 128, 1835.0, 229.0)],
)
def test_memory_and_peak_of_a_gaudi(name: str, gibibytes: int, bf16: float, fp32: float, machine: Path) -> None:
    gaudi(machine, cards=8, name=name)
    assert GAUDI.count() == 8 and GAUDI.memory_bytes() == gibibytes * 2**30
    assert GAUDI.peak_flops("bf16")[0] == bf16 * 1e12
    flops, source = GAUDI.peak_flops("fp32")
    assert flops == fp32 * 1e12 and ("data sheet" in source or "set device.peak_tflops" in source)


def test_files_of_the_older_gaudi_driver(machine: Path) -> None:
    write(machine / "dev/hl0")
    write(machine / "dev/hl_controlD0")
    write(machine / "sys/class/habanalabs/hl0/device_type", "GAUDI2\n")
    assert GAUDI.count() == 1 and GAUDI.memory_bytes() == 96 * 2**30


def test_memory_and_peak_of_a_logical_core(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainium(machine)
    assert TRAINIUM.peak_flops("fp32") == (pytest.approx(181e12 / 4), "data sheet, 2 of 8 cores of trn2")
    for variables, gibibytes, flops in (
        ({}, 24, 667e12 / 4),
        ({"NEURON_LOGICAL_NC_CONFIG": "1"}, 12, 667e12 / 8),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn3"}, 18, 671e12 / 8),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert TRAINIUM.memory_bytes() == gibibytes * 2**30
        assert TRAINIUM.peak_flops("bf16")[0] == pytest.approx(flops)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9")
    assert TRAINIUM.peak_flops("bf16") == (0.0, "unknown chip: set device.peak_tflops to see MFU")


@pytest.mark.parametrize(
    ("precision", "stochastic"),
    [("bf16_sr", True), ("bf16", False), ("bf16SR", True), ("fp32_ZeroOptMaster", True)]
    + [("fp32_ZeroOptMasterGradAcc", False), ("megatron_amp_O2", False), ("fp32_OptStates", True), ("fp32", False)],
)
def test_trainium_rounds_stochastically_only_in_some_precisions(precision: str, stochastic: bool) -> None:
    config = resolve(make(), 1).config
    config.trainer.precision = precision  # of the recipe, whether or not this version accepts it
    variables = TRAINIUM.environment(config)
    assert variables.pop("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION") == "1"
    expected = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1", "NEURON_RT_STOCHASTIC_ROUNDING_SEED": "1234"}
    assert variables == (expected if stochastic else {})


def test_compiling_ahead_for_trainium_needs_no_device(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FAKES)
    assert TRAINIUM.probe() is not None
    with pytest.raises(ConfigError, match="NEURON_PLATFORM_TARGET_OVERRIDE(.|\n)*trn2 or trn3"):
        TRAINIUM.ahead_of_time_environment()  # a wrong target would fail only on the run's chips
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    for name, value in TRAINIUM.ahead_of_time_environment().items():
        monkeypatch.setenv(name, value)
    assert os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] == "trn2"
    assert TRAINIUM.probe() is None and TRAINIUM.count() == 1 and TRAINIUM.memory_bytes() == 24 * 2**30
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    trainium(machine, name="Trainium3")
    assert TRAINIUM.ahead_of_time_environment()["NEURON_PLATFORM_TARGET_OVERRIDE"] == "trn3"


def test_compiled_graphs_are_counted(tmp_path: Path) -> None:
    variables = TRAINIUM.compile_environment(tmp_path)
    assert set(variables) == {"TORCH_NEURONX_NEFF_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    assert all(Path(value).is_relative_to(tmp_path) for value in variables.values())
    assert TRAINIUM.count_compiled_graphs(tmp_path) == 0
    for name in ("ab/cd/abcd.neff", "ab/ce/abce.neff", "ab/ce/abce.lock"):
        write(Path(variables["TORCH_NEURONX_NEFF_CACHE_DIR"]) / name)
    assert TRAINIUM.count_compiled_graphs(tmp_path) == 2

    assert GAUDI.environment(resolve(make(), 1).config) == {"PT_HPU_LAZY_MODE": "0"}
    assert GAUDI.ahead_of_time_environment() == {}
    recipes = GAUDI.compile_environment(tmp_path)["PT_HPU_RECIPE_CACHE_CONFIG"].split(",")
    assert (recipes[0], recipes[1], recipes[3]) == (str(tmp_path / "recipes"), "false", "true")
    write(Path(recipes[0]) / "123.recipe")
    assert GAUDI.count_compiled_graphs(tmp_path) == 1


PIPELINE = ("trainer.pp=2", "trainer.compile=true")
STEPS = 4
Events = list[dict[str, Any]]


def train(folder: Path, root: Path, *overrides: str, **variables: str) -> tuple[list[float], Events]:
    """Run train.py in a new process with the driver's files in ``root``; return losses and the stand-ins' records."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.jsonl"
    variables = {"OMP_NUM_THREADS": "1", "STAND_IN_LOG": str(log), "STAND_IN_ROOT": str(root)} | variables
    variables["PYTHONPATH"] = os.pathsep.join([str(FAKES), str(ROOT)])
    precision = "trainer.precision=fp32"  # accelerators have another default
    arguments = [*SMALL, f"trainer.steps={STEPS}", "checkpoint.save_last=false", precision, f"run.dir={folder / 'run'}"]
    words = [sys.executable, str(TRAIN_PY), *arguments, *overrides]
    done = processes.run_command(*words, timeout=240, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return processes.losses(folder / "run"), [json.loads(line) for line in log.read_text().splitlines()]


def named(events: Events, name: str) -> Events:
    return [event for event in events if event["event"] == name]


def agree(losses: list[float], expected: list[float]) -> bool:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)) <= 1e-5


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
    assert len(named(events, "activation or gradient by all-reduce")) == 2 * 2 * 4 * STEPS

    _, events = train(tmp_path / "second", root, "device=neuron", *PIPELINE, **variables)
    assert not named(events, "compiled") and len(named(events, "cache hit")) == 4


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
