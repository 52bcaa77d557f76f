"""Kernels of a device: attention, loss and optimizer operations whose fastest form depends on the hardware.

``Kernels`` is plain torch and correct on every device. It has a base class per subject, which its users take. A device
overrides methods in its package. All blocks of a process share one object per device and mode, so torch.compile reuses
the graph of one block for the next. Attention takes these paths:

    sequences             CPU, compiled     CPU, eager       CUDA             other devices
    whole                 C++ kernel (1)    chunks (2)       torch's SDPA (4) torch's SDPA
    documents, window     C++ kernel (1)    tiles            varlen (3)       dense mask
    block-sparse          tiles             tiles            tiles            dense mask
    random-LTD subset of  dense mask        dense mask       dense mask       dense mask
    window, block-sparse

    (1) fp32 and bf16, head dimension a multiple of 32, at most 16,384 tokens, and a C++ compiler; else as eager.
    (2) at lengths where it is faster (devices/cpu/attention.py); else torch's SDPA.
    (3) 16-bit formats, head dimension a multiple of 8 and at most 256; else tiles.
    (4) with Transformer Engine, cuDNN for whole sequences, documents and windows (cuda/transformer_engine.py);
        in fp32 with grouped heads, tiles.

SDPA, tiles and the dense mask are in devices/torch_attention.py; the others are in the packages of their devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_llama.arch.attention_pattern import Pattern
from megatron_llama.config.precision import STATE_BLOCK
from megatron_llama.devices import torch_attention
from megatron_llama.devices.attention_inputs import AttentionInputs, Documents, build_attention_inputs

FUSED_ADAM: dict[bool, Callable[..., None]] = {False: torch._fused_adam_, True: torch._fused_adamw_}
"""torch's kernels, by whether weight decay is decoupled."""
LEAST_SCALE = 1e-12
"""Scale of a block of zeros: the divisor must not be 0."""


def to_fixed_point(values: Tensor, bits: int) -> Tensor:
    """Return floats as multiples of 2^-bits, int64, truncated."""
    return (values.float() * 2.0**bits).to(torch.int64)


def largest_magnitude(values: Tensor) -> Tensor:
    """Return the largest absolute value, fp32 scalar, or NaN."""
    least, most = torch.aminmax(values)  # a tenth of the time of a maximum norm on a CPU
    return torch.maximum(-least, most).float()


class Levels(NamedTuple):
    """Values of the 256 codes of an 8-bit state, on a device."""

    values: Tensor
    """fp32 [256], ascending."""
    boundaries: Tensor
    """fp32 [256]: the smallest value that is rounded to a higher level than this one. Infinite for the last."""
    lowest: Tensor
    """uint8 [65536]: the lowest code of fp32 values by their upper 16 bits. The only other code is the next one. A
    binary search among the boundaries takes seven times as long on a CPU."""

    def nearest(self, values: Tensor) -> Tensor:
        """Return the codes of ``values`` in [-1, 1], int32 [number of values]. NaN gets an arbitrary code."""
        flat = values.flatten()
        codes = self.lowest.index_select(0, flat.view(torch.int32) >> 16 & 0xFFFF).int()
        return codes + (flat >= self.boundaries.index_select(0, codes))


class Float8Operand(NamedTuple):
    """A matrix in float8; its values are ``data / scale``."""

    data: Tensor
    """float8 [rows, columns]."""
    scale: Tensor
    """fp32: a scalar, [rows, 1] for the left operand of a matmul or [1, columns] for the right one."""


class AdamHyperparameters(NamedTuple):
    """Factors of one update of Adam."""

    keep: float
    """1 - learning rate * weight decay if weight decay is decoupled, otherwise 1."""
    decay: float
    """Weight decay that is added to the gradient; 0 if it is decoupled."""
    beta1: float
    beta2: float
    eps: float
    root: Tensor
    """Square root of the second moment's bias correction, fp32 scalar on the weight's device."""
    rate: Tensor
    """Learning rate divided by the first moment's bias correction, fp32 scalar."""


class AttentionKernels:
    """Attention."""

    attention: str
    compiled: bool

    def visible(self, tokens: Tensor, documents: Documents | None, pattern: Pattern) -> AttentionInputs | None:
        """Return the visible keys of tokens [b, s], for ``attend``. None: all earlier tokens of the sequence."""
        return build_attention_inputs(tokens, documents, pattern, self.attention, self.compiled)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: AttentionInputs | None = None) -> Tensor:
        """Return the attention of q [b, heads, s, d] to k and v [b, kv heads, s, d] as [b, heads, s, d]."""
        return torch_attention.attend(q, k, v, visible)


class LossKernels:
    """Operations of the loss and of gradients."""

    def logits_like(self, hidden: Tensor, tokens: int, rows: int) -> Tensor:
        """Return empty memory for logits [tokens, rows] of ``hidden`` [n, h] in the layout of the fastest matmuls."""
        return hidden.new_empty(tokens, rows)

    def add_to_grid_(self, total: Tensor, values: Tensor, bits: int) -> Tensor:
        """Add multiples of 2^-bits to ``total`` (int64) in place, and return the largest absolute value, fp32 scalar.

        Args:
            values: fp32 or bf16, shaped like ``total``. They are truncated to multiples.
        """
        total += to_fixed_point(values, bits)
        return largest_magnitude(values)

    def is_one(self, factor: Tensor) -> bool:
        """Whether a scalar is 1. False if the host would have to wait for its value."""
        return False

    def add_(self, total: Tensor, part: Tensor) -> None:
        """Add ``part`` to ``total`` in place. ``part`` may be bf16 where ``total`` is fp32."""
        total += part


