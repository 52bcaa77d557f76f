"""The C++ loops of exact mode have the bits of torch's operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_llama.devices import get_device
from megatron_llama.devices.cpu import kernels as cpu_kernels
from megatron_llama.devices.kernels import EAGER, AdamHyperparameters

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
    largest = KERNELS.add_to_grid_(torch.zeros(3, 21, dtype=torch.int64), values, BITS)
    assert not largest.isfinite()


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
