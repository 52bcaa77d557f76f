"""Measurements of ``scripts/plan.py --calibrate``: kernels, collectives, and steps of two tiny models.

All ranks measure concurrently, because the ranks of a run share cores, caches and memory.
``tools/forecast/this_machine.py`` derives forecasts from the results.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_llama import cli
from megatron_llama.devices import HOST, Device, get_device
from megatron_llama.launch.world import find_world
from megatron_llama.model.loss import LossSpec
from megatron_llama.model.loss import _LinearCrossEntropy as LinearCrossEntropy
from megatron_llama.model.rms_norm import RMSNorm
from megatron_llama.model.rotary import rotary_table, rotate
from megatron_llama.parallel import process_groups
from megatron_llama.plan import Plan
from megatron_llama.system.files import write_atomically
from megatron_llama.system.progress import ProgressBar
from megatron_llama.system.tables import plural
from megatron_llama.tools.common import MOCK_RUN
from megatron_llama.tools.forecast import this_machine
from megatron_llama.tools.forecast.this_machine import COLLECTIVES, FORMS, OVERLAPPED, RANKS, STEPS, WIDTH, Calibration
from megatron_llama.tools.measured_steps import build_steps, rank_results

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS = 5
ROUND_SECONDS = 0.01
"""Minimum length of a round. In shorter ones, ranks that share a core might not run concurrently."""
GEMMS = (
    (256, 288, 864),
    (512, 768, 288),
    (512, 512, 2752),
    (1024, 512, 1024),
    (2048, 1376, 512),
    (256, 2048, 2048),
    (512, 288, 16000),
)
"""Shapes (rows, inner, columns) of the measured GEMMs."""
LENGTHS = ((4, 128), (2, 512), (1, 1024))  # (sequences, tokens per sequence) of the attention measurements
VOCABULARY, HEAD_WIDTH = 32_000, 64  # output head whose logits exceed the caches, with a small hidden size
MESSAGES = (2**12, 2**17, 2**20, 2**23)  # payloads of the measured collectives, bytes
GEMM_SHAPE = (512, 288, 768)
"""GEMM between two collectives. It takes some milliseconds, as in a small model."""
OVERLAPPED_GEMMS = 4  # GEMMs that run concurrently with an overlapped collective
COLLECTIVES_PER_ROUND = 4
COLLECTIVE_ROUNDS = 3
MIN_SHARE = 0.01  # lower bound of a collective's share of a round, against noise
CACHE_BYTES = 2**25  # total size of the buffers that alternate, so that they leave the caches as in a step
COPIED = 2**24  # elements of the copy that measures memory bandwidth
MEASUREMENTS = len(FORMS) * (len(GEMMS) + len(LENGTHS) + 4) + 2 + len(STEPS) * len(FORMS)
"""Measurements per rank, without collectives."""


def median_seconds(work: Callable[[], Any], times: int | None = None) -> float:
    """Return the seconds of ``work``: the median of ROUNDS rounds after one warm-up call.

    The median is used because a step is the sum of many such operations.

    Args:
        times: calls per round. None: as many as fill ROUND_SECONDS, which differs between ranks; not for collectives.
    """
    work()
    if times is None:
        times = max(1, math.ceil(ROUND_SECONDS / max(_seconds(work, 1), 1e-6)))
    return statistics.median(_seconds(work, times) for _ in range(ROUNDS))


def _seconds(work: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


def measure(
    plans: dict[str, Plan], rank: int, device: Device, torch_device: torch.device, done: Callable[[], None]
) -> dict[str, Any]:
    """Run all measurements of one rank and return them by name. ``done`` is called after each measurement.

    ``plans`` are the plans of STEPS by name and number format, all of the same layout.
    """
    any_plan = next(iter(plans.values()))
    topology = any_plan.topology(rank)
    results: dict[str, Any] = {"threads": torch.get_num_threads()}
    with process_groups(any_plan, topology, device, torch_device):

        def counted(seconds: float) -> float:
            done()
            return seconds

        for form in FORMS:
            dtype = DTYPES[form]
            results[form] = {
                "products": [(*shape, counted(_gemm(*shape, dtype))) for shape in GEMMS],
                "attention": [(*shape, counted(_attention(*shape, dtype))) for shape in LENGTHS],
                "pieces": [(tokens, counted(_elementwise(any_plan, tokens, dtype))) for tokens in (128, 512, 1024)],
                "loss": (512, HEAD_WIDTH, VOCABULARY, counted(_loss(512, dtype))),
            }
        source = torch.zeros(COPIED)
        target = torch.empty_like(source)
        results["copy"] = 2 * 4 * COPIED / counted(median_seconds(lambda: target.copy_(source)))
        results["adam"] = counted(_adam())
        if dist.get_world_size() > 1:
            results["collectives"] = _collectives(counted)
        for name, plan in plans.items():
            results.setdefault("steps", {})[name] = counted(_step(plan, rank, device, torch_device))
    return results


def _gemm(rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
    """Return the mean seconds of the three GEMMs of a linear layer: output, input gradient, weight gradient."""
    x, weight = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
    out = torch.randn(rows, columns, dtype=dtype)

    def linear() -> None:
        torch.matmul(x, weight.t())
        torch.matmul(out, weight)
        torch.matmul(out.t(), x)

    return median_seconds(linear) / 3


def _forward_backward(work: Callable[..., torch.Tensor], inputs: Iterable[torch.Tensor]) -> float:
    """Return the seconds of ``work`` and its backward pass."""
    leaves = [leaf.requires_grad_() for leaf in inputs]
    gradient = torch.ones_like(work(*leaves))

    def both() -> None:
        torch.autograd.grad(work(*leaves), leaves, gradient)

    return median_seconds(both)


def _attention(sequences: int, tokens: int, dtype: torch.dtype) -> float:
    """Return the forward and backward seconds of causal attention with 8 heads of size 64, in a block's layout."""
    inputs = [torch.randn(tokens, sequences, 8, 64, dtype=dtype) for _ in range(3)]

    def core(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.permute(1, 2, 0, 3) for y in qkv)
        return get_device(HOST).kernels(compiled=False).attend(q, k, v).permute(2, 0, 1, 3).reshape(tokens, -1)

    return _forward_backward(core, inputs)


