"""Preparation of forked processes, once in the parent: imports, frozen objects that forks do not copy, shorter runs.

A rank of a test runs for about a second, of which its own imports would take a fifth.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

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
from megatron_llama.devices import processor
from megatron_llama.plan import Plan
from megatron_llama.system.files import write_atomically
from megatron_llama.train import loss_curve, metrics

# A collection in a child writes to every object that it visits, and so copies the parent's pages; frozen objects are
# not visited. The parent unfreezes them.
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)


def leave_picture_empty(plan: Plan) -> Path:
    """Create an empty ``loss.png``. To draw one takes longer than a run of a test."""
    write_atomically(picture := plan.run_dir / loss_curve.PICTURE_FILE, "")
    return picture


# Commands in new processes draw, and measure the peak in full. Other tests draw by train/loss_curve.py.
metrics.draw_run = leave_picture_empty
processor.ROUND_SECONDS = 0.001


def warm_oracles() -> None:
    """Import transformers and PEFT, and compile transformers' patterns of names, if a collected test uses them."""
    if "transformers" in sys.modules:
        with suppress(ImportError):  # their tests skip
            import peft  # noqa: F401
            import transformers.models.auto.modeling_auto  # noqa: F401
            from transformers.conversion_mapping import get_checkpoint_conversion_mapping
            from transformers.models.llama import modeling_llama  # noqa: F401

            get_checkpoint_conversion_mapping("llama")
