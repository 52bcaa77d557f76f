"""Measure checkpoints: save and load compared with a file copy and torch.save, blocking time, and init_from.

Reports how long a save blocks training, and the bytes and memory that init_from uses.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from megatron_llama.checkpoint import state as contents
from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.export import export
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.manifest import read_manifest
from megatron_llama.cli import main as launch
from megatron_llama.data.batches import build_data
from megatron_llama.devices import get_device
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan

REPEATS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--model", default="llama_56m", help="preset whose weights and optimizer states are saved")
    parser.add_argument("--folder", type=Path, help="folder for the files (default: a temporary folder)")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 1 if a run failed."""
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    common = ["data=mock", "device=cpu", "data.seq_length=64", f"model={args.model}", "trainer.steps=0"]
    hf = folder / "hf"
    try:
        one = [*common, f"run.dir={folder / 'one'}"]
        four = [*common, "model=from_hf", f"init_from={hf}", "trainer.tp=4", f"run.dir={folder / 'four'}"]
        if launch(one, _disk) != 0:
            return 1
        export(find_checkpoint(folder / "one"), hf)
        if launch(four, _slices) != 0:
            return 1
        for path in sorted([*(folder / "one").glob("figures*"), *(folder / "four").glob("figures*")]):
            sys.stdout.write(path.read_text() + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _checkpointer(plan: Plan, measure: Callable[[Checkpointer, int], dict[str, Any]]) -> None:
    """Build a rank's model, optimizer and checkpointer; write the figures of ``measure`` to the run folder."""
    rank = int(os.environ["RANK"])
    device, topology = get_device("cpu"), plan.topology(rank)
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    with process_groups(plan, topology, device, torch_device):
        before = _memory("VmRSS")
        model = build_model(plan, topology, device, torch_device)
        data = build_data(plan, topology, torch_device)
        checkpointer = Checkpointer(plan, topology, model, build_optimizer(plan, model), data)
        figures = measure(checkpointer, before)
    (plan.run_dir / f"figures_{rank}.json").write_text(json.dumps(figures))


def _disk(plan: Plan) -> None:
    """Measure saving and loading of weights and optimizer states in one rank."""

    def measure(checkpointer: Checkpointer, _: int) -> dict[str, Any]:
        for _name, _shard, moment in checkpointer.optimizer.states():
            assert isinstance(moment, torch.Tensor)
            moment.normal_()
        tensors = contents.weights(checkpointer.model.shards, owned=True)
        tensors |= contents.optimizer_states(checkpointer.optimizer, owned=True)
        size = sum(part.numel() * part.element_size() for tensor in tensors.values() for _, part in tensor.parts)
        saver = checkpointer.saver
        checkpointer._save(0)  # allocates the staging memory
        saver.wait()
        state = read_manifest(find_checkpoint(checkpointer.checkpoints)).state
        step = iter(range(1, 100))
        blocked: list[float] = []

        def save() -> None:
            state.step = next(step)
            saver.start(tensors, state)
            blocked.append(saver.blocked_seconds)
            saver.wait()

        def copy(target: IO[bytes]) -> None:
            with source.open("rb") as file:
                shutil.copyfileobj(file, target, 4 << 20)

        save()
        manifest = read_manifest(find_checkpoint(checkpointer.checkpoints))
        (source,) = [manifest.stored.folder / name for name in manifest.files]
        plain = {f"{n}{i}": part for n, tensor in tensors.items() for i, (_, part) in enumerate(tensor.parts)}
        copied, torchs = checkpointer.checkpoints / "copy", checkpointer.checkpoints / "torch"
        seconds = _medians(
            {
                "save": save,
                "load with hash check": lambda: manifest.stored.load_into(tensors),
                "file copy and fsync": lambda: _synced(copied, copy),
                "torch.save and fsync": lambda: _synced(torchs, functools.partial(torch.save, plain)),
                "torch.load": lambda: torch.load(torchs, weights_only=True),
            }
        )
        return {
            "megabytes": round(size / 1e6, 1),
            "MB/s": {name: round(size / 1e6 / value) for name, value in seconds.items()},
            "asynchronous save, seconds": round(seconds["save"], 3),
            "asynchronous save, seconds that block training, first": round(blocked[0], 3),
            "asynchronous save, seconds that block training, later": round(statistics.median(blocked[1:]), 3),
        }

    _checkpointer(plan, measure)


def _slices(plan: Plan) -> None:
    """Measure a rank that starts from a Hugging Face folder."""

    def measure(checkpointer: Checkpointer, before: int) -> dict[str, Any]:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak memory
        checkpointer.resume()
        share = sum(s.local[p.local_slices].numel() * 4 for s in checkpointer.model.shards for p in s.rectangles)
        return {
            "init_from at tp4, rank": checkpointer.topology.rank,
            "share of the weights, MB": round(share / 1e6, 1),
            "bytes read / share": round(checkpointer.bytes_read / share, 4),
            "peak memory above the memory before the model is built, MB": round((_memory("VmHWM") - before) / 1e6, 1),
        }

    _checkpointer(plan, measure)


def _medians(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return median seconds, measured alternately, so that other load on the machine affects all functions."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(REPEATS):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _synced(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace ``path`` with the output of ``write`` and fsync it."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _memory(field: str) -> int:
    """Read a field of /proc/self/status, in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024
