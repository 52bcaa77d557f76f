"""Offloaded activations: gradients are equal, copies end with the backward pass. tests/layouts/ has it in layouts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_llama.model import offload
from megatron_llama.model.offload import Offload

ROTARY = torch.full((4, 1), 2.0), torch.full((4, 1), 3.0)


class Toy(nn.Module):
    """A block that saves its input, a weight and the rotary angles."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], visible: Any = None, subset: Any = None) -> Tensor:
        cos, sin = rotary
        y = (x * cos + x * sin).sin() @ self.weight
        return y.sin()


def chunk(count: int = 3, offloaded: bool = True) -> list[Toy]:
    torch.manual_seed(0)
    blocks = [Toy() for _ in range(count)]
    if offloaded:
        wrapper = Offload()
        for block in blocks:
            block.forward = wrapper.wrap(block, block.forward)  # type: ignore[method-assign]
    return blocks


def forward(blocks: list[Toy], *of_layer: Any) -> Tensor:
    x = torch.ones(4, 4, requires_grad=True)
    for block in blocks:
        x = block(x, ROTARY, None, *of_layer)
    return x.sum()


def gradients(blocks: list[Toy], passes: int = 1) -> list[Tensor | None]:
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


def test_copies_end_with_the_backward_pass(host_copies: list[weakref.ref[Any]]) -> None:
    blocks = chunk()
    loss = forward(blocks)
    assert host_copies and all(copy() is not None for copy in host_copies)
    loss.backward()
    del loss
    gc.collect()
    assert all(copy() is None for copy in host_copies), "a copy outlives its pass"


def test_copies_are_prefetched_during_the_following_block(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, runs = list[Toy](), list[int]()
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
    loss = forward(chunk(1))
    shared = len(host_copies)
    of_layer = forward(chunk(1), "a subset")
    assert len(host_copies) - shared == shared + len(ROTARY)
    loss.backward()
    of_layer.backward()


def test_nothing_moves_without_gradients(host_copies: list[weakref.ref[Any]]) -> None:
    with torch.no_grad():
        forward(chunk())
    assert not host_copies
