"""Quantized communication between data-parallel ranks: error bounds and arithmetic compared with numpy in fp64, then
complete training steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_llama.config.precision import EXCHANGE_BLOCK, exchanged_bytes
from megatron_llama.parallel.quantized_comm import FORMATS, GradientExchange, Hops, Int8, ReplicaAllReduce, WeightGather
from tests.oracle import oracle, run_layout, worst
from tests.ranks import run_ranks
from tests.rows import read_layouts, rows

SIZES = (700, 5, 256)  # of three tensors in a row: blocks that are not full, and one that is
FP32 = np.finfo(np.float32).eps


def values(rows: int, seed: int = 0) -> torch.Tensor:
    """[rows, values] of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, sum(SIZES), generator=generator) * torch.logspace(-6, 2, sum(SIZES))


def rounded(kind: str, row: np.ndarray, sizes: Sequence[int] = SIZES) -> np.ndarray:
    """Return the received values of a sent row, by the paper's formulas in fp64."""
    if kind == "bf16":
        return torch.from_numpy(row).float().bfloat16().double().numpy()
    out = []
    for tensor in np.split(row.astype(np.float64), np.cumsum(sizes)[:-1]):
        for start in range(0, len(tensor), EXCHANGE_BLOCK):
            block = tensor[start : start + EXCHANGE_BLOCK]
            scale = np.abs(block).max() / 127 or 1.0
            out.append(np.rint(block / scale) * scale)
    return np.concatenate(out)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_message_has_the_bytes_and_the_error_that_are_stated(kind: str) -> None:
    sent, form = values(3), FORMATS[kind](SIZES)
    packed = form.pack(sent)
    arrived = form.unpack(packed)
    assert packed.dtype == torch.uint8 and packed.shape == (3, exchanged_bytes(kind, SIZES))
    assert arrived.dtype == torch.float32
    for row, back in zip(sent.double().numpy(), arrived.double().numpy(), strict=True):
        if kind == "bf16":
            bound = 2.0**-8 * np.abs(row)
        else:
            parts = [t for tensor in np.split(row, np.cumsum(SIZES)[:-1]) for t in _blocks(tensor)]
            bound = np.concatenate([np.full(len(block), np.abs(block).max() / 254) for block in parts])
        error = np.abs(back - row)
        assert (error <= bound * (1 + 300 * FP32)).all()
        assert (error > bound / 2).mean() > 0.05, "the bound is met by far: it is not the error"
        exact = rounded(kind, row)
        differ = ~np.isclose(back, exact, rtol=1e-5, atol=0)
        assert differ.sum() <= 1, "a code may differ where fp32 rounds a quotient to a half, and that is rare"


def _blocks(tensor: np.ndarray) -> list[np.ndarray]:
    return [tensor[start : start + EXCHANGE_BLOCK] for start in range(0, len(tensor), EXCHANGE_BLOCK)]


def test_what_can_not_be_sent_is_not_hidden() -> None:
    """A step with a value that is not finite is noticed by its norm."""
    for bad in (torch.inf, -torch.inf, torch.nan):
        for kind, form in FORMATS.items():
            row = torch.ones(1, 300)
            row[0, 7] = bad
            arrived = (packer := form([300])).unpack(packer.pack(row))
            assert not arrived[0, :EXCHANGE_BLOCK].isfinite().all(), kind
            assert arrived[0, EXCHANGE_BLOCK:].isfinite().all()


def test_int8_of_nothing_and_of_next_to_nothing() -> None:
    """Replicated gradients of a norm on tensor-parallel ranks stay equal, next to other gradients."""
    tiny = torch.tensor([[0.0, 1e-44, -7e-45] + [0.0] * 253, [3e-39, -3e-39] + [1e-45] * 254])
    form = Int8([256])
    arrived = form.unpack(form.pack(tiny))
    assert arrived.isfinite().all() and ((arrived - tiny).abs() <= tiny.abs().amax(1, keepdim=True)).all()
    assert torch.equal(form.unpack(form.pack(torch.zeros(1, 256))), torch.zeros(1, 256))
    norm = torch.randn(1, 100, generator=torch.Generator().manual_seed(1))
    form = Int8([100, 100])
    ranks = [form.unpack(form.pack(torch.cat([norm, norm * other], dim=1))) for other in (1.0, 1e3)]
    assert torch.equal(ranks[0][:, :100], ranks[1][:, :100])


