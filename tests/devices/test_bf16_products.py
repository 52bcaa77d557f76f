"""bf16 matmuls computed in fp32, on every processor; the C++ loops of exact mode have the bits of torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.devices import get_device
from megatron_llama.devices.cpu import device as cpu
from megatron_llama.devices.cpu import kernels as cpu_kernels
from megatron_llama.devices.cpu import matmul
from megatron_llama.devices.kernels import EAGER, AdamHyperparameters

BF16 = torch.bfloat16
ROUNDED_ONCE = 2**-8
"""How far the nearest bf16 number may be, as a share."""

M, K, N = 24, 40, 56


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(BF16)


def in_place(base: Tensor, one: Tensor, other: Tensor) -> Tensor:
    multiply = base.addmm_ if base.dim() == 2 else base.baddbmm_
    returned = multiply(one, other, beta=0.5, alpha=2)
    assert returned is base
    return base


def into(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def product(*tensors: Tensor, **factors: float) -> Tensor:
        out = torch.full_like(operator(*tensors), torch.nan)
        assert operator(*tensors, **factors, out=out) is out
        return out

    return product


ONE, OTHER, SUM = numbers(M, K), numbers(K, N), numbers(M, N)
ONES, OTHERS, SUMS = numbers(3, M, K), numbers(3, K, N), numbers(3, M, N)
PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "matmul": (torch.matmul, (ONE, OTHER)),
    "matmul, transposed": (torch.matmul, (numbers(K, M).t(), numbers(N, K).t())),
    "matmul, a batch by one": (torch.matmul, (ONES, OTHER)),
    "linear": (F.linear, (ONES, numbers(N, K), numbers(N))),
    "mm into": (into(torch.mm), (ONE, OTHER)),
    "addmm": (torch.addmm, (SUM, ONE, OTHER)),
    "addmm into": (into(torch.addmm), (SUM, ONE, OTHER)),
    "addmm in place": (in_place, (SUM, ONE, OTHER)),
    "bmm": (torch.bmm, (ONES, OTHERS)),
    "bmm into": (into(torch.bmm), (ONES, OTHERS)),
    "baddbmm": (torch.baddbmm, (SUMS, ONES, OTHERS)),
    "baddbmm into": (into(torch.baddbmm), (SUMS, ONES, OTHERS)),
    "baddbmm in place": (in_place, (SUMS, ONES, OTHERS)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_the_exact_one_rounded_once(name: str) -> None:
    product, tensors = PRODUCTS[name]
    exact = product(*(x.double() for x in tensors))
    matmul.multiply_in_fp32()
    actual = product(*(x.clone() for x in tensors))
    assert actual.dtype == BF16
    torch.testing.assert_close(actual.double(), exact, rtol=ROUNDED_ONCE, atol=1e-4)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Output and gradients of q, k and v."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("mask", [None, "bool", "bf16"])
def test_attention_is_that_of_fp32(mask: str | None) -> None:
    q, k, v = numbers(2, 4, 70, 16), numbers(2, 2, 70, 16), numbers(2, 2, 70, 16)
    sees = torch.ones(70, 70, dtype=torch.bool).tril(3)
    hides = torch.zeros(70, 70, dtype=BF16).masked_fill_(~sees, -torch.inf)
    given = {None: None, "bool": sees, "bf16": hides}[mask]
    fp32 = hides.double() if mask == "bf16" else given
    exact = attention(q.double(), k.double(), v.double(), fp32)
    matmul.multiply_in_fp32()
    actual = attention(q, k, v, given)
    for result, reference in zip(actual, exact, strict=True):
        assert result.dtype == BF16
        # Output and its gradient are rounded before the backward pass reads them.
        torch.testing.assert_close(result.double(), reference, rtol=4 * ROUNDED_ONCE, atol=0.01)


def test_other_dtypes_are_torchs_to_the_bit() -> None:
    """An output of another shape is resized."""

    def products() -> list[Tensor]:
        one, other, base = ONE.float(), OTHER.float(), SUM.float()
        return [one @ other, torch.addmm(base, one, other, alpha=0.5), ONE.double() @ OTHER.double()]

    before = products()
    matmul.multiply_in_fp32()
    assert all(map(torch.equal, products(), before))
    matmul.multiply_in_fp32()
    out = torch.empty(0, dtype=BF16)
    torch.mm(ONE, OTHER, out=out)
    assert torch.equal(out, ONE @ OTHER)


@pytest.mark.parametrize("fast", [True, False])
def test_a_rank_replaces_them_where_torch_has_no_fast_ones(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(matmul, "has_fast_bf16", lambda: fast)
    monkeypatch.setattr(cpu, "_tune_malloc", lambda options: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cpu.Cpu().enter(0, 1)
    assert matmul.multiply_in_fp32.cache_info().currsize == (not fast)


BITS = 50
KERNELS = get_device("cpu").kernels(compiled=False)


@pytest.fixture(autouse=True)
def compiled() -> None:
    if cpu_kernels.exact_library() is None:
        pytest.skip("no C++ compiler")


def _random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 288), (7, 5), (3, 1000), (1, 17)])
def test_values_are_added_as_integers(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    values = _random(shape[0], shape[1] + 3).to(dtype)[:, 1:-2]
    start = torch.randint(-(2**60), 2**60, (shape[0], shape[1] + 7), generator=torch.Generator().manual_seed(1))
    expected, total = start.clone(), start.clone()
    largest = EAGER.add_to_grid_(expected[:, 2:-5], values, BITS)
    assert torch.equal(KERNELS.add_to_grid_(total[:, 2:-5], values, BITS), largest)
    assert torch.equal(total, expected)
    assert not torch.equal(total, start)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [0, 16, 20])
def test_values_that_are_not_finite_are_reported(value: float, column: int) -> None:
    values = _random(3, 21)
    values[1, column] = value
    assert not KERNELS.add_to_grid_(torch.zeros(3, 21, dtype=torch.int64), values, BITS).isfinite()


@pytest.mark.parametrize("size", [5, 16, 40_001])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_has_the_bits_of_separate_operators(size: int, decay: float) -> None:
    keep = 1.0 if decay else 1 - 3e-4 * 0.1
    root, rate = torch.tensor(0.3123), torch.tensor(3e-3)
    numbers = AdamHyperparameters(keep=keep, decay=decay, beta1=0.9, beta2=0.95, eps=1e-8, root=root, rate=rate)
    start = [_random(size, seed=seed) for seed in range(4)]
    start[3] = start[3].abs() * 1e-3
    expected, updated = ([x.clone() for x in start] for _ in range(2))
    for _ in range(3):
        EAGER.elementwise_adam_(*expected, numbers)
        KERNELS.elementwise_adam_(*updated, numbers)
    assert all(torch.equal(x, y) for x, y in zip(updated, expected, strict=True))
    assert not torch.equal(updated[0], start[0])
