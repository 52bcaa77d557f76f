"""The global norm equals fp64's for every size, dtype and layout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_llama.devices import HOST, device_named, kernels
from megatron_llama.devices.cpu import kernels as cpu_kernels
from megatron_llama.devices.cpu.kernels import CHUNK
from megatron_llama.optim.norm import gradient_norm, parameter_norm
from megatron_llama.parallel import Shard
from tests.ranks import run_ranks

SHAPES = (3 * CHUNK // 512 + 5, 512), (700, 7), (900,)
CPU = torch.device("cpu")


class _Whole(Shard):
    """A parameter that one rank owns, in two parts."""

    def owned(self, tensor: torch.Tensor, *, every_replica: bool = False) -> Iterator[torch.Tensor]:
        yield from tensor.tensor_split(2)


def _shards(dtypes: tuple[torch.dtype, ...]) -> list[Shard]:
    generator, shards = torch.Generator().manual_seed(1), []
    for shape, dtype in zip(SHAPES, dtypes, strict=True):
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator))
        parameter.grad_dtype = None  # type: ignore[attr-defined]
        parameter.grad = torch.randn(shape, generator=generator).to(dtype)
        shards.append(_Whole("norm.weight", parameter, [], True))
    return shards


def _errors(rank: int, dtypes: tuple[torch.dtype, ...]) -> list[float]:
    """Relative errors of the gradients' and the weights' norm."""
    shards = _shards(dtypes)
    actual = gradient_norm(shards, CPU), parameter_norm(shards, CPU)
    grads, weights = [shard.grad for shard in shards], [shard.local for shard in shards]
    exact = [torch.cat([x.double().flatten() for x in tensors if x is not None]).norm() for tensors in (grads, weights)]
    return [float((norm.double() - right).abs() / right) for norm, right in zip(actual, exact, strict=True)]


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 3, (torch.bfloat16,) * 3, (torch.bfloat16, torch.float32, torch.float32)], ids=str
)
def test_it_is_exact_for_large_matrices(dtypes: tuple[torch.dtype, ...]) -> None:
    assert max(run_ranks(_errors, 1, dtypes)[0]) < 5e-7


def test_chunks_on_a_cpu_have_the_bits_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "CHUNK", 3000)
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(shape, generator=generator).bfloat16() for shape in ((61, 512), (700, 7), (2900,), (0, 5))]
    parts.append(torch.randn(4, 5000, generator=generator))
    ours, plain = (each.norms(parts) for each in (device_named(HOST).kernels(compiled=False), kernels.EAGER))
    assert torch.equal(torch.cat(ours), torch.cat(plain))
