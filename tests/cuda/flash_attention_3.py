"""Attention of the device with the stand-in for FlashAttention 3. Raises if a result is wrong.

Runs as a program on the runtime. Results are compared with a dense mask in fp32.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from megatron_llama.arch.pattern import Pattern
from megatron_llama.devices import device_named
from megatron_llama.devices.visibility import Documents, build_attention_inputs, dense_mask
from tests.cuda.host_arithmetic import HostArithmetic, on_host

LENGTH, HEAD_DIM = 48, 16
WITHOUT = "without"
"""Argument: the package is not installed."""


def reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor) -> list[Tensor]:
    """Return the output and the gradients of q, k and v in fp32."""
    q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = (q @ keys.mT) / math.sqrt(HEAD_DIM)
    out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.float())]


def check(pattern: Pattern, documents: Documents | None) -> None:
    """Compare the attention of the device with the reference."""
    torch.manual_seed(1)
    q, k, v, grad = (torch.randn(LENGTH, 2, n, HEAD_DIM).bfloat16().permute(1, 2, 0, 3) for n in (4, 2, 2, 4))
    whole = documents or Documents.whole(2, LENGTH, torch.device("cpu"))
    expected = reference(q, k, v, grad, dense_mask(whole.positions(), pattern, whole.ids))
    kernels = device_named("cuda").kernels(compiled=False)
    with HostArithmetic(math.inf):
        on_device = [x.cuda().requires_grad_() for x in (q, k, v)]
        moved = None if documents is None else documents.on(lambda x: x.cuda())
        tokens = torch.zeros(2, LENGTH, device="cuda")
        out = kernels.attend(*on_device, build_attention_inputs(tokens, moved, pattern, "varlen", False))
        actual = [out, *torch.autograd.grad(out, on_device, grad.cuda())]
        torch.cuda.synchronize()
    for one, other in zip(actual, expected, strict=True):
        host = on_host(one.detach()).float()
        assert ((host - other).norm() / other.norm()).item() < 2**-7, "not equal within the rounding of bf16"


def main() -> None:
    is_installed = WITHOUT not in sys.argv
    if is_installed:
        sys.path.insert(0, str(Path(__file__).with_name("stand_ins")))
    device_named("cuda").enter(0, 1)
    implementation = torch.nn.attention.current_flash_attention_impl()
    assert implementation == ("FA3" if is_installed else None), implementation
    if not is_installed:
        return print("done")
    import flash_attn_interface  # type: ignore[import-not-found]

    ids = (torch.arange(2 * LENGTH).view(2, LENGTH) % 17 == 0).cumsum(1)
    for number, (pattern, documents) in enumerate(
        [(Pattern(), None), (Pattern(), Documents.of(ids)), (Pattern(window=9), None), (Pattern(5), Documents.of(ids))],
        start=1,
    ):
        check(pattern, documents)
        assert flash_attn_interface.calls == {"fwd": number, "bwd": number}
    print("done")


if __name__ == "__main__":
    main()
