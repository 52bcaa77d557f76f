"""LoRA (Hu et al. 2021, arXiv:2106.09685): low-rank updates of frozen matrices, tensor- and sequence-parallel.

    y = x Wᵀ + scale · (x Aᵀ) Bᵀ        A [rank, in], B [out, rank], scale = alpha / rank (rsLoRA: alpha / sqrt(rank))

DoRA (Liu et al. 2024, arXiv:2402.09353) scales each output by magnitude / norm. The norm is of the row of
W + scale · B A. The magnitude is a parameter; it starts as the norm of the row of W.

Each Hugging Face module has a separate A and B, as in PEFT. For fused matrices (q, k, v; gate, up) they are stacked by
rows into one parameter, so that one matmul computes all x Aᵀ. With different ranks, B is padded with zero columns.
arch/hf_tp_mapping.py maps the rows to the modules.

LoRA follows the split of its matrix. For a column-parallel W, B is split by rows and A is replicated. For a
row-parallel W, A is split by columns and B is replicated. Only x Aᵀ [s, b, rank] is gathered or reduced, not x.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import nn
from torch.distributed._functional_collectives import all_reduce

from megatron_llama.arch.hf_tp_mapping import is_lora, is_saved_module
from megatron_llama.arch.lora_targets import LayerAdapters
from megatron_llama.arch.parameters import StackedAdapters, fused_rows, stacked_adapters
from megatron_llama.config import FinetuneConfig, ModelConfig
from megatron_llama.config.precision import QUANTIZED_BITS
from megatron_llama.devices import HOST
from megatron_llama.model.llama import Llama
from megatron_llama.model.quantized import dequantize

_VALUES_AT_ONCE = 1 << 22
"""Values of a matrix that are in fp32 at once for DoRA's norms."""


class LoraLinear(nn.Module):
    """Frozen parallel linear layer with its LoRA update. Has the interface of ``base_layer``.

    Args:
        base_layer: the frozen layer.
        rows: this rank's rows of the matrix by Hugging Face module, in their order.
        stack: the adapters. Other modules get no update.
    """

    def __init__(
        self,
        base_layer: ColumnParallelLinear | RowParallelLinear,
        rows: Mapping[str, int],
        stack: StackedAdapters,
        finetune: FinetuneConfig,
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.is_column = isinstance(base_layer, ColumnParallelLinear)
        self.sequence_parallel = base_layer.config.sequence_parallel
        self.ranks = list(stack.ranks)
        self.scalings = [adapter.scaling for adapter in stack.modules.values()]
        self.dropout = finetune.lora_dropout
        self.rows = list(rows.values())
        self.is_target = [module in stack.modules for module in rows]
        targets = list(stack.rows)
        columns = base_layer.input_size if self.is_column else base_layer.input_size_per_partition
        empty = partial(torch.empty, dtype=base_layer.config.params_dtype, device=base_layer.weight.device)
        self.lora_A = nn.Parameter(empty(sum(self.ranks), columns))
        self.lora_B = nn.Parameter(empty(sum(targets), stack.width))
        self.targets = targets
        self.lora_magnitude_vector = nn.Parameter(empty(sum(targets))) if finetune.use_dora else None
        self.quantized = finetune.frozen_dtype if finetune.frozen_dtype in QUANTIZED_BITS else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[s(/t), b, in(/t)] to (output [s(/t), b, out(/t)], bias [out/t] or None), as megatron-core's layers."""
        y, bias = self.base_layer(x)
        lows = self._communicate(self._times_a(x)).split(self.ranks, dim=-1)
        factored = zip(lows, self._sides(), self.scalings, strict=True)
        updates = [F.linear(low, b) * scaling for low, b, scaling in factored]
        factors = [None] * len(updates) if self.lora_magnitude_vector is None else self._factors()
        parts = []
        outputs = (y,) if len(self.rows) == 1 else y.split(self.rows, dim=-1)  # the gradient of a split is a copy
        for part, is_target in zip(outputs, self.is_target, strict=True):
            if is_target:
                part, factor = part + updates.pop(0), factors.pop(0)
                part = part if factor is None else part * factor.to(part.dtype)
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1), bias

    def _sides(self) -> list[torch.Tensor]:
        """Return B [rows, rank] of each target, without padding."""
        sides = zip(self.lora_B.split(self.targets, dim=0), self.ranks, strict=True)
        return [b if b.shape[1] == rank else b[:, :rank] for b, rank in sides]

    def _factors(self) -> list[torch.Tensor | None]:
        """Return DoRA's factors [out/t] of each target's output: magnitude / norm of the row of W + scale · B A.

        The norm counts as constant in the gradient (arXiv:2402.09353, section 4.3), as in PEFT.
        """
        assert self.lora_magnitude_vector is not None
        with torch.no_grad():
            weights = self.base_layer.weight.split(self.rows, dim=0)
            targets = [weight for weight, is_target in zip(weights, self.is_target, strict=True) if is_target]
            sides = zip(targets, self.lora_A.split(self.ranks, dim=0), self._sides(), self.scalings, strict=True)
            summed = torch.cat([self._row_squares(*each) for each in sides])
            if not self.is_column and self.base_layer.tp_group.size() > 1:  # each rank has some columns
                summed = all_reduce(summed, "sum", self.base_layer.tp_group)
            norms = summed.sqrt()
        return [*(self.lora_magnitude_vector / norms).split(self.targets)]

    def _row_squares(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return the squared norms of the rows of W + scale · B A, fp32 [rows], some rows at a time."""
        rows = max(1, _VALUES_AT_ONCE // a.shape[1])
        squares = []
        for part, side in zip(weight.split(rows), b.split(rows), strict=True):
            base = part.float() if self.quantized is None else dequantize(part, self.quantized, torch.float32)
            merged = base + (side.float() @ a.float()) * scaling
            squares.append(merged.square().sum(dim=1))
        return torch.cat(squares)

    def _times_a(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Aᵀ of all targets [.., targets * rank]. Each target has a separate dropout mask, as in PEFT."""
        if not (self.dropout and self.training):
            return F.linear(x, self.lora_A)
        sides = self.lora_A.split(self.ranks, dim=0)
        return torch.cat([F.linear(F.dropout(x, self.dropout), a) for a in sides], dim=-1)

    def _communicate(self, low: torch.Tensor) -> torch.Tensor:
        """Gather x Aᵀ for a column-parallel matrix, reduce it for a row-parallel one.

        The collectives are the same as of the matrix itself, in the backward pass too.
        """
        group = self.base_layer.tp_group  # without it megatron-core warns, which is a graph break
        if self.is_column:
            if self.sequence_parallel:
                return gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=group)
            return copy_to_tensor_model_parallel_region(low, group=group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low, group=group)
        return reduce_from_tensor_model_parallel_region(low, group=group)


