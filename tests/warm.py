"""Imports for forked processes, done once in the parent, and frozen objects that forks do not copy.

A rank of a test runs for about a second, of which its own imports would take a fifth.
"""

from __future__ import annotations

import gc
import os

import matplotlib.backends.backend_agg  # noqa: F401  draws loss.png
import matplotlib.pyplot  # noqa: F401
import megatron.core.transformer.multi_token_prediction  # noqa: F401  schedules import it at each first pass
import megatron.core.transformer.transformer_block  # noqa: F401

import megatron_llama.cli
import megatron_llama.devices.cpu.kernels
import megatron_llama.launch.start
import megatron_llama.optim.adam  # factories are imported by name
import megatron_llama.optim.low_precision
import megatron_llama.optim.schedules
import megatron_llama.parallel
import megatron_llama.train.run_rank  # noqa: F401

# A collection in a child writes to every object that it visits, and so copies the parent's pages; frozen objects are
# not visited. The parent unfreezes them.
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)
