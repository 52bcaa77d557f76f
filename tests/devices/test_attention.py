"""Every kernel computes what a dense mask in fp32 says, for documents and patterns, and no more than it must."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron_llama.arch.attention_pattern import Keys, Pattern
from megatron_llama.devices import HOST, NAMES, device_named, torch_attention
from megatron_llama.devices.attention_inputs import AttentionInputs, Documents, build_attention_inputs, dense_mask
from megatron_llama.devices.cpu import attention as cpu_attention
from tests.devices.helpers import attention_inputs, dense_attention
from tests.model.flash import flash_on_cpu

Call = torch_attention._Kernel
KERNELS = device_named(HOST).kernels(compiled=False)
attend = KERNELS.attend
CUDA = device_named("cuda")
CUDA.kernels(compiled=False)  # adds varlen to the kernels of documents
LENGTH = 96
PLAIN, WINDOW, BLOCKS = Pattern(), Pattern(window=20), Pattern(block=4, local_blocks=4, global_blocks=1)
PATTERNS = {
    "plain": PLAIN,
    "window": WINDOW,
    "window of two": Pattern(window=2),
    "window of a tile and one": Pattern(window=33),
    "window as long as the sequence": Pattern(window=LENGTH),
    "blocks": BLOCKS,
    "blocks, two of three global": Pattern(block=5, local_blocks=3, global_blocks=2),
    "blocks, all global": Pattern(block=8, local_blocks=2, global_blocks=2),
}
# The kernel, whether it runs in compiled blocks, and the operator of a tile's calls.
WAYS = {
    "tiles": ("tiles", False, Call.CPU_FLASH),
    "tiles, products": ("tiles", False, Call.MATMUL),
    "tiles, flash": ("tiles", False, Call.FLASH),
    "tiles, efficient": ("tiles", False, Call.EFFICIENT),
    "tiles, compiled": ("tiles", True, Call.CPU_FLASH),
    "varlen": ("varlen", False, None),
    "varlen, compiled": ("varlen", True, None),
    "mask": ("mask", False, None),
}


def inputs(seed: int, dtype: torch.dtype, heads: int, kv_heads: int, rows: int = 2) -> tuple[Tensor, ...]:
    return attention_inputs(dtype, heads, kv_heads, LENGTH, rows=rows, seed=seed)


def reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, pattern: Pattern, those: Documents) -> tuple[Tensor, ...]:
    return dense_attention(q, k, v, grad, dense_mask(those.positions(), pattern, those.ids), torch.float32)


def layout(seed: int, rows: int = 2) -> Documents:
    """Return documents with random boundaries: from one per sequence to about one per token."""
    generator = torch.Generator().manual_seed(seed)
    share = [0.0, 0.02, 0.1, 0.7][seed % 4]
    return Documents.of((torch.rand(rows, LENGTH, generator=generator) < share).cumsum(1))


def off(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest ‖a-b‖ / ‖b‖, b being at least of size 1."""
    return max(((a - b).norm() / b.norm().clamp(min=1)).item() for a, b in zip(actual, expected, strict=True))


@pytest.fixture
def flash() -> Iterator[None]:
    with flash_on_cpu():
        yield