def lora_linear(
    base: Callable[..., Any],
    adapters: LayerAdapters,
    finetune: FinetuneConfig,
    matrix: str,
    model: ModelConfig,
    mcore: TransformerConfig,
) -> nn.Module:
    """Build a layer by ``base``, with uninitialized A and B if the layer's ``adapters`` have a module of it."""
    layer, tp = base(matrix, model, mcore), mcore.tensor_model_parallel_size
    stack = stacked_adapters(model, adapters, matrix, tp)
    return layer if stack is None else LoraLinear(layer, fused_rows(model, matrix, tp), stack, finetune)  # type: ignore[no-any-return]


class TokenRows(nn.Module):
    """Trained rows of a frozen embedding (trainable_token_indices), PEFT's trainable tokens.

    Values, not differences, which replace the table's rows in the lookup and in a tied output head. All tensor-parallel
    ranks hold all rows.

    Args:
        tokens: ids, in the order of the rows.
    """

    def __init__(self, tokens: Sequence[int], hidden: int, mcore: TransformerConfig) -> None:
        super().__init__()
        self.trainable_tokens_delta = nn.Parameter(torch.empty(len(tokens), hidden, dtype=mcore.params_dtype))
        self.group = get_tensor_model_parallel_group()
        self.sequence_parallel = mcore.sequence_parallel
        self.ids, self.tokens = tokens, torch.tensor(tokens, device=HOST)
        self.order = self.tokens.argsort()

    def replace(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Replace embeddings x [s(/t), b, h] of these tokens. ``tokens``: ids [b, s]."""
        self.tokens, self.order = self.tokens.to(x.device), self.order.to(x.device)
        rows, tokens = self.trainable_tokens_delta, tokens.t()
        if self.sequence_parallel:  # each rank has a part of the sequence, and so of the gradient
            rows = copy_to_tensor_model_parallel_region(rows, group=self.group)
            tokens = tokens.chunk(self.group.size())[self.group.rank()]
        place = torch.searchsorted(self.tokens, tokens.contiguous(), sorter=self.order)
        number = self.order[place.clamp(max=len(self.order) - 1)]
        return torch.where((self.tokens[number] == tokens)[..., None], F.embedding(number, rows).to(x.dtype), x)

    def in_table(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's rows of the table, [vocabulary/t, h], with the trained ones."""
        rows = copy_to_tensor_model_parallel_region(self.trainable_tokens_delta, group=self.group)
        first = self.group.rank() * len(weight)
        numbers = [n for n, token in enumerate(self.ids) if 0 <= token - first < len(weight)]
        places = [numbers, [self.ids[n] - first for n in numbers]]
        index, place = torch.tensor(places, dtype=torch.int64, device=weight.device).unbind()
        return weight.index_copy(0, place, rows[index].to(weight.dtype))


def freeze(chunk: Llama, finetune: FinetuneConfig, frozen_dtype: torch.dtype) -> None:
    """Freeze a chunk on the meta device, except for LoRA, ``modules_to_save`` and biases.

    Args:
        frozen_dtype: dtype of frozen weights that are not quantized.
    """
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(is_lora(name) or is_saved_module(name, chunk.model, finetune))
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(frozen_dtype)
    if chunk.is_first and not chunk.embed_tokens.weight.requires_grad:
        chunk.embed_tokens.register_forward_hook(_require_grad)


def _require_grad(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
    """Make the first block's input require a gradient, as in all other blocks, so that all share one compiled graph.

    PEFT has the same hook (enable_input_require_grads).
    """
    return output.requires_grad_() if torch.is_grad_enabled() else output
