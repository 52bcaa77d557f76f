"""Attention of the device with the stand-ins for FlashAttention 3 and Transformer Engine. Raises if a result is wrong.

Runs as a program on the runtime, with one of ``PACKAGES`` as argument. Results are compared with a dense mask in fp32.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch

from megatron_llama.arch.attention_pattern import Pattern
from megatron_llama.devices import device_named
from megatron_llama.devices.attention_inputs import Documents, build_attention_inputs, dense_mask
from tests.cuda.host_arithmetic import HostArithmetic, on_host
from tests.devices.helpers import attention_inputs, dense_attention

LENGTH, HEAD_DIM = 48, 16
IDS = (torch.arange(2 * LENGTH).view(2, LENGTH) % 17 == 0).cumsum(1)
CASES = [(Pattern(), None), (Pattern(), Documents.of(IDS)), (Pattern(window=9), None), (Pattern(5), Documents.of(IDS))]
STAND_INS = Path(__file__).with_name("stand_ins")
NONE, FLASH_ATTENTION_3, TRANSFORMER_ENGINE = PACKAGES = ("none", "flash_attention_3", "transformer_engine")
BLACKWELL = 10, 0
"""Compute capability of the GPUs that use Transformer Engine."""


def check(pattern: Pattern, documents: Documents | None) -> None:
    """Compare the attention of the device with the reference."""
    q, k, v, grad = attention_inputs(torch.bfloat16, 4, 2, LENGTH, d=HEAD_DIM, seed=1)
    whole = documents or Documents.whole(2, LENGTH, torch.device("cpu"))
    expected = dense_attention(q, k, v, grad, dense_mask(whole.positions(), pattern, whole.ids), torch.float32)
    kernels = device_named("cuda").kernels(compiled=False)
    with HostArithmetic(math.inf):
        on_device = [x.detach().cuda().requires_grad_() for x in (q, k, v)]
        moved = None if documents is None else documents.on(lambda x: x.cuda())
        tokens = torch.zeros(2, LENGTH, device="cuda")
        out = kernels.attend(*on_device, build_attention_inputs(tokens, moved, pattern, "varlen", False))
        actual = [out, *torch.autograd.grad(out, on_device, grad.cuda())]
        torch.cuda.synchronize()
    for one, other in zip(actual, expected, strict=True):
        host = on_host(one.detach()).float()
        assert ((host - other).norm() / other.norm()).item() < 2**-7, "not equal within the rounding of bf16"


def with_flash_attention_3() -> None:
    import flash_attn_interface  # type: ignore[import-not-found]

    for number, case in enumerate(CASES, start=1):
        check(*case)
        assert flash_attn_interface.calls == {"fwd": number, "bwd": number}


def with_transformer_engine() -> None:
    from transformer_engine.pytorch.cpp_extensions import fused_attn  # type: ignore[import-not-found]

    expected = {"fwd sbhd": 1, "bwd sbhd": 1}
    for number, case in enumerate(CASES):
        check(*case)
        expected |= {"fwd thd": number, "bwd thd": number} if number else {}
        assert fused_attn.calls == expected


def main() -> None:
    package = sys.argv[1]
    is_blackwell = package == TRANSFORMER_ENGINE
    if package != NONE:
        sys.path.insert(0, str(STAND_INS / "te" if is_blackwell else STAND_INS))
    with patch.object(torch.cuda, "get_device_capability", lambda *_: BLACKWELL) if is_blackwell else nullcontext():
        device_named("cuda").enter(0, 1)
    implementation = torch.nn.attention.current_flash_attention_impl()
    assert implementation == ("FA3" if package == FLASH_ATTENTION_3 else None), implementation
    if package == FLASH_ATTENTION_3:
        with_flash_attention_3()
    elif is_blackwell:
        with_transformer_engine()
    print("done")


if __name__ == "__main__":
    main()
