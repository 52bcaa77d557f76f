"""Recomputation changes the saved tensors and no gradient (tests/layouts/test_layouts.py)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_llama.model import mlp_chunks, offload, recompute
from megatron_llama.model.offload import Offload
from megatron_llama.model.recompute import _policy, recomputable, wrap_block
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from tests.oracle import make_plan, on_ranks_by_plan, rank_groups, rank_model
from tests.ranks import run_ranks

S, B, H, F_, HEADS, KV, D = 16, 2, 32, 64, 4, 2, 8
NORMS, QKV, OUT, GATE_UP = 2 * S * B, S * B * (HEADS + 2 * KV) * D, S * B * HEADS * D, 2 * S * B * F_
LSE, RESIDUAL, ROTATED = S * B * HEADS, S * B * H, S * B * (HEADS + KV) * D
SAVED = {  # values that a block's graph holds, without its input and its output
    "full": 0,
    "selective": NORMS + QKV + OUT + RESIDUAL + GATE_UP,
    "elementwise": NORMS + QKV + OUT + LSE + RESIDUAL + GATE_UP,
    # and the outputs of both norms, rotated queries and keys, silu, SwiGLU; here merged heads are a view
    "none": NORMS + QKV + OUT + LSE + RESIDUAL + GATE_UP + 2 * RESIDUAL + ROTATED + 2 * S * B * F_,
}


def test_operators_whose_results_a_compiled_block_saves() -> None:
    gather, attend = (SimpleNamespace(namespace=each, tags=[]) for each in ("_c10d_functional", "megatron_llama"))
    aten = torch.ops.aten
    sdpa = aten._scaled_dot_product_flash_attention.default  # has the tag of random operators
    operators = aten.mm.default, gather, aten.native_dropout.default, attend, sdpa, aten.silu.default
    for saves, last in ((True, "MUST_SAVE"), (False, "MUST_RECOMPUTE")):
        names = [_policy(saves, None, operator).name for operator in operators]
        assert names == ["PREFER_SAVE", "PREFER_SAVE", "MUST_SAVE", last, last, "MUST_RECOMPUTE"]


CASES: dict[str, tuple[str, bool, int]] = {
    **{kind: (f"trainer.recompute={kind}", False, values) for kind, values in SAVED.items()},
    "MLP chunks save the input only": ("trainer.mlp_chunks=2", False, SAVED["none"] - GATE_UP - 2 * S * B * F_),
    # Merged heads are recomputed where they are a copy.
    "heads first": ("trainer.recompute=elementwise", True, NORMS + OUT + RESIDUAL + GATE_UP),
}
"""Setting, whether attention's output has its heads first, and the saved values."""


def test_saved_values_of_a_block() -> None:
    plans = [(make_plan(1, setting), heads_first) for setting, heads_first, _ in CASES.values()]
    saved = dict(zip(CASES, run_ranks(_saved_values, 1, plans)[0], strict=True))
    assert saved == {name: expected for name, (*_, expected) in CASES.items()}


def _saved_values(rank: int, plans: list[tuple[Plan, bool]]) -> list[int]:
    """Return the number of fp32 values of storages that a block's forward pass allocates and that outlive it.

    With ``heads_first`` attention is an operator that saves its output, whose memory is [b, heads, s, d].
    """
    results = []
    with rank_groups(plans[0][0], rank):
        for plan, heads_first in plans:
            chunk = rank_model(plan, rank).chunks[0]
            inputs = chunk.build_inputs(torch.zeros(B, S, dtype=torch.int64))
            x = torch.randn(S, B, H, requires_grad=True)
            if heads_first:
                chunk.layers["1"].self_attn.attend = lambda q, k, v, visible: q.contiguous().exp()
            with _Storages() as storages:
                y = chunk.layers["1"](x, *inputs.of(1))
            (y * y).sum().backward()  # the graph lives until here
            results.append(storages.values_at_exit - y.numel())
    return results


class _Storages(TorchDispatchMode):
    """Counter of the values of storages that operators allocate inside the context and that are alive at its end."""

    def __enter__(self) -> _Storages:
        self._made: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        self._made.update(
            leaf.untyped_storage()
            for leaf in tree_leaves(out)
            if isinstance(leaf, Tensor) and leaf.untyped_storage() not in before
        )
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.values_at_exit = sum(storage.nbytes() for storage in self._made) // 4


@recomputable
def double(x: Tensor) -> Tensor:
    return 2 * x


