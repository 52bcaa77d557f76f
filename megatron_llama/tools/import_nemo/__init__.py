"""From the YAML files of NeMo, neuronx-nemo-megatron and NxDT to ours."""

from megatron_llama.tools.import_nemo.convert import Converted, Found, convert
from megatron_llama.tools.import_nemo.write_yaml import as_yaml, check, command_line, listing

__all__ = ["Converted", "Found", "as_yaml", "check", "command_line", "convert", "listing"]
