"""The Trainium device on made-up machines. Not run on hardware."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_llama.config import ConfigError
from megatron_llama.devices import get_device
from megatron_llama.devices.neuron import device as neuron
from megatron_llama.plan import Plan, resolve
from tests.config.helpers import make
from tests.devices.helpers import FAKES, trainium, write

DEVICE = neuron.DEVICE


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose driver's files are under a folder; none yet."""
    monkeypatch.setattr(neuron, "ROOT", tmp_path)
    for name in ("VISIBLE_CORES", "NUM_CORES"):
        monkeypatch.delenv(f"NEURON_RT_{name}", raising=False)
    for name in ("NEURON_LOGICAL_NC_CONFIG", "NEURON_PLATFORM_TARGET_OVERRIDE", "TORCH_NEURONX_COMPILE_ONLY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def plan_in(precision: str) -> Plan:
    """A plan in a precision, whether or not this version lets it be configured."""
    plan = resolve(make(), 1)
    plan.config.trainer.precision = precision
    return plan


def test_a_machine_without_it_says_so_and_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"device=neuron is unavailable on this host: this machine has no Neuron device .*"
    with pytest.raises(ValueError, match=message):
        get_device("neuron")
    monkeypatch.syspath_prepend(FAKES)
    assert DEVICE.probe() == "this machine has no Neuron device (/dev/neuron0)"
    assert "torch_neuronx" not in sys.modules


def test_a_missing_package_is_told_with_its_source(machine: Path) -> None:
    trainium(machine)
    assert DEVICE.probe() == (
        "torch_neuronx is not installed; install it from AWS's own package index (AWS Neuron documentation, setup "
        "guide for PyTorch)"
    )


@pytest.mark.parametrize("device_is_there", [True, False])
def test_a_placeholder_counts_as_not_installed(
    device_is_there: bool, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device_is_there:
        trainium(machine)
    line = 'raise ImportError("WRONG PACKAGE. Please install the package from Neuron Repository")\n'
    write(machine / "site/torch_neuronx/__init__.py", line)
    monkeypatch.syspath_prepend(machine / "site")
    reason = DEVICE.probe() or ""
    assert "torch_neuronx is PyPI's placeholder; install the real package from" in reason
    assert "AWS's own package index" in reason and ("no Neuron device" in reason) is not device_is_there


def test_auto_takes_it_before_gaudi_and_the_cpu(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainium(machine)
    monkeypatch.syspath_prepend(FAKES)
    assert DEVICE.probe() is None and get_device("auto").name == "neuron"
    assert "torch_neuronx" not in sys.modules, "asking must leave torch alone, whose import the environment precedes"


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
    assert DEVICE.count() == cores


@pytest.mark.parametrize("variable", ["NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "NEURON_LOGICAL_NC_CONFIG"])
@pytest.mark.parametrize("text", ["all", "-1", "0-"])
def test_a_variable_that_is_no_number_is_the_users_mistake(
    variable: str, text: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainium(machine)
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=variable):
        DEVICE.count()


@pytest.mark.parametrize(
    ("user", "local_rank", "core"),
    [
        (None, 3, "3"),  # torchrun, or this program's own start: one of all
        ("4-7", 2, "6"),  # the user keeps some for others
        ("5", 3, "5"),  # srun gave this task its own: the rank's number says nothing
    ],
)
def test_each_process_takes_one_core(
    user: str | None, local_rank: int, core: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainium(machine, chips=2)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", user or "")
    monkeypatch.setitem(sys.modules, "torch_neuronx", type(sys)("torch_neuronx"))
    monkeypatch.setattr(neuron, "torch_device", lambda: "its device")
    assert DEVICE.enter(local_rank, 4) == "its device"
    assert neuron.os.environ["NEURON_RT_VISIBLE_CORES"] == core


def test_more_ranks_than_cores_is_the_users_mistake(machine: Path) -> None:
    trainium(machine)
    with pytest.raises(ConfigError, match=r"local\s+rank\s+4\s+has\s+no\s+device:\s+4\s+are\s+visible"):
        DEVICE.enter(4, 5)


def test_memory_and_peak_are_those_of_a_logical_core(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainium(machine)
    assert DEVICE.memory_bytes() == 24 * 2**30
    assert DEVICE.peak_flops("bf16")[0] == pytest.approx(667e12 / 4)
    assert DEVICE.peak_flops("fp32") == (pytest.approx(181e12 / 4), "data sheet, 2 of 8 cores of trn2")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert DEVICE.memory_bytes() == 12 * 2**30 and DEVICE.peak_flops("bf16")[0] == pytest.approx(667e12 / 8)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    assert DEVICE.memory_bytes() == 18 * 2**30 and DEVICE.peak_flops("bf16")[0] == pytest.approx(671e12 / 8)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9")
    assert DEVICE.peak_flops("bf16") == (0.0, "unknown chip: set device.peak_tflops to see MFU")


@pytest.mark.parametrize(
    ("precision", "stochastic"),
    [
        ("bf16_sr", True),
        ("bf16", False),
        # The recipe's six.
        ("bf16SR", True),
        ("fp32_ZeroOptMaster", True),
        ("fp32_ZeroOptMasterGradAcc", False),
        ("megatron_amp_O2", False),
        ("fp32_OptStates", True),
        ("fp32", False),
    ],
)
def test_the_hardware_rounds_only_where_the_precision_says_so(precision: str, stochastic: bool) -> None:
    variables = DEVICE.environment(plan_in(precision).config)
    assert variables.pop("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION") == "1"
    expected = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1", "NEURON_RT_STOCHASTIC_ROUNDING_SEED": "1234"}
    assert variables == (expected if stochastic else {})


def test_compiling_ahead_needs_no_device(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FAKES)
    assert DEVICE.probe() is not None
    with pytest.raises(ConfigError, match="NEURON_PLATFORM_TARGET_OVERRIDE(.|\n)*trn2 or trn3"):
        DEVICE.ahead_of_time_environment()  # a wrong target would fail only on the run's chips
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    for name, value in DEVICE.ahead_of_time_environment().items():
        monkeypatch.setenv(name, value)
    assert neuron.os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] == "trn2"
    assert DEVICE.probe() is None and DEVICE.count() == 1 and DEVICE.memory_bytes() == 24 * 2**30
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    trainium(machine, name="Trainium3")
    assert DEVICE.ahead_of_time_environment()["NEURON_PLATFORM_TARGET_OVERRIDE"] == "trn3"


def test_graphs_are_counted_where_the_compiler_puts_them(tmp_path: Path) -> None:
    variables = DEVICE.compile_environment(tmp_path)
    assert set(variables) == {"TORCH_NEURONX_NEFF_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    assert all(Path(value).is_relative_to(tmp_path) for value in variables.values())
    assert DEVICE.count_compiled_graphs(tmp_path) == 0
    for name in ("ab/cd/abcd.neff", "ab/ce/abce.neff", "ab/ce/abce.lock"):
        write(Path(variables["TORCH_NEURONX_NEFF_CACHE_DIR"]) / name)
    assert DEVICE.count_compiled_graphs(tmp_path) == 2
