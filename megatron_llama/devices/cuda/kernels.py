"""Kernels of NVIDIA GPUs: FlashAttention over documents of different lengths. Not run on hardware."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_llama.arch.pattern import fits_varlen
from megatron_llama.devices import attention
from megatron_llama.devices.cuda import varlen
from megatron_llama.devices.kernels import Kernels
from megatron_llama.devices.visibility import AttentionInputs

attention.KERNELS["varlen"] = attention.DocumentKernel(varlen.forward, varlen.backward)


class CudaKernels(Kernels):
    """``varlen`` for documents and windows; tiles for what it does not take."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: AttentionInputs | None = None) -> Tensor:
        if visible is None or visible.kernel != "varlen":
            return attention.attend(q, k, v, visible)
        dtype = "float32" if q.dtype == torch.float32 else "bfloat16"
        kernel = "varlen" if fits_varlen(visible.pattern, dtype, q.shape[3]) else "tiles"
        return attention.attend_documents(q, k, v, visible, kernel)
