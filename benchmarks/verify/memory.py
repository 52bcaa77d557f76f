"""What lives when a training step needs the most memory, by component: of any train.py, older commits' too.

    python -m benchmarks.verify.memory TRAIN_PY SETTING ...

Runs TRAIN_PY with the settings and records the CPU allocator's events of the third step (torch.profiler). The tensors
that the optimizer knows tell weights, states and gradients; logits are known by their size. One rank, CPU only. Only
the optimizer is hooked: a hook on modules would be traced into what TRAIN_PY compiles.
"""

from __future__ import annotations

import gc
import runpy
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

WATCHED_STEP = 3
WEIGHTS, STATES, GRADIENTS, LOGITS, OTHER = "weights", "optimizer states", "gradients", "logits", "all else"
COMPONENTS = (WEIGHTS, STATES, GRADIENTS, LOGITS, OTHER)


class Watcher:
    """Counts the optimizer's steps, and profiles one from the end of the update before it to the end of its own.

    The profiler runs a step longer: of memory that is older than it, it does not see the end.
    """

    def __init__(self) -> None:
        self.step = 0
        self.profile: Any = None
        self.known: dict[int, tuple[str, int]] = {}  # by address: (component, bytes) before the step
        self.gradients: set[int] = set()
        self.least_logits = 0
        """Bytes of a row of logits in 16 bits, padding included."""
        self.weight_sizes: set[int] = set()
        self.begun_at = self.updated_at = 0

    def before_update(self, optimizer: Any, *_: Any) -> None:
        if self.step == WATCHED_STEP - 1:
            self.updated_at = time.time_ns()
            self.gradients = {_memory(p.grad)[0] for p in _parameters(optimizer) if p.grad is not None}

    def after_update(self, optimizer: Any, *_: Any) -> None:
        self.step += 1
        if self.step == WATCHED_STEP - 2:
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
            self.profile.__enter__()
        elif self.step == WATCHED_STEP - 1:
            gc.collect()
            self._look(optimizer)
            self.begun_at = time.time_ns()
        elif self.step == WATCHED_STEP:
            self.profile.__exit__(None, None, None)
            self._report()

    def _look(self, optimizer: Any) -> None:
        """Notes all tensors that are alive, but not those that stood for them while graphs were compiled."""
        for tensor in gc.get_objects():
            real = issubclass(type(tensor), torch.Tensor) and not issubclass(type(tensor), FakeTensor)
            if real and tensor.device.type == "cpu":
                try:
                    address, size = _memory(tensor)
                except (NotImplementedError, RuntimeError):
                    continue
                self.known.setdefault(address, (OTHER, size))
        for parameter in _parameters(optimizer):
            self.known[_memory(parameter)[0]] = (WEIGHTS, _memory(parameter)[1])
            for state in optimizer.state.get(parameter, {}).values():
                parts = [state] if isinstance(state, torch.Tensor) else vars(state).values()  # 8-bit: codes, scales
                for part in parts:
                    if isinstance(part, torch.Tensor):
                        self.known[_memory(part)[0]] = (STATES, _memory(part)[1])
            if parameter.grad is not None:
                self.known[_memory(parameter.grad)[0]] = (GRADIENTS, _memory(parameter.grad)[1])
        vocabulary = max(p.shape[0] for p in _parameters(optimizer) if p.dim() == 2)
        self.least_logits = 2 * vocabulary
        self.weight_sizes = {p.numel() * size for p in _parameters(optimizer) for size in (2, 4)}

    def _report(self) -> None:
        seen = (change for change in _allocations(self.profile) if change.start_time_ns >= self.begun_at)
        changes = sorted(seen, key=lambda change: change.start_time_ns)
        kind_at = {address: kind for address, (kind, _) in self.known.items()}
        kinds = []
        for change in changes:
            address, size = change.extra_fields.ptr, change.extra_fields.alloc_size
            if size > 0:
                is_logits = size % self.least_logits == 0 and size not in self.weight_sizes
                kind_at[address] = LOGITS if is_logits else OTHER
            kinds.append([address, kind_at.get(address, OTHER), size])
        # The last allocation at a gradient's address before the update, and its end, are the gradient's.
        for address in self.gradients:
            mine = [n for n, change in enumerate(changes) if change.extra_fields.ptr == address]
            births = [n for n in mine if kinds[n][2] > 0 and changes[n].start_time_ns < self.updated_at]
            for n in mine if not births else [n for n in mine if n >= births[-1]][:2]:
                kinds[n][1] = GRADIENTS
        alive: Counter[str] = Counter()
        for kind, size in self.known.values():
            alive[kind] += size
        most, at_peak = 0, dict(alive)
        for _, kind, size in kinds:
            alive[kind] += size
            if sum(alive.values()) > most:
                most, at_peak = sum(alive.values()), dict(alive)
        for component in COMPONENTS:
            print(f"live at the peak: {component:17s} {at_peak.get(component, 0) / 2**20:8,.0f} MiB", flush=True)
        print(f"live at the peak: {'together':17s} {most / 2**20:8,.0f} MiB", flush=True)


def _allocations(profile: Any) -> Iterator[Any]:
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if "Allocation" in str(event.tag):
            yield event


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor's storage."""
    storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
    return storage.data_ptr(), storage.nbytes()


if __name__ == "__main__":
    watcher = Watcher()
    register_optimizer_step_pre_hook(watcher.before_update)
    register_optimizer_step_post_hook(watcher.after_update)
    program = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(program.resolve().parent))
    runpy.run_path(str(program), run_name="__main__")
