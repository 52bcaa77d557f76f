"""The kernel of compiled blocks on a CPU against all scores in fp64, for whole sequences, documents and windows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._inductor.codecache import CppCodeCache
from torch.utils.flop_counter import FlopCounterMode

from megatron_llama.arch.attention_pattern import Pattern
from megatron_llama.devices import HOST, device_named
from megatron_llama.devices.attention_inputs import Documents, dense_mask
from megatron_llama.devices.cpu import attention as cpu_attention
from tests.compiled import needs_compiler
from tests.devices.helpers import attention_inputs, dense_attention

pytestmark = needs_compiler
EAGER, COMPILED = (device_named(HOST).kernels(compiled) for compiled in (False, True))
LENGTH = 300
"""Three blocks of queries, of which the last is not whole."""
WINDOW, SPARSE = Pattern(window=50), Pattern(block=4, local_blocks=4, global_blocks=1)


def inputs(
    dtype: torch.dtype = torch.float32, heads: int = 4, kv_heads: int = 2, length: int = LENGTH, d: int = 64
) -> tuple[Tensor, ...]:
    return attention_inputs(dtype, heads, kv_heads, length, d=d)


def documents(length: int = LENGTH) -> Documents:
    """Documents with different lengths per row: some inside a block, some over all blocks."""
    places, ends = torch.arange(length), [[3, 70, 71, 200], [129]]
    return Documents.of(torch.stack([torch.bucketize(places, torch.tensor(row), right=True) for row in ends]))


def first_visible(pattern: Pattern, those: Documents | None, length: int) -> Tensor | None:
    visible = COMPILED.visible(torch.zeros(2, length, dtype=torch.int64), those, pattern)
    return None if visible is None else visible.first_visible_key


def dense(pattern: Pattern, those: Documents | None, length: int) -> Tensor:
    if those is None:
        return dense_mask(torch.arange(length).expand(2, length), pattern)
    return dense_mask(those.positions(), pattern, those.ids)


def errors(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    pairs = [(one.detach().double(), other) for one, other in zip(actual, expected, strict=True)]
    return [float((one - other).norm() / other.norm()) for one, other in pairs]


def of_ours(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, first: Tensor | None = None) -> tuple[Tensor, ...]:
    out = cpu_attention.attend(q, k, v, first)[0]
    return out, *torch.autograd.grad(out, (q, k, v), grad)


@pytest.mark.parametrize("dtype", cpu_attention.DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 64), (6, 1, 32), (3, 3, 128), (2, 1, 96), (1, 1, 256)])
@pytest.mark.parametrize("length", [1, 31, 64, 129, LENGTH])
def test_is_as_exact_as_torchs_kernel(dtype: torch.dtype, heads: int, kv_heads: int, d: int, length: int) -> None:
    q, k, v, grad = inputs(dtype, heads, kv_heads, length, d)
    expected = dense_attention(q, k, v, grad, dense(Pattern(), None, length))
    actual = of_ours(q, k, v, grad)
    assert {x.dtype for x in actual} == {dtype}
    assert [x.stride() for x in actual] == [x.stride() for x in (q, q, k, v)], "strides that the layers expect"
    if length == 1:  # nothing to choose from: gradients of q and k are 0
        assert torch.equal(actual[0][:, ::heads], v[:, ::kv_heads])
        assert actual[1].abs().max() < 1e-5 and actual[2].abs().max() < 1e-5
        return
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torchs = errors((out, *torch.autograd.grad(out, (q, k, v), grad)), expected)
    ours = errors(actual, expected)
    # In fp32 both are off by roundings of sums alone, whose order is the library's.
    factor, most = (1.1, 5e-3) if dtype == torch.bfloat16 else (2, 1e-6)
    assert all(one < factor * other + 1e-8 for one, other in zip(ours, torchs, strict=True)), (ours, torchs)
    assert max(ours) < most


@pytest.mark.parametrize("dtype", cpu_attention.DTYPES)
@pytest.mark.parametrize("pattern", [Pattern(), WINDOW, Pattern(window=1), Pattern(window=LENGTH - 1)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_sees_documents_and_windows(dtype: torch.dtype, pattern: Pattern, packed: bool) -> None:
    q, k, v, grad = inputs(dtype)
    those = documents() if packed else None
    ours = errors(
        of_ours(q, k, v, grad, first_visible(pattern, those, LENGTH)),
        dense_attention(q, k, v, grad, dense(pattern, those, LENGTH)),
    )
    if pattern.window == 1:  # a token attends only to itself: gradients of q and k are rounding errors of 0
        ours = [ours[0], ours[3]]
    assert max(ours) < (5e-3 if dtype == torch.bfloat16 else 1e-6)


def test_log_sum_exp_is_that_of_the_scores() -> None:
    """Large scores do not overflow, and NaN is seen."""
    q, k, v, _ = inputs()
    _, lse = cpu_attention.attend(q, k, v, None)
    scores = (q.double() @ k.double().repeat_interleave(2, dim=1).mT) * 64**-0.5
    expected = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf).logsumexp(-1)
    assert torch.allclose(lse.double(), expected, atol=1e-5)
    q, k, v, grad = inputs()
    q = (q.detach() * 1000).requires_grad_()
    actual = of_ours(q, k, v, grad)
    assert all(x.isfinite().all() for x in actual)
    assert errors(actual, dense_attention(q, k, v, grad, dense(Pattern(), None, LENGTH)))[0] < 1e-3
    q, k, v, _ = inputs(torch.bfloat16)
    k.detach()[0, 0, 140] = torch.nan
    out = cpu_attention.attend(q, k, v, None)[0]
    assert out[0, :2, 140:].isnan().all() and not out[0, 2:].isnan().any() and not out[1].isnan().any()


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_alone_is_what_it_is_beside_others(packed: bool) -> None:
    """Subsets of rows and heads are bit-identical for any number of threads, because layouts split them."""
    q, k, v, grad = inputs(torch.bfloat16)
    first = first_visible(WINDOW, documents(), LENGTH) if packed else None
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = of_ours(q, k, v, grad, first)
        torch.set_num_threads(2)  # one for each query head of the part
        alone = [x.detach()[1:, x.shape[1] // 2 :].requires_grad_() for x in (q, k, v)]
        part = of_ours(*alone, grad[1:, 2:], None if first is None else first[1:])
    finally:
        torch.set_num_threads(threads)
    for one, other, heads in zip(whole, part, (2, 2, 1, 1), strict=True):
        assert torch.equal(one[1:, heads:], other)


@pytest.mark.parametrize("dtype", cpu_attention.DTYPES)
def test_takes_tensors_as_they_lie(dtype: torch.dtype) -> None:
    q, k, v, grad = inputs(dtype)
    expected = of_ours(q, k, v, grad)

    def odd_strides(x: Tensor) -> Tensor:
        return torch.empty(2, x.shape[1], LENGTH, 65, dtype=dtype)[..., :64].copy_(x.detach()).requires_grad_()

    def numbers_apart(x: Tensor) -> Tensor:
        return x.detach().mT.contiguous().mT.requires_grad_()

    for change in (odd_strides, numbers_apart):
        actual = of_ours(*(change(x) for x in (q, k, v)), change(grad).detach())
        assert all(map(torch.equal, actual, expected))
    first = first_visible(WINDOW, documents(), LENGTH)
    assert first is not None
    apart = first.t().contiguous().t()
    assert all(map(torch.equal, of_ours(q, k, v, grad, apart), of_ours(q, k, v, grad, first)))
    alike = grad[:, :1].expand_as(grad)  # such as a sum's gradient
    assert all(map(torch.equal, of_ours(q, k, v, alike), of_ours(q, k, v, alike.contiguous())))


def test_bf16_goes_in_fp32_where_nothing_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "_multiplies_bf16", lambda: False)
    q, k, v, grad = inputs(torch.bfloat16)
    actual = of_ours(q, k, v, grad)
    assert {x.dtype for x in actual} == {torch.bfloat16}
    # Rounded once, at the end.
    assert max(errors(actual, dense_attention(q, k, v, grad, dense(Pattern(), None, LENGTH)))) < 2e-3


def test_refuses_what_it_would_misread() -> None:
    q, k, v, _ = (x.detach() for x in inputs())
    first = torch.zeros(2, LENGTH, dtype=torch.int32)
    for changed in ((q, k.bfloat16(), v), (q, k[:, :, 1:], v), (q, k, v[..., :32]), (q[:, :3], k, v)):
        with pytest.raises(ValueError, match=r"queries float32 \[2, .* do not match keys"):
            cpu_attention.attend(*changed, None)
    for wrong in (first.long(), first[:1]):
        with pytest.raises(ValueError, match=r"must be int32 \[2, 300\]"):
            cpu_attention.attend(q, k, v, wrong)


@pytest.fixture
def no_library() -> Iterator[None]:
    cpu_attention._library.cache_clear()
    yield
    cpu_attention._library.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_where_it_can_not_be_compiled_torchs_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: str) -> None:
        raise RuntimeError("C++ compile error\nwith many lines")

    monkeypatch.setattr(CppCodeCache, "load", fails)
    with pytest.warns(UserWarning, match=r"torch's kernel, because .* could not be compiled \(C\+\+ compile error\)"):
        assert not cpu_attention.serves(inputs()[0])


def test_whom_it_serves() -> None:
    def serves(d: int = 64, dtype: torch.dtype = torch.float32, device: str = "cpu", length: int = 8) -> bool:
        return cpu_attention.serves(torch.empty(1, 1, length, d, dtype=dtype, device=device))

    assert serves() and serves(32) and serves(128, torch.bfloat16)
    assert not serves(16) and not serves(80) and not serves(dtype=torch.float16) and not serves(device="meta")
    longest = cpu_attention.LONGEST
    assert serves(length=longest) and not serves(length=longest + 1)


@pytest.mark.parametrize(
    ("pattern", "packed", "d", "ours"),
    [(Pattern(), False, 64, True), (Pattern(), True, 64, True), (WINDOW, True, 64, True)]
    + [(SPARSE, False, 64, False), (Pattern(), False, 16, False)],
    ids=["whole", "documents", "documents and window", "blocks", "narrow heads"],
)
def test_compiled_blocks_go_through_it(pattern: Pattern, packed: bool, d: int, ours: bool) -> None:
    q, k, v, grad = inputs(length=LENGTH, d=d)
    those = documents() if packed else None
    backend = EagerAndRecordGraphs()
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    compiled = torch.compile(COMPILED.attend, backend=backend, dynamic=False, fullgraph=True)
    actual = compiled(q, k, v, COMPILED.visible(tokens, those, pattern))
    assert ["cpu_attention" in graph.code for graph in backend.graphs] == [ours]
    eager = EAGER.attend(q, k, v, EAGER.visible(tokens, those, pattern))
    assert torch.allclose(actual, eager, atol=1e-5)
    pairs = zip(*(torch.autograd.grad(out, (q, k, v), grad) for out in (actual, eager)), strict=True)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)


def test_the_operator_keeps_torchs_rules() -> None:
    q, k, v, grad = inputs(torch.bfloat16)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    first = first_visible(WINDOW, documents(), LENGTH)
    for given in (None, first):
        torch.library.opcheck(cpu_attention.attend, (q, k, v, given), test_utils=tests)
    out, lse = cpu_attention.attend(q, k, v, first)
    saved = (x.detach() for x in (grad, q, k, v, out, lse))
    torch.library.opcheck(cpu_attention._backward, (*saved, first), test_utils=tests)
    with FlopCounterMode(display=False) as counter:
        of_ours(q, k, v, grad)
    assert counter.get_total_flops() == (4 + 10) * 2 * 4 * LENGTH**2 * 64
