"""The environment of a rank, from what its device and its compiler want."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_llama.config import ConfigError, Problem
from megatron_llama.devices import Device
from megatron_llama.plan import Plan


def variables(device: Device, plan: Plan) -> dict[str, str]:
    """What must stand in a rank's environment before it imports torch, without what the user has set.

    Raises ConfigError where the compiler's cache can't be made."""
    wanted = device.environment(plan)
    if plan.config.trainer.compile:
        cache = Path(str(plan.config.trainer.compile_cache))
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            rule = f"the folder can't be made: {error.strerror}"
            problem = Problem("trainer.compile_cache", str(cache), rule, "write another trainer.compile_cache=PATH")
            raise ConfigError([problem]) from error
        wanted |= device.compile_environment(cache)
    return {name: value for name, value in wanted.items() if name not in os.environ}
