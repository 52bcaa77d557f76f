"""Code that runs inside the ranks of a run on the runtime, called by ``startup/sitecustomize.py``."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from contextlib import ExitStack
from types import ModuleType
from typing import Any

RUNTIME = "libcudart.so.13"
SMALL = 4096  # numbers: counts and losses, not activations
ACCESSES = "HOST_CUDA_ACCESSES"
"""Variable that records the memory that each operator reads and writes."""
FAULT = "HOST_CUDA_FAULT"
"""Variable with names of ``faults.FAULTS``, separated by commas: mistakes in each step that the tests must find."""
NO_COPIES = "HOST_CUDA_NO_COPIES"
"""Variable that omits the comparison of weights that ranks share."""
STEP_START, STEP_END = "step_start", "step_end"
"""Marks in the log."""
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


def compare_copies_on_the_host(module: ModuleType) -> None:
    """Let the comparison of weights of several ranks read their real bytes. States result from undefined gradients.

    Muon and optimizers of the host or of 8-bit states copy results of undefined gradients to the weights.
    """
    compare = _with_host_arithmetic(module.Copies.compare)

    @functools.wraps(module.Copies.compare)
    def check(copies: Any, parts: Any, moment: str, *, with_states: bool) -> None:
        if not os.environ.get(NO_COPIES):
            compare(copies, [part for part in parts if not part[0]], moment, with_states=False)

    module.Copies.compare = check  # type: ignore[attr-defined]


def choose_first_variants(heuristics: ModuleType) -> None:
    """Let Inductor use the first variant of each Triton kernel: kernels take no time here."""
    heuristics.CachingAutotuner.bench = lambda *_, **__: 1.0  # type: ignore[attr-defined]


def prepare_steps(loop: ModuleType) -> None:
    """Mark training steps in the log, and replace values that kernels would compute.

    The host computes the counts of tokens. Losses and norms are 0. Checks of these values are off.
    """
    loop.training_step = _prepared(loop.training_step)  # type: ignore[attr-defined]
    loop.read_scalars = _without_losses(loop.read_scalars)  # type: ignore[attr-defined]
    loop.validate = _with_host_arithmetic(loop.validate, SMALL)  # type: ignore[attr-defined]
    loop.ParallelModel.count = _with_host_arithmetic(loop.ParallelModel.count)  # type: ignore[attr-defined]
    loop.StepGuard.check = lambda *_: True  # type: ignore[attr-defined]
    loop.LabelCheck.check = lambda *_: None  # type: ignore[attr-defined]


def _without_losses(read_scalars: Any) -> Any:
    @functools.wraps(read_scalars)
    def read(*args: Any, **kwargs: Any) -> Any:
        floats, integers = read_scalars(*args, **kwargs)
        return [0.0 for _ in floats], integers

    return _with_host_arithmetic(read, SMALL)


def _prepared(training_step: Any) -> Any:
    @functools.wraps(training_step)
    def step(number: int, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as changes:
            if os.environ.get(ACCESSES):
                from tests.cuda.accesses import Accesses

                changes.enter_context(Accesses())
            for name in filter(None, os.environ.get(FAULT, "").split(",")):
                from tests.cuda.faults import FAULTS

                changes.enter_context(FAULTS[name]())
            mark(f"event={STEP_START} step={number}")
            result = training_step(number, *args, **kwargs)
            mark(f"event={STEP_END} step={number}")
        return result

    return step
