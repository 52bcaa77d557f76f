"""The Gaudi device on made-up machines. Not run on hardware."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_llama.config import ConfigError
from megatron_llama.devices import get_device, hpu
from megatron_llama.plan import resolve
from tests.config.helpers import make
from tests.devices.helpers import FAKES, gaudi, write

DEVICE = hpu.DEVICE


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose driver's files are under a folder; none yet."""
    monkeypatch.setattr(hpu, "ROOT", tmp_path)
    for name in ("HABANA_VISIBLE_MODULES", "HLS_MODULE_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_machine_without_it_says_so(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gaudi(machine, cards=0)  # an accelerator of another make
    message = "device=hpu is unavailable on this host: this machine has no Intel Gaudi driver"
    with pytest.raises(ValueError, match=message):
        get_device("hpu")
    monkeypatch.syspath_prepend(FAKES)
    assert DEVICE.probe() == "this machine has no Intel Gaudi driver or card"


def test_packages_and_their_source(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gaudi(machine)
    assert (DEVICE.probe() or "").startswith("habana_frameworks is not installed; install it from Intel's own package")
    monkeypatch.syspath_prepend(FAKES)
    assert DEVICE.probe() is None and get_device("auto").name == "hpu"
    assert "habana_frameworks.torch" not in sys.modules


@pytest.mark.parametrize(
    ("name", "gibibytes", "bf16", "fp32"),
    [("GAUDI2", 96, 432.0, 0.0), ("GAUDI2D", 96, 432.0, 0.0), ("GAUDI3", 128, 1835.0, 229.0)],
)
def test_memory_and_peak_by_name(name: str, gibibytes: int, bf16: float, fp32: float, machine: Path) -> None:
    gaudi(machine, cards=8, name=name)
    assert DEVICE.count() == 8 and DEVICE.memory_bytes() == gibibytes * 2**30
    assert DEVICE.peak_flops("bf16")[0] == bf16 * 1e12
    flops, source = DEVICE.peak_flops("fp32")
    assert flops == fp32 * 1e12 and ("data sheet" in source or "set device.peak_tflops" in source)


def test_the_older_drivers_files(machine: Path) -> None:
    write(machine / "dev/hl0")
    write(machine / "dev/hl_controlD0")
    write(machine / "sys/class/habanalabs/hl0/device_type", "GAUDI2\n")
    assert DEVICE.count() == 1 and DEVICE.memory_bytes() == 96 * 2**30


@pytest.mark.parametrize(
    ("visible", "user", "local_rank", "module"),
    [(None, None, 3, "3"), ("4,5,6,7", None, 1, "5"), ("6", None, 3, "6"), (None, "2", 3, "2")],
)
def test_each_process_takes_one_card(
    visible: str | None,
    user: str | None,
    local_rank: int,
    module: str,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gaudi(machine, cards=8)
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", visible or "")
    monkeypatch.setenv("HLS_MODULE_ID", "?")  # so that it is put back
    monkeypatch.delenv("HLS_MODULE_ID")
    if user is not None:
        monkeypatch.setenv("HLS_MODULE_ID", user)
    package = "habana_frameworks"
    for name in (package, f"{package}.torch", f"{package}.torch.core", f"{package}.torch.distributed"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    monkeypatch.setitem(sys.modules, f"{package}.torch.distributed.hccl", type(sys)("hccl"))
    monkeypatch.setattr(hpu, "torch_device", lambda: "its device")
    assert DEVICE.enter(local_rank, 4) == "its device"
    assert hpu.os.environ["HLS_MODULE_ID"] == module


def test_a_variable_that_is_no_number_is_the_users_mistake(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gaudi(machine)
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "all")
    with pytest.raises(ConfigError, match="HABANA_VISIBLE_MODULES"):
        DEVICE.count()


def test_more_ranks_than_cards_is_the_users_mistake(machine: Path) -> None:
    gaudi(machine, cards=2)
    with pytest.raises(ConfigError, match=r"local\s+rank\s+2\s+has\s+no\s+device:\s+2\s+are\s+visible"):
        DEVICE.enter(2, 3)


def test_variables(tmp_path: Path) -> None:
    assert DEVICE.environment(resolve(make(), 1).config) == {"PT_HPU_LAZY_MODE": "0"}
    assert DEVICE.ahead_of_time_environment() == {}
    variables = DEVICE.compile_environment(tmp_path)
    folder, emptied, _, shared = variables["PT_HPU_RECIPE_CACHE_CONFIG"].split(",")
    assert (folder, emptied, shared) == (str(tmp_path / "recipes"), "false", "true")
    write(Path(folder) / "123.recipe")
    assert DEVICE.count_compiled_graphs(tmp_path) == 1