@recomputable
def columns(x: Tensor) -> Tensor:
    """A tensor whose memory is not in the order of its dimensions."""
    return (3 * x).t()


@recomputable
def reshaped(x: Tensor) -> Tensor:
    """A view of its input."""
    return x.view(-1)


class Toy(nn.Module):
    """A block whose forward is a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.forward = wrap_block("elementwise", False, self, self.forward)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[no-any-return]


def gradient(function: Any, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    function(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def views(x: Tensor) -> Tensor:
    """Saves views of a recomputed tensor: parts, transposed, with strides and offsets."""
    y = columns(x * x)
    first, second = y.chunk(2, dim=1)
    return first.t()[1:, ::2] * second.t()[1:, ::2] * y[0, 3]


def chained(x: Tensor) -> Tensor:
    """Recomputed tensors inside a recomputed function, and from one another."""
    return double(double(x * x).sin()).sin() * columns(x).t()


def freed(x: Tensor) -> Tensor:
    """Recipes of outputs that are freed at once: the allocator reuses their memory for later tensors."""
    for _ in range(50):
        double(x.detach())
    total = x
    for _ in range(50):
        total = total.sin() * x
    return total


def viewed_input(x: Tensor) -> Tensor:
    return reshaped(x.exp()).sin() * double(x).view(-1)


@pytest.mark.parametrize("function", [views, chained, freed, viewed_input])
def test_saved_tensors_are_recomputed_exactly(function: Any) -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(gradient(Toy(function), x), gradient(function, x))


def test_a_view_of_an_input_is_saved_unchanged() -> None:
    packed = _packed(lambda x: reshaped(x * x).sin())
    assert packed and all(isinstance(saved, Tensor) for saved in packed)
    assert any(not isinstance(saved, Tensor) for saved in _packed(lambda x: double(x).sin()))


def _packed(function: Any) -> list[Any]:
    """Return all objects that autograd stores in a forward pass."""
    packed, pack = [], recompute._Recipes.pack

    def observed(recipes: recompute._Recipes, tensor: Tensor) -> Any:
        packed.append(pack(recipes, tensor))
        return packed[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute._Recipes, "pack", observed)
        Toy(function)(torch.randn(4, 4, requires_grad=True))
    return packed


def test_recipes_end_with_the_block() -> None:
    held: list[weakref.ref[Tensor]] = []

    def unsaved(x: Tensor) -> Tensor:
        inner = x.detach() + 1
        held.append(weakref.ref(inner))
        return x.sin() + double(inner)  # an addition saves nothing

    output = Toy(unsaved)(torch.randn(4, requires_grad=True))
    assert held[0]() is None, "a recipe holds the input of a function whose output is not saved"
    assert recompute._recipes is None
    with pytest.raises(ZeroDivisionError):
        Toy(lambda x: 1 / 0)(output)
    assert recompute._recipes is None, "also after an error"


def test_no_recipes_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute._Recipes, "add", lambda *_: pytest.fail("recorded"))
    with torch.no_grad():
        Toy(double)(torch.ones(2))
    double(torch.ones(2, requires_grad=True)).sum().backward()  # outside of a block


def test_a_module_is_recomputed_through_its_hooks() -> None:
    """Profiles and rehearsals use these hooks to attribute work to modules."""

    class Norm(nn.Module):
        @recomputable
        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(x, x.shape[-1:])

    norm, calls = Norm(), list[bool]()
    norm.register_forward_hook(lambda *_: calls.append(torch._C._current_autograd_node() is not None))
    gradient(Toy(lambda x: norm(x).sin()), torch.randn(2, 4))
    assert calls == [False, True]


ROTARY = torch.full((4, 1), 2.0), torch.full((4, 1), 3.0)


class OffloadedToy(nn.Module):
    """A block that saves its input, a weight and the rotary angles."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], visible: Any = None, subset: Any = None) -> Tensor:
        cos, sin = rotary
        y = (x * cos + x * sin).sin() @ self.weight
        return y.sin()


def chunk(count: int = 3, offloaded: bool = True) -> list[OffloadedToy]:
    torch.manual_seed(0)
    blocks = [OffloadedToy() for _ in range(count)]
    if offloaded:
        wrapper = Offload()
        for block in blocks:
            block.forward = wrapper.wrap(block, block.forward)  # type: ignore[method-assign]
    return blocks


