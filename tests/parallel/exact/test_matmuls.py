"""Matmuls of exact mode, by blocks or at once after a trial, and its means over heads."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megatron_llama.parallel.exact import matmuls
from megatron_llama.parallel.exact.layers import Heads
from megatron_llama.parallel.exact.matmuls import ALL, product

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
