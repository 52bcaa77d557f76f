"""Stand-in for TorchNeuron. Importing it gives torch its device module, process group and compiler."""

import os
import types
from pathlib import Path

import stand_in.collectives
import stand_in.compiler
import torch
import torch.distributed as dist
from stand_in import environment, record


def max_memory_allocated() -> int:
    return 12345


def _touch(name: str) -> None:
    """The runtime starts with the first process group and not before; then it has the core of this process."""
    if not dist.is_initialized():
        raise RuntimeError(f"torch.neuron.{name}: the runtime must not be initialised before init_process_group")


def _manual_seed_all(seed: int) -> None:
    _touch("manual_seed_all")
    record("seed", seed=seed)


stand_in.collectives.register("neuron")
stand_in.compiler.register(
    "neuron", lambda: Path(os.environ.get("TORCH_NEURONX_NEFF_CACHE_DIR", "/tmp/neff_cache")), ".neff"
)
torch.neuron = types.ModuleType("torch.neuron")
torch.neuron.manual_seed_all = _manual_seed_all
torch.neuron.synchronize = lambda device=None: _touch("synchronize")
record("import torch_neuronx", environment=environment())
