"""What each ``trainer.precision`` means: the one table that model, sharding, optimizer, memory and docs read.

Dtypes are torch's names as strings, so that a plan needs no torch. docs/precision.md explains the columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BYTES = {"float32": 4, "bfloat16": 2}
QUANTIZED_BITS = {"int8": 8, "nf4": 4}
QUANTIZATION_BLOCK = 64
"""Values of a row that share an fp32 scale, in int8 and in nf4: QLoRA's block (Dettmers et al. 2023,
arXiv:2305.14314)."""


def quantized_bytes(kind: str, values: int) -> int:
    """Bytes of ``values``, whole blocks of them, with their scales: 1.0625 a value in int8, 0.5625 in nf4."""
    return values * QUANTIZED_BITS[kind] // 8 + values // QUANTIZATION_BLOCK * BYTES["float32"]


@dataclass(frozen=True)
class Precision:
    """The dtypes of one way to train."""

    name: str
    """Its own name; aliases share an entry, and so a name."""
    weights: str
    """In the matrix products; activations and the gradients of a micro batch have it too."""
    accumulation: str
    """Of gradient sums over micro batches before they are sharded, and over ranks."""
    master: str | None
    """The copy that the optimizer updates, where that is not the weights themselves."""
    moments: str
    """What the optimizer remembers of each weight."""
    stochastic: bool
    """Whether what the optimizer keeps in bf16 is rounded stochastically, not to nearest; also whether hardware with a
    switch for it is to have it on."""

    @property
    def stored(self) -> str:
        """What ranks hold, update and save: the master copy, or the weights. Sharded gradients have it too."""
        return self.master or self.weights

    @property
    def products(self) -> str:
        """fp32 or bf16: what the matrix products run in, as peak figures are given."""
        return "fp32" if self.weights == "float32" else "bf16"

    def __str__(self) -> str:
        words = f"{_short(self.weights)} weights"
        if self.master:
            words += f", {_short(self.master)} master"
        words += f", {_short(self.accumulation)} sums, {_short(self.moments)} moments"
        if self.stored == "float32":
            return words
        return f"{words}, rounded {'stochastically' if self.stochastic else 'to nearest'}"


def _short(dtype: str) -> str:
    return {"float32": "fp32", "bfloat16": "bf16"}[dtype]


_F, _B = "float32", "bfloat16"
_ENTRIES = (
    #          name                  weights sums  master moments stochastic
    Precision("fp32", _F, _F, None, _F, False),
    Precision("bf16", _B, _F, _F, _F, False),
    Precision("bf16_sr", _B, _B, None, _B, True),
    Precision("bf16_pure", _B, _B, None, _B, False),
    Precision("fp32_OptStates", _B, _B, None, _F, True),
    Precision("fp32_ZeroOptMaster", _B, _B, _F, _F, True),
)
# The Trainium recipe's names for what exists already.
_ALIASES = {"bf16SR": "bf16_sr", "fp32_ZeroOptMasterGradAcc": "bf16", "megatron_amp_O2": "bf16"}

PRECISIONS: Mapping[str, Precision] = {
    **{entry.name: entry for entry in _ENTRIES},
    **{alias: entry for alias, name in _ALIASES.items() for entry in _ENTRIES if entry.name == name},
}
"""Every legal ``trainer.precision``."""
