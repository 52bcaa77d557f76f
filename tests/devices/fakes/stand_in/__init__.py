"""Stand-ins for the packages of Trainium and Gaudi, as far as this program uses them, working on the CPU.

Written after the documentation and the public beta of TorchNeuron: the process group is a Python ProcessGroup without
send and recv, the compiler takes static shapes only and keeps one file per graph. Torch's device type is the one thing
that can't be had without the real package: ``install`` puts the CPU in its place.

STAND_IN_LOG: a file that gets one JSON object per event. STAND_IN_ROOT: a folder with the driver's files.
"""

from __future__ import annotations

import importlib.abc
import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLES = ("NEURON_", "TORCH_NEURONX_", "PT_HPU_", "HLS_", "OMP_")


def record(event: str, **details: Any) -> None:
    """Append an event; short lines written at once do not mix."""
    line = {"event": event, "rank": os.environ.get("RANK"), **details}
    with open(os.environ["STAND_IN_LOG"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def environment() -> dict[str, str]:
    """The variables of the vendors, as they stand."""
    return {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}


class _SeesTorch(importlib.abc.MetaPathFinder):
    """Records the environment in the moment that torch is first imported; that it is looked for does not count."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def recorded(module: ModuleType) -> None:
            record("import torch", environment=environment())
            load(module)

        spec.loader.exec_module = recorded  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Have the devices find the stand-in driver's files, and say "cpu" where they would make torch's device."""
    from megatron_llama.devices import hpu
    from megatron_llama.devices.neuron import device as neuron

    def on_the_cpu() -> Any:
        import torch

        return torch.device("cpu")

    for module in (hpu, neuron):
        module.ROOT = Path(os.environ["STAND_IN_ROOT"])
        module.torch_device = on_the_cpu
    sys.meta_path.insert(0, _SeesTorch())
