"""Stochastic rounding is unbiased, exactly; its noise is uniform, independent and the same on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from megatron_llama.devices.cuda.kernels import CudaKernels
from megatron_llama.optim.low_precision import noise, round_stochastically, round_with_noise, start_of_noise, stream
from tests.compiled import SECONDS, needs_compiler
from tests.ranks import run_ranks

CPU = torch.device("cpu")
ALL = torch.arange(1 << 16, dtype=torch.int32)
KEYS = stream(1234, "weight", "model.norm.weight")
SHAPE = (512, 384)
# 255 degrees of freedom; five standard deviations above the mean. The noise is fixed, so this never flickers.
CHI_SQUARE_255 = 255 + 5 * (2 * 255) ** 0.5


def bits(number: int) -> float:
    """The fp32 value with these bits."""
    return torch.tensor(number, dtype=torch.int64).to(torch.int32).view(torch.float32).item()


def made(step: int, keys: tuple[int, int] = KEYS, offset: tuple[int, ...] = (0, 0), size: tuple[int, ...] = SHAPE):
    """The noise of a rectangle at a step."""
    return noise(keys, torch.tensor(step, dtype=torch.int32), offset, size, CPU)


def chi_square(cells: torch.Tensor) -> float:
    """The chi-square statistic of 256 kinds of values against equal frequencies."""
    counts = torch.bincount(cells.flatten(), minlength=256).double()
    expected = cells.numel() / 256
    assert len(counts) == 256
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "value",
    [1.0001, -1.0001, 0.02, 3.14159, 1e-4, -2.5e30, 1.9999, 1e-40, -1e-45, bits(0x3F80FFFF), bits(0x3F7F8001)],
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


def test_small_updates_are_not_lost() -> None:
    ones = torch.ones(1000)
    stochastic, nearest, exact = ones.bfloat16(), ones.bfloat16(), ones.clone()
    for step in range(10_000):
        exact += 1e-4
        nearest = (nearest.float() + 1e-4).bfloat16()
        stochastic = round_stochastically(stochastic.float() + 1e-4, made(step, size=(1000,), offset=(0,)))
    assert nearest.unique().tolist() == [1.0]
    assert exact[0].item() == pytest.approx(2.0, abs=1e-3)
    # Each value is a random walk: 10,000 steps of up to 2^-7 with probability 1e-4 * 2^7 each, so a deviation of 0.09.
    assert stochastic.float().mean().item() == pytest.approx(2.0, abs=5 * 0.09 / 1000**0.5)
    assert 0.07 < stochastic.float().std().item() < 0.11


def test_noise_is_uniform() -> None:
    for step in (0, 1, 100_000):
        values = made(step)
        assert values.dtype == torch.int32 and values.shape == SHAPE
        for cells in (values & 0xFF, values >> 8, (values >> 4) & 0xFF):
            assert chi_square(cells) < CHI_SQUARE_255
    assert chi_square(made(3, offset=(0,), size=(200_000,)) & 0xFF) < CHI_SQUARE_255


def test_noise_is_independent_of_its_neighbours() -> None:
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


def test_a_part_has_the_noise_of_the_whole() -> None:
    whole = made(5)
    for rows in pairwise((0, 100, 101, 512)):
        for columns in pairwise((0, 7, 384)):
            part = made(5, offset=(rows[0], columns[0]), size=(rows[1] - rows[0], columns[1] - columns[0]))
            assert torch.equal(part, whole[slice(*rows), slice(*columns)])
    assert torch.equal(made(5, offset=(13,), size=(20,)), made(5, offset=(0,), size=(40,))[13:33])


def test_noise_is_what_it_was() -> None:
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


def _cases() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Values, the start of their noise, and the rounded values."""
    generator = torch.Generator().manual_seed(0)
    for (size, offset), step in itertools.product(CASES, (0, 17, 1 << 24)):
        values = torch.randn(size, generator=generator)
        values.view(-1)[:2] = torch.tensor([float("inf"), float("nan")])
        expected = round_stochastically(values, made(step, offset=offset, size=size))
        yield values, torch.tensor(start_of_noise(KEYS, step, offset), dtype=torch.int32), expected


def _same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(actual.view(torch.int16), expected.view(torch.int16))


def test_rounding_in_one_function_has_the_same_bits() -> None:
    assert all(_same(round_with_noise(values, starts), expected) for values, starts, expected in _cases())


@pytest.mark.slow
@needs_compiler
def test_compiled_rounding_has_the_same_bits() -> None:
    """The function that CUDA compiles, here by Inductor's C++."""
    assert run_ranks(_compiled_is_equal, 1, timeout=SECONDS) == [True]


def _compiled_is_equal(_: int) -> bool:
    fused = CudaKernels(compiled=True).fuse(round_with_noise)
    assert fused is not None
    return all(_same(fused(values, starts), expected) for values, starts, expected in _cases())
