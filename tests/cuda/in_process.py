"""Code that runs inside the ranks of a run on the runtime, called by ``startup/sitecustomize.py``."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from types import ModuleType
from typing import Any

RUNTIME = "libcudart.so.13"
SMALL = 4096  # numbers: counts and losses, not activations
ACCESSES = "HOST_CUDA_ACCESSES"
"""Variable that records the memory that each operator reads and writes."""
OBJECT_COLLECTIVES = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)


def mark(text: str) -> None:
    """Add a line to the log of this process."""
    ctypes.CDLL(RUNTIME).host_cuda_mark(text.encode())


def compute_object_collectives_on_the_host(module: ModuleType) -> None:
    """Let collectives of Python objects compare and add sizes on the host."""
    for name in OBJECT_COLLECTIVES:
        setattr(module, name, _with_host_arithmetic(getattr(module, name)))


def _with_host_arithmetic(function: Any, most: float = math.inf) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from tests.cuda.host_arithmetic import HostArithmetic  # torch is still being imported before the first call

        with HostArithmetic(most):
            return function(*args, **kwargs)

    return call


def prepare_steps(loop: ModuleType) -> None:
    """Mark training steps in the log, and switch off the checks of values that kernels would compute."""
    if os.environ.get(ACCESSES):
        loop.training_step = _with_accesses(loop.training_step)  # type: ignore[attr-defined]
    loop.training_step = _marked(loop.training_step)  # type: ignore[attr-defined]
    loop.validate = _with_host_arithmetic(loop.validate, SMALL)  # type: ignore[attr-defined]
    loop.FiniteCheck.check = lambda *_: True  # type: ignore[attr-defined]
    loop.LabelCheck.check = lambda *_: None  # type: ignore[attr-defined]


def _with_accesses(training_step: Any) -> Any:
    @functools.wraps(training_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        from tests.cuda.accesses import Accesses

        with Accesses():
            return training_step(*args, **kwargs)

    return step


def _marked(training_step: Any) -> Any:
    @functools.wraps(training_step)
    def marked(step: int, *args: Any, **kwargs: Any) -> Any:
        mark(f"event=step_start step={step}")
        result = training_step(step, *args, **kwargs)
        mark(f"event=step_end step={step}")
        return result

    return marked