class UpdateKernels:
    """Operations of the optimizer."""

    def fuse(self, function: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
        """Return ``function``, of elementwise operations, as one kernel. None if this device has no such form.

        The result has the rounding of ``function``: integers are bit-identical.
        """
        return None

    def norms(self, parts: Iterable[Tensor]) -> list[Tensor]:
        """Return the 2-norm of each row of each part, flattened, in fp32.

        A whole matrix would lose precision on a CPU, where torch adds the squares one by one. It would also depend on
        the layout.
        """
        return [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32).view(-1) for part in parts]

    def rows_at_once(self, width: int) -> int:
        """Return the number of rows of ``width`` values that an update casts to fp32 together."""
        return max(1, (1 << 24) // max(1, width))  # each operation is a launch, so few and large ones

    def read_block(self, codes: Tensor, scales: Tensor, levels: Levels) -> Tensor:
        """Return the fp32 values of an 8-bit state: uint8 ``codes`` [rows, columns] with a scale per STATE_BLOCK."""
        values = levels.values.index_select(0, codes.flatten().int()).view(codes.shape)
        return values.unflatten(1, (-1, STATE_BLOCK)).mul_(scales.unsqueeze(-1)).flatten(1)

    def write_block(
        self, values: Tensor, levels: Levels, codes: Tensor, scales: Tensor, unless: Tensor | None = None
    ) -> None:
        """Quantize fp32 ``values`` [rows, columns] into ``codes`` and ``scales``.

        A non-finite value makes its whole block non-finite. Where ``unless`` (bool scalar) is true, codes and scales
        keep their bits.
        """
        blocks = values.unflatten(1, (-1, STATE_BLOCK))
        new_scales = blocks.abs().amax(-1).clamp_(min=LEAST_SCALE)
        new_codes = levels.nearest(blocks / new_scales.unsqueeze(-1)).view(values.shape).to(torch.uint8)
        codes.copy_(new_codes if unless is None else torch.where(unless, codes, new_codes))
        scales.copy_(new_scales if unless is None else torch.where(unless, scales, new_scales))

    def adam_(
        self, tensors: Sequence[Tensor], step: Tensor, factor: Tensor | None, *, decoupled: bool, **numbers: float
    ) -> None:
        """Update an fp32 weight and its states in place by torch's fused Adam, or AdamW if ``decoupled``.

        Args:
            tensors: weight, gradient (fp32 or bf16, left as it is), exp_avg and exp_avg_sq.
            step: number of updates, this one included.
            factor: fp32 scalar, multiplied with the gradient in fp32.
            numbers: lr, beta1, beta2, eps, weight_decay.
        """
        weight, grad, exp_avg, exp_avg_sq = tensors
        gradient = grad.to(weight.dtype)
        gradient = gradient if factor is None else gradient * factor
        states: tuple[list[Tensor], ...] = ([exp_avg], [exp_avg_sq], [], [step])
        FUSED_ADAM[decoupled]([weight], [gradient], *states, amsgrad=False, maximize=False, **numbers)

    def elementwise_adam_(
        self, weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: AdamHyperparameters
    ) -> None:
        """Update an fp32 weight and its states in place by IEEE's basic operations, which round one by one.

        The result does not depend on an element's place; the result of the fused kernel does.
        """
        # Each product is a separate tensor: a fused product and sum would be rounded once instead of twice.
        if numbers.keep != 1:
            weight.mul_(numbers.keep)
        if numbers.decay:
            grad = grad + weight * numbers.decay
        exp_avg.mul_(numbers.beta1).add_(grad * (1 - numbers.beta1))
        exp_avg_sq.mul_(numbers.beta2).add_(grad * grad * (1 - numbers.beta2))
        root = exp_avg_sq.double().sqrt().float()  # torch's fp32 square root on a CPU is not always the nearest number
        denominator = (root / numbers.root).add_(numbers.eps)
        weight.sub_(exp_avg / denominator * numbers.rate)


class Kernels(AttentionKernels, LossKernels, UpdateKernels):
    """Plain torch for every operation, with matmuls and fused operators.

    Args:
        attention: ``Device.attention``.
        compiled: whether the blocks run through torch.compile.
        fuses_loss: whether Inductor fuses the elementwise operations of the loss, which then needs no fp32 logits.
    """

    def __init__(self, *, attention: str = "tiles", compiled: bool = False, fuses_loss: bool = False) -> None:
        self.attention, self.compiled, self.fuses_loss = attention, compiled, fuses_loss

    def float8_mm(self, a: Float8Operand, b: Float8Operand, dtype: torch.dtype, fast: bool = False) -> Tensor:
        """Return the product of a [m, k] and b [k, n] as [m, n] in ``dtype``.

        Emulated: operands and sums are fp32, as in torchao's emulation.

        Args:
            fast: add in less than fp32, where the device has such units.
        """
        return torch.mm(a.data.float() / a.scale, b.data.float() / b.scale).to(dtype)

    def fuse_rows(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return ``function``, of elementwise operations and sums, as few kernels. None as for ``fuse``.

        Results are rounded as in ``function``. One graph serves any number of rows; other sizes of a row need another
        graph. No gradients are recorded.
        """
        return None


EAGER = Kernels()
"""The default where no device is given: plain torch, uncompiled."""
_SHARED: dict[tuple[object, ...], Kernels] = {}


def shared_kernels(kind: type[Kernels], attention: str, compiled: bool, fuses_loss: bool) -> Kernels:
    """Return one object of ``kind`` per process and arguments."""
    kernels = kind(attention=attention, compiled=compiled, fuses_loss=fuses_loss)
    return _SHARED.setdefault((kind, attention, compiled, fuses_loss), kernels)
