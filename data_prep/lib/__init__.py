"""Library of the data preparation scripts. No module imports torch."""

import megatron_llama  # noqa: F401  its excepthook reports packages that are not installed
