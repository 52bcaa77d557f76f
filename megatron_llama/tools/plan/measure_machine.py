"""What ``scripts/plan.py --calibrate`` measures on each rank: kernels, collectives, and steps of two tiny models.

Every rank measures the same things at the same time, as the ranks of a run compute at the same time, and share cores,
caches and memory. ``plan/forecast/this_machine.py`` says what follows from the numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state

from megatron_llama.config.precision import BYTES
from megatron_llama.data.batches import build_data
from megatron_llama.devices import Device
from megatron_llama.model.llama import FeedForward, RMSNorm
from megatron_llama.model.loss import _LinearCrossEntropy as LinearCrossEntropy
from megatron_llama.model.rotary import rotary_table, rotate
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan
from megatron_llama.plan.forecast.this_machine import FORMS, WIDTH
from megatron_llama.tools.steps import steps_of
from megatron_llama.topology import build_topology

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
REPEATS = 3
PRODUCTS = (
    (256, 288, 864),
    (512, 768, 288),
    (512, 512, 2752),
    (1024, 512, 1024),
    (2048, 1376, 512),
    (256, 2048, 2048),
    (512, 288, 16000),
)
LENGTHS = ((4, 128), (2, 512), (1, 1024))
"""Sequences and tokens of each, of attention."""
VOCABULARY, NARROW = 32_000, 64
"""Of an output head: as large as real ones, so that its logits are in no cache, and as narrow as can be."""
MESSAGES = (2**12, 2**17, 2**20, 2**23)
COPIED = 2**24


def best(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Seconds of ``work``: the least of some times, after a first one that is not counted. Other work on the machine
    can only add to it."""
    work()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def measure(plans: dict[str, Plan], rank: int, device: Device, torch_device: torch.device) -> dict[str, Any]:
    """All measurements of one rank. ``plans`` are those of STEPS, by name and number format, all of one layout."""
    any_plan = next(iter(plans.values()))
    topology = build_topology(any_plan, rank)
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    with process_groups(any_plan, topology, device, torch_device):
        for form in FORMS:
            dtype = DTYPES[form]
            found[form] = {
                "products": [(*shape, _product(*shape, dtype)) for shape in PRODUCTS],
                "attention": [(*shape, _attention(*shape, dtype)) for shape in LENGTHS],
                "pieces": [(tokens, _pieces(any_plan, tokens, dtype)) for tokens in (128, 512, 1024)],
                "loss": (512, NARROW, VOCABULARY, _loss(512, dtype)),
            }
        source = torch.zeros(COPIED)
        target = torch.empty_like(source)
        found["copy"] = 2 * 4 * COPIED / best(lambda: target.copy_(source))
        found["adam"] = _adam()
        if dist.get_world_size() > 1:
            found["collectives"] = {form: dict(_collectives(DTYPES[form])) for form in FORMS}
        for name, plan in plans.items():
            found.setdefault("steps", {})[name] = _step(plan, rank, device, torch_device)
    return found


def _product(rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
    """Seconds of one product, as the mean of the three of a linear layer: forward, input's and weight's gradient."""
    x, weight = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
    out = torch.randn(rows, columns, dtype=dtype)

    def three() -> None:
        torch.matmul(x, weight.t())
        torch.matmul(out, weight)
        torch.matmul(out.t(), x)

    return best(three) / 3


def _forward_backward(work: Callable[..., torch.Tensor], inputs: Iterable[torch.Tensor]) -> float:
    """Seconds of ``work`` and its backward pass."""
    leaves = [leaf.requires_grad_() for leaf in inputs]
    gradient = torch.ones_like(work(*leaves))

    def both() -> None:
        torch.autograd.grad(work(*leaves), leaves, gradient)

    return best(both)


def _attention(sequences: int, tokens: int, dtype: torch.dtype) -> float:
    """Forward and backward of causal attention with 8 heads of 64, laid out as a block has them."""
    inputs = [torch.randn(tokens, sequences, 8, 64, dtype=dtype) for _ in range(3)]

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.permute(1, 2, 0, 3) for y in qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).reshape(tokens, -1)

    return _forward_backward(attend, inputs)


