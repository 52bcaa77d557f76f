"""What ``scripts/plan.py --calibrate`` measures on each rank: kernels, collectives, and steps of two tiny models.

Every rank measures the same things at the same time, as the ranks of a run compute at the same time, and share cores,
caches and memory. ``tools/forecast/this_machine.py`` says what follows from the numbers.
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
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_llama import cli
from megatron_llama.data.batches import build_data
from megatron_llama.devices import HOST, Device, get_device
from megatron_llama.model.llama import RMSNorm
from megatron_llama.model.loss import _LinearCrossEntropy as LinearCrossEntropy
from megatron_llama.model.rotary import rotary_table, rotate
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.parallel.groups import current_groups
from megatron_llama.plan import Plan
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import plural
from megatron_llama.tools.common import MOCK_RUN, progress_bar
from megatron_llama.tools.forecast.this_machine import (
    COLLECTIVES,
    FORMS,
    OVERLAPPED,
    RANKS,
    STEPS,
    VERSION,
    WIDTH,
    Calibration,
    calibration_path,
)
from megatron_llama.tools.steps import open_steps

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS = 5
ROUND_SECONDS = 0.01
"""Least length of a round: shorter than that and ranks that share a core are seen alone on it, or not at all."""
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
BETWEEN = (512, 288, 768)
"""The product that ranks compute between two collectives, some milliseconds as in a small model."""
LONGER = 4
"""So many of it beside one that nobody waits for."""
IN_A_ROUND = 4
"""Collectives of a round."""
COLLECTIVE_ROUNDS = 3
LEAST = 0.01
"""Share of a round that a collective takes at least, whatever noise says."""
CACHES = 2**25
"""Bytes of buffers that are taken in turn: a step's are never the same twice in a row."""
COPIED = 2**24
MEASUREMENTS = len(FORMS) * (len(PRODUCTS) + len(LENGTHS) + 4) + 2 + len(STEPS) * len(FORMS)
"""Made by each rank, beside those of collectives."""


