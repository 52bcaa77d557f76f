"""float8 matmuls against torchao's."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from megatron_llama.devices.cuda.kernels import CudaKernels
from megatron_llama.devices.kernels import Float8Operand, Kernels
from megatron_llama.model.recompute import RECOMPUTE_POLICIES, wrap_block
from megatron_llama.parallel.float8 import RECIPES, Layer, _cast, _Float8Linear

torchao = pytest.importorskip("torchao.float8", reason="torchao, the oracle, is a development dependency")


def ours(recipe: str) -> Layer:
    return Layer(RECIPES[recipe], Kernels(), True, None, False, None)


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An input [s, b, in] with outliers, a weight [out, in] and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    x, weight, grad = (torch.randn(*shape, generator=generator) for shape in ((12, 2, 48), (32, 48), (12, 2, 32)))
    x[3, 1] *= 100
    x[:, :, 5] = 0
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), grad.to(dtype) * 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_are_those_of_torchao(recipe: str, dtype: torch.dtype) -> None:
    x, weight, grad = operands(dtype)
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    theirs = torchao.float8_linear.Float8Linear.from_float(nn.Linear(48, 32, bias=False, dtype=dtype), config)
    theirs.weight = nn.Parameter(weight.detach().clone())
    copy = x.detach().clone().requires_grad_()
    expected = theirs(copy)
    expected.backward(grad)
    output = _Float8Linear.apply(x, weight, ours(recipe))
    output.backward(grad)
    assert output.equal(expected)
    assert x.grad is not None and x.grad.equal(copy.grad)
    assert weight.grad is not None and weight.grad.equal(theirs.weight.grad)


def test_a_frozen_weight_has_no_gradient() -> None:
    """Operands are divided by their scales."""
    x, weight, grad = operands(torch.float32)
    _Float8Linear.apply(x, weight.requires_grad_(False), ours("rowwise")).backward(grad)
    assert weight.grad is None and x.grad is not None
    values = torch.tensor([[1.0, -2.0], [0.5, 448.0]])
    operand = _cast(values, torch.float8_e4m3fn, ours("tensorwise"), -1, None)
    assert isinstance(operand, Float8Operand) and operand.scale.item() == 1.0
    assert (operand.data.float() / operand.scale).equal(values)


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_and_large_values_stay_finite(recipe: str) -> None:
    for values in (torch.zeros(4, 8), torch.full((4, 8), 3e38), torch.tensor([[1e-30, 3e38]] * 4)):
        assert _cast(values, torch.float8_e4m3fn, ours(recipe), -1, None).data.float().isfinite().all()


def test_the_gpu_path_has_the_arguments_of_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of rows that follow the matmul are multiplied in place: fp32 matrices would take twice its memory."""
    calls, results, multiply = [], list[torch.Tensor](), torch._scaled_mm

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, **options: object) -> torch.Tensor:
        assert a.is_contiguous() and b.t().is_contiguous()
        calls.append({name: value for name, value in options.items() if not isinstance(value, torch.Tensor)})
        results.append(multiply(a, b, **options))
        return results[-1]

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    x, weight, _ = operands(torch.bfloat16)
    for recipe, by_row in (("tensorwise", False), ("rowwise", True)):
        layer = ours(recipe)
        a = _cast(x.flatten(0, 1).detach(), torch.float8_e4m3fn, layer, -1, None)
        b = _cast(weight.t().detach(), torch.float8_e4m3fn, layer, 0, None)
        for dtype in (torch.bfloat16, torch.float32):
            for fast in (True, False):
                result = CudaKernels().float8_mm(a, b, dtype, fast)
                expected = Kernels().float8_mm(a, b, dtype)
                assert result.dtype == dtype
                torch.testing.assert_close(result, expected, rtol=2**-7, atol=0 if by_row else 2e-2)
                out = torch.bfloat16 if by_row else dtype
                assert calls[-1] == {"out_dtype": out, "use_fast_accum": fast}
                assert (result is results[-1]) == (dtype == out)


@pytest.mark.parametrize("kind", RECOMPUTE_POLICIES)
def test_compiled_blocks_do_not_recompute_matmuls(kind: str) -> None:
    """Three matmuls per layer, counted in the compiled graphs with a GPU's operators."""
    counts: list[int] = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        counts.append(sum(node.target is torch.ops.aten._scaled_mm.default for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    layer = Layer(RECIPES["tensorwise"], CudaKernels(compiled=True), True, None, False, None)

    def block(x: torch.Tensor) -> torch.Tensor:
        return _Float8Linear.apply(_Float8Linear.apply(x, weight, layer).sigmoid(), weight, layer).sin()

    x, weight = torch.randn(32, 1, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    torch.compile(wrap_block(kind, False, nn.Module(), block), backend=backend, fullgraph=True)(x).sum().backward()
    assert counts == [2, 4]
