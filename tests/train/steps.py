"""A run's metrics without a run: a small plan and made-up measurements of its steps."""

from __future__ import annotations

from pathlib import Path

from megatron_llama.config import load_config
from megatron_llama.devices import Peak
from megatron_llama.plan import Plan, resolve
from megatron_llama.train.metrics import MetricsLogger
from tests.paths import CONF

PEAK = Peak(100e9, "made up")
STEPS = 12


def plan_of(run_dir: Path, *overrides: str) -> Plan:
    """A small plan on two ranks, with its run in ``run_dir``."""
    common = ["data=mock", "device=cpu", "trainer.tp=2", f"trainer.steps={STEPS}", f"run.dir={run_dir}"]
    return resolve(load_config([*common, *overrides], CONF), 2)


def measured(step: int, **more: float | None) -> dict[str, float | int | None]:
    """The measurements of a step, as the training loop passes them to the logger."""
    return {
        "step": step,
        "consumed_samples": 8 * step,
        "tokens": 2048,
        "attended": 2048 * 256,
        "consumed_tokens": 2048 * step,
        "global_batch_size": 8,
        "reduced_train_loss": 8.0 / step,
        "lr": 1e-4 * step,
        "gradient_norm": 1.0 + 1 / 3 * step,
        "step_time_s": 0.5 * step,
        "data_time_s": 0.01 * step,
        "peak_memory_bytes": 123_456_789,
        **more,
    }


def log_steps(plan: Plan, first: int = 1, last: int = STEPS) -> None:
    """Logs some steps, with a validation at each fourth."""
    with MetricsLogger(plan, PEAK, start_step=first - 1) as logger:
        for step in range(first, last + 1):
            logger.log_step(measured(step, **({"val_loss": 9.0 / step} if step % 4 == 0 else {})))
