"""Initial weights that do not depend on the layout: each value is a function of seed, Hugging Face name and position.

Megatron-LM has one generator per rank, so each layout starts from other weights and runs of two layouts differ.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch

from megatron_llama.arch.hf_tp_mapping import Rectangle, is_lora
from megatron_llama.config import ModelConfig

# Rows per generator: a rank draws only the blocks that its rectangle overlaps, not whole tensors. The number must never
# change, because the initial weights depend on it.
_BLOCK_ROWS = 64


def initial_values(rectangle: Rectangle, model: ModelConfig, seed: int) -> torch.Tensor:
    """Return the initial values of a rectangle of a Hugging Face tensor, fp32, on the CPU.

    * Norm weights: ones. Biases: zeros.
    * Matrices: normal with std ``initializer_range``; o_proj and down_proj, which write into the residual stream, with
      std ``initializer_range`` / sqrt(2 L) (Radford et al. 2019, GPT-2; Megatron-LM's scaled_init_method_normal).
    * LoRA, as in PEFT: A uniform within 1/sqrt(in), which is kaiming_uniform_ with a = sqrt(5). B zero, so that the
      first forward pass equals the base model's.
    """
    if len(rectangle.global_shape) == 1:
        return torch.full(rectangle.size, 0.0 if rectangle.name.endswith(".bias") else 1.0)
    if is_lora(rectangle.name):
        if rectangle.name.endswith("lora_B.weight"):
            return torch.zeros(rectangle.size)
        return _random_values(rectangle, seed, torch.rand).mul_(2).sub_(1).div_(math.sqrt(rectangle.global_shape[1]))
    std = model.initializer_range
    if rectangle.name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * model.num_hidden_layers)
    return _random_values(rectangle, seed, torch.randn).mul_(std)


def _random_values(rectangle: Rectangle, seed: int, draw: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return the rectangle of the tensor that ``draw`` generates by blocks of rows."""
    rows, columns = rectangle.global_shape
    first, last = rectangle.offset[0], rectangle.offset[0] + rectangle.size[0]
    values = torch.empty(rectangle.size)
    for start in range(first // _BLOCK_ROWS * _BLOCK_ROWS, last, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, rows)
        digest = hashlib.blake2b(f"{seed}/{rectangle.name}/{start}".encode(), digest_size=8).digest()
        block_seed = int.from_bytes(digest, "big") >> 1  # 63 bits: torch's seeds are signed
        block = draw(stop - start, columns, generator=torch.Generator().manual_seed(block_seed))
        low, high = max(start, first), min(stop, last)
        columns_of_rank = slice(rectangle.offset[1], rectangle.offset[1] + rectangle.size[1])
        values[low - first : high - first] = block[low - start : high - start, columns_of_rank]
    return values


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name in config/precision.py."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
