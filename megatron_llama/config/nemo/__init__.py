"""From the YAML files of NeMo, neuronx-nemo-megatron and NxDT to ours."""

from megatron_llama.config.nemo.convert import Converted, Found, convert
from megatron_llama.config.nemo.write import as_yaml, check, command_line, listing

__all__ = ["Converted", "Found", "as_yaml", "check", "command_line", "convert", "listing"]
