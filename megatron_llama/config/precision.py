"""The dtypes of each ``trainer.precision``, which model, sharding, optimizer, memory estimate and docs read.

Dtypes are torch's names as strings, so that a plan does not import torch. docs/guides/training/precision.md explains
the columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

BYTES = {"float32": 4, "bfloat16": 2}
QUANTIZED_BITS = {"int8": 8, "nf4": 4}
QUANTIZATION_BLOCK = 64
"""Values of a row that share an fp32 scale, in int8 and in nf4: QLoRA's block (Dettmers et al. 2023,
arXiv:2305.14314)."""
_SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def quantized_bytes(kind: str, values: int) -> int:
    """Return the bytes of ``values`` (whole blocks) with their scales: 1.0625 per value in int8, 0.5625 in nf4."""
    return values * QUANTIZED_BITS[kind] // 8 + values // QUANTIZATION_BLOCK * BYTES["float32"]


STATE_BLOCK = 32
"""Values of a row that share an fp32 scale in 8-bit optimizer states. Small, since each tensor-parallel rank must hold
whole blocks: Llama-7B's down_proj at tp=8 has rows of 1,376 values, or 43 blocks."""
LEAST_IN_BLOCKS = 4096
"""Smallest matrix with 8-bit states, in values; bitsandbytes and torchao have the same limit."""


def has_8bit_states(shape: Sequence[int]) -> bool:
    """Return whether ``optim.state_bits=8`` applies to a parameter with this unsharded shape."""
    return len(shape) == 2 and shape[1] % STATE_BLOCK == 0 and shape[0] * shape[1] >= LEAST_IN_BLOCKS


def state_bytes_8bit(values: int) -> int:
    """Return the bytes of one 8-bit state of ``values`` (whole blocks) with its scales: 1.125 per value."""
    return values + values // STATE_BLOCK * BYTES["float32"]


EXCHANGES = ("bf16", "int8")
"""Formats in which data-parallel ranks may exchange gradients (parallel/quantized_comm.py)."""
EXCHANGE_BLOCK = 256
"""Successive values of a parameter that share an fp32 scale when they are sent in int8."""


def exchanged_bytes(kind: str, sizes: Iterable[int]) -> int:
    """Return the bytes of a message with ``sizes`` values of each parameter, in bf16 or int8.

    int8 sends whole blocks: 260 bytes for up to 256 values.
    """
    if kind == "bf16":
        return BYTES["bfloat16"] * sum(sizes)
    return (EXCHANGE_BLOCK + BYTES["float32"]) * sum(-(-size // EXCHANGE_BLOCK) for size in sizes)


@dataclass(frozen=True)
class Precision:
    """The dtypes of one ``trainer.precision``."""

    name: str
    """Name; aliases have the name of their entry."""
    compute_dtype: str
    """Weights and inputs of matmuls, activations, and the gradients of one micro batch."""
    grad_accum_dtype: str
    """Gradient sums over micro batches (before sharding) and over data-parallel ranks."""
    master: str | None
    """Master weights; None if the optimizer updates the compute weights."""
    optimizer_state_dtype: str
    """Optimizer states (exp_avg, exp_avg_sq)."""
    stochastic: bool
    """Whether bf16 optimizer updates are rounded stochastically instead of to nearest. Also enables the stochastic
    rounding mode of hardware that has one."""

    @property
    def param_dtype(self) -> str:
        """Dtype of the parameters that ranks hold, update and save: the master weights' if there are any.

        Reduced gradients have the same dtype unless ``Storage.keeps_bf16_grads``.
        """
        return self.master or self.compute_dtype

    @property
    def compute_format(self) -> str:
        """The compute dtype as "fp32" or "bf16", the names in tables of peak FLOP/s."""
        return _SHORT[self.compute_dtype]

    def __str__(self) -> str:
        words = f"{self.compute_format} weights"
        if self.master:
            words += f", {_SHORT[self.master]} master"
        words += f", {_SHORT[self.grad_accum_dtype]} sums, {_SHORT[self.optimizer_state_dtype]} moments"
        if self.param_dtype == "float32":
            return words
        return f"{words}, rounded {'stochastically' if self.stochastic else 'to nearest'}"


_F, _B = "float32", "bfloat16"
_ENTRIES = (
    #         name                  compute, grad_accum, master, optimizer_state, stochastic
    Precision("fp32", _F, _F, None, _F, False),
    Precision("bf16", _B, _F, _F, _F, False),
    Precision("bf16_sr", _B, _B, None, _B, True),
    Precision("bf16_pure", _B, _B, None, _B, False),
    Precision("fp32_OptStates", _B, _B, None, _F, True),
    Precision("fp32_ZeroOptMaster", _B, _B, _F, _F, True),
)
# Names of the Trainium recipe.
_ALIASES = {"bf16SR": "bf16_sr", "fp32_ZeroOptMasterGradAcc": "bf16", "megatron_amp_O2": "bf16"}

PRECISIONS: Mapping[str, Precision] = {
    **{entry.name: entry for entry in _ENTRIES},
    **{alias: entry for alias, name in _ALIASES.items() for entry in _ENTRIES if entry.name == name},
}
"""All valid values of ``trainer.precision``."""
