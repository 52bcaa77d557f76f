"""Causal attention on a CPU: a C++ kernel for compiled blocks, and matmuls by chunks for whole sequences otherwise.

torch's FlashAttention for CPUs multiplies bf16 as fp32 in its backward pass, and calls large library matmuls in both
passes. Both kernels here keep their blocks in the CPU's caches. Neither repeats key and value heads.

The C++ kernel (attention_cpu.cpp) is FlashAttention in both passes. It keeps blocks in the cache and multiplies them by
torch's small matmuls (brgemm), which use the processor's bf16 units. It takes documents and a window, and computes
little of the hidden part. Scores, weights and sums are fp32. Weights and the gradients of scores are rounded to the
tensors' dtype before a matmul. A thread takes a key and value head of one sequence with its query heads, or one query
head. The first call compiles the kernel with Inductor's compiler, into Inductor's cache: seconds, once for a kind of
processor.

The matmuls by chunks need no compiler. A chunk of queries and its visible keys is two batched matmuls in the forward
pass and five in the backward pass. Its softmax is one operator on scores that are still in the cache. Keys behind the
chunk's last query are not computed. The queries of a group of heads are rows of one matrix. The backward pass needs
queries, keys and values alone: it recomputes the softmax (as in Dao et al. 2022, arXiv:2205.14135). Scores and the
gradients of the weights are fp32 matmuls, as in torch's kernel, and so is the output. The other three matmuls of the
backward pass are in the tensors' dtype. With AMX units, bf16 tensors go through torch's kernel in the forward pass, and
the fp32 matmuls of the backward pass run on these units.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from megatron_llama.devices.cpu.matmul import by_amx, by_onednn, exact_in, in_512_bits
from megatron_llama.devices.processor import load_cpp
from megatron_llama.devices.torch_attention import empty_like, register_attention

aten = torch.ops.aten
DTYPES = torch.float32, torch.bfloat16
HEAD = 32
"""head_dim must be a multiple of it: two fp32 vectors of the widest processors."""
LONGEST = 16384
"""Longest sequence in tokens. In the backward pass a thread has memory for ten tensors of a head's size, half of them
fp32. With one query head per thread there are two more in fp32 per head."""


def serves(q: Tensor) -> bool:
    """Whether the kernel supports queries [b, heads, s, d], with the same number of keys."""
    fits = q.shape[3] % HEAD == 0 and q.shape[2] <= LONGEST
    return q.device.type == "cpu" and q.dtype in DTYPES and fits and _compiles()


@torch.compiler.assume_constant_result  # Dynamo cannot trace it
def _compiles() -> bool:
    return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    """Compile the kernel. Returns None, with a warning, if it cannot be compiled."""
    # One source text, because Inductor's cache key is the text.
    files = [Path(__file__).with_name(name).read_text() for name in ("attention_cpu_blocks.h", "attention_cpu.cpp")]
    source = "".join(files).replace("#pragma once", "").replace('#include "attention_cpu_blocks.h"', "")
    library = load_cpp(source, "attention uses torch's kernel, because the C++ kernel could not be compiled")
    if library is None:
        return None
    library.multiplies.restype = ctypes.c_bool
    return library if library.multiplies(False) else None


@torch.library.custom_op("megatron_llama::cpu_attention", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (attention [b, heads, s, d], log-sum-exp of scores [b, heads, s], fp32) by the C++ kernel.

    Args:
        q: [b, heads, s, d], fp32 or bf16.
        k, v: [b, kv heads, s, d].
        first: [b, s], int32, first visible key of each query, non-decreasing. A query attends to all keys from there to
            itself. None: 0.
    """
    kv = q.shape[0], k.shape[1], *q.shape[2:]
    if not (k.shape == v.shape == kv and q.dtype == k.dtype == v.dtype and q.shape[1] % k.shape[1] == 0):
        raise ValueError(f"queries {_describe(q)} do not match keys {_describe(k)} and values {_describe(v)}")
    if first is not None and (first.dtype != torch.int32 or first.shape != (q.shape[0], q.shape[2])):
        raise ValueError(f"first is {_describe(first)}: must be int32 {[q.shape[0], q.shape[2]]}")
    inputs = [_kernel_input(x) for x in (q, k, v)]
    out, lse = empty_like(inputs[0]), q.new_empty(q.shape[:3], dtype=torch.float32)
    _call("attention_forward", [*inputs, out, lse], q.shape, k.shape[1], first)
    return _in(q.dtype, out), lse


