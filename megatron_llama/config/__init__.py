"""The configuration of a run: every setting, typed, documented and with its limit; ``load_config`` reads them.

    config = load_config(["model=llama7b", "trainer.tp=8"], Path("conf"))

Imports no torch. What a config means on a number of devices is ``megatron_llama.plan``.
"""

from megatron_llama.config.hostfile import Host, parse_hostfile, parse_hosts
from megatron_llama.config.load_config import from_yaml, load_config, to_yaml
from megatron_llama.config.precision import PRECISIONS
from megatron_llama.config.problems import ConfigError, Problem, format_problems
from megatron_llama.config.settings import (
    Config,
    DataConfig,
    DeviceConfig,
    FinetuneConfig,
    ModelConfig,
    RandomLTD,
    RopeScaling,
    SparseAttention,
    TrainerConfig,
)

__all__ = [
    "PRECISIONS",
    "Config",
    "ConfigError",
    "DataConfig",
    "DeviceConfig",
    "FinetuneConfig",
    "Host",
    "ModelConfig",
    "Problem",
    "RandomLTD",
    "RopeScaling",
    "SparseAttention",
    "TrainerConfig",
    "load_config",
    "format_problems",
    "from_yaml",
    "parse_hostfile",
    "parse_hosts",
    "to_yaml",
]