def _collectives(rank: int, ranks: int, kind: str) -> dict[str, torch.Tensor]:
    assert (group := dist.group.WORLD) is not None
    inside, across = ([dist.new_group(pair) for pair in pairs] for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    hops, twice = Hops(inside[rank // 2], across[rank % 2]), torch.empty(sum(SIZES))
    local, shard = values(ranks, seed=rank), values(1, seed=50 + rank)[0]
    one_sum, copied = torch.empty(local.shape[1]), shard.clone()
    GradientExchange(kind, SIZES)(one_sum, local.flatten(), group, dist.ReduceOp.SUM)
    GradientExchange(kind, SIZES, hops)(twice, local.flatten(), group, dist.ReduceOp.SUM)
    ReplicaAllReduce(kind, SIZES, group)(copied)
    gathered = torch.empty(ranks, len(shard))
    gathered[rank] = shard
    WeightGather(kind, SIZES, None)(gathered.view(-1), gathered[rank], group)
    return {"summed": one_sum, "twice": twice, "copied": copied, "gathered": gathered}


@pytest.mark.parametrize("kind", FORMATS)
def test_collectives_are_the_published_arithmetic(kind: str) -> None:
    ranks = 4
    actual = run_ranks(_collectives, ranks, ranks, kind)
    widths = [-(-size // ranks) for size in SIZES]
    shards = [values(1, seed=50 + rank)[0].numpy() for rank in range(ranks)]
    cut = [_side_by_side(shard, ranks, widths) for shard in shards]
    sums = [sum(rounded(kind, other[rank], widths) for other in cut) for rank in range(ranks)]
    whole = np.stack([rounded(kind, one_sum, widths) for one_sum in sums])
    columns = np.split(whole, np.cumsum(widths)[:-1], axis=1)
    summed = np.concatenate([part.reshape(-1)[:size] for part, size in zip(columns, SIZES, strict=True)])
    for rank, answer in enumerate(actual):
        sent = [rounded(kind, values(ranks, seed=other)[rank].numpy()) for other in range(ranks)]
        assert _same(answer["summed"], sum(sent))
        assert _same(answer["twice"], sum(rounded(kind, sent[node] + sent[node + 1]) for node in (0, 2)))
        assert _same(answer["copied"], summed), "of a sum that was rounded again"
        assert torch.equal(answer["copied"], actual[0]["copied"]), "copies drift apart"
        assert torch.equal(answer["gathered"], actual[0]["gathered"]), "ranks compute with other weights"
        assert _same(answer["gathered"], np.stack([rounded(kind, shard) for shard in shards]))


def _side_by_side(shard: np.ndarray, ranks: int, widths: Sequence[int]) -> np.ndarray:
    tensors = zip(np.split(shard, np.cumsum(SIZES)[:-1]), widths, strict=True)
    return np.concatenate([np.pad(t, (0, ranks * p - len(t))).reshape(ranks, p) for t, p in tensors], axis=1)


def _same(actual: torch.Tensor, expected: np.ndarray) -> bool:
    """Up to the order of fp32 sums, and a code or two that fp32 rounds to the other side."""
    differ = ~np.isclose(actual.double().numpy(), expected, rtol=1e-5, atol=1e-9)
    return bool(differ.sum() <= 3)


# --- training -----------------------------------------------------------------------------------------------------

# Relative differences from one process after three steps, and how far the gradients of the first may be off for sure.
LAYOUTS, QUICK = read_layouts(__file__, "messages")
BOUNDS = {"bf16": (0.01, 1e-4), "int8": (0.05, 1e-3), "both int8": (0.1, 1e-3), "second copy": (1e-5, 0)}


@pytest.mark.parametrize("name", rows([(name, [name]) for name in LAYOUTS], QUICK))
def test_training_is_off_by_what_is_sent_and_no_more(name: str) -> None:
    """``assemble`` checks that replicas are bit-identical."""
    most, least = BOUNDS[name.rpartition(", ")[2]]
    ranks, layout = LAYOUTS[name]
    actual = run_layout(ranks, *layout)
    differences = worst(actual, oracle())
    assert least <= differences["first_grads"] <= most and differences["losses"] <= most / 10
    assert actual.copies or "no sp" not in name
