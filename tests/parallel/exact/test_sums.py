"""Sums that do not depend on the layout: integers, and trees over blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_llama.arch.exact_blocks import attention_rows, mlp_rows, num_blocks
from megatron_llama.config import ModelConfig
from megatron_llama.optim.gradient_norm import _exact_norm
from megatron_llama.parallel.exact import matmuls
from megatron_llama.parallel.exact.layers import Heads
from megatron_llama.parallel.exact.matmuls import ALL, product
from megatron_llama.parallel.exact.sums import (
    LARGEST,
    LOGP_BITS,
    GradShards,
    Total,
    Tree,
    add_pairs,
    from_grid,
    to_grid,
)
from tests.ranks import run_ranks


def test_integer_sums_have_no_order() -> None:
    """Values from 2^-26 on are exact."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(100_000, generator=generator)
    values = values[values.abs() >= 2.0**-26]
    assert torch.equal(from_grid(to_grid(values)), values)
    assert from_grid(to_grid(torch.tensor(1e-16))) == 0
    assert from_grid(to_grid(torch.tensor(-1e6), LOGP_BITS), LOGP_BITS) == -1e6
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1000, 8, generator=generator) * torch.logspace(-12, 0, 1000)[:, None]
    grid = to_grid(values)
    assert torch.equal(grid.sum(0), grid[torch.randperm(1000, generator=generator)].sum(0))
    assert not torch.equal(add_pairs([*values]), add_pairs([*values.flip(0)]))
    assert torch.allclose(from_grid(grid.sum(0)), values.double().sum(0).float(), rtol=1e-6)


def _total(samples: int = 4, tokens: int = 4) -> Total:
    return Total(torch.Size((3, 2)), samples, tokens, GradShards(1, None), scatters_early=False)


@pytest.mark.parametrize("value", [torch.inf, torch.nan, LARGEST / 4])
def test_sums_that_may_be_too_large_are_marked(value: float) -> None:
    total = _total()
    total.add(torch.full((3, 2), value))
    assert total.take(torch.device("cpu"))[1]


def test_sums_are_added_where_they_belong() -> None:
    total = _total()
    total.add(torch.ones(1, 2), slice(1, 2))
    total.add_rows(torch.tensor([2, 2, 0]), torch.ones(3, 2))
    rows, too_large = total.take(torch.device("cpu"))
    assert from_grid(rows).tolist() == [[1, 1], [1, 1], [2, 2]]
    assert not too_large
    assert not total.take(torch.device("cpu"))[0].any(), "a new sum begins at 0"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_a_tree_does_not_depend_on_the_ranks(ranks: int) -> None:
    expected = add_pairs([*_leaves()])
    parts = run_ranks(_tree_sums, ranks)
    assert torch.equal(parts[0][0], expected)
    scattered = torch.cat([part for _, part in parts]) if ranks > 1 else parts[0][1]
    assert torch.equal(scattered, expected)


def _leaves() -> torch.Tensor:
    return torch.randn(12, 12, 5, generator=torch.Generator().manual_seed(2))


def _tree_sums(rank: int) -> list[torch.Tensor]:
    """Return the sum, and this rank's part of a scattered sum."""
    ranks = dist.get_world_size()
    tree = Tree(12, dist.group.WORLD if ranks > 1 else None)
    leaves = _leaves().chunk(ranks)[rank].unbind()
    return [tree.total(tree.nodes(leaves), scatter=scatter) for scatter in (False, True)]


def test_the_exact_norm_does_not_depend_on_the_parts() -> None:
    whole, one, three, infinite, nan = run_ranks(_norms, 1)[0]
    assert one == three == pytest.approx(whole, rel=1e-7)
    assert not math.isfinite(infinite) and not math.isfinite(nan)


def _norms(_: int) -> list[float]:
    """Return torch's norm, the exact norm with one part and with three, and the norm with inf or nan."""
    values = torch.randn(999, generator=torch.Generator().manual_seed(3)) * torch.logspace(-20, 3, 999)
    parts = [[values], [*values.chunk(3)], *([torch.tensor([1.0, value])] for value in (torch.inf, torch.nan))]
    return [values.double().norm().item(), *(_exact_norm(part, torch.device("cpu")).item() for part in parts)]


@pytest.mark.parametrize(
    ("heads", "kv", "units", "expected"),
    [(8, 8, 64, 8), (32, 8, 11008, 8), (4, 2, 64, 4), (6, 6, 768, 6), (9, 3, 36, 9)],
)
def test_number_of_blocks(heads: int, kv: int, units: int, expected: int) -> None:
    assert num_blocks(_model(heads, kv, units)) == expected


