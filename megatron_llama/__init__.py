"""Megatron-style 3D-parallel training of Llama models, from one core to a thousand accelerators."""

import warnings

# What megatron-core says at import about packages that we don't use, and torch about names that megatron-core and
# fully_shard call: nobody who trains can act on it, and each rank would say it.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\b")
warnings.filterwarnings(
    "ignore", category=FutureWarning, message=r".*torch\.distributed\.(reduce_scatter_tensor|all_gather_into)"
)