@torch.library.custom_op("megatron_llama::cpu_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, from the output's gradient and the results of ``attend``."""
    inputs = [_kernel_input(x) for x in (grad, q, k, v, out)]
    dq, dk, dv = (empty_like(x) for x in inputs[1:4])
    _call("attention_backward", [*inputs, lse, dq, dk, dv], q.shape, k.shape[1], first)
    return _in(q.dtype, dq), _in(q.dtype, dk), _in(q.dtype, dv)


def _describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _multiplies_bf16() -> bool:
    """Whether bf16 matmuls are faster than fp32 matmuls."""
    library = _library()
    assert library is not None
    return torch.cpu._is_avx512_bf16_supported() and library.multiplies(True)


def _kernel_input(x: Tensor) -> Tensor:
    """Return x, or a copy in the layout of the kernel: contiguous d, even strides, fp32 without bf16 instructions."""
    if x.dtype == torch.bfloat16 and not _multiplies_bf16():
        x = x.float()
    return empty_like(x).copy_(x) if x.stride(3) != 1 or any(stride % 2 for stride in x.stride()[:3]) else x


def _in(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x if x.dtype == dtype else empty_like(x, dtype).copy_(x)


def _call(name: str, tensors: list[Tensor], q: torch.Size, kv_heads: int, first: Tensor | None) -> None:
    """Call a function of attention_cpu.cpp. The end of that file lists the arguments."""
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


register_attention(attend, _backward, tensors=1)


CHUNK = 128
"""Tokens of a chunk of queries. Half of the scores among a chunk's own tokens are computed in vain."""
FASTER = range(384, 768)
"""Sequence lengths for which the chunks are faster than torch's kernel with MKL. From 768 on torch's kernel takes 256
queries at a time instead of 64. Below about 384 its scores fit a nearer cache."""
FASTER_BY_ONEDNN, FASTER_IN_512_BITS = range(16, 768), range(16, 8193)
"""Faster lengths if oneDNN multiplies fp32 (Zen 4, both dtypes; torch's kernel uses MKL even then), and for bf16 with
512-bit units (Zen 5). Lengths above 8,192 were not measured."""
FASTER_BY_AMX = range(16, 768)
"""Faster lengths for bf16 with AMX units, which torch's forward pass uses well and its backward pass does not."""
SCORES = 2**20
"""Scores in memory together: 4 MiB, which stay in the cache. A chunk of one kv head may exceed it."""


def is_faster(q: Tensor) -> bool:
    """Whether ``causal_attention`` is faster than torch's kernel for queries [b, heads, s, d]."""
    if q.device.type != "cpu" or q.dtype not in (torch.float32, torch.bfloat16):
        return False
    if by_amx(q.dtype):
        return q.shape[2] in FASTER_BY_AMX
    if not by_onednn():
        return q.shape[2] in FASTER
    return q.shape[2] in (FASTER_IN_512_BITS if q.dtype == torch.bfloat16 and in_512_bits() else FASTER_BY_ONEDNN)


@torch.library.custom_op("megatron_llama::causal_attention", mutates_args=())
def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the causal attention of q [b, heads, s, d] to k and v [b, kv heads, s, d] as [b, heads, s, d]."""
    if by_amx(q.dtype):
        return empty_like(q).copy_(aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0])
    queries, keys, values = (_by_kv_head(x, k.shape[1], torch.float32) for x in (q, k, v))
    scale, out, memory = q.shape[3] ** -0.5, torch.empty_like(queries), _Buffer(torch.float32)
    for chunk in _chunks(queries, keys):
        weights = _weights(queries, keys, chunk, scale, memory)
        out[chunk.heads, chunk.rows] = weights @ values[chunk.heads, : chunk.visible]
    return _by_head(out, q)


@torch.library.custom_op("megatron_llama::causal_attention_backward", mutates_args=())
def causal_attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, from the output's gradient."""
    scale, kv_heads = q.shape[3] ** -0.5, k.shape[1]
    queries, keys, values, grads = (_by_kv_head(x, kv_heads, x.dtype) for x in (q, k, v, grad))
    queries_fp32, keys_fp32, values_fp32, grads_fp32 = (x.float() for x in (queries, keys, values, grads))
    dq, dk, dv = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(keys)
    memory, second, low_precision = _Buffer(torch.float32), _Buffer(torch.float32), _Buffer(q.dtype)
    with exact_in(q.dtype):
        for chunk in _chunks(queries_fp32, keys_fp32):
            heads, rows, visible = chunk.heads, chunk.rows, chunk.visible
            weights = _weights(queries_fp32, keys_fp32, chunk, scale, memory)
            # The scale is applied here, and so to the gradients of the scores.
            by_weight = _matmul(grads_fp32[heads, rows], values_fp32[heads, :visible].mT, scale, second)
            factors = _cast(weights, low_precision)
            dv[heads, :visible].baddbmm_(factors.mT, grads[heads, rows])
            by_score = aten._softmax_backward_data.out(by_weight, weights, -1, torch.float32, grad_input=by_weight)
            factors = _cast(by_score, low_precision)
            dq[heads, rows] = factors @ keys[heads, :visible]
            dk[heads, :visible].baddbmm_(factors.mT, queries[heads, rows])
    return _by_head(dq, q), _by_head(dk, k), _by_head(dv, v)


class _HeadChunk(NamedTuple):
    heads: slice
    """Range among the kv heads of all rows of the batch."""
    rows: slice
    """Range among the queries of a kv head."""
    visible: int
    """Keys that are visible to its last token."""
    hidden: Tensor
    """0 where a query attends to a key of the chunk's tokens, else -inf [rows, tokens]."""


def _chunks(queries: Tensor, keys: Tensor) -> Iterator[_HeadChunk]:
    """Yield the chunks of queries [kv heads, s * group, d]."""
    kv_heads, length = keys.shape[:2]
    group = queries.shape[1] // length
    at_once = max(1, SCORES // (group * CHUNK * length))
    positions = torch.arange(CHUNK)
    hidden = torch.zeros(CHUNK * group, CHUNK)
    hidden.masked_fill_(positions > positions.repeat_interleave(group).unsqueeze(-1), -math.inf)
    for first in range(0, kv_heads, at_once):
        heads = slice(first, min(first + at_once, kv_heads))
        for stop in range(length, 0, -CHUNK):  # the largest first, for _Buffer
            start = max(0, stop - CHUNK)
            tokens = stop - start
            yield _HeadChunk(heads, slice(start * group, stop * group), stop, hidden[: tokens * group, :tokens])


class _Buffer:
    """Memory of successive tensors; the first is the largest. Page faults of new memory take as long as a softmax."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._whole: Tensor | None = None

    def of(self, *shape: int) -> Tensor:
        """Return an uninitialized tensor in the memory of the previous one."""
        if self._whole is None:
            self._whole = torch.empty(shape, dtype=self.dtype)
        return self._whole.view(-1)[: math.prod(shape)].view(shape)


def _weights(queries: Tensor, keys: Tensor, chunk: _HeadChunk, scale: float, memory: _Buffer) -> Tensor:
    """Return the softmax of a chunk's scores [kv heads, rows, keys], fp32."""
    scores = _matmul(queries[chunk.heads, chunk.rows], keys[chunk.heads, : chunk.visible].mT, scale, memory)
    scores[..., -chunk.hidden.shape[1] :] += chunk.hidden
    return torch.softmax(scores, -1, out=scores)


def _matmul(one: Tensor, other: Tensor, scale: float, memory: _Buffer) -> Tensor:
    out = memory.of(one.shape[0], one.shape[1], other.shape[2])
    return torch.baddbmm(out, one, other, beta=0, alpha=scale, out=out)


def _cast(x: Tensor, memory: _Buffer) -> Tensor:
    """Cast x to the buffer's dtype; x itself if it has that dtype."""
    return x if x.dtype == memory.dtype else memory.of(*x.shape).copy_(x)


def _by_kv_head(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Copy x [b, heads, s, d] to [b * kv heads, s * group, d]. A token's queries of a group are adjacent."""
    by_token = x.unflatten(1, (kv_heads, -1)).transpose(2, 3)
    return by_token.to(dtype, memory_format=torch.contiguous_format, copy=True).flatten(0, 1).flatten(1, 2)


def _by_head(x: Tensor, like: Tensor) -> Tensor:
    """Copy [b * kv heads, s * group, d] to the shape and dtype of ``like``, in the layers' memory order."""
    b, heads, s, _ = like.shape
    group = x.shape[1] // s
    out = empty_like(like)
    out.unflatten(1, (-1, group)).transpose(2, 3).copy_(x.view(b, heads // group, s, group, x.shape[2]))
    return out


@causal_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return empty_like(q)


@causal_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(q), empty_like(k), empty_like(v)


causal_attention.register_autograd(
    lambda ctx, grad: causal_attention_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _flops(matmuls: int, q: tuple[int, ...]) -> int:
    """Return the FLOPs of matmuls over all scores, as torch counts them for its attention."""
    return 2 * matmuls * math.prod(q) * q[2]


for _name in ("cpu_attention", "causal_attention"):
    _forward, _gradient = (getattr(torch.ops.megatron_llama, name) for name in (_name, f"{_name}_backward"))
    register_flop_formula(_forward)(lambda q, *_, **more: _flops(2, q))
    register_flop_formula(_gradient)(lambda grad, q, *_, **more: _flops(5, q))