def _model(heads: int, kv: int, units: int) -> ModelConfig:
    return ModelConfig(
        hidden_size=heads * 4, num_attention_heads=heads, num_key_value_heads=kv, intermediate_size=units, head_dim=4
    )


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kv", [1, 2, 8])
def test_each_kv_head_is_counted_once(tp: int, kv: int) -> None:
    model = _model(8, kv, 64)
    counted = 0
    for rank in range(tp):
        rows = attention_rows(model, tp, rank)
        assert all(before.stop == after.first for before, after in zip(rows, rows[1:], strict=False)), "no gaps"
        counted += sum(row.leaf is not None for row in rows)
    assert counted == 8 + 2 * kv  # blocks of q, heads or blocks of k and v
    assert [row.leaf for row in mlp_rows(model, tp)] == 2 * [*range(8 // tp)]


ROWS = [slice(0, 32), slice(32, 64)]
COLUMNS = [slice(0, 48), slice(48, 96), slice(96, 144)]


@pytest.fixture(autouse=True)
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmuls, "_agree", {})


def _operands(k: int = 80) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(64, k, generator=generator), torch.randn(k, 144, generator=generator)


def _cases() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    left, right = _operands()
    yield left, right
    yield left.t().contiguous().t(), right
    yield left, right.t().contiguous().t()
    yield torch.cat([left, left], 1)[:, 1:81], right  # not contiguous, not aligned


@pytest.mark.parametrize("inner", [ALL, slice(16, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("left, right", _cases())
def test_a_product_has_the_bits_of_its_blocks(
    left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, inner: slice
) -> None:
    """Both in the call that makes the trial and in the next one."""
    left, right = left.to(dtype), right.to(dtype)
    expected = matmuls.by_block(left, right, ROWS, COLUMNS, inner)
    for _ in range(2):
        assert torch.equal(product(left, right, ROWS, COLUMNS, inner), expected)
    torch.testing.assert_close(expected, left[:, inner] @ right[inner])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_adds_in_another_order_is_not_used_at_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 results hide most differences of ordinary sums."""
    left, right = (x.to(dtype) for x in _operands())
    multiply, sizes = torch.mm, []

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        sizes.append(a.shape[0])
        if a.shape[0] < 64:
            return multiply(a, b)
        a, b = a.float(), b.float()
        return (multiply(a[:, :40], b[:40]) + multiply(a[:, 40:], b[40:])).to(dtype)

    monkeypatch.setattr(torch, "mm", mm)
    expected = matmuls.by_block(left, right, ROWS, COLUMNS, ALL)
    product(left, right, ROWS, COLUMNS)  # the trial
    sizes.clear()
    assert torch.equal(product(left, right, ROWS, COLUMNS), expected)
    assert sizes == [32] * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_products_of_a_trial_are_rounding_errors(dtype: torch.dtype) -> None:
    left, right = (x.to(dtype) for x in _operands())
    trial = matmuls._operands(left, right, slice(16, 40))
    result = trial[0][:, 16:40].double() @ trial[1][16:40].double()
    terms = trial[0][:, 16:40].double().abs() @ trial[1][16:40].double().abs()
    assert (result.abs() / terms).max() < 1e-14
    rounded = trial[0][:, 16:40] @ trial[1][16:40]
    assert (rounded != 0).float().mean() > 0.5


def test_a_trial_is_made_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = _operands()
    state = torch.get_rng_state()
    product(left, right, ROWS, COLUMNS)
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("a second trial"))
    product(left, right, ROWS, COLUMNS)


def test_a_small_result_that_agrees_by_chance_is_not_used_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AVX-512, 1 x 2 results of MKL in another order agree in a quarter of the cases."""
    left, right = torch.randn(1, 64), torch.randn(64, 2)
    multiply, whole = torch.mm, []

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if b.shape[1] == 1:
            return multiply(a, b)
        whole.append(1)
        return torch.cat([multiply(a, column) for column in b.split(1, dim=1)], dim=1) + (len(whole) > 1)

    monkeypatch.setattr(torch, "mm", mm)
    columns = [slice(0, 1), slice(1, 2)]
    expected = matmuls.by_block(left, right, [ALL], columns, ALL)
    assert torch.equal(product(left, right, [ALL], columns), expected)


def test_the_mean_of_copied_heads() -> None:
    """Two ranks hold a copy of each of four heads; each head counts once."""
    x = torch.randn(3, 2, 4, 5, dtype=torch.float64)
    heads = Heads(SimpleNamespace(gather=lambda by_head: by_head.repeat_interleave(2, dim=0)), copies=2)  # type: ignore[arg-type]
    torch.testing.assert_close(heads.mean(x), x.mean((2, 3), keepdim=True))
