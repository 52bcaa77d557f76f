"""Measure how long a training step waits for its data, with batches built in the step and on the prefetch thread."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from megatron_llama.cli import main as launch
from megatron_llama.corpus.indexed_format import write_index
from megatron_llama.data.batches import Batches, Samples, build_data
from megatron_llama.data.prefetch import Prefetcher
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import build_model, open_device, process_groups
from megatron_llama.plan import Plan
from megatron_llama.system.tables import markdown_table
from megatron_llama.train.loop import training_step
from megatron_llama.train.sanity import StepGuard

ROUNDS, STEPS, VOCABULARY = 3, 10, 2048
HEAD = ("read latency", "batch built", "data_time_s, median", "maximum", "step, median")


class Slow:
    """Samples with an additional read latency of ``seconds``, as from remote storage."""

    once = False

    def __init__(self, samples: Samples, seconds: float) -> None:
        self.samples, self.seconds = samples, seconds

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]:
        time.sleep(self.seconds)
        return self.samples[index]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--tokens", type=float, default=50e6, help="tokens of the synthetic dataset (default 50e6)")
    parser.add_argument(
        "--delays", type=float, nargs="+", default=[0, 0.005, 0.05], help="added latencies per sample, seconds"
    )
    parser.add_argument("overrides", nargs="*", help="settings, for example model=llama_15m")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 1 if the run failed."""
    folder = Path(tempfile.mkdtemp())
    try:
        _made_up(folder, int(args.tokens))
        settings = ["data=redpajama", "data.tokenizer=null", f"data.prefixes=[{folder / 'text'}]", "device=cpu"]
        steps = f"trainer.steps={2 * len(args.delays) * ROUNDS * STEPS}"
        common = [steps, f"model.vocab_size={VOCABULARY}", "logging.sample_prompts=[]", f"run.dir={folder / 'run'}"]
        return launch([*settings, *common, *args.overrides], partial(_measure, args.delays))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _made_up(folder: Path, total: int) -> None:
    """Write a dataset of random ids with document lengths typical of web text."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(6.2, 1.0, total // 812)).astype("<i4")
    lengths.tofile(folder / "lengths")
    with open(folder / "text.idx", "wb") as index:
        _, tokens = write_index(index, folder / "lengths", np.dtype("<u2"))
    rng.integers(0, VOCABULARY, tokens, dtype=np.uint16).tofile(folder / "text.bin")


def _measure(delays: list[float], plan: Plan) -> None:
    """Train with both ways of building batches alternately, and print the table."""
    topology, (device, torch_device) = plan.topology(int(os.environ["RANK"])), open_device(plan)
    with process_groups(plan, topology, device, torch_device):
        model = build_model(plan, topology, device, torch_device)
        optimizer = build_optimizer(plan, model)
        samples = build_data(plan, topology, torch_device).train.samples
        guard, step = StepGuard(0), 0
        waits: dict[tuple[float, str], list[float]] = {}
        steps: dict[tuple[float, str], list[float]] = {}
        size = plan.config.trainer.global_batch_size
        for _ in range(ROUNDS):
            for delay in delays:
                batches = Batches(Slow(samples, delay) if delay else samples, plan, topology, torch_device)
                for way in ("in the step", "on a thread"):
                    with Prefetcher(batches, (step + STEPS) * size) as prefetcher:
                        for number in range(STEPS):
                            step, start = step + 1, time.perf_counter()
                            source = prefetcher if way == "on a thread" else batches
                            metrics = training_step(step, plan, model, optimizer, source, guard)
                            if number:  # the first step always waits
                                waits.setdefault((delay, way), []).append(metrics["data_time_s"])
                                steps.setdefault((delay, way), []).append(time.perf_counter() - start)
    if topology.rank == 0:
        rows = [
            [
                f"{delay * 1e3:g} ms more per sample" if delay else "from the page cache",
                way,
                f"{statistics.median(seconds) * 1e3:.3f} ms",
                f"{max(seconds) * 1e3:.3f} ms",
                f"{statistics.median(steps[delay, way]) * 1e3:.1f} ms",
            ]
            for (delay, way), seconds in waits.items()
        ]
        sys.stdout.write("\n".join(markdown_table(HEAD, rows)) + "\n")
