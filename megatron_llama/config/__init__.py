"""What a run is asked to be (``Config``), and what that means on a number of devices (``Plan``).

    config = compose(["model=llama7b", "trainer.tp=8"], Path("conf"))
    plan = resolve(config, world_size=8)
    print(format_plan(plan))

Needs no device, and imports no torch: a plan for 512 ranks is made on a login node.
"""

from megatron_llama.config.compose import compose, from_yaml, to_yaml
from megatron_llama.config.counting import parameters, parameters_per_stage, trained_parameters
from megatron_llama.config.hosts import Host, hostfile_hosts, listed_hosts
from megatron_llama.config.memory import Machine, RankMemory, stage_memory
from megatron_llama.config.plan import Plan
from megatron_llama.config.precision import PRECISIONS, Precision
from megatron_llama.config.problems import ConfigError, Problem, format_problems
from megatron_llama.config.report import format_plan
from megatron_llama.config.resolve import resolve
from megatron_llama.config.settings import (
    CheckpointConfig,
    Config,
    DataConfig,
    DeviceConfig,
    FinetuneConfig,
    LaunchConfig,
    LoggingConfig,
    ModelConfig,
    OptimConfig,
    RopeScaling,
    RunConfig,
    TrainerConfig,
)

__all__ = [
    "PRECISIONS",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DeviceConfig",
    "FinetuneConfig",
    "Host",
    "LaunchConfig",
    "LoggingConfig",
    "Machine",
    "ModelConfig",
    "OptimConfig",
    "Plan",
    "Precision",
    "Problem",
    "RankMemory",
    "RopeScaling",
    "RunConfig",
    "TrainerConfig",
    "compose",
    "format_plan",
    "format_problems",
    "from_yaml",
    "hostfile_hosts",
    "listed_hosts",
    "parameters",
    "parameters_per_stage",
    "resolve",
    "stage_memory",
    "to_yaml",
    "trained_parameters",
]
