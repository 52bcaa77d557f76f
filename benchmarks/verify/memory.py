"""Measure live memory by component at the peak of a training step.

    python -m benchmarks.verify.memory TRAIN_PY SETTING ...

Runs TRAIN_PY (of this or another checkout) with the settings, and records the CPU allocator's events of the third step
with torch.profiler. Weights, optimizer states and gradients are identified through the optimizer, logits by their size.
One rank, CPU only. Only the optimizer has hooks: module hooks would be traced into compiled code.
"""

from __future__ import annotations

import argparse
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
WEIGHTS, STATES, GRADIENTS, LOGITS, OTHER = "weights", "optimizer states", "gradients", "logits", "other"
COMPONENTS = (WEIGHTS, STATES, GRADIENTS, LOGITS, OTHER)


class Watcher:
    """Optimizer hooks that profile one step, from the end of the previous update to the end of its update.

    The profiler starts one step earlier, as it does not record when older memory is freed.
    """

    def __init__(self) -> None:
        self.step = 0
        self.profile: Any = None
        self.known: dict[int, tuple[str, int]] = {}  # by address: (component, bytes) before the step
        self.gradients: set[int] = set()
        self.least_logits = 0
        """Bytes of a row of logits in a 16-bit dtype, padding included."""
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
            self._record_live_tensors(optimizer)
            self.begun_at = time.time_ns()
        elif self.step == WATCHED_STEP:
            self.profile.__exit__(None, None, None)
            self._report()

    def _record_live_tensors(self, optimizer: Any) -> None:
        """Record the component of all live tensors. Fake tensors of the compiler have no memory and are skipped."""
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
        recent = (change for change in _allocations(self.profile) if change.start_time_ns >= self.begun_at)
        changes = sorted(recent, key=lambda change: change.start_time_ns)
        kind_at = {address: kind for address, (kind, _) in self.known.items()}
        kinds = []
        for change in changes:
            address, size = change.extra_fields.ptr, change.extra_fields.alloc_size
            if size > 0:
                is_logits = size % self.least_logits == 0 and size not in self.weight_sizes
                kind_at[address] = LOGITS if is_logits else OTHER
            kinds.append([address, kind_at.get(address, OTHER), size])
        # The last allocation at a gradient's address before the update, and its release, belong to the gradient.
        for address in self.gradients:
            events = [n for n, change in enumerate(changes) if change.extra_fields.ptr == address]
            allocated = [n for n in events if kinds[n][2] > 0 and changes[n].start_time_ns < self.updated_at]
            for n in events if not allocated else [n for n in events if n >= allocated[-1]][:2]:
                kinds[n][1] = GRADIENTS
        live: Counter[str] = Counter()
        for kind, size in self.known.values():
            live[kind] += size
        peak, at_peak = 0, dict(live)
        for _, kind, size in kinds:
            live[kind] += size
            if sum(live.values()) > peak:
                peak, at_peak = sum(live.values()), dict(live)
        for component in COMPONENTS:
            print(f"live at the peak: {component:17s} {at_peak.get(component, 0) / 2**20:8,.0f} MiB", flush=True)
        print(f"live at the peak: {'total':17s} {peak / 2**20:8,.0f} MiB", flush=True)


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
    """Return address and bytes of a tensor's storage."""
    storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    summary, command, *paragraphs = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(
        usage=f"{command.strip()}\n", description="\n\n".join([summary, *paragraphs]), allow_abbrev=False
    )
    parser.add_argument("program", metavar="TRAIN_PY", type=Path, help="path of a train.py")
    parser.add_argument("settings", metavar="SETTING", nargs=argparse.REMAINDER, help="arguments of TRAIN_PY")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    watcher = Watcher()
    register_optimizer_step_pre_hook(watcher.before_update)
    register_optimizer_step_post_hook(watcher.after_update)
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(args.program.resolve().parent))
    runpy.run_path(str(args.program), run_name="__main__")