def _elementwise(plan: Plan, tokens: int, dtype: torch.dtype) -> float:
    """Return the forward and backward seconds of a block's elementwise operations."""
    model = replace(plan.model, hidden_size=WIDTH, num_attention_heads=8, num_key_value_heads=8, head_dim=WIDTH // 8)
    norm = RMSNorm(WIDTH, 1e-5, dtype)
    torch.nn.init.ones_(norm.weight)
    angles = rotary_table(model, tokens, torch.device(HOST))
    stream = torch.randn(tokens, 1, WIDTH, dtype=dtype)
    heads = torch.randn(tokens, 1, 8, WIDTH // 8, dtype=dtype)
    gate_up = torch.randn(tokens, 1, 2 * 4 * WIDTH, dtype=dtype)
    seconds = 2 * _forward_backward(lambda x: x + norm(x), [stream])
    seconds += 2 * _forward_backward(lambda x: rotate(x, *angles), [heads])

    def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    return seconds + _forward_backward(silu_and_multiply, [gate_up])


def _loss(tokens: int, dtype: torch.dtype) -> float:
    """Return the forward and backward seconds of output head and loss, mostly of the loss."""
    labels, weights = torch.randint(VOCABULARY, (tokens,)), torch.ones(tokens)
    stream = torch.randn(tokens, 1, HEAD_WIDTH, dtype=dtype)
    head = torch.randn(VOCABULARY, HEAD_WIDTH, dtype=dtype)
    spec = LossSpec(VOCABULARY, None, sequence_parallel=False)

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = LinearCrossEntropy.apply(x, weight, labels, weights, spec)
        return value

    return _forward_backward(loss, [stream, head])


def _adam(parameters: int = 2**22) -> float:
    """Return the seconds per parameter of gradient norm, clipping and AdamW."""
    weights = [torch.nn.Parameter(torch.randn(parameters // 8)) for _ in range(8)]
    optimizer = torch.optim.AdamW(weights, fused=True)
    for weight in weights:
        weight.grad = torch.randn_like(weight)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    return median_seconds(update) / parameters


def _collectives(counted: Callable[[float], float]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return (payload, seconds) of each kind of collective, blocking and overlapped.

    Payloads are counted as in tools/forecast/traffic.py.
    """
    seconds_of: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for mode, kinds in COLLECTIVES.items():
        for kind in kinds:
            times = []
            for size in MESSAGES:
                seconds = _added_seconds(_collective(kind, size), mode == OVERLAPPED)
                times.append((size, counted(seconds / (2 if kind == "send" else 1))))
            seconds_of.setdefault(mode, {})[kind] = times
    return seconds_of


def _collective(kind: str, size: int) -> Callable[[], dist.Work | None]:
    """Return a function that starts a collective of ``size`` bytes. ``send`` is a blocking round trip to a neighbor."""
    ranks, rank, count = dist.get_world_size(), dist.get_rank(), size // 4
    pairs = range(min(2 * COLLECTIVES_PER_ROUND, max(2, CACHE_BYTES // size)))
    buffers = itertools.cycle([(torch.zeros(count), torch.zeros(count)) for _ in pairs])
    other = rank ^ 1

    def start() -> dist.Work | None:
        whole, more = next(buffers)
        part = more[: count // ranks]
        if kind == "all_reduce":
            return dist.all_reduce(whole, async_op=True)
        if kind == "all_gather":
            return dist.all_gather_into_tensor(whole, part, async_op=True)
        if kind == "reduce_scatter":
            return dist.reduce_scatter_tensor(part, whole, async_op=True)
        if kind == "all_to_all":
            return dist.all_to_all_single(more, whole, async_op=True)
        for sender in sorted((rank, other)):
            dist.send(whole, other) if sender == rank else dist.recv(whole, other)
        return None

    return start


def _added_seconds(start: Callable[[], dist.Work | None], overlapped: bool) -> float:
    """Return the seconds that a collective adds to computing, after it or ``overlapped`` with it.

    They include waiting for the last rank, cache misses, and gloo's threads, which use the ranks' cores. Collectives
    without computing take half the time: their buffers stay in the caches and all ranks are in step.
    """
    rows, inner, columns = GEMM_SHAPE
    x, weight = torch.randn(rows, inner), torch.randn(columns, inner)

    def compute() -> None:
        for _ in range(OVERLAPPED_GEMMS if overlapped else 1):
            torch.matmul(x, weight.t())

    def both() -> None:
        work = start() if overlapped else None
        compute()
        work = work if overlapped else start()
        if work is not None:
            work.wait()

    both()
    times = []
    for _ in range(COLLECTIVE_ROUNDS):
        dist.barrier()
        alone = _seconds(compute, COLLECTIVES_PER_ROUND)
        dist.barrier()
        times.append((_seconds(both, COLLECTIVES_PER_ROUND), alone))
    together, alone = (statistics.median(column) for column in zip(*times, strict=True))
    return max(together - alone, MIN_SHARE * together)


def _step(plan: Plan, rank: int, device: Device, torch_device: torch.device) -> float:
    """Return the seconds of a training step."""
    with build_steps(plan, plan.topology(rank), device, torch_device) as steps:
        numbers = itertools.count(1)
        return median_seconds(lambda: steps.run(next(numbers)), 1)


def calibrate(path: Path | None = None) -> int:
    """Measure this host and write its calibration file; return the exit status."""
    by_ranks: dict[str, Any] = {}
    load = os.getloadavg()[0]
    for ranks in RANKS:
        sys.stdout.write(f"measuring with {ranks} {plural(ranks, 'rank')} (of {', '.join(map(str, RANKS))}) ...\n")
        sys.stdout.flush()
        plans = dict(_plans(ranks))
        status, measurements = rank_results(next(iter(plans.values())), partial(_measure, plans))
        if status:
            return status
        by_ranks[str(ranks)] = measurements[0]
    device = get_device(HOST)
    machine = Calibration(
        version=this_machine.VERSION,
        host=socket.gethostname(),
        date=datetime.datetime.now().isoformat(" ", "minutes"),
        cores=device.count(),
        memory_bytes=device.memory_bytes(),
        torch=torch.__version__,
        load=load,
        by_ranks=by_ranks,
    )
    path = path or this_machine.calibration_path()
    write_atomically(path, json.dumps(asdict(machine), indent=1) + "\n")
    sys.stdout.write(f"wrote {path}\n")
    return 0


def _plans(ranks: int) -> Iterator[tuple[str, Plan]]:
    """Yield the plans of the timed steps by name and number format."""
    fixed = ["model.num_hidden_layers=4", "model.num_attention_heads=2", "model.num_key_value_heads=2"]
    fixed += ["trainer.micro_batch_size=1", f"trainer.dp={ranks}", "device=cpu", "trainer.steps=100"]
    for name, (sizes, micro_batches) in STEPS.items():
        for form in FORMS:
            words = [f"{setting}={value}" for setting, value in sizes.items()]
            words += [f"trainer.global_batch_size={micro_batches * ranks}", f"trainer.precision={form}"]
            config = cli.parse_overrides([*fixed, *words, *MOCK_RUN, "checkpoint.every_steps=null"])
            yield f"{name}, {form}", find_world(config, None).plan()


def _measure(plans: dict[str, Plan], plan: Plan) -> dict[str, Any]:
    """Measure on one rank; rank 0 shows the progress."""
    device, rank, ranks = get_device(HOST), int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), ranks)
    if rank:
        return measure(plans, rank, device, torch_device, lambda: None)
    numbers, total = itertools.count(1), MEASUREMENTS
    if ranks > 1:
        total += sum(map(len, COLLECTIVES.values())) * len(MESSAGES)
    with ProgressBar(f"{ranks} {plural(ranks, 'rank')}", "measurements", total) as shown:
        return measure(plans, rank, device, torch_device, lambda: shown.show(next(numbers)))
