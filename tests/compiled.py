"""What forked ranks need before they build a model that compiles."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from megatron_llama.devices import get_device
from megatron_llama.plan import Plan
from tests.parallel.symmetric_memory import symmetric_memory

REASON = get_device("cpu").compiler_missing()
needs_compiler = pytest.mark.skipif(REASON is not None, reason=str(REASON))
SECONDS = 600
"""That ranks which compile may take: compilers are slow on a busy machine."""


def skip_without_compiler(overrides: Iterable[str]) -> None:
    """Skips a row of a table that compiles where nothing can."""
    if REASON is not None and "trainer.compile=true" in overrides:
        pytest.skip(REASON)


def prepare_rank(plan: Plan) -> None:
    """What the process that starts ranks does for a plan that compiles, and what trainer.async_tp finds on GPUs. For
    each plan of a forked rank, before its model is built."""
    trainer = plan.config.trainer
    if trainer.compile:
        os.environ.update(get_device("cpu").compile_environment(Path(str(trainer.compile_cache))))
        torch._dynamo.reset()  # a plan's graphs are counted against its own limit
    if trainer.async_tp:
        symmetric_memory()
