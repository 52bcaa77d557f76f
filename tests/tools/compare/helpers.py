"""Write runs with known curves in the formats of the programs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from megatron_llama.config import ConfigError, Problem
from megatron_llama.tools.compare.cli import compare_runs, parser
from megatron_llama.tools.compare.verdict import Comparison
from megatron_llama.train.loss_curve import Floats

STEPS, BATCH = 400, 8


def falling(steps: int = STEPS, batch: int = BATCH) -> Floats:
    """Return a smooth loss that falls from 6 to 2 over samples, independent of the batch size."""
    samples = batch * np.arange(1, steps + 1)
    return 2 + 4 * np.exp(-samples / 800)


def noisy(curve: Floats, seed: int, size: float = 0.02) -> Floats:
    """Add independent normal noise of relative standard deviation ``size`` to each step."""
    return curve * (1 + size * np.random.default_rng(seed).standard_normal(len(curve)))


def write_metrics(path: Path, losses: Iterable[float], batch: int = BATCH, seconds: float = 0.5) -> str:
    """Write a run folder with a metrics.jsonl like the trainer, NaN as null."""
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
    """Write TensorBoard events; ``scalars`` are (tag, value of a step, axis of a step)."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=purge, filename_suffix=f".{len(list(folder.glob('*')))}")
    for step in steps:
        for tag, value, axis in scalars:
            writer.add_scalar(tag, value(step), axis(step))
    writer.close()
    return str(folder)


def identity(step: int) -> float:
    """Return the step as axis or value."""
    return step


def compared(*runs: str, **options: float | Sequence[str]) -> Comparison:
    """Compare ``runs`` as scripts/compare.py does; list options are repeated, except ``seeds``."""
    arguments = list(runs)
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, int | float):
            arguments.append(f"{option}={value}")
        elif name == "seeds":
            arguments += [option, *value]
        else:
            arguments += [f"{option}={one}" for one in value]
    return compare_runs(parser().parse_args(arguments))


def problems(*runs: str, **options: float | Sequence[str]) -> list[Problem]:
    """Return the problems of a comparison."""
    try:
        compared(*runs, **options)
    except ConfigError as error:
        return list(error.problems)
    return []
