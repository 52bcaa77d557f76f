"""What a config means on a number of devices: ``resolve(config, world_size)`` returns a ``Plan`` or raises ConfigError.

    plan = resolve(config, world_size=8)
    print(format_plan(plan))

Pure, without torch and without devices: a plan for 512 ranks is made on a login node.
"""

from megatron_llama.plan.format_plan import format_plan
from megatron_llama.plan.memory import Machine, RankMemory, stage_memory
from megatron_llama.plan.parameters import parameters, parameters_per_stage, trained_parameters
from megatron_llama.plan.plan import Plan
from megatron_llama.plan.resolve import resolve

__all__ = [
    "Machine",
    "Plan",
    "RankMemory",
    "format_plan",
    "parameters",
    "parameters_per_stage",
    "resolve",
    "stage_memory",
    "trained_parameters",
]
