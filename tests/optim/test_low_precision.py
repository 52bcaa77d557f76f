"""The optimizer without master weights: bitwise equal to torch's update, then rounded once. Stochastic rounding is
unbiased, exactly; its noise is uniform and independent. test_layouts.py compares layouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx

from megatron_llama.arch.hf_tp_mapping import Rectangle
from megatron_llama.config.optimizers import OPTIMIZERS
from megatron_llama.devices.cpu.kernels import CpuKernels
from megatron_llama.devices.cuda.kernels import CudaKernels
from megatron_llama.devices.kernels import EAGER, Kernels
from megatron_llama.optim.adam import adam_update, adamw_update
from megatron_llama.optim.low_precision import (
    ElementwiseOptimizer,
    noise,
    round_stochastically,
    round_with_noise,
    sgd_update,
    start_of_noise,
    stream,
)
from tests.compiled import SECONDS, needs_compiler
from tests.optim.given_gradients import elementwise_inputs
from tests.oracle import CPU
from tests.ranks import run_ranks

SEED, STEPS = 99, 3
SHAPE = (40, 33)
GROUP = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9}
TORCH: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW([p], 0.01, (0.9, 0.95), 1e-8, 0.1, foreach=False),
    "adam": lambda p: torch.optim.Adam([p], 0.01, (0.9, 0.95), 1e-8, 0.1, foreach=False),
    "sgd": lambda p: torch.optim.SGD([p], 0.01, 0.9, weight_decay=0.1, foreach=False),
}
FORMULAS = {"adamw": adamw_update, "adam": adam_update, "sgd": sgd_update}
# Two rectangles of two tensors, as the merged projections have them; the second is not at its tensor's corner.
PIECES = [Rectangle("a", (30, 33), (0, 0), (0, 0), (30, 33)), Rectangle("b", (50, 66), (5, 33), (30, 0), (10, 33))]


def rounded(values: torch.Tensor, kind: str, step: int) -> torch.Tensor:
    """The expected rounding of a tensor that consists of PIECES."""
    number = torch.tensor(step, dtype=torch.int32)
    noises = [noise(stream(SEED, kind, p.name), number, p.offset, p.size, CPU) for p in PIECES]
    return round_stochastically(values, torch.cat(noises))


def elementwise(name: str, weight: torch.nn.Parameter, **settings: Any) -> ElementwiseOptimizer:
    """The optimizer of one weight, which consists of PIECES."""
    inputs = elementwise_inputs(weight, name, PIECES, seed=SEED, **settings)
    return ElementwiseOptimizer(inputs, FORMULAS[name], **GROUP)


@pytest.mark.parametrize("block", [1 << 16, 330])
@pytest.mark.parametrize("moments", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("stochastic", [True, False])
def test_before_rounding_it_is_torchs(
    name: str, moments: torch.dtype, stochastic: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuKernels, "rows_at_once", lambda kernels, width: block // width)
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(SHAPE, generator=generator).bfloat16())
    states = OPTIMIZERS[name].states
    ours = elementwise(name, weight, state_dtype=moments, stochastic=stochastic)
    factor = torch.tensor(0.37)
    for step in range(STEPS):
        gradient = torch.randn(SHAPE, generator=generator).bfloat16()
        reference = torch.nn.Parameter(weight.detach().float())
        theirs = TORCH[name](reference)
        theirs.state[reference] = {kind: ours.state[weight][kind].float().clone() for kind in states}
        theirs.state[reference]["step"] = torch.tensor(float(step))
        reference.grad = gradient.float() * factor  # clipped in fp32: once rounded, not twice
        theirs.step()
        weight.grad = gradient.clone()
        ours.step(factor=factor, skip=[None, torch.tensor(False)][step % 2])
        assert torch.equal(weight.grad, gradient)
        pairs = [("weight", weight.detach(), reference.detach())]
        pairs += [(kind, ours.state[weight][kind], theirs.state[reference][kind]) for kind in states]
        for kind, actual, exact in pairs:
            if actual.dtype == torch.float32:
                assert torch.equal(actual, exact), kind
            else:
                assert torch.equal(actual, rounded(exact, kind, step) if stochastic else exact.bfloat16()), kind
                assert not torch.equal(actual.float(), exact), "nothing was rounded, so nothing was tested"
    assert ours.state[weight]["step"] == STEPS
    before = [tensor.clone() for tensor in (weight, *ours.state[weight].values())]
    weight.grad = torch.full_like(weight, torch.nan)
    ours.step(factor=factor, skip=torch.tensor(True))
    ours.revert_step_count()
    weight.grad = None
    ours.revert_step_count()  # of no weight
    assert all(map(torch.equal, before, (weight, *ours.state[weight].values()))), "skipped"


class Fusing(Kernels):
    """Kernels that round a rectangle in one function, and count its calls."""

    calls = 0

    def fuse(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counted(*tensors: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return function(*tensors)

        return counted


@pytest.mark.parametrize("block", [1 << 16, 330])
def test_rounding_in_one_function_gives_the_same_weights(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results, kernels = [], [EAGER, Fusing()]
    monkeypatch.setattr(Kernels, "rows_at_once", lambda _, width: max(1, block // width))
    for kernel in kernels:
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(40, 33, generator=generator).bfloat16())
        optimizer = elementwise("adamw", weight, state_dtype=torch.bfloat16, stochastic=True, kernels=kernel)
        for _ in range(3):
            weight.grad = torch.randn(40, 33, generator=generator).bfloat16()
            optimizer.step()
        results.append([weight.detach(), *(optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq"))])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert isinstance(kernels[1], Fusing) and kernels[1].calls == 3 * 3 * (2 if block == 1 << 16 else 4)


ALL = torch.arange(1 << 16, dtype=torch.int32)
KEYS = stream(1234, "weight", "model.norm.weight")
NOISE_SHAPE = (512, 384)
# 255 degrees of freedom; five standard deviations above the mean. The noise is fixed, so this never flickers.
CHI_SQUARE_255 = 255 + 5 * (2 * 255) ** 0.5


def bits(number: int) -> float:
    """The fp32 value with these bits."""
    return torch.tensor(number, dtype=torch.int64).to(torch.int32).view(torch.float32).item()


def made(
    step: int, keys: tuple[int, int] = KEYS, offset: tuple[int, ...] = (0, 0), size: tuple[int, ...] = NOISE_SHAPE
):
    """The noise of a rectangle at a step."""
    return noise(keys, torch.tensor(step, dtype=torch.int32), offset, size, CPU)


def chi_square(cells: torch.Tensor) -> float:
    """The chi-square statistic of 256 kinds of values against equal frequencies."""
    counts = torch.bincount(cells.flatten(), minlength=256).double()
    expected = cells.numel() / 256
    assert len(counts) == 256
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "value", [1.0001, -1.0001, 0.02, 3.14159, 1e-4, -2.5e30, 1.9999, 1e-40, -1e-45, bits(0x3F80FFFF), bits(0x3F7F8001)]
)
def test_the_mean_over_all_noises_is_the_value(value: float) -> None:
    exact = torch.tensor(value)
    rounded = round_stochastically(exact.expand(1 << 16).contiguous(), ALL)
    assert rounded.dtype == torch.bfloat16
    assert rounded.double().mean() == exact.double()  # no tolerance: the sum of so many bf16 values fits float64
    low, high = rounded.float().min(), rounded.float().max()
    assert low <= exact <= high and len(rounded.unique()) == 2  # its two neighbours, nothing else


def test_what_bf16_holds_stays_and_what_is_no_number_passes() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).bitwise_left_shift(16).view(torch.float32)  # all of bf16
    for amount in (0, 1, 65535):
        rounded = round_stochastically(every, torch.full_like(ALL, amount))
        same = (rounded.float().view(torch.int32) == every.view(torch.int32)) | (every.isnan() & rounded.isnan())
        assert same.all()
    payloads = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -8388607], dtype=torch.int32).view(torch.float32)  # NaNs
    assert round_stochastically(payloads, torch.full((4,), 65535, dtype=torch.int32)).isnan().all()


def test_noise_is_uniform_and_independent() -> None:
    for step in (0, 1, 100_000):
        values = made(step)
        assert values.dtype == torch.int32 and values.shape == NOISE_SHAPE
        for cells in (values & 0xFF, values >> 8, (values >> 4) & 0xFF):
            assert chi_square(cells) < CHI_SQUARE_255
    assert chi_square(made(3, offset=(0,), size=(200_000,)) & 0xFF) < CHI_SQUARE_255
    values = made(7)
    others = {
        "next row": values.roll(1, 0),
        "next column": values.roll(1, 1),
        "row and column exchanged": made(7, size=(384, 512)).T,
        "next step": made(8),
        "a power of two of steps later": made(7 + 1024),
        "another tensor": made(7, stream(1234, "weight", "lm_head.weight")),
        "another moment": made(7, stream(1234, "exp_avg", "model.norm.weight")),
        "another seed": made(7, stream(1235, "weight", "model.norm.weight")),
    }
    for name, other in others.items():
        for shift in (0, 12):  # the lowest and the highest four bits of both: all 256 pairs equally often
            pairs = ((values >> shift) & 15) * 16 + ((other >> shift) & 15)
            assert chi_square(pairs) < CHI_SQUARE_255, name
    # Over four corners: hashes of row and column that are only combined by xor would cancel.
    corners = [values, values.roll(1, 0), values.roll(1, 1), values.roll((1, 1), (0, 1))]
    assert chi_square((corners[0] ^ corners[1] ^ corners[2] ^ corners[3]) & 0xFF) < CHI_SQUARE_255


def test_noise_is_that_of_older_versions_and_of_the_whole() -> None:
    whole = made(5)
    for rows in pairwise((0, 100, 101, 512)):
        for columns in pairwise((0, 7, 384)):
            part = made(5, offset=(rows[0], columns[0]), size=(rows[1] - rows[0], columns[1] - columns[0]))
            assert torch.equal(part, whole[slice(*rows), slice(*columns)])
    assert torch.equal(made(5, offset=(13,), size=(20,)), made(5, offset=(0,), size=(40,))[13:33])
    # A resumed run must use the noise of the program that started it. This implementation uses unsigned integers,
    # as the definition does.
    assert KEYS == (1760943426, 1998540192)

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    for keys in (KEYS, (-5, -(2**31))):
        first, second = (mix(key % 2**32 ^ 70_000) for key in keys)
        rows = [mix((first + row) % 2**32) for row in range(2**31 - 2, 2**31)]
        columns = [mix((second + column) % 2**32) for column in range(40, 43)]
        expected = [[mix(row ^ column) & 0xFFFF for column in columns] for row in rows]
        assert made(70_000, keys, offset=(2**31 - 2, 40), size=(2, 3)).tolist() == expected
        line = [mix(mix((first + place) % 2**32) ^ mix(second)) & 0xFFFF for place in range(5, 9)]
        assert made(70_000, keys, offset=(5,), size=(4,)).tolist() == line


def test_one_graph_for_all_steps() -> None:
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def rounded(values: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return round_stochastically(values, noise(KEYS, step, (0, 0), (8, 16), CPU))

    values = torch.rand(8, 16)
    for step in range(4):
        number = torch.tensor(step, dtype=torch.int32)
        assert torch.equal(rounded(values, number), round_stochastically(values, made(step, size=(8, 16))))
    assert counter.frame_count == 1


CASES = [((40, 24), (7, 5)), ((3, 24), (1 << 20, 0)), ((50,), (9,)), ((64, 32), (0, 0))]


def _cases() -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
    """The inputs of ``round_with_noise``, and the rounded values."""
    generator = torch.Generator().manual_seed(0)
    for (size, offset), step in itertools.product(CASES, (0, 17, 1 << 24)):
        values = torch.randn(size, generator=generator)
        values.view(-1)[:2] = torch.tensor([float("inf"), float("nan")])
        expected = round_stochastically(values, made(step, offset=offset, size=size))
        starts = torch.tensor(start_of_noise(KEYS, step, offset), dtype=torch.int32)
        yield (values, starts, *(torch.arange(count, dtype=torch.int32) for count in size)), expected


def _same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(actual.view(torch.int16), expected.view(torch.int16))


def test_rounding_in_one_function_has_the_same_bits() -> None:
    assert all(_same(round_with_noise(*inputs), expected) for inputs, expected in _cases())


def test_a_compiler_does_not_make_the_numbers_of_rows() -> None:
    """Inductor of torch 2.11 makes int64 of them on CUDA, if their count is dynamic."""
    inputs, _ = next(_cases())
    assert "arange" not in str(make_fx(round_with_noise)(*inputs).graph)


@pytest.mark.slow
@needs_compiler
def test_compiled_rounding_has_the_same_bits() -> None:
    """The function that CUDA compiles, here by Inductor's C++."""
    assert run_ranks(_compiled_is_equal, 1, timeout=SECONDS) == [True]


def _compiled_is_equal(_: int) -> bool:
    fused = CudaKernels(compiled=True).fuse(round_with_noise)
    assert fused is not None
    return all(_same(fused(*inputs), expected) for inputs, expected in _cases())