def _pieces(plan: Plan, tokens: int, dtype: torch.dtype) -> float:
    """Forward and backward of what a block does between its products: norms, residuals, rotations, the activation."""
    model = replace(plan.model, hidden_size=WIDTH, num_attention_heads=8, num_key_value_heads=8, head_dim=WIDTH // 8)
    norm = RMSNorm(WIDTH, 1e-5, dtype)
    torch.nn.init.ones_(norm.weight)
    angles = rotary_table(model, tokens, torch.device("cpu"))
    stream = torch.randn(tokens, 1, WIDTH, dtype=dtype)
    heads = torch.randn(tokens, 1, 8, WIDTH // 8, dtype=dtype)
    wide = torch.randn(tokens, 1, 2 * 4 * WIDTH, dtype=dtype)
    found = 2 * _forward_backward(lambda x: x + norm(x), [stream])
    found += 2 * _forward_backward(lambda x: rotate(x, *angles), [heads])
    return found + _forward_backward(FeedForward._silu_and_multiply, [wide])


def _loss(tokens: int, dtype: torch.dtype) -> float:
    """Forward and backward of the output head and the loss, of a width so small that the loss is most of it."""
    labels, weights = torch.randint(VOCABULARY, (tokens,)), torch.ones(tokens)
    stream, table = torch.randn(tokens, 1, NARROW, dtype=dtype), torch.randn(VOCABULARY, NARROW, dtype=dtype)
    alone = parallel_state.get_tensor_model_parallel_group()

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = LinearCrossEntropy.apply(
            x, weight, labels, weights, VOCABULARY, (True, True), alone, False
        )
        return found

    return _forward_backward(loss, [stream, table])


def _adam(parameters: int = 2**22) -> float:
    """Seconds for each parameter of the gradient's norm, clipping and AdamW."""
    weights = [torch.nn.Parameter(torch.randn(parameters // 8)) for _ in range(8)]
    optimizer = torch.optim.AdamW(weights, fused=True)
    for weight in weights:
        weight.grad = torch.randn_like(weight)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    return best(update) / parameters


def _collectives(dtype: torch.dtype) -> Iterable[tuple[str, list[tuple[int, float]]]]:
    """Seconds by payload, as plan/traffic.py counts it, of each kind."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    width = BYTES[str(dtype).removeprefix("torch.")]

    def work(kind: str, size: int) -> Callable[[], Any]:
        whole, part = torch.zeros(size // width, dtype=dtype), torch.zeros(size // width // ranks, dtype=dtype)
        if kind == "all_reduce":
            return lambda: dist.all_reduce(whole)
        if kind == "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, part)
        if kind == "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(part, whole)
        other = rank ^ 1

        def ping() -> None:  # to a neighbour and back
            for sender in sorted((rank, other)):
                dist.send(whole, other) if sender == rank else dist.recv(whole, other)

        return ping

    for kind in ("all_reduce", "all_gather", "reduce_scatter", "send"):
        times = []
        for size in MESSAGES:
            call = work(kind, size)
            dist.barrier()
            times.append((size, best(call) / (2 if kind == "send" else 1)))
        yield kind, times


def _step(plan: Plan, rank: int, device: Device, torch_device: torch.device) -> float:
    """Seconds of a training step."""
    topology = build_topology(plan, rank)
    model = build_model(plan, topology, device, torch_device)
    optimizer = build_optimizer(plan, model)
    data = build_data(plan, topology, torch_device)
    with steps_of(plan, topology, model, optimizer, data) as steps:
        numbers = iter(range(1, 1000))
        return best(lambda: steps.run(next(numbers)))
