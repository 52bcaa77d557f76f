"""The optimizers: one row each, which settings, rules, the memory estimate, checkpoints and training read.

A new optimizer is a row here and a file in ``optim/``; ``optim/base.py`` describes that file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OptimizerRow:
    """The properties of an optimizer. Its name is the value of ``optim.name``."""

    factory: str
    """Path of the function that builds it. It is text, since a config imports no torch."""
    states: tuple[str, ...]
    """Names of its states, which checkpoints contain. Each state has a weight's shape."""
    unsigned_states: tuple[str, ...] = ()
    """The states that are never negative. In 8 bits they have other levels."""
    extra_states: int = 0
    """Further tensors of a weight's size, which belong to a rank and not to a weight."""
    betas: int = 2
    """Number of ``optim.betas`` that it reads."""
    whole_matrix: bool = False
    """Whether a matrix is updated as a whole, so that no rank may hold a part of it."""
    sums_gradients: bool = False
    """Whether it sums gradients over data-parallel ranks itself, which then hold whole weights."""
    exchanges_signs: bool = False
    """Whether data-parallel ranks exchange signs of momenta after ``optim.freeze_step`` steps."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Settings that it does not support (``optim.state_bits``, ``trainer.offload``, and ``trainer.precision`` with
    weights in bf16), each with the reason: a sentence whose subject is the optimizer."""

    @property
    def state_tensors(self) -> int:
        """Tensors of a weight's size in memory, in addition to weight and gradient."""
        return len(self.states) + self.extra_states


OPTIMIZERS: dict[str, OptimizerRow] = {
    "adamw": OptimizerRow(
        factory="megatron_llama.optim.adam.build_adamw",
        states=("exp_avg", "exp_avg_sq"),
        unsigned_states=("exp_avg_sq",),
    ),
    "adam": OptimizerRow(
        factory="megatron_llama.optim.adam.build_adam",
        states=("exp_avg", "exp_avg_sq"),
        unsigned_states=("exp_avg_sq",),
    ),
    "sgd": OptimizerRow(
        factory="megatron_llama.optim.low_precision.build_sgd",
        states=("momentum_buffer",),
        betas=1,
    ),
    "onebit_adam": OptimizerRow(
        factory="megatron_llama.optim.onebit_adam.build_onebit_adam",
        states=("exp_avg", "exp_avg_sq"),
        unsigned_states=("exp_avg_sq",),
        extra_states=1,
        sums_gradients=True,
        exchanges_signs=True,
        refuses={
            "optim.state_bits": "averages whole momenta, and adds what a sign loses to them",
            "trainer.offload": "exchanges momenta between devices in its step",
            "trainer.precision": "needs weights in fp32: errors of a sign are added to them",
        },
    ),
}
"""By ``optim.name``."""
