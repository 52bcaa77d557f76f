"""Attention of a part of the queries, and the order of the parts. tests/layouts compares training with one process."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from megatron_llama.arch.pattern import Lengths, Pattern
from megatron_llama.config import ModelConfig
from megatron_llama.devices.attention import tiles_backward, tiles_forward
from megatron_llama.devices.attention_inputs import Documents, dense_mask
from megatron_llama.model.inputs import InputBuilder
from megatron_llama.parallel.context import BACKENDS, Backend, DividedInputBuilder, to_natural_order, to_rank_order
from megatron_llama.topology import Grid, Topology, chunk_work, divide

LENGTH = 48
PATTERNS = {"causal": Pattern(), "window": Pattern(window=5), "blocks": Pattern(0, 2, 3, 1)}
DOCUMENTS = {"whole": ((LENGTH,), (LENGTH,)), "documents": ((12, 7, 1, 28), (5, 43))}


def documents_of(lengths: Lengths) -> Documents:
    return Documents.of(torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in lengths]))


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_orders_are_inverses(cp: int, lengths: Lengths) -> None:
    sequence = torch.arange(LENGTH)
    division = divide(cp, LENGTH, lengths)
    parts = to_rank_order(sequence, division)
    assert parts.tolist() == [[position for chunk in chunks for position in chunk] for chunks in division]
    assert torch.equal(to_natural_order(parts, division), sequence)


@pytest.mark.parametrize("lengths", [None, DOCUMENTS["documents"]], ids=DOCUMENTS)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_a_rank_rotates_its_tokens(backend: type[Backend], lengths: Lengths | None) -> None:
    """all_gather divides by the work of the documents, ulysses without regard to them."""
    documents = None if lengths is None else documents_of(lengths)
    topology = Topology(Grid({"tp": 1, "cp": 2, "dp": 1, "pp": 1}), rank=1)
    inputs = InputBuilder(ModelConfig(head_dim=8), lambda *_: None)
    build = DividedInputBuilder(inputs, Mock(backend, by_documents=backend.by_documents), topology)
    local = [each for chunk in divide(2, LENGTH, lengths if backend.by_documents else None)[1] for each in chunk]
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    whole = inputs.whole(tokens, documents).rotary[0].expand(LENGTH, 2, 1, -1)
    assert torch.equal(build(tokens[:, local], documents).rotary[0].expand(LENGTH // 2, 2, 1, -1), whole[local])


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_the_work_of_a_division_is_what_the_kernels_compute(pattern: Pattern) -> None:
    """Without masked keys, which some tiles compute."""
    lengths = DOCUMENTS["documents"]
    documents = documents_of(lengths)
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
