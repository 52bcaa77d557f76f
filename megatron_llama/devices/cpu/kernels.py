"""Kernels of the CPU: C++ and column-major logits in compiled runs, chunks that fit the cache in both modes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_llama.arch.attention_pattern import Pattern
from megatron_llama.config.precision import STATE_BLOCK
from megatron_llama.devices import torch_attention
from megatron_llama.devices.attention_inputs import AttentionInputs, Documents, first_visible_keys
from megatron_llama.devices.cpu import attention as cpu_attention
from megatron_llama.devices.cpu.matmul import by_amx
from megatron_llama.devices.kernels import FUSED_ADAM, LEAST_SCALE, AdamHyperparameters, Kernels, Levels
from megatron_llama.devices.processor import load_cpp

CHUNK = 2**20
"""Values of a gradient that are cast to fp32 together: they fit the cache, and call overhead is small."""
ADDED_AT_ONCE = 2**18
"""Values that ``add_`` casts to fp32 together: they fit the cache."""
MOST_BY_COLUMNS = 768
"""Most tokens of a chunk with column-major logits on AMX units. The matmul of the weight's gradient, which reads
columns, then takes half the time. With more tokens the gradient of the hidden states takes twice the time."""


class CpuKernels(Kernels):
    """Overrides for host tensors. The optimizer's overrides are bit-identical to plain torch."""

    def visible(self, tokens: Tensor, documents: Documents | None, pattern: Pattern) -> AttentionInputs | None:
        inputs = super().visible(tokens, documents, pattern)
        if inputs is None or not self.compiled or pattern.group:
            return inputs
        if documents is None:
            documents = Documents.whole(tokens.shape[0], tokens.shape[1], tokens.device)
        return inputs._replace(first_visible_key=first_visible_keys(documents, pattern.window))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: AttentionInputs | None = None) -> Tensor:
        first = None if visible is None else visible.first_visible_key
        if torch.compiler.is_compiling() and (visible is None or first is not None) and cpu_attention.serves(q):
            return cpu_attention.attend(q, k, v, first)[0]
        if visible is None and cpu_attention.is_faster(q):
            return cpu_attention.causal_attention(q, k, v)
        return torch_attention.attend(q, k, v, visible)

    def logits_like(self, hidden: Tensor, tokens: int, rows: int) -> Tensor:
        if self.fuses_loss and by_amx(hidden.dtype) and tokens <= MOST_BY_COLUMNS:
            return hidden.new_empty(rows, tokens).t()
        return super().logits_like(hidden, tokens, rows)

    def add_to_grid_(self, total: Tensor, values: Tensor, bits: int) -> Tensor:
        if not _is_matrix(total, values) or exact_library() is None:
            return super().add_to_grid_(total, values, bits)
        assert total.dtype == torch.int64 and total.shape == values.shape, (total.dtype, values.shape)
        largest = torch.empty(())
        strides = [ctypes.c_int64(x.stride(0)) for x in (total, values)]
        sizes = [ctypes.c_float(2.0**bits), *map(ctypes.c_int64, total.shape), *strides]
        name = "add_fp32" if values.dtype == torch.float32 else "add_bf16"
        _run(exact_library(), name, total, values, largest, *sizes)
        return largest

    def is_one(self, factor: Tensor) -> bool:
        return bool(factor == 1)

    def add_(self, total: Tensor, part: Tensor) -> None:
        # torch would first cast the whole part to fp32, in new memory.
        if part.element_size() >= total.element_size() or not total.is_contiguous():
            super().add_(total, part)
            return
        fp32 = total.new_empty(min(ADDED_AT_ONCE, total.numel()))
        parts = part.reshape(-1).split(ADDED_AT_ONCE)
        for sums, values in zip(total.view(-1).split(ADDED_AT_ONCE), parts, strict=True):
            sums += fp32[: values.numel()].copy_(values)

    def rows_at_once(self, width: int) -> int:
        return max(1, (1 << 18) // max(1, width))  # few enough for the cache

    def norms(self, parts: Iterable[Tensor]) -> list[Tensor]:
        """Upcast bf16 a few rows at a time, since torch's norm with a dtype takes five times as long."""
        norms: list[Tensor] = []
        for part in parts:
            if part.dtype == torch.float32:
                norms += super().norms([part])
                continue
            chunks = part.split(max(1, CHUNK // max(1, math.prod(part.shape[1:]))))
            buffer = torch.empty(chunks[0].numel())
            for rows in chunks:
                norms += super().norms([buffer[: rows.numel()].view(rows.shape).copy_(rows)])
        return norms

    def read_block(self, codes: Tensor, scales: Tensor, levels: Levels) -> Tensor:
        if not self._uses_cpp(codes):
            return super().read_block(codes, scales, levels)
        values = torch.empty(codes.shape, dtype=torch.float32)
        _call("read_blocks", codes, scales, levels.values, values, blocks=scales.numel())
        return values

    def write_block(
        self, values: Tensor, levels: Levels, codes: Tensor, scales: Tensor, unless: Tensor | None = None
    ) -> None:
        if not self._uses_cpp(codes):
            super().write_block(values, levels, codes, scales, unless)
        elif unless is None or not unless:
            assert values.dtype == torch.float32 and values.shape == codes.shape, (values.dtype, values.shape)
            tables = levels.boundaries, levels.lowest, ctypes.c_float(LEAST_SCALE)
            _call("write_blocks", values.contiguous(), *tables, codes, scales, blocks=scales.numel())

    def adam_(
        self, tensors: Sequence[Tensor], step: Tensor, factor: Tensor | None, *, decoupled: bool, **numbers: float
    ) -> None:
        """Cast and scale a chunk of the gradient in the cache, where torch's kernel then reads it."""
        weight, grad, *states = tensors
        values = [x.view(-1).split(CHUNK) for x in (weight, *states)]
        buffer = weight.new_empty(min(CHUNK, weight.numel()))
        for part, mean, square, chunk in zip(*values, grad.reshape(-1).split(CHUNK), strict=True):
            gradient = buffer[: chunk.numel()].copy_(chunk)
            if factor is not None:
                gradient.mul_(factor)
            FUSED_ADAM[decoupled](
                [part], [gradient], [mean], [square], [], [step], amsgrad=False, maximize=False, **numbers
            )

    def elementwise_adam_(
        self, weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: AdamHyperparameters
    ) -> None:
        tensors = [weight, grad, exp_avg, exp_avg_sq]
        if not all(type(x) is Tensor and x.is_contiguous() for x in tensors) or exact_library() is None:
            super().elementwise_adam_(weight, grad, exp_avg, exp_avg_sq, numbers)
            return
        betas = numbers.beta1, 1 - numbers.beta1, numbers.beta2, 1 - numbers.beta2
        factors = numbers.keep, numbers.decay, *betas, float(numbers.root), numbers.eps, float(numbers.rate)
        numbers_in_c = [*map(ctypes.c_float, factors), ctypes.c_int64(weight.numel())]
        _run(exact_library(), "elementwise_adam", *tensors, *numbers_in_c)

    def _uses_cpp(self, codes: Tensor) -> bool:
        """Whether the C++ kernel is available. Fake tensors have no memory that it could read."""
        return self.compiled and type(codes) is torch.Tensor and library() is not None


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, with a warning, if they cannot be compiled."""
    source = Path(__file__).with_name("blockwise_cpu.cpp").read_text()
    source = f"constexpr long BLOCK = {STATE_BLOCK};\n{source}"
    return load_cpp(source, "8-bit states use torch's operators, because the C++ kernel could not be compiled")


@cache
def exact_library() -> ctypes.CDLL | None:
    """The compiled loops of exact mode; None, with a warning, if they cannot be compiled."""
    source = Path(__file__).with_name("exact_cpu.cpp").read_text()
    return load_cpp(source, "exact mode uses torch's operators, because the C++ kernel could not be compiled")


def _is_matrix(*tensors: Tensor) -> bool:
    """Whether all are matrices in memory, whose rows are contiguous. Fake tensors have no memory."""
    return all(type(x) is Tensor and x.ndim == 2 and x.stride(1) == 1 for x in tensors)


def _call(name: str, *arguments: Tensor | ctypes.c_float, blocks: int) -> None:
    assert all(a.is_contiguous() for a in arguments if isinstance(a, Tensor))
    _run(library(), name, *arguments, ctypes.c_int64(blocks))


def _run(source: ctypes.CDLL | None, name: str, *arguments: Any) -> None:
    """Call a C++ function with the addresses of tensors, numbers, and the number of threads."""
    assert all(a.device.type == "cpu" for a in arguments if isinstance(a, Tensor))
    given = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
    getattr(source, name)(*given, ctypes.c_int(torch.get_num_threads()))
