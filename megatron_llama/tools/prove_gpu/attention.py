"""Attention kernels against fp64 on the CPU. As a module, ``python -m ... DEVICE MODE small|full`` prints JSON.

Modes: eager and compiled, the device's kernels; backends, each kernel of torch's scaled_dot_product_attention.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_llama.arch.attention_pattern import Pattern
from megatron_llama.devices import Device, get_device
from megatron_llama.devices.attention_inputs import Documents, dense_mask, masked

LENGTHS = {"small": 193, "full": 1000}
"""Tokens per sequence; no multiples of the kernels' tiles."""
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest distance of output and gradients, relative to their norm."""
ROWS, HEADS, KV_HEADS = 2, 4, 2


@dataclass(frozen=True)
class Case:
    """Attention of one shape, mask and dtype."""

    mask: str
    dtype: str
    head_dim: int
    pattern: Pattern = Pattern()
    documents: int = 1
    dropped: bool = False
    """Whether tokens are missing, as in layers of random-LTD, which need a dense mask."""

    @property
    def name(self) -> str:
        return f"{self.mask}, {self.dtype}, heads of {self.head_dim}"


MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "documents": {"documents": 5},
    "window": {"pattern": Pattern(window=48)},
    "window of documents": {"pattern": Pattern(window=48), "documents": 5},
    "blocks": {"pattern": Pattern(block=16, local_blocks=4, global_blocks=1)},
    "random-LTD": {"dropped": True, "documents": 5},
}


def cases(mode: str, size: str) -> Iterator[Case]:
    """Yield the cases of a mode. Compilation takes seconds per case, so compiled cases are fewer."""
    for dtype in TOLERANCES:
        for mask, fields in MASKS.items():
            if mode == "backends" and mask != "causal" or mode == "compiled" and fields.get("dropped"):
                continue
            for head_dim in (64,) if mode == "compiled" or size == "small" else (64, 128, 40, 256):
                yield Case(mask, dtype, head_dim, **fields)


def main(argv: Sequence[str]) -> int:
    """Print the results of all cases of a mode: name, kernel, error (number, text, or null: no kernel), tolerance."""
    name, mode, size = argv
    device, tokens = get_device(name), LENGTHS[size]
    place, results = device.enter(0, 1), []
    for case in cases(mode, size):
        for kernel, attend in _kernels(device, case, mode, tokens, place):
            error = _measure(attend, case, tokens, place)
            result = {"name": case.name, "kernel": kernel, "error": error, "tolerance": TOLERANCES[case.dtype]}
            results.append(result)
    sys.stdout.write(json.dumps(results) + "\n")
    return 0


def _kernels(
    device: Device, case: Case, mode: str, tokens: int, place: torch.device
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield (name, function of q, k, v) of the kernels of a case."""
    if mode == "backends":
        for name, backend in SDPBackend.__members__.items():
            if name not in ("ERROR", "OVERRIDEABLE"):

                def attend(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = backend) -> Tensor:
                    with sdpa_kernel(backend):
                        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

                yield name.lower(), attend
        return
    compiled = mode == "compiled"
    visible = _visible(device, case, compiled, tokens, place)
    name = "scaled_dot_product_attention" if visible is None else visible.kernel
    attend = partial(device.kernels(compiled).attend, visible=visible)
    if compiled:
        torch._dynamo.reset()

        def compiled_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v)  # type: ignore[no-any-return]

        yield f"compiled {name}", torch.compile(compiled_attend)
    else:
        yield name, attend


def _positions(case: Case, tokens: int) -> tuple[Tensor, Tensor]:
    """Return (document, position in it) of each token [rows, s]; with gaps if tokens are dropped."""
    longer = 2 * tokens if case.dropped else tokens
    index = torch.arange(longer)  # documents of different boundaries in each row
    ids = torch.stack([(index + 17 * row) * case.documents // (longer + 17 * row) for row in range(ROWS)])
    positions = Documents.of(ids).positions()
    if case.dropped:
        generator = torch.Generator().manual_seed(3)
        selected = torch.stack([torch.randperm(longer, generator=generator)[:tokens].sort()[0] for _ in range(ROWS)])
        return ids.gather(1, selected), positions.gather(1, selected)
    return ids, positions


def _visible(device: Device, case: Case, compiled: bool, tokens: int, place: torch.device) -> Any:
    """Return the inputs of the device's kernel."""
    ids, positions = _positions(case, tokens)
    documents = Documents.of(ids).on(lambda x: x.to(place)) if case.documents > 1 else None
    if case.dropped:
        return masked(positions.to(place), case.pattern, documents)
    return device.kernels(compiled).visible(ids.to(place), documents, case.pattern)


def _measure(attend: Callable[..., Any], case: Case, tokens: int, place: torch.device) -> float | str | None:
    """Return the largest relative distance of output and gradients from fp64; a text if the kernel fails."""
    generator = torch.Generator().manual_seed(1)
    dtype = getattr(torch, case.dtype)
    shapes = [(tokens, ROWS, heads, case.head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    drawn = [torch.randn(*shape, generator=generator).permute(1, 2, 0, 3).to(dtype) for shape in shapes]
    *inputs, grad = [x.to(place) for x in drawn]
    inputs = [x.requires_grad_() for x in inputs]
    try:
        out = attend(*inputs)
        actual = [out, *torch.autograd.grad(out, inputs, grad)]
    except Exception as error:
        absent = "No available kernel" in str(error) or "No viable backend" in str(error)
        return None if absent else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    expected = _reference(case, tokens, *drawn)
    distances = [
        ((a.detach().cpu().double() - e).norm() / e.norm()).item() for a, e in zip(actual, expected, strict=True)
    ]
    return max(distances) if all(distance == distance for distance in distances) else "the result is not a number"


def _reference(case: Case, tokens: int, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Return output and gradients of q, k and v in fp64, with a dense mask."""
    ids, positions = _positions(case, tokens)
    mask = dense_mask(positions, case.pattern, ids)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in inputs[1:])
    scores = (inputs[0] @ keys.mT * case.head_dim**-0.5).masked_fill(~mask, -torch.inf)
    out = scores.softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.double())]


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # not sys.exit, which waits for Inductor's compile processes
