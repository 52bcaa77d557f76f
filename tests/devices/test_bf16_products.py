"""bf16 matmuls computed in fp32. The tests replace torch's operators on every processor, with fast bf16 or without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.devices.cpu import device as cpu
from megatron_llama.devices.cpu import matmul

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


def test_gradients_take_the_same_products() -> None:
    x, weight = numbers(6, M, K), numbers(N, K)
    matmul.multiply_in_fp32()
    x.requires_grad_(), weight.requires_grad_()
    F.linear(x, weight).float().square().sum().backward()
    exact_x, exact_weight = x.detach().double(), weight.detach().double()
    made = 2 * (exact_x @ exact_weight.t()).bfloat16().double()
    for result, exact in ((x.grad, made @ exact_weight), (weight.grad, made.flatten(0, 1).t() @ exact_x.flatten(0, 1))):
        assert result is not None
        torch.testing.assert_close(result.double(), exact, rtol=2 * ROUNDED_ONCE, atol=0.01 * exact.abs().max().item())


def test_other_dtypes_are_torchs_to_the_bit() -> None:
    def products() -> list[Tensor]:
        one, other, base = ONE.float(), OTHER.float(), SUM.float()
        return [one @ other, torch.addmm(base, one, other, alpha=0.5), ONE.double() @ OTHER.double()]

    before = products()
    matmul.multiply_in_fp32()
    assert all(map(torch.equal, products(), before))


def test_an_output_of_another_shape_is_resized() -> None:
    matmul.multiply_in_fp32()
    out = torch.empty(0, dtype=BF16)
    torch.mm(ONE, OTHER, out=out)
    assert torch.equal(out, ONE @ OTHER)


def test_torchs_operators_are_restored(recwarn: pytest.WarningsRecorder) -> None:
    one, other = numbers(200, 300), numbers(300, 100)
    before = one @ other
    library = matmul.multiply_in_fp32()
    assert torch.equal(one @ other, (one.float() @ other.float()).bfloat16())
    library._destroy()
    matmul.multiply_in_fp32.cache_clear()
    assert torch.equal(one @ other, before)
    assert not recwarn.list


@pytest.mark.parametrize("fast", [True, False])
def test_a_rank_replaces_them_where_torch_has_no_fast_ones(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(matmul, "has_fast_bf16", lambda: fast)
    monkeypatch.setattr(cpu, "_tune_malloc", lambda options: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cpu.Cpu().enter(0, 1)
    assert matmul.multiply_in_fp32.cache_info().currsize == (not fast)
