"""Attention of a part of the queries, and the order of the parts. tests/layouts compares training with one process."""

from __future__ import annotations

import pytest
import torch

from megatron_llama.arch.pattern import Pattern
from megatron_llama.devices.attention import tiles_backward, tiles_forward
from megatron_llama.parallel.context import to_natural_order, to_rank_order
from megatron_llama.topology import zigzag

LENGTH = 48
PATTERNS = {"causal": Pattern(), "window": Pattern(window=5), "blocks": Pattern(0, 2, 3, 1)}
DOCUMENTS = {"whole": ((LENGTH,), (LENGTH,)), "documents": ((12, 7, 1, 28), (5, 43))}


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_orders_are_inverses(cp: int) -> None:
    sequence = torch.arange(LENGTH)
    parts = to_rank_order(sequence, cp)
    expected = [[position for chunk in zigzag(rank, cp, LENGTH) for position in chunk] for rank in range(cp)]
    assert parts.tolist() == expected
    assert torch.equal(to_natural_order(parts), sequence)


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("cp", [2, 4])
def test_attention_of_all_ranks_adds_up(cp: int, pattern: Pattern, lengths: tuple[tuple[int, ...], ...]) -> None:
    torch.manual_seed(0)
    q, grad = torch.randn(2, 2, 4, LENGTH, 8).unbind(0)
    k, v = torch.randn(2, 2, 2, LENGTH, 8).unbind(0)
    out, lse = tiles_forward(q, k, v, lengths, None, pattern)
    whole = tiles_backward(grad, q, k, v, out, lse, lengths, None, pattern)
    sums = [torch.zeros_like(k), torch.zeros_like(v)]
    for rank in range(cp):
        chunks = zigzag(rank, cp, LENGTH)
        local = torch.tensor([position for chunk in chunks for position in chunk])
        q_part, grad_part = q[:, :, local], grad[:, :, local]
        part, part_lse = tiles_forward(q_part, k, v, lengths, None, pattern, chunks)
        torch.testing.assert_close(part, out[:, :, local])
        torch.testing.assert_close(part_lse, lse[:, :, local])
        dq, *dkv = tiles_backward(grad_part, q_part, k, v, part, part_lse, lengths, None, pattern, chunks)
        torch.testing.assert_close(dq, whole[0][:, :, local], rtol=1e-4, atol=1e-5)
        for total, more in zip(sums, dkv, strict=True):
            total += more
    for total, expected in zip(sums, whole[1:], strict=True):
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)
