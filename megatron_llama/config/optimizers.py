"""The optimizers: their settings, and their properties, which rules, memory estimate, checkpoints and training read.

A new optimizer needs a row here and a file in ``optim/``; ``optim/base.py`` describes the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_llama.config.limits import FIXED, LOGGED, OPTIM, TWO_BETAS, above_zero, at_least, between, one_of


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


_ADAM = ("exp_avg", "exp_avg_sq")
OPTIMIZERS: dict[str, OptimizerRow] = {
    name: OptimizerRow(f"megatron_llama.optim.adam.build_{name}", _ADAM, unsigned_states=_ADAM[1:])
    for name in ("adamw", "adam")
} | {
    "sgd": OptimizerRow(factory="megatron_llama.optim.low_precision.build_sgd", states=("momentum_buffer",), betas=1),
    "onebit_adam": OptimizerRow(
        factory="megatron_llama.optim.onebit_adam.build_onebit_adam",
        states=_ADAM,
        unsigned_states=_ADAM[1:],
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
        states=_ADAM,
        matrix_states=("momentum_buffer",),
        unsigned_states=_ADAM[1:],
        gathers_matrices=True,
        refuses={
            "optim.state_bits": "has one state per matrix, which is not quantized",
            "trainer.offload": "exchanges matrices between devices in its step",
            "finetune.method": "orthogonalizes the updates of the blocks' matrices, which LoRA freezes",
        },
    ),
}
"""Rows by ``optim.name``."""


@dataclass
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: Annotated[str, one_of(*OPTIMIZERS), FIXED] = "adamw"
    """adamw, adam or sgd, from torch.optim, onebit_adam or muon. With trainer.zero=0, onebit_adam exchanges
    signs of momenta instead of gradients after freeze_step. muon orthogonalizes the updates of the blocks' matrices;
    AdamW updates the other weights."""
    freeze_step: Annotated[int | None, at_least(1), OPTIM] = None
    """For onebit_adam: steps of plain Adam, without bias correction, before the exchange of signs. Derived: 15 % of
    the steps."""
    state_bits: Annotated[int | None, one_of(8), LOGGED] = None
    """Bits of the optimizer states of matrices: 8, or null for the dtype of trainer.precision. With 8, each 32 values
    of a row share an fp32 scale (Dettmers et al. 2022, arXiv:2110.02861)."""
    lr: Annotated[float | None, above_zero("3e-4"), OPTIM] = None
    """Highest learning rate. Derived: 3e-4; for fine-tuning of all weights 2e-5, as in Llama 2 (arXiv:2307.09288):
    with finetune.method=full, or data.kind=sft and init_from."""
    min_lr: Annotated[float | None, at_least(0), OPTIM] = None
    """Lowest learning rate after the decay. Derived: lr / 10."""
    warmup_steps: Annotated[int | None, at_least(0), OPTIM] = None
    """Steps of linear warm-up. Derived: a tenth of the steps, at most 2000."""
    warmup_ratio: Annotated[float | None, between(0, 1, "0.03")] = None
    """Instead of warmup_steps: the warm-up's share of the run's steps, rounded up as in transformers."""
    constant_steps: Annotated[int | None, at_least(0), OPTIM] = None
    """Steps at min_lr at the end of the run (NeMo's constant_steps); for wsd, steps of the final decay. Derived: 0;
    for wsd a tenth of the steps."""
    betas: Annotated[list[float], TWO_BETAS, OPTIM] = field(default_factory=lambda: [0.9, 0.95])
    """Adam's coefficients of the running averages of gradient and squared gradient."""
    eps: Annotated[float, above_zero(), OPTIM] = 1e-8
    """Added to the denominator of Adam's update."""
    momentum: Annotated[float, between(0, 0.999), OPTIM] = 0.95
    """For muon: coefficient of the Nesterov momentum of matrices."""
    matrix_lr: Annotated[float | None, above_zero("0.02"), OPTIM] = None
    """For muon: highest learning rate of matrices; the schedule scales it as lr. Derived: lr; 0.02 with
    adjust_lr=original."""
    adjust_lr: Annotated[str, one_of("match_rms_adamw", "original"), OPTIM] = "match_rms_adamw"
    """For muon: factor of a matrix's update, by torch.optim.Muon's names. With match_rms_adamw it is 0.2 *
    sqrt(max(rows, columns)), so that AdamW's lr and weight_decay fit (Moonlight, arXiv:2502.16982). With original,
    by Keller Jordan, it is sqrt(max(1, rows / columns))."""
    split_heads: Annotated[bool, OPTIM] = False
    """For muon: orthogonalize each head of q, k and v separately."""
    qk_clip: Annotated[float | None, above_zero("100"), OPTIM] = None
    """Largest attention logit of a head before QK-Clip scales down its q and k weights after the update. null: off.
    Source: Kimi K2, arXiv:2507.20534. docs/guides/methods/muon.md"""
    weight_decay: Annotated[float, at_least(0), OPTIM] = 0.1
    """Decoupled weight decay; norms are exempt."""
    clip: Annotated[float | None, above_zero(), OPTIM] = 1.0
    """Maximum global gradient norm; larger gradients are scaled down. null: no clipping."""
    schedule: Annotated[dict[str, Any], OPTIM] = field(default_factory=dict)
    """Learning-rate schedule that Hydra instantiates: _target_ and its arguments except the optimizer. Derived: a
    cosine."""

    @property
    def row(self) -> OptimizerRow:
        """The properties of the optimizer."""
        return OPTIMIZERS[self.name]

    @property
    def peak_lr(self) -> float:
        """``lr``, which ``choose_defaults`` sets in every plan."""
        assert self.lr is not None, "choose_defaults fills it in"
        return self.lr
