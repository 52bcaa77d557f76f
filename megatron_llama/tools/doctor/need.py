"""What the settings say about the machines before a run: its folders, and what it will write into them."""

from __future__ import annotations

from pathlib import Path

from megatron_llama.config import Config
from megatron_llama.config.precision import BYTES
from megatron_llama.plan import Plan
from megatron_llama.plan.memory import optimizer_bytes
from megatron_llama.system.files import user_cache
from megatron_llama.tools.doctor.disks import RUN, Need


def folders_of(config: Config) -> dict[str, Path]:
    """The folders that a run writes to, by their setting."""
    found = {RUN: Path(config.run.dir or "runs")}
    if config.trainer.compile:
        found["trainer.compile_cache"] = Path(config.trainer.compile_cache or user_cache("compile")).expanduser()
    if config.data.cache_dir:
        found["data.cache_dir"] = Path(config.data.cache_dir).expanduser()
    return found


def need_of(plan: Plan) -> Need:
    """Weights and optimizer states of what is trained, and how many checkpoints there will be."""
    config = plan.config
    size = plan.whole.trained * BYTES[plan.precision.param_dtype] + optimizer_bytes(plan, plan.whole)
    every, keep, steps = config.checkpoint.every_steps, config.checkpoint.keep, config.trainer.steps
    made = (steps // every if every else 0) + (1 if config.checkpoint.save_last and (not every or steps % every) else 0)
    # An old one goes once the new one is whole.
    kept = made if keep is None else min(made, keep + 1)
    return Need(size if made else 0, kept)