@pytest.mark.parametrize(
    ("pattern", "way"),
    # Inside compiled blocks it is the same code.
    [(p, w) for p in PATTERNS for w in WAYS if p in ("plain", "window", "blocks") or not WAYS[w][1]],
)
@pytest.mark.usefixtures("flash")
def test_output_and_gradients_equal_a_dense_masks(way: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, compiled, call = WAYS[way]
    if PATTERNS[pattern].group and kernel == "varlen":
        assert CUDA.attention_kernel(PATTERNS[pattern], "bfloat16", 64) == "tiles", "varlen has no blocks"
        return
    masked = Call.MATMUL if call in (Call.FLASH, Call.EFFICIENT) else call  # these take no mask
    monkeypatch.setattr(torch_attention, "_kernel", lambda q, mask: call if mask is None else masked)
    for seed in range(5):
        dtype = torch.bfloat16 if seed == 3 else torch.float32
        heads, kv_heads = ((4, 2), (6, 1), (3, 3))[seed % 3]
        q, k, v, grad = inputs(seed, dtype, heads, kv_heads)
        documents = layout(seed) if seed < 4 else None
        expected = reference(q, k, v, grad, PATTERNS[pattern], documents or Documents.whole(2, LENGTH, q.device))
        visible = build_attention_inputs(torch.zeros(2, LENGTH), documents, PATTERNS[pattern], kernel, compiled)
        out = attend(q, k, v, visible)
        actual = out, *torch.autograd.grad(out, (q, k, v), grad)
        assert {x.dtype for x in actual} == {dtype}
        assert off(actual, expected) < (2e-2 if dtype == torch.bfloat16 else 1e-6), f"seed {seed}"


def test_mask_by_hand() -> None:
    def drawn(pattern: Pattern, ids: list[int]) -> list[str]:
        documents = Documents.of(torch.tensor([ids]))
        rows = dense_mask(documents.positions(), pattern, documents.ids)[0, 0]
        return ["".join("x" if mark else "." for mark in row) for row in rows.tolist()]

    assert drawn(PLAIN, [0, 0, 1, 2, 2, -1]) == ["x.....", "xx....", "..x...", "...x..", "...xx.", ".....x"]
    # Mistral's window counts the token itself.
    assert drawn(Pattern(window=2), [0, 0, 0, 1, 1, 1]) == ["x.....", "xx....", ".xx...", "...x..", "...xx.", "....xx"]
    # Groups of two blocks of one token, of which the second is global.
    rows = ["x.....", "xx....", ".xx...", ".xxx..", ".x.xx.", ".x.xxx"]
    assert drawn(Pattern(block=1, local_blocks=2, global_blocks=1), [0] * 6) == rows


def test_positions_and_borders_by_hand() -> None:
    documents = Documents.of(torch.tensor([[0, 0, 1, 2, 2, -1]]))
    assert documents.positions().tolist() == [[0, 1, 0, 0, 1, 0]]
    assert documents.lengths == ((2, 1, 2, 1),)
    assert documents.cu_seqlens.tolist() == [0, 2, 3, 5, 6, 6, 6]


class Calls(TorchDispatchMode):
    """Record the operators that run, and the inputs of attention operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attention: list[list[torch.Size]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.names.add(name)
        if "flash_attention" in name and "backward" not in name:
            self.attention.append([x.shape for x in args if isinstance(x, torch.Tensor)])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", ["tiles", "mask", "plain"])
def test_no_kernel_repeats_key_and_value_heads(kernel: str) -> None:
    q, k, v, _ = inputs(1, torch.float32, 6, 2)
    kernel_inputs = (
        None if kernel == "plain" else build_attention_inputs(torch.zeros(2, LENGTH), layout(1), PLAIN, kernel, False)
    )
    with Calls() as calls:
        attend(q, k, v, kernel_inputs).sum().backward()
    assert calls.attention and not calls.names & {"repeat", "repeat_interleave", "index_select", "gather"}
    assert all(keys[1] == values[1] == 2 for _, keys, values, *_ in calls.attention)


@pytest.mark.parametrize(("pattern", "share"), [(PLAIN, 1.0), (WINDOW, 1.6), (BLOCKS, 1.0)])
def test_little_is_computed_that_is_not_seen(pattern: Pattern, share: float) -> None:
    """Ratio of the computed scores (half of a causal call's) to the visible scores."""
    q, k, v, _ = inputs(1, torch.float32, 1, 1, rows=1)
    computed = 0.0
    call = torch_attention._call

    def count(queries: Tensor, keys: Tensor, values: Tensor, which: Keys) -> tuple[Tensor, Tensor]:
        nonlocal computed
        computed += queries.shape[2] * keys.shape[2] * (0.5 if which is Keys.CAUSAL else 1.0)
        return call(queries, keys, values, which)

    documents = layout(1, rows=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_attention, "_call", count)
        attend(q, k, v, build_attention_inputs(torch.zeros(1, LENGTH), documents, pattern, "tiles", False))
    let_through = sum(pattern.span(n) * n / 2 for n in documents.lengths[0])
    # A span counts half of the scores on the edge of the visible area.
    assert 0 < dense_mask(documents.positions(), pattern, documents.ids).sum() - let_through <= LENGTH / 2
    assert computed <= share * let_through


def test_who_takes_which_kernel() -> None:
    kernels = {name: device_named(name).attention_kernel(PLAIN, "bfloat16", 128) for name in NAMES}
    assert kernels == {"cpu": "tiles", "cuda": "varlen", "hpu": "mask", "neuron": "mask"}
    # FlashAttention's kernels have no fp32, no odd heads and no blocks.
    others = [(PLAIN, "float32", 128), (PLAIN, "bfloat16", 20), (PLAIN, "bfloat16", 264), (BLOCKS, "bfloat16", 128)]
    assert {CUDA.attention_kernel(*other) for other in others} == {"tiles"}
    assert CUDA.attention_kernel(WINDOW, "bfloat16", 128) == "varlen"
    assert KERNELS.visible(torch.zeros(1, 8), None, PLAIN) is None, "plain causal attention"


@pytest.mark.usefixtures("flash")
def test_grouped_heads_in_fp32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch_attention, "takes_efficient", lambda q: True)
    monkeypatch.setattr(torch_attention, "_kernel", lambda q, mask: calls.append(q.shape) or Call.EFFICIENT)
    q, k, v, grad = inputs(1, torch.float32, 4, 2)
    expected = reference(q, k, v, grad, PLAIN, Documents.whole(2, LENGTH, q.device))
    out = CUDA.kernels(compiled=False).attend(q, k, v)
    assert off((out, *torch.autograd.grad(out, (q, k, v), grad)), expected) < 1e-6
    assert calls == [q.shape] * 2


def test_other_documents_make_no_other_graph() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(attend, backend=backend, dynamic=False, fullgraph=True)
    for seed in range(4):
        q, k, v, grad = inputs(seed, torch.float32, 4, 2)
        documents = layout(seed)
        expected = reference(q, k, v, grad, WINDOW, documents)
        out = compiled(q, k, v, build_attention_inputs(torch.zeros(2, LENGTH), documents, WINDOW, "tiles", True))
        assert off((out, *torch.autograd.grad(out, (q, k, v), grad)), expected) < 1e-6
    assert len(graphs) == 1


@pytest.mark.usefixtures("flash")
def test_the_operator_keeps_torchs_rules() -> None:
    q, k, v, _ = inputs(1, torch.float32, 4, 2)
    documents = layout(1)
    for kernel in ("tiles", "varlen"):
        offsets = documents.cu_seqlens.clone() if kernel == "varlen" else None
        arguments = (q, k, v, documents.host_cu_seqlens, offsets, kernel, [0, 0, 0, 0])
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch_attention._operator, arguments, test_utils=tests)


