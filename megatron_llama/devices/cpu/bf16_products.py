"""Products of bf16 matrices, and attention, on a CPU that has no instructions for them: in fp32.

Where oneDNN does not take bf16 (x86 without AVX-512, many laptops among them), torch multiplies it number by number,
at 1 GFLOP/s where fp32 makes 70 (docs/log.md). Here torch's operators widen their operands, multiply in fp32 and round
the result once, as instructions for bf16 do. All that a process computes goes that way: eager and compiled layers,
their backward passes, the loss, attention and generation. The fp32 copies last as long as the product.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_IN_PLACE = "addmm_", "baddbmm_"
_PRODUCTS = "mm", "mm.out", "addmm", "addmm.out", "bmm", "bmm.out", "baddbmm", "baddbmm.out"
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"


def multiplies_bf16() -> bool:
    """Whether torch has fast products of bf16 matrices for this processor."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def multiply_in_fp32() -> torch.library.Library:
    """Replaces the operators in this process and its forks. The result's ``_destroy`` brings torch's own back."""
    import torch

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # that one is replaced
        for name in (*_IN_PLACE, *_PRODUCTS, *_ATTENTION):
            library.impl(name, _widened(name), "CPU", with_keyset=True, allow_override=True)
    return library


def _widened(name: str) -> Any:
    """torch's operator, in fp32 for bf16 tensors."""
    import torch

    torchs = torch.library.get_kernel(f"aten::{name}", "CPU")

    def product(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if args[0].dtype != torch.bfloat16:
            return torchs.call_boxed(keys, *args, **kwargs)
        wide = {key: _wide(value) for key, value in kwargs.items()}
        target = args[0] if name in _IN_PLACE else kwargs.get("out")
        if "out" in kwargs:
            wide["out"] = torch.empty(0)
        found = torchs.call_boxed(keys, *map(_wide, args), **wide)
        if target is not None:
            return target.resize_(found.shape).copy_(found)
        if name == _ATTENTION[0]:
            return found[0].bfloat16(), found[1]  # the log-sum-exp is fp32 in any case
        return found.bfloat16() if isinstance(found, torch.Tensor) else tuple(each.bfloat16() for each in found)

    return product


def _wide(x: Any) -> Any:
    """x, in fp32 if it is a bf16 tensor."""
    import torch

    return x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x
