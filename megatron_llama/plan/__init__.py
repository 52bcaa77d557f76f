"""Plan of a config on a number of devices: ``resolve(config, world_size)`` returns a ``Plan`` or raises ConfigError.

    plan = resolve(config, world_size=8)
    print(format_plan(plan))

Needs neither torch nor devices: a login node can plan 512 ranks.
"""

from megatron_llama.plan.format_plan import batch_line, format_plan, layout_lines
from megatron_llama.plan.plan import Plan
from megatron_llama.plan.resolve import resolve
from megatron_llama.plan.rules.memory import Machine

__all__ = ["Machine", "Plan", "batch_line", "format_plan", "layout_lines", "resolve"]