def forward(blocks: list[OffloadedToy], *of_layer: Any) -> Tensor:
    x = torch.ones(4, 4, requires_grad=True)
    for block in blocks:
        x = block(x, ROTARY, None, *of_layer)
    return x.sum()


def gradients(blocks: list[OffloadedToy], passes: int = 1) -> list[Tensor | None]:
    for loss in [forward(blocks) for _ in range(passes)]:  # as in a pipeline, forward passes come first
        loss.backward()
    return [block.weight.grad for block in blocks]


@pytest.fixture
def host_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """Weak references to all host copies."""
    copies: list[weakref.ref[Any]] = []
    initialize = offload._HostCopy.__init__

    def observed(self: Any, storage: Tensor, stream: Any) -> None:
        copies.append(weakref.ref(self))
        initialize(self, storage, stream)

    monkeypatch.setattr(offload._HostCopy, "__init__", observed)
    yield copies


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_are_bit_identical(passes: int) -> None:
    expected = gradients(chunk(offloaded=False), passes)
    for ours, plain in zip(gradients(chunk(), passes), expected, strict=True):
        assert ours is not None and plain is not None and torch.equal(ours, plain)


def test_tensors_of_another_device_stay() -> None:
    """torch 2.11's attention kernels save random states on the host."""
    block = offload._BlockOffload(OffloadedToy(), (), torch.device("cpu"), None)
    assert (state := torch.empty(2, device="meta")) is block.pack(state) and not block.copies


def test_copies_end_with_the_backward_pass(host_copies: list[weakref.ref[Any]]) -> None:
    blocks = chunk()
    loss = forward(blocks)
    assert host_copies and all(copy() is not None for copy in host_copies)
    loss.backward()
    del loss
    gc.collect()
    assert all(copy() is None for copy in host_copies), "a copy outlives its pass"


def test_copies_are_prefetched_during_the_following_block(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, runs = list[OffloadedToy](), list[int]()
    copies: dict[int, list[Any]] = {}
    run = Offload._run

    def observed(self: Offload, block: Any, *args: Any) -> Tensor:
        output = run(self, block, *args)
        last = self._last()
        assert last is not None
        copies[blocks.index(block)] = list(last.copies.values())
        return output

    monkeypatch.setattr(Offload, "_run", observed)
    blocks += chunk()
    loss = forward(blocks)
    for number, block in enumerate(blocks):
        block.weight.register_hook(lambda _, number=number: runs.append(number))
    blocks[1].weight.register_hook(
        lambda _: runs.extend(10 for copy in copies[0] if copy.device_copy is not None)  # block 0 has not run backward
    )
    loss.backward()
    assert runs[:2] == [2, 1] and runs.count(10) == len(copies[0]) > 0 and runs[-1] == 0


def test_shared_inputs_stay_and_layer_inputs_move(host_copies: list[weakref.ref[Any]]) -> None:
    """Without gradients, all stays on the device."""
    with torch.no_grad():
        forward(chunk())
    assert not host_copies
    loss = forward(chunk(1))
    shared = len(host_copies)
    of_layer = forward(chunk(1), "a subset")
    assert len(host_copies) - shared == shared + len(ROTARY)
    loss.backward()
    of_layer.backward()


class _Matmuls(TorchDispatchMode):
    """Recorder of the tokens in each product with gate_up_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and out.shape[-1] == 2 * F_ and out.shape[0] != H:
            self.rows.append(out.shape[0])
        return out


def test_each_chunk_runs_twice() -> None:
    """In the forward and in the backward pass, also in blocks that are recomputed."""
    kinds = ("none", "elementwise", "full")
    plans = [make_plan(1, f"trainer.recompute={kind}", "trainer.mlp_chunks=4") for kind in kinds]
    assert on_ranks_by_plan(_rows_of_matmuls, plans)[0] == [[B * S // 4] * 8] * 3


def _rows_of_matmuls(plan: Plan, model: ParallelModel) -> list[int]:
    inputs = model.chunks[0].build_inputs(torch.zeros(B, S, dtype=torch.int64))
    with _Matmuls() as matmuls:
        model.chunks[0].layers["1"](torch.randn(S, B, H, requires_grad=True), *inputs.of(1)).sum().backward()
    return matmuls.rows


def test_gradients_of_bf16_are_summed_in_fp32() -> None:
    grads = [torch.full((1,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    sums: list[torch.Tensor] = []
    for grad in grads:
        sums = mlp_chunks._added(sums, [grad])
    assert sums[0].item() == 258.0  # bf16 has 8 bits: 256 + 1 is 256
