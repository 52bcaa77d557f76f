"""Initial weights that do not depend on the layout: each value is a function of seed, Hugging Face name and
position."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch

from megatron_llama.config import ModelConfig
from megatron_llama.model.names import Piece, is_lora

# Rows drawn with one generator. A rank draws only the blocks that its rectangle touches, not the whole tensor; part
# of the definition of the initial weights, so never change it.
_BLOCK_ROWS = 64


def initial_values(piece: Piece, model: ModelConfig, seed: int) -> torch.Tensor:
    """The initial values of a rectangle, fp32, on the CPU: ones for norms, else normal with ``initializer_range``.

    The projections that write into the residual stream are scaled by 1/sqrt(2 L) (GPT-2; Megatron's scaled init).
    LoRA begins as PEFT begins it: A uniform within 1/sqrt(in), which is Kaiming's with a = sqrt(5); B zero.
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
    """A rectangle of what ``draw`` gives for the whole tensor, block of rows by block of rows."""
    rows, columns = piece.global_shape
    first, last = piece.offset[0], piece.offset[0] + piece.size[0]
    values = torch.empty(piece.size)
    for start in range(first // _BLOCK_ROWS * _BLOCK_ROWS, last, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, rows)
        generator = torch.Generator().manual_seed(_block_seed(seed, piece.name, start))
        block = draw(stop - start, columns, generator=generator)
        low, high = max(start, first), min(stop, last)
        columns_wanted = slice(piece.offset[1], piece.offset[1] + piece.size[1])
        values[low - first : high - first] = block[low - start : high - start, columns_wanted]
    return values


def _block_seed(seed: int, name: str, row: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes a signed 64-bit seed
