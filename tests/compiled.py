"""Preparation of forked ranks whose model is compiled."""

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
"""Time limit of ranks that compile."""


def skip_without_compiler(overrides: Iterable[str]) -> None:
    """Skip a row of a table that compiles, if there is no compiler."""
    if REASON is not None and "trainer.compile=true" in overrides:
        pytest.skip(REASON)


def prepare_rank(plan: Plan) -> None:
    """Set the environment of a plan that compiles, and stand-ins for trainer.async_tp. Call it before build_model."""
    trainer = plan.config.trainer
    if trainer.compile:
        os.environ.update(get_device("cpu").compile_environment(Path(str(trainer.compile_cache))))
        torch._dynamo.reset()  # a plan's graphs are counted against its own limit
    if trainer.async_tp:
        symmetric_memory()
