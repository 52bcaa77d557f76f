"""Configuration of a run: typed settings with documentation and limits, and ``load_config``.

    config = load_config(["model=llama7b", "trainer.tp=8"], Path("conf"))

Imports no torch. ``megatron_llama.plan`` derives the plan of a config on a number of devices.
"""

from megatron_llama.config.load_config import from_yaml, load_config
from megatron_llama.config.problems import ConfigError, Problem, format_problems
from megatron_llama.config.settings import Config, FinetuneConfig, ModelConfig, RopeScaling
from megatron_llama.config.stored_settings import to_yaml

__all__ = ["Config", "ConfigError", "FinetuneConfig", "ModelConfig", "Problem", "RopeScaling"]
__all__ += ["format_problems", "from_yaml", "load_config", "to_yaml"]