@pytest.mark.parametrize("call", [*Call, None])
@pytest.mark.parametrize("pattern", [PLAIN, WINDOW, BLOCKS], ids=["plain", "window", "blocks"])
def test_fake_tensors_pass(pattern: Pattern, call: Call | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors compute the shapes that rehearsals need. FlashAttention over documents also runs on an absent GPU:
    with one row, because fake copies are not supported, and a manual backward pass, because autograd needs a driver."""
    if call is None and pattern.group:
        return
    if call is not None:
        masked = Call.MATMUL if call in (Call.FLASH, Call.EFFICIENT) else call
        monkeypatch.setattr(torch_attention, "_kernel", lambda q, mask: call if mask is None else masked)
    documents, device = layout(1, rows=1), "cpu" if call else "cuda"
    with FakeTensorMode():
        q, k, v = (
            torch.empty(LENGTH, 1, n, 8, dtype=torch.bfloat16, device=device).permute(1, 2, 0, 3) for n in (4, 2, 2)
        )
        offsets = torch.empty(LENGTH + 1, dtype=torch.int32, device=device)
        kernel = "tiles" if call else "varlen"
        visible = AttentionInputs(pattern, kernel, documents.lengths, cu_seqlens=offsets)
        out, lse = torch_attention._forward(q, k, v, visible)
        grads = torch_attention._backward(torch.empty_like(out), (q, k, v, out, lse), visible)
    assert [x.shape for x in (out, *grads)] == [q.shape, q.shape, k.shape, v.shape]
    assert {x.device.type for x in (out, lse, *grads)} == {device}
    assert lse.shape == (1, 4, LENGTH) and lse.dtype == torch.float32


CHUNKED = cpu_attention.FASTER[20]


def chunked_inputs(dtype: torch.dtype, heads: int, kv_heads: int, length: int = CHUNKED) -> tuple[Tensor, ...]:
    """The root of 8, the head's size, is no power of two, so that scaled queries are no bf16 numbers."""
    return attention_inputs(dtype, heads, kv_heads, length)


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "at_once"), [(4, 2, 2**20), (6, 1, 2**20), (6, 3, 1)])
def test_chunks_are_as_exact_as_torchs_kernel(
    dtype: torch.dtype, heads: int, kv_heads: int, at_once: int, amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_attention, "SCORES", at_once)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    q, k, v, grad = chunked_inputs(dtype, heads, kv_heads)
    expected = dense_attention(q, k, v, grad, torch.ones(CHUNKED, CHUNKED, dtype=torch.bool).tril())

    def errors(out: Tensor) -> list[float]:
        actual = out, *torch.autograd.grad(out, (q, k, v), grad)
        assert {x.dtype for x in actual} == {dtype}
        return [off((one,), (other,)) for one, other in zip(actual, expected, strict=True)]

    setting = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    ours = errors(attend(q, k, v, None))
    assert torch.backends.mkldnn.matmul.fp32_precision == setting  # type: ignore[attr-defined]
    torchs = errors(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    # In fp32 both are off by roundings of sums alone, whose order is the library's.
    factor, most = (1.1, 5e-3) if dtype == torch.bfloat16 else (1.5, 1e-6)
    assert all(one < factor * other for one, other in zip(ours, torchs, strict=True)), (ours, torchs)
    assert max(ours) < most


def test_chunks_make_a_row_alone_what_it_is_beside_others() -> None:
    """Subsets of rows and heads are bit-identical, because layouts split them."""
    q, k, v, grad = chunked_inputs(torch.bfloat16, 4, 2)
    whole = attend(q, k, v, None)
    part = attend(q[1:, 2:], k[1:, 1:], v[1:, 1:], None)
    assert torch.equal(part, whole[1:, 2:])
    grads = torch.autograd.grad(whole, (q, k, v), grad), torch.autograd.grad(part, (q, k, v), grad[1:, 2:])
    for one, other, heads in zip(*grads, (2, 1, 1), strict=True):
        assert torch.equal(one[1:, heads:], other[1:, heads:])


def test_who_goes_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    def goes(length: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> bool:
        return cpu_attention.is_faster(torch.empty(1, 1, length, 8, dtype=dtype, device=device))

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(cpu_attention, "by_onednn", lambda: False)
    first, last = cpu_attention.FASTER[0], cpu_attention.FASTER[-1]
    for dtype in (torch.float32, torch.bfloat16):
        assert [goes(length, dtype) for length in (first - 1, first, last, last + 1)] == [False, True, True, False]
    monkeypatch.setattr(cpu_attention, "by_onednn", lambda: True)
    lengths = (first - 1, first, last, last + 1)
    assert [goes(length) for length in lengths] == [True, True, True, False]
    for upcast in (False, True):
        monkeypatch.setattr(cpu_attention, "in_512_bits", lambda upcast=upcast: upcast)
        assert [goes(length, torch.bfloat16) for length in lengths] == [True, True, True, upcast]
    assert not goes(1) and not goes(1, torch.bfloat16)
    assert not goes(512, torch.float16) and not goes(512, device="meta")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(cpu_attention, "by_onednn", lambda: False)
    assert [goes(length, torch.bfloat16) for length in (first - 1, last, last + 1)] == [True, True, False]
    assert not goes(first - 1), "in fp32 the units are of no use"


def test_a_graph_goes_by_chunks_where_onednn_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the lengths for which it does by MKL: the compiler sees the switch as the uncompiled code does."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    q, k, v, _ = chunked_inputs(torch.bfloat16, 4, 2, length=100)
    backend = EagerAndRecordGraphs()
    for precision in ("none", "bf16"):
        torch.backends.mkldnn.matmul.fp32_precision = precision  # type: ignore[attr-defined]
        torch._dynamo.reset()
        actual = torch.compile(attend, backend=backend, dynamic=False, fullgraph=True)(q, k, v, None)
        assert torch.equal(actual, attend(q, k, v, None))
    assert ["causal_attention" in graph.code for graph in backend.graphs] == [False, True]


def test_chunks_are_one_operator_in_a_graph_and_for_the_counter() -> None:
    q, k, v, grad = chunked_inputs(torch.bfloat16, 4, 2)
    compiled = torch.compile(attend, backend="aot_eager", dynamic=False, fullgraph=True)
    out = attend(q, k, v, None)
    actual = compiled(q, k, v, None)
    assert torch.equal(actual, out)
    with FlopCounterMode(display=False) as counter:
        grads = torch.autograd.grad(attend(q, k, v, None), (q, k, v), grad)
    assert counter.get_total_flops() == (4 + 10) * 2 * 4 * CHUNKED**2 * 8
    assert all(map(torch.equal, torch.autograd.grad(actual, (q, k, v), grad), grads))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(cpu_attention.causal_attention, (q, k, v), test_utils=tests)
    inputs = grad, *(x.detach() for x in (q, k, v))
    torch.library.opcheck(cpu_attention.causal_attention_backward, inputs, test_utils=tests)
