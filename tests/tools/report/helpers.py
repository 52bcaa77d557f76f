"""Run folders of a known run, without training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_llama.cli import parse_overrides
from megatron_llama.config import to_yaml
from megatron_llama.launch.world import find_world
from megatron_llama.plan import format_plan

TOKENS = 512
"""Tokens of a step."""


def record(step: int, **more: Any) -> dict[str, Any]:
    """Return the metrics of a step, with the keys of the trainer."""
    return {
        "step": step,
        "consumed_samples": 8 * step,
        "consumed_tokens": TOKENS * step,
        "global_batch_size": 8,
        "reduced_train_loss": round(2 + 4 * math.exp(-step / 50) + 0.1 * math.sin(step), 4),
        "lr": 3e-4 / (1 + step),
        "gradient_norm": 1 + 0.2 * math.cos(step),
        "throughput": 80.0,
        "tokens_per_second": 5000.0 + step % 7,
        "tflops_per_device": 0.02,
        "mfu": 0.15 + 0.001 * (step % 5),
        "mfu_full": 0.16,
        "step_time_s": 0.1,
        "data_time_s": 0.001,
        "peak_memory_bytes": 350 << 20,
        "global_step": step,
        "train_step_timing": 0.1,
        "throughput_peak": 90.0,
        **({"val_loss": 2 + 4 * math.exp(-step / 50), "val_token_accuracy": 0.3} if step % 10 == 0 else {}),
        **more,
    }


def write_run(
    folder: Path, steps: int = 60, settings: Mapping[str, Any] | None = None, starts: str = "", **more: Any
) -> Path:
    """Write metrics.jsonl, config.yaml, plan.txt and starts.jsonl of a run; return the folder.

    Args:
        more: Metrics that each step has in addition.
    """
    folder.mkdir(parents=True, exist_ok=True)
    overrides = [f"{name}={value}" for name, value in (settings or {}).items()]
    base = ["model=llama_2m", "data=mock", "device=cpu", "data.seq_length=64", "trainer.global_batch_size=8"]
    plan = find_world(parse_overrides([*base, f"trainer.steps={steps}", *overrides]), None).plan()
    (folder / "config.yaml").write_text(to_yaml(plan.config, plan.requested), encoding="utf-8")
    (folder / "plan.txt").write_text(format_plan(plan), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(lines(steps, **more)), encoding="utf-8")
    if starts:
        (folder / "starts.jsonl").write_text(starts, encoding="utf-8")
    return folder


def lines(steps: int, **more: Any) -> Iterator[str]:
    """Yield the lines of a metrics.jsonl."""
    for step in range(1, steps + 1):
        yield json.dumps(record(step, **more)) + "\n"


def start_line(time: float, step: int | None, **more: Any) -> str:
    """Return the line of a start in starts.jsonl."""
    known = {"event": "start", "time": time, "step": step, "command": "python train.py", "host": "elsewhere", "pid": 1}
    return json.dumps(known | more) + "\n"


def end_line(time: float, step: int, status: int, reason: str) -> str:
    """Return the line of an end in starts.jsonl."""
    return json.dumps({"event": "end", "time": time, "step": step, "status": status, "reason": reason}) + "\n"
