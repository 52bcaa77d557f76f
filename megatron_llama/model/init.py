"""Initial weights that do not depend on the layout: each value is a function of seed, Hugging Face name and position.

With one generator per rank, as in Megatron-LM, another layout starts from other weights, and no two layouts can be
compared.
"""
from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch

from megatron_llama.arch.names import Piece, is_lora
from megatron_llama.config import ModelConfig

# Rows per generator: a rank draws only the blocks that its rectangle overlaps, not whole tensors. Another number would
# give other initial weights, so it must never change.
_BLOCK_ROWS = 64


def initial_values(piece: Piece, model: ModelConfig, seed: int) -> torch.Tensor:
    """The initial values of a rectangle, fp32, on the CPU: ones for norms, else normal with std ``initializer_range``.

    o_proj and down_proj, which write into the residual stream, are scaled by 1/sqrt(2 L) (Radford et al. 2019, GPT-2;
    Megatron-LM's scaled_init_method_normal). LoRA starts as in PEFT: A uniform within 1/sqrt(in), which is
    kaiming_uniform_ with a = sqrt(5); B zero, so that the first forward pass is the base model's.
    """
    if len(piece.global_shape) == 1:
        return torch.ones(piece.size)
    if is_lora(piece.name):
        if piece.name.endswith("lora_B.weight"):
            return torch.zeros(piece.size)
        return _random_values(piece, seed, torch.rand).mul_(2).sub_(1).div_(math.sqrt(piece.global_shape[1]))
    std = model.initializer_range
    if piece.name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * model.num_hidden_layers)
    return _random_values(piece, seed, torch.randn).mul_(std)


def _random_values(piece: Piece, seed: int, draw: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The rectangle's part of the whole tensor that ``draw`` defines, one block of rows after the other."""
    rows, columns = piece.global_shape
    first, last = piece.offset[0], piece.offset[0] + piece.size[0]
    values = torch.empty(piece.size)
    for start in range(first // _BLOCK_ROWS * _BLOCK_ROWS, last, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, rows)
        digest = hashlib.blake2b(f"{seed}/{piece.name}/{start}".encode(), digest_size=8).digest()
        block_seed = int.from_bytes(digest, "big") >> 1  # 63 bits: torch's seeds are signed
        block = draw(stop - start, columns, generator=torch.Generator().manual_seed(block_seed))
        low, high = max(start, first), min(stop, last)
        kept_columns = slice(piece.offset[1], piece.offset[1] + piece.size[1])
        values[low - first : high - first] = block[low - start : high - start, kept_columns]
    return values


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that config/precision.py means by a name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
