"""The parts that the data preparation scripts share. Nothing here imports torch."""

import megatron_llama  # noqa: F401  its excepthook reports packages that are not installed
