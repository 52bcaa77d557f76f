"""The environment of a rank, from what its device and its compiler want."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_llama.config import Plan
from megatron_llama.devices import Device


def variables(device: Device, plan: Plan) -> dict[str, str]:
    """What must stand in a rank's environment before it imports torch, without what the user has set."""
    wanted = device.environment(plan)
    if plan.config.trainer.compile:
        wanted |= device.compile_environment(Path(str(plan.config.trainer.compile_cache)))
    return {name: value for name, value in wanted.items() if name not in os.environ}
