"""Causal attention on a CPU by a kernel of our own, in compiled blocks: FlashAttention's, also in its backward pass.

torch's kernel for CPUs multiplies bf16 in its backward pass as fp32, and calls a library's large products in both. This
one (attention_cpu.cpp) keeps blocks in the cache and multiplies them by torch's small products (brgemm), which use what
units the processor has. It takes the sequences' documents and a window, computes little of what is hidden, and repeats
no key and value heads. Scores, weights and sums are fp32; weights and the gradients of scores are rounded to the
tensors' dtype before a product. A thread takes a key and value head of one sequence with its query heads, or one query
head.

The first call compiles it with Inductor's compiler, into Inductor's cache: seconds, once for a kind of processor.
Uncompiled layers, which need no compiler, go through attention_chunks.py or torch's kernel.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from megatron_llama.devices.cpu.cpp import load_cpp
from megatron_llama.model.attention_tiles import empty_like

DTYPES = torch.float32, torch.bfloat16
HEAD = 32
"""Numbers of a head, of which there must be a multiple: two vectors of fp32 of the widest processors."""
LONGEST = 16384
"""Tokens of a sequence. In the backward pass a thread has memory for ten tensors of a head's size, half of them fp32;
where query heads go apart there are two more in fp32 for each of them."""


def serves(q: Tensor) -> bool:
    """Whether the kernel takes queries [b, heads, s, d], of which there are as many as keys."""
    fits = q.shape[3] % HEAD == 0 and q.shape[2] <= LONGEST
    return q.device.type == "cpu" and q.dtype in DTYPES and fits and _compiles()


@torch.compiler.assume_constant_result  # Dynamo can't look into it
def _compiles() -> bool:
    return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled kernel; None, with a warning, where it can't be had."""
    # One file for the compiler, as Inductor keeps it by its text.
    files = [Path(__file__).with_name(name).read_text() for name in ("attention_cpu_blocks.h", "attention_cpu.cpp")]
    source = "".join(files).replace("#pragma once", "").replace('#include "attention_cpu_blocks.h"', "")
    library = load_cpp(source, "attention goes through torch's kernel: ours for CPUs could not be compiled")
    if library is None:
        return None
    library.multiplies.restype = ctypes.c_bool
    return library if library.multiplies(False) else None


@torch.library.custom_op("megatron_llama::cpu_attention", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """(attention [b, heads, s, d] of q to k and v [b, kv heads, s, d], fp32 log-sum-exp of scores [b, heads, s]).

    ``first`` [b, s], int32, is the first key that each query sees, which never falls; None for 0. It sees all from
    there to its own.
    """
    kv = q.shape[0], k.shape[1], *q.shape[2:]
    if not (k.shape == v.shape == kv and q.dtype == k.dtype == v.dtype and q.shape[1] % k.shape[1] == 0):
        raise ValueError(f"queries {_said(q)} do not go with keys {_said(k)} and values {_said(v)}")
    if first is not None and (first.dtype != torch.int32 or first.shape != (q.shape[0], q.shape[2])):
        raise ValueError(f"first is {_said(first)}, and has to be int32 {[q.shape[0], q.shape[2]]}")
    inputs = [_as_taken(x) for x in (q, k, v)]
    out, lse = empty_like(inputs[0]), q.new_empty(q.shape[:3], dtype=torch.float32)
    _call("attention_forward", [*inputs, out, lse], q.shape, k.shape[1], first)
    return _in(q.dtype, out), lse


@torch.library.custom_op("megatron_llama::cpu_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of ``attend``'s output, and its results."""
    inputs = [_as_taken(x) for x in (grad, q, k, v, out)]
    dq, dk, dv = (empty_like(x) for x in inputs[1:4])
    _call("attention_backward", [*inputs, lse, dq, dk, dv], q.shape, k.shape[1], first)
    return _in(q.dtype, dq), _in(q.dtype, dk), _in(q.dtype, dv)


def _said(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _multiplies_bf16() -> bool:
    """Whether products of bf16 are faster than those of fp32."""
    library = _library()
    assert library is not None
    return torch.cpu._is_avx512_bf16_supported() and library.multiplies(True)


def _as_taken(x: Tensor) -> Tensor:
    """x, or a copy: the kernel reads a head's numbers as neighbours, bf16 ones by pairs, and where there are no
    instructions for bf16 it wants fp32."""
    if x.dtype == torch.bfloat16 and not _multiplies_bf16():
        x = x.float()
    apart = x.stride(3) != 1 or any(stride % 2 for stride in x.stride()[:3])
    return empty_like(x).copy_(x) if apart else x


def _in(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x if x.dtype == dtype else empty_like(x, dtype).copy_(x)


def _call(name: str, tensors: list[Tensor], q: torch.Size, kv_heads: int, first: Tensor | None) -> None:
    """A function of attention_cpu.cpp, whose end says what it takes."""
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    first = None if first is None else first.contiguous()
    getattr(_library(), name)(
        ctypes.c_bool(tensors[0].dtype == torch.bfloat16),
        (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors)),
        (ctypes.c_int64 * len(strides))(*strides),
        ctypes.c_void_p(None if first is None else first.data_ptr()),
        (ctypes.c_int64 * 5)(q[0], q[1], kv_heads, q[2], q[3]),
        ctypes.c_float(q[3] ** -0.5),
        ctypes.c_int(torch.get_num_threads()),
    )


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    return empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(q), empty_like(k), empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *qkv, first = inputs
    ctx.save_for_backward(*qkv, *output, first)


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors), None


attend.register_autograd(_gradient, setup_context=_keep)


def _flops(q: tuple[int, ...], products: int) -> int:
    """Of products for the whole square of scores, as torch counts scaled_dot_product_attention."""
    return 2 * products * math.prod(q) * q[2]


@register_flop_formula(torch.ops.megatron_llama.cpu_attention)
def _forward_flops(q: tuple[int, ...], *_: Any, **__: Any) -> int:
    return _flops(q, 2)


@register_flop_formula(torch.ops.megatron_llama.cpu_attention_backward)
def _backward_flops(_: tuple[int, ...], q: tuple[int, ...], *__: Any, **___: Any) -> int:
    return _flops(q, 5)
