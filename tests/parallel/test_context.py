"""Attention of a part of the queries, and the order of the parts. tests/layouts compares training with one process."""

from __future__ import annotations

import pytest
import torch

from megatron_llama.arch.pattern import Lengths, Pattern
from megatron_llama.devices.attention import tiles_backward, tiles_forward
from megatron_llama.devices.visibility import Documents, dense_mask
from megatron_llama.parallel.context import to_natural_order, to_rank_order
from megatron_llama.topology import chunk_work, divide

LENGTH = 48
PATTERNS = {"causal": Pattern(), "window": Pattern(window=5), "blocks": Pattern(0, 2, 3, 1)}
DOCUMENTS = {"whole": ((LENGTH,), (LENGTH,)), "documents": ((12, 7, 1, 28), (5, 43))}


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_orders_are_inverses(cp: int, lengths: Lengths) -> None:
    sequence = torch.arange(LENGTH)
    division = divide(cp, LENGTH, lengths)
    parts = to_rank_order(sequence, division)
    assert parts.tolist() == [[position for chunk in chunks for position in chunk] for chunks in division]
    assert torch.equal(to_natural_order(parts, division), sequence)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_the_work_of_a_division_is_what_the_kernels_compute(pattern: Pattern) -> None:
    """Without masked keys, which some tiles compute."""
    lengths = DOCUMENTS["documents"]
    documents = Documents.of(torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in lengths]))
    visible = dense_mask(documents.positions(), pattern, documents.ids)[:, 0]
    size = LENGTH // 8
    expected = [int(visible[:, start : start + size].sum()) for start in range(0, LENGTH, size)]
    assert chunk_work(LENGTH, 8, lengths, pattern) == expected


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("cp", [2, 4])
def test_attention_of_all_ranks_adds_up(cp: int, pattern: Pattern, lengths: Lengths) -> None:
    torch.manual_seed(0)
    q, grad = torch.randn(2, 2, 4, LENGTH, 8).unbind(0)
    k, v = torch.randn(2, 2, 2, LENGTH, 8).unbind(0)
    out, lse = tiles_forward(q, k, v, lengths, None, pattern)
    whole = tiles_backward(grad, q, k, v, out, lse, lengths, None, pattern)
    sums = [torch.zeros_like(k), torch.zeros_like(v)]
    for rank in range(cp):
        chunks = divide(cp, LENGTH, lengths, pattern)[rank]
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