def typical(work: Callable[[], Any], times: int | None = None) -> float:
    """Seconds of ``work``: the median of some rounds, after a first time that is not counted. A step is the sum of many
    such pieces, and so as long as they are in the middle, not as the fastest of them.

    A round repeats it ``times`` times; None: as often as fills the round, which no other rank knows of.
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
    """All measurements of one rank. ``plans`` are those of STEPS, by name and number format, all of one layout;
    ``done`` is called after each measurement."""
    any_plan = next(iter(plans.values()))
    topology = any_plan.topology(rank)
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    with process_groups(any_plan, topology, device, torch_device):

        def noted(seconds: float) -> float:
            done()
            return seconds

        for form in FORMS:
            dtype = DTYPES[form]
            found[form] = {
                "products": [(*shape, noted(_product(*shape, dtype))) for shape in PRODUCTS],
                "attention": [(*shape, noted(_attention(*shape, dtype))) for shape in LENGTHS],
                "pieces": [(tokens, noted(_pieces(any_plan, tokens, dtype))) for tokens in (128, 512, 1024)],
                "loss": (512, NARROW, VOCABULARY, noted(_loss(512, dtype))),
            }
        source = torch.zeros(COPIED)
        target = torch.empty_like(source)
        found["copy"] = 2 * 4 * COPIED / noted(typical(lambda: target.copy_(source)))
        found["adam"] = noted(_adam())
        if dist.get_world_size() > 1:
            found["collectives"] = _collectives(noted)
        for name, plan in plans.items():
            found.setdefault("steps", {})[name] = noted(_step(plan, rank, device, torch_device))
    return found


def _product(rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
    """Seconds of one product, as the mean of the three of a linear layer: forward, input's and weight's gradient."""
    x, weight = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
    out = torch.randn(rows, columns, dtype=dtype)

    def three() -> None:
        torch.matmul(x, weight.t())
        torch.matmul(out, weight)
        torch.matmul(out.t(), x)

    return typical(three) / 3


def _forward_backward(work: Callable[..., torch.Tensor], inputs: Iterable[torch.Tensor]) -> float:
    """Seconds of ``work`` and its backward pass."""
    leaves = [leaf.requires_grad_() for leaf in inputs]
    gradient = torch.ones_like(work(*leaves))

    def both() -> None:
        torch.autograd.grad(work(*leaves), leaves, gradient)

    return typical(both)


def _attention(sequences: int, tokens: int, dtype: torch.dtype) -> float:
    """Forward and backward of causal attention with 8 heads of 64, laid out as a block has them."""
    inputs = [torch.randn(tokens, sequences, 8, 64, dtype=dtype) for _ in range(3)]

    def core(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.permute(1, 2, 0, 3) for y in qkv)
        return get_device(HOST).kernels(compiled=False).attend(q, k, v).permute(2, 0, 1, 3).reshape(tokens, -1)

    return _forward_backward(core, inputs)


def _pieces(plan: Plan, tokens: int, dtype: torch.dtype) -> float:
    """Forward and backward of what a block does between its products: norms, residuals, rotations, the activation."""
    model = replace(plan.model, hidden_size=WIDTH, num_attention_heads=8, num_key_value_heads=8, head_dim=WIDTH // 8)
    norm = RMSNorm(WIDTH, 1e-5, dtype)
    torch.nn.init.ones_(norm.weight)
    angles = rotary_table(model, tokens, torch.device(HOST))
    stream = torch.randn(tokens, 1, WIDTH, dtype=dtype)
    heads = torch.randn(tokens, 1, 8, WIDTH // 8, dtype=dtype)
    wide = torch.randn(tokens, 1, 2 * 4 * WIDTH, dtype=dtype)
    found = 2 * _forward_backward(lambda x: x + norm(x), [stream])
    found += 2 * _forward_backward(lambda x: rotate(x, *angles), [heads])
    return found + _forward_backward(_silu_and_multiply, [wide])


def _silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _loss(tokens: int, dtype: torch.dtype) -> float:
    """Forward and backward of the output head and the loss, of a width so small that the loss is most of it."""
    labels, weights = torch.randint(VOCABULARY, (tokens,)), torch.ones(tokens)
    stream, table = torch.randn(tokens, 1, NARROW, dtype=dtype), torch.randn(VOCABULARY, NARROW, dtype=dtype)
    alone = current_groups()["tp"]

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

    return typical(update) / parameters


def _collectives(noted: Callable[[float], float]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Seconds by payload, as tools/forecast/traffic.py counts it, of each kind: of those that a rank waits for, and of
    those that run beside its computing."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for how, kinds in COLLECTIVES.items():
        for kind in kinds:
            times = []
            for size in MESSAGES:
                seconds = _added(_collective(kind, size), how == OVERLAPPED)
                times.append((size, noted(seconds / (2 if kind == "send" else 1))))
            found.setdefault(how, {})[kind] = times
    return found


def _collective(kind: str, size: int) -> Callable[[], dist.Work | None]:
    """Starts a collective with a payload of ``size`` bytes; ``send`` goes to a neighbour and back, and has ended."""
    ranks, rank, count = dist.get_world_size(), dist.get_rank(), size // 4
    pairs = range(min(2 * IN_A_ROUND, max(2, CACHES // size)))
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


def _added(start: Callable[[], dist.Work | None], beside: bool) -> float:
    """Seconds by which a collective makes ranks slower that compute, before it or ``beside`` it: by itself, by waiting
    for the rank that comes last, by the caches that it takes, and by gloo's threads, which take the cores on which the
    ranks compute.

    One after the other and alone, collectives take half of that: their buffers stay in the caches, all ranks are there.
    """
    rows, inner, columns = BETWEEN
    x, weight = torch.randn(rows, inner), torch.randn(columns, inner)

    def compute() -> None:
        for _ in range(LONGER if beside else 1):
            torch.matmul(x, weight.t())

    def both() -> None:
        work = start() if beside else None
        compute()
        work = work if beside else start()
        if work is not None:
            work.wait()

    both()
    found = []
    for _ in range(COLLECTIVE_ROUNDS):
        dist.barrier()
        alone = _seconds(compute, IN_A_ROUND)
        dist.barrier()
        found.append((_seconds(both, IN_A_ROUND), alone))
    together, alone = (statistics.median(times) for times in zip(*found, strict=True))
    return max(together - alone, LEAST * together)


def _step(plan: Plan, rank: int, device: Device, torch_device: torch.device) -> float:
    """Seconds of a training step."""
    topology = plan.topology(rank)
    model = build_model(plan, topology, device, torch_device)
    optimizer = build_optimizer(plan, model)
    data = build_data(plan, topology, torch_device)
    with open_steps(plan, topology, model, optimizer, data) as steps:
        numbers = itertools.count(1)
        return typical(lambda: steps.run(next(numbers)), 1)


# ``scripts/plan.py --calibrate``: measures this machine in a minute or two, so that runs on it can be planned.


def calibrate(path: Path | None = None) -> int:
    """Measures and writes the file of this host; returns the exit status."""
    from megatron_llama.devices import HOST, get_device
    from megatron_llama.launch.start import Share, start_ranks

    by_ranks: dict[str, Any] = {}
    load = os.getloadavg()[0]
    for ranks in RANKS:
        sys.stdout.write(f"measuring {ranks} {plural(ranks, 'rank')} of {RANKS[-1]} at most ...\n")
        sys.stdout.flush()
        plans = dict(_plans(ranks))
        with tempfile.TemporaryDirectory() as folder:
            entry, share = partial(_measure, plans, Path(folder)), Share(ranks, output_dir=Path(folder))
            if status := start_ranks(next(iter(plans.values())), entry, share):
                return status
            by_ranks[str(ranks)] = json.loads((Path(folder) / "measured.json").read_text())
    import torch

    device = get_device(HOST)
    machine = Calibration(
        version=VERSION,
        host=socket.gethostname(),
        date=datetime.datetime.now().isoformat(" ", "minutes"),
        cores=device.count(),
        memory_bytes=device.memory_bytes(),
        torch=torch.__version__,
        load=load,
        by_ranks=by_ranks,
    )
    path = path or calibration_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(machine), indent=1) + "\n")
    sys.stdout.write(f"written to {path}\n")
    return 0


def _plans(ranks: int) -> Iterator[tuple[str, Plan]]:
    """Those of the steps that are timed, by name and number format."""
    from megatron_llama.launch.world import find_world

    fixed = ["model.num_hidden_layers=4", "model.num_attention_heads=2", "model.num_key_value_heads=2"]
    fixed += ["trainer.micro_batch_size=1", f"trainer.dp={ranks}", "device=cpu", "trainer.steps=100"]
    for name, (sizes, micro_batches) in STEPS.items():
        for form in FORMS:
            words = [f"{setting}={value}" for setting, value in sizes.items()]
            words += [f"trainer.global_batch_size={micro_batches * ranks}", f"trainer.precision={form}"]
            config = cli.parse_overrides([*fixed, *words, *MOCK_RUN, "checkpoint.every_steps=null"])
            yield f"{name}, {form}", find_world(config, None).plan()


def _measure(plans: dict[str, Plan], folder: Path, plan: Plan) -> None:
    """What each rank does; the first one writes."""
    from megatron_llama.devices import HOST, get_device

    device, rank = get_device(HOST), int(os.environ["RANK"])
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), ranks)
    if rank:
        measure(plans, rank, device, torch_device, lambda: None)
        return
    numbers, total = itertools.count(1), MEASUREMENTS
    if ranks > 1:
        total += sum(map(len, COLLECTIVES.values())) * len(MESSAGES)
    with progress_bar(f"{ranks} {plural(ranks, 'rank')}", "measurements", total) as shown:
        found = measure(plans, rank, device, torch_device, lambda: shown.show(next(numbers)))
    (folder / "measured.json").write_text(json.dumps(found))
