"""Runs with known curves, written as the programs write them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_llama.config import ConfigError, Problem
from megatron_llama.tools.compare.cli import Asked, run_comparison
from megatron_llama.tools.compare.verdict import Comparison

STEPS, BATCH = 400, 8


def falling(steps: int = STEPS, batch: int = BATCH) -> np.ndarray:
    """A smooth loss over samples, the same whatever the batch: 6 falling to 2."""
    samples = batch * np.arange(1, steps + 1)
    return 2 + 4 * np.exp(-samples / 800)


def noisy(curve: np.ndarray, seed: int, size: float = 0.02) -> np.ndarray:
    return curve * (1 + size * np.random.default_rng(seed).standard_normal(len(curve)))


def ours(path: Path, losses: Iterable[float], batch: int = BATCH, seconds: float = 0.5) -> str:
    """A run folder with a metrics.jsonl as the trainer writes it, NaN as null."""
    path.mkdir(parents=True)
    lines = [
        {
            "step": step,
            "consumed_samples": step * batch,
            "consumed_tokens": step * batch * 128,
            "reduced_train_loss": float(loss) if math.isfinite(loss) else None,
            "step_time_s": seconds,
        }
        for step, loss in enumerate(losses, start=1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


Scalars = Sequence[tuple[str, Callable[[int], float], Callable[[int], float]]]


def events(folder: Path, steps: Iterable[int], scalars: Scalars, purge: int | None = None) -> str:
    """TensorBoard events; ``scalars`` are (tag, value of a step, axis of a step)."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=purge, filename_suffix=f".{len(list(folder.glob('*')))}")
    for step in steps:
        for tag, value, axis in scalars:
            writer.add_scalar(tag, value(step), axis(step))
    writer.close()
    return str(folder)


def same(step: int) -> float:
    return step


def compared(*runs: str, **options: Any) -> Comparison:
    return run_comparison(Asked(runs=runs, **options))


def problems(*runs: str, **options: Any) -> list[Problem]:
    try:
        run_comparison(Asked(runs=runs, **options))
    except ConfigError as error:
        return list(error.problems)
    return []
