"""Frozen matrices in 8 or 4 bits, stored as bytes and dequantized for each matmul.

    int8   round(w / scale), scale = max |w| / 127.5
    nf4    the nearest of 16 levels times scale, scale = max |w| (QLoRA: Dettmers et al. 2023, arXiv:2305.14314)

Each block of QUANTIZATION_BLOCK consecutive values of a row has one fp32 scale. A row's bytes are its codes, then its
scales. So splitting a matrix by rows (column-parallel layers, ``fully_shard``) never splits a block, and
plan/rules/finetune.py rejects layouts in which splitting by columns would. Values are the same in every layout. The
scales stay fp32, because QLoRA's double quantization (torchao's NF4Tensor) needs the mean of the whole tensor.

torchao quantizes. Storage and matmuls are here, because torchao's tensor subclasses support neither megatron-core's
layers nor the row splits of ``fully_shard``. Plain uint8 tensors work with both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import nn

from megatron_llama.config import ModelConfig
from megatron_llama.config.precision import QUANTIZATION_BLOCK, QUANTIZED_BITS, quantized_bytes
from megatron_llama.model.llama import parallel_linear

# The levels of the paper's appendix E, rounded to four digits as in torchao.
_NF4 = (
    *(-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0),
    *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0),
)
_PAIRS: dict[torch.device, torch.Tensor] = {}
"""Result of ``_values_of_bytes`` per device."""
_MOST_VALUES = 2**20
"""Values quantized together. torchao compares each value with all 16 levels, which takes 64 bytes per value."""


@torch.no_grad()
def quantize(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Quantize fp32 [rows, columns] to uint8 [rows, bytes of a row], on the same device. Needs torchao.

    A non-finite value makes its whole block non-finite.

    Args:
        values: fp32, with columns a multiple of QUANTIZATION_BLOCK.
        kind: int8 or nf4.
    """
    pack = {"int8": _pack_int8, "nf4": _pack_nf4}[kind]
    at_once = max(1, _MOST_VALUES // values.shape[1])
    packed = values.new_empty(len(values), quantized_bytes(kind, values.shape[1]), dtype=torch.uint8)
    for first in range(0, len(values), at_once):
        rows = values[first : first + at_once].contiguous()
        packed[first : first + at_once] = torch.cat(pack(rows), dim=1)
    return packed


def dequantize(packed: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize uint8 [rows, bytes of a row] to [rows, columns] in ``dtype``, computed in fp32."""
    columns = packed.shape[1] * QUANTIZATION_BLOCK // quantized_bytes(kind, QUANTIZATION_BLOCK)
    codes, scales = packed.split([columns * QUANTIZED_BITS[kind] // 8, columns // QUANTIZATION_BLOCK * 4], dim=1)
    if kind == "int8":
        values = codes.contiguous().view(torch.int8).float()
    else:
        values = F.embedding(codes.int(), _values_of_bytes(packed)).flatten(1)
    # A copy, because a view as fp32 must be aligned.
    scale = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
    # In place: a copy in fp32 would be the largest temporary of a step.
    values.unflatten(1, (-1, QUANTIZATION_BLOCK)).mul_(scale.unsqueeze(-1))
    return values.to(dtype)


def _values_of_bytes(packed: torch.Tensor) -> torch.Tensor:
    """Return the two values of each byte, fp32 [256, 2], on the device of ``packed``. The first is in the upper bits.

    Eager code builds them once per device. Compiled code, whose graph must not depend on earlier calls, and fake
    tensors build them at each call. No value is copied from host memory, which would be a sync.
    """
    is_shared = type(packed) is torch.Tensor and not torch.compiler.is_compiling()
    if is_shared and packed.device in _PAIRS:
        return _PAIRS[packed.device]
    codes = torch.arange(len(_NF4), dtype=torch.int32, device=packed.device)
    levels = torch.zeros(len(_NF4), device=packed.device)
    for code, level in enumerate(_NF4):
        levels = torch.where(codes == code, level, levels)
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
    if is_shared and type(pairs) is torch.Tensor:  # not in a mode that makes fake tensors
        _PAIRS[packed.device] = pairs
    return pairs


def quantized_linear(matrix: str, model: ModelConfig, mcore: TransformerConfig, *, kind: str) -> nn.Module:
    """Build a parallel linear layer with a quantized weight, on the meta device."""
    layer: Any = parallel_linear(matrix, model, mcore, matmul=partial(_linear, kind))
    rows, columns = layer.weight.shape
    packed = layer.weight.new_empty(rows, quantized_bytes(kind, columns), dtype=torch.uint8)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    return layer  # type: ignore[no-any-return]


def _pack_int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from torchao.quantization import Int8Tensor, PerGroup  # an optional dependency, slow to import

    quantized = Int8Tensor.from_hp(values, granularity=PerGroup(QUANTIZATION_BLOCK))
    return quantized.qdata.view(torch.uint8), quantized.scale.contiguous().view(torch.uint8)


def _pack_nf4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor

    blocks = values.numel() // QUANTIZATION_BLOCK
    levels = torch.tensor(_NF4, device=values.device)
    codes = NF4Tensor.convert_to_norm_float_weight(values, blocks, QUANTIZATION_BLOCK, levels)
    scales = values.unflatten(1, (-1, QUANTIZATION_BLOCK)).abs().amax(-1)
    return codes.view(len(values), -1), scales.view(torch.uint8)


def _linear(kind: str, input: torch.Tensor, weight: torch.Tensor, bias: None, **how: Any) -> torch.Tensor:
    """Multiply input [s(/t), b, in] by a quantized weight [out, bytes of a row] to [s, b, out]."""
    assert bias is None, "biases are added outside"
    if how["sequence_parallel"]:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=how["tp_group"])
    elif how["allreduce_dgrad"]:
        input = copy_to_tensor_model_parallel_region(input, group=how["tp_group"])
    output: torch.Tensor = _QuantizedLinear.apply(input, weight, kind)
    return output


class _QuantizedLinear(torch.autograd.Function):
    """x Wᵀ for a frozen W. Saves the quantized W only, because no gradient of W is needed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.kind = kind
        return torch.matmul(x, dequantize(packed, kind, x.dtype).t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.matmul(grad, dequantize(ctx.saved_tensors[0], ctx.kind, grad.dtype)), None, None
