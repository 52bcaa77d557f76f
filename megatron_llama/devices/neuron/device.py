"""AWS Trainium 2 and 3, through TorchNeuron (the native PyTorch backend, ``torch_neuronx`` 2.13 and later).

Not run on hardware: written from AWS's documentation and tested against a stand-in (tests/devices/fakes). The launcher
reads the driver's files, because a process that uses the runtime acquires the cores.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.precision import PRECISIONS
from megatron_llama.devices.base import Device, LazyModule, Peak, device_index, numbers_in, package_missing

if TYPE_CHECKING:
    import torch

    from megatron_llama.config import Config
    from megatron_llama.topology import Topology
else:
    torch = LazyModule("torch")

ROOT = Path("/")  # root of the driver's files; tests replace it
PACKAGE = "torch_neuronx"
SOURCE = "AWS's own package index (AWS Neuron documentation, setup guide for PyTorch)"


class _Chip(NamedTuple):
    """Chip with all its cores; dense TFLOP/s."""

    part: str
    """Part of the driver's name of the chip."""
    bf16: float
    fp32: float
    gibibytes: int


# From AWS's architecture pages of Trainium2 and Trainium3.
_CHIPS = {"trn2": _Chip("trainium2", 667.0, 181.0, 96), "trn3": _Chip("trainium3", 671.0, 183.0, 144)}
_CORES_PER_CHIP = 8


def torch_device() -> torch.device:
    """Return torch's device, without an index: a process has one core."""
    return torch.device("neuron")


def _chips() -> list[Path]:
    """Return the driver's folder of each chip of this machine or container."""
    nodes = sorted((ROOT / "dev").glob("neuron[0-9]*"))
    return [ROOT / "sys/devices/virtual/neuron_device" / node.name for node in nodes]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _cores_per_device() -> int:
    """Return the number of physical cores per logical core, which is torch's device."""
    variable = "NEURON_LOGICAL_NC_CONFIG"
    return max(1, numbers_in(variable, os.environ.get(variable) or "2")[0])


def _target() -> str | None:
    """Return the short name of the chip, or of the compilation target. None if it is not in ``_CHIPS``."""
    if override := os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE"):
        return override if override in _CHIPS else None
    for path in _chips()[:1]:
        folder = path / "info/architecture"
        text = f"{_read(folder / 'device_name')} {_read(folder / 'instance_type')}".lower()
        return next((name for name, chip in _CHIPS.items() if name in text or chip.part in text), None)
    return None


def _visible_cores() -> list[int]:
    """Return the logical cores that this process may use, from the user's variables or the driver."""
    if listed := os.environ.get("NEURON_RT_VISIBLE_CORES"):
        return numbers_in("NEURON_RT_VISIBLE_CORES", listed)
    if number := os.environ.get("NEURON_RT_NUM_CORES"):
        return list(range(numbers_in("NEURON_RT_NUM_CORES", number)[0]))
    physical = sum(int(_read(chip / "core_count") or _CORES_PER_CHIP) for chip in _chips())
    return list(range(physical // _cores_per_device()))


def _compiles_only() -> bool:
    """Whether graphs are compiled but not run, without a device."""
    return os.environ.get("TORCH_NEURONX_COMPILE_ONLY") == "1"


class Neuron(Device):
    """One rank per logical NeuronCore."""

    name = "neuron"
    backend = "neuron"
    is_accelerator = True
    forkable = False  # the runtime rejects forked processes
    compiler = "neuron"
    attention = "mask"
    graph_suffix = ".neff"
    variable_prefixes = ("NEURON_", "XLA_")

    def probe(self) -> str | None:
        no_chip = None if _chips() or _compiles_only() else "this machine has no Neuron device (/dev/neuron0)"
        return ", and ".join(filter(None, (no_chip, package_missing(PACKAGE, SOURCE)))) or None

    def count(self) -> int:
        """Return the number of logical cores; 1 without a device if graphs are only compiled."""
        return len(_visible_cores()) or int(_compiles_only())

    def memory_bytes(self) -> int:
        return _CHIPS[_target() or "trn2"].gibibytes * _cores_per_device() * 2**30 // _CORES_PER_CHIP

    def hardware(self) -> dict[str, str]:
        facts, chips = {}, _chips()
        if driver := _read(ROOT / "sys/module/neuron/version"):
            facts["driver"] = driver
        if chips:
            facts["devices"] = f"{len(chips)} chips"
        return facts

    def environment(self, config: Config) -> dict[str, str]:
        # Fail if a graph does not compile. The fallback to single operators would only be slow.
        variables = {"TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1"}
        if PRECISIONS[str(config.trainer.precision)].stochastic:
            variables["NEURON_RT_STOCHASTIC_ROUNDING_EN"] = "1"
            variables["NEURON_RT_STOCHASTIC_ROUNDING_SEED"] = str(config.trainer.seed)
        return variables

    def enter(self, local_rank: int, local_ranks: int) -> torch.device:
        cores = _visible_cores()
        if cores or not _compiles_only():
            core = cores[device_index(self.name, local_rank, len(cores))]
            os.environ["NEURON_RT_VISIBLE_CORES"] = str(core)  # the process group takes one core per process
        import torch_neuronx  # type: ignore[import-not-found]  # noqa: F401  registers device, collectives, compiler

        return torch_device()

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        torch.neuron.manual_seed_all(seed)  # type: ignore[attr-defined]

    def pipeline_transfers(self, topology: Topology) -> AbstractContextManager[None]:
        """Test send and recv first: some releases of the process group lack them."""
        from megatron_llama.devices.neuron.pair_transfers import transfers_context

        return transfers_context(topology, torch_device())

    def peak_flops(self, precision: str) -> Peak:
        target = _target()
        if target is None:
            return Peak(0.0, "unknown chip: set device.peak_tflops to see MFU")
        chip, cores = _CHIPS[target], _cores_per_device()
        teraflops = chip.fp32 if precision == "fp32" else chip.bf16
        return Peak(
            teraflops * 1e12 * cores / _CORES_PER_CHIP, f"data sheet, {cores} of {_CORES_PER_CHIP} cores of {target}"
        )

    def peak_memory_bytes(self) -> int:
        import torch_neuronx

        self.synchronize()  # statistics lag behind queued work
        return torch_neuronx.max_memory_allocated()

    def synchronize(self) -> None:
        torch.neuron.synchronize()  # type: ignore[attr-defined]

    def compile_environment(self, folder: Path) -> dict[str, str]:
        # The backend writes atomically, so machines may share the folder.
        return {**super().compile_environment(folder), "TORCH_NEURONX_NEFF_CACHE_DIR": str(folder / "neff")}

    def ahead_of_time_environment(self) -> dict[str, str]:
        variable = "NEURON_PLATFORM_TARGET_OVERRIDE"
        if target := os.environ.get(variable) or _target():
            return {"TORCH_NEURONX_COMPILE_ONLY": "1", variable: target}
        rule = "this machine has no chip, so the compilation target is unknown"
        instead = f"export {variable}={' or '.join(_CHIPS)}, the chip of the run"
        raise ConfigError([Problem(variable, None, rule, instead)])


DEVICE = Neuron()
