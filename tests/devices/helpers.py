"""Machines that consist of their drivers' files, and attention with a dense mask."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

FAKES = Path(__file__).parent / "fakes"


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def trainium(root: Path, chips: int = 1, name: str = "Trainium2", cores: int = 8) -> Path:
    """A machine with chips of some cores."""
    for chip in range(chips):
        write(root / f"dev/neuron{chip}")
        folder = root / f"sys/devices/virtual/neuron_device/neuron{chip}"
        write(folder / "core_count", f"{cores}\n")
        write(folder / "info/architecture/device_name", f"{name}\n")
    return root


def gaudi(root: Path, cards: int = 1, name: str = "GAUDI2") -> Path:
    """A machine with a newer driver, and another accelerator that shares its folder."""
    for card in range(cards):
        write(root / f"dev/accel/accel{card}")
        write(root / f"sys/class/accel/accel{card}/device/device_type", f"{name}\n")
    write(root / f"dev/accel/accel{cards}")
    write(root / f"sys/class/accel/accel{cards}/device/vendor", "0x8086\n")
    return root


def attention_inputs(
    dtype: torch.dtype, heads: int, kv_heads: int, length: int, *, rows: int = 2, d: int = 8, seed: int = 0
) -> tuple[Tensor, ...]:
    """Return q, k, v and the output's gradient, [rows, heads, length, d], with the strides of the layers' tensors."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads, kv_heads, kv_heads, heads)
    tensors = [torch.randn(length, rows, n, d, generator=generator).to(dtype).permute(1, 2, 0, 3) for n in sizes]
    return (*(x.requires_grad_() for x in tensors[:3]), tensors[3])


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """Return the output and the gradients of q, k and v, with repeated heads and all scores."""
    upcast = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in upcast[1:])
    out = ((upcast[0] @ keys.mT) * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ values
    return out.detach(), *torch.autograd.grad(out, upcast, grad.to(dtype))
