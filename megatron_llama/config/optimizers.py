"""Properties of the optimizers, which settings, rules, memory estimate, checkpoints and training read.

A new optimizer needs a row here and a file in ``optim/``; ``optim/base.py`` describes the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OptimizerRow:
    """Properties of an optimizer. Its name is the value of ``optim.name``."""

    factory: str
    """Import path of the function that builds the optimizer; text, since a config imports no torch."""
    states: tuple[str, ...]
    """Names of the states in checkpoints. Each state has a weight's shape."""
    matrix_states: tuple[str, ...] | None = None
    """Names of the states of the blocks' matrices. None: ``states``."""
    unsigned_states: tuple[str, ...] = ()
    """States that are never negative; in 8 bits they use other levels."""
    extra_states: int = 0
    """Number of further tensors of a weight's size that each rank holds and checkpoints omit."""
    betas: int = 2
    """Number of values of ``optim.betas`` in use."""
    whole_matrix: bool = False
    """Whether the update needs the whole matrix on one rank."""
    gathers_matrices: bool = False
    """Whether the ranks of a pipeline stage divide the blocks' matrices, and each gathers its matrices as a whole."""
    sums_gradients: bool = False
    """Whether the optimizer sums gradients over data-parallel ranks, which then hold unsharded weights."""
    exchanges_signs: bool = False
    """Whether data-parallel ranks exchange signs of momenta after ``optim.freeze_step`` steps."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Unsupported settings (``optim.state_bits``, ``trainer.offload``, ``trainer.precision`` with bf16 weights,
    ``finetune.method=lora``) and the reason, a clause whose subject is the optimizer."""

    @property
    def state_tensors(self) -> int:
        """Number of tensors of a weight's size in memory, in addition to weight and gradient."""
        return len(self.states) + self.extra_states

    def states_of(self, *, is_matrix: bool) -> tuple[str, ...]:
        """Return the names of the states of a weight. ``is_matrix``: it is a matrix of a block."""
        return self.matrix_states if is_matrix and self.matrix_states is not None else self.states


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
            "optim.state_bits": "needs fp32 momenta, to which it adds the compression error",
            "trainer.offload": "exchanges momenta between devices in its step",
            "trainer.precision": "needs fp32 weights: compression errors are added to them",
        },
    ),
    "muon": OptimizerRow(
        factory="megatron_llama.optim.muon.build_muon",
        states=("exp_avg", "exp_avg_sq"),
        matrix_states=("momentum_buffer",),
        unsigned_states=("exp_avg_sq",),
        gathers_matrices=True,
        refuses={
            "optim.state_bits": "has one state per matrix, which is not quantized",
            "trainer.offload": "exchanges matrices between devices in its step",
            "finetune.method": "orthogonalizes the updates of the blocks' matrices, which LoRA freezes",
        },
    ),
}
"""Rows by ``optim.name``."""
