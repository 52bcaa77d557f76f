"""Seconds of a training step, by what they are spent on.

A step is: the micro batches of the slowest pipeline stage, the pipeline's bubble, what communication adds to them where
it can't be hidden, and the optimizer. Matrix products run at the share of the device's peak that was fitted for its
chip and format, less on small shapes; what runs between them at the speed of memory; constants.json has the fitted
numbers, docs/guides/tools/planning.md the formulas in words.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_llama.plan.job import Job
from megatron_llama.plan.memory import kept_by_layer
from megatron_llama.tools.forecast.hardware import HardwareSpec

MEMORY_REACH = 0.85
"""Share of the memory's bandwidth that simple kernels reach."""
BACKWARD_PRODUCTS = 2
"""Products in the backward pass for each one of the forward pass: the input's gradient and the weight's."""
FLASH_BACKWARD = 2.5
"""Five products in the backward of attention that recomputes its scores, two in the forward (arXiv:2205.14135)."""
OPERATIONS = {"eager": 40, "compiled": 8, "fused": 16}
"""Kernels of a block's forward pass beside its products and attention: norms, rotations, residuals, copies."""
SCORES_OPERATIONS = 9
"""Kernels of attention that computes the square of scores: two products, scale, mask, softmax, dropout, copies."""
REPEATED_OPERATIONS = 0.7
"""Share of them that elementwise recomputation repeats: the norms, rotations and activation, no residuals."""
COLLECTIVE_OPERATIONS = 4
LOSS_BYTES = 24
"""Bytes for each logit that a loss of few kernels reads and writes: in 32 bits, three times each."""
HOST_BANDWIDTH = 25e9
"""Bytes/s of a host's memory for each of the eight ranks that share it: 200 GB/s, as a processor with eight channels of
DDR4 3200 has. Not fitted: no published run says what its optimizer takes there."""
NARROW = ("fp8", "fp4")
"""Formats that tensors are cast to before a product."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest ranks; what is hidden beside something else is not in it."""

    matmul: float = 0.0
    """Matrix products of the blocks."""
    head: float = 0.0
    """The output head's products, and the loss."""
    attention: float = 0.0
    memory_bound: float = 0.0
    """Norms, activations, residuals, rotations, casts."""
    launch: float = 0.0
    """Gaps between kernels, what the host needs longer than the device, and what it does once a step."""
    tensor: float = 0.0
    context: float = 0.0
    pipeline: float = 0.0
    """Messages between stages."""
    bubble: float = 0.0
    data_parallel: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0
    """Copies to the host and back that outlast what is computed meanwhile, and the optimizer's step there."""
    waiting: float = 0.0
    """For the slowest of many nodes."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Each part by its name, in the order above."""
        return {part.name: getattr(self, part.name) for part in fields(self)}


@dataclass(frozen=True)
class _Work:
    """Seconds of one micro batch on one rank: forward, backward and what is recomputed."""

    matmul: float
    attention: float
    memory_bound: float
    launch: float
    """Of the device: kernels that start one after the other."""
    tensor: float

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory_bound + self.launch + self.tensor


def step_time(job: Job, device: HardwareSpec, constants: Mapping[str, float]) -> StepTime:
    """The forecast of one step of ``job`` on ``device``, of which each rank has one (or its part of one)."""
    layer, head = _layer(job, device, constants), _head(job, device, constants)
    layers, m = job.layers_by_stage, job.num_microbatches
    on_device = [count * layer.total + (stage == job.pp - 1) * head for stage, count in enumerate(layers)]
    # The host starts kernels ahead of the device, so that the slower of the two sets the pace; if it can.
    on_host = [count * kernel_count(job) * constants["host.operation"] / device.host_speed for count in layers]
    in_turn = job.pp > 1 and job.program.waits_for_messages
    per_stage = [sum(both) if in_turn else max(both) for both in zip(on_device, on_host, strict=True)]
    slowest = max(range(job.pp), key=per_stage.__getitem__)
    count, has_head = layers[slowest], slowest == job.pp - 1
    bubble = (sum(per_stage) - per_stage[slowest]) / job.vpp
    working = m * per_stage[slowest]
    context = m * count * _context_parallel(job, layer, device, constants)
    pipeline = m * _messages(job, device, constants)
    data = _data_parallel(job, slowest, working, device, constants)
    host = constants["launch.step"]
    optimizer = 0.0 if job.offloads_optimizer else _optimizer(job, slowest, device, constants)
    offload = _offload(job, slowest, working)
    nodes = max(1.0, job.ranks / device.per_node)
    done = working + bubble + context + pipeline + data + host + optimizer + offload
    return StepTime(
        matmul=m * count * layer.matmul,
        head=m * head * has_head,
        attention=m * count * layer.attention,
        memory_bound=m * count * layer.memory_bound,
        launch=m * (count * layer.launch + per_stage[slowest] - on_device[slowest]) + host,
        tensor=m * count * layer.tensor,
        context=context,
        pipeline=pipeline,
        bubble=bubble,
        data_parallel=data,
        optimizer=optimizer,
        offload=offload,
        waiting=done * constants["waiting"] * math.log2(nodes),
    )


def microbatch_seconds(job: Job, device: HardwareSpec, constants: Mapping[str, float]) -> tuple[float, float]:
    """Seconds of a micro batch on one rank, forward and backward: (of one block, of the output head)."""
    return _layer(job, device, constants).total, _head(job, device, constants)


def matmul_seconds(
    rows: float, inner: float, columns: float, form: str, device: HardwareSpec, constants: Mapping[str, float]
) -> float:
    """Seconds of a product [rows, inner] x [inner, columns]: 2 * rows * inner * columns FLOPs at the share of the peak
    that the device reaches, and less where a side is short beside the tiles that the work is cut into."""
    form = device.format_used(form)
    share = constants.get(f"matmul.{device.family}.{form}", constants["matmul"] * device.reach[form])
    tile = constants["tile.bf16" if form in ("bf16", "fp32") else "tile.fp8"]
    filled = (1 + tile / rows) * (1 + tile / inner) * (1 + tile / columns)
    return 2 * rows * inner * columns / (device.peaks[form] * share) * filled


def _layer(job: Job, device: HardwareSpec, constants: Mapping[str, float]) -> _Work:
    """One block."""
    rows, shape, kernels = job.tokens, job.shape, job.program.kernels
    forward = weights = 0.0
    for inner, columns in shape.layer_products(job.tp):
        forward += matmul_seconds(rows, inner, columns, job.format, device, constants)
        weights += matmul_seconds(columns, rows, inner, job.format, device, constants)
    again = _again(job)
    matmul = forward * (2 + again)
    if job.lora_parameters:
        # Frozen weights have no gradient; the adapters' thin products are as slow as reading their inputs.
        thin = 3 * rows * sum(inner + columns for inner, columns in shape.layer_products(job.tp)) * 2
        memory = thin / (device.bandwidth * MEMORY_REACH)
    else:
        matmul, memory = matmul + weights, 0.0
    core, scores = _attention(job, device, constants)
    core_again = max(again, _core_again(job))
    attention = core * (1 + FLASH_BACKWARD + core_again)
    if job.program.attention == "scores":
        attention = (core + scores) * (3 + core_again)
    split = job.tp if job.sp else 1
    whole = 10 * rows * shape.hidden / split
    inside = rows * ((3 if shape.gated else 2) * shape.ffn + 2 * (shape.queries + shape.keys)) / job.tp
    passes = (whole + inside) * job.inner_bytes * constants[f"passes.{kernels}"]
    if job.format in NARROW:
        passes += rows * (2 * shape.hidden + 2 * shape.ffn / job.tp) * 3 * constants[f"passes.{job.scaling}"]
    memory += passes * (2.5 + max(again, _between_again(job))) / (device.bandwidth * MEMORY_REACH)
    gaps = kernel_count(job) * constants[f"gap.{kernels}"]
    return _Work(matmul, attention, memory, gaps, _tensor_parallel(job, device, constants))


def _again(job: Job) -> float:
    """Share of a block's matrix products that the backward pass repeats, as a mean over the blocks."""
    return {"full": 1.0, "half": 0.5}.get(job.recompute, 0.0) / job.recompute_every


def _core_again(job: Job) -> float:
    """The same of what lies between the products of attention, which selective recomputation repeats in Megatron-LM
    (arXiv:2205.05198) and here."""
    repeats = job.program.attention in ("scores", "tuned") or job.program.repeats_elementwise
    return repeats * (job.recompute == "selective") / job.recompute_every


def _between_again(job: Job) -> float:
    """The same of norms, rotations and the activation: elementwise repeats them, and here selective does too."""
    repeats = job.recompute == "elementwise" or (job.recompute == "selective" and job.program.repeats_elementwise)
    return repeats / job.recompute_every


def kernel_count(job: Job) -> float:
    """Kernels that a block starts for one micro batch: forward, backward and what is recomputed.

    The backward pass starts two for each one of the forward pass. A collective takes the host as long as some kernels:
    buffers are registered, streams wait for one another.
    """
    program = job.program
    forward = len(job.shape.layer_products()) + OPERATIONS[program.kernels]
    forward += SCORES_OPERATIONS if program.attention == "scores" else 1
    forward += 6 * len(job.adapted)
    again = _again(job)
    found = forward * (3 + again)
    found += OPERATIONS[program.kernels] * _between_again(job) * REPEATED_OPERATIONS
    if job.tp > 1:
        found += COLLECTIVE_OPERATIONS * (4 + (2 * _again(job) if job.recompute == "full" else 0))
    return found


def _attention(job: Job, device: HardwareSpec, constants: Mapping[str, float]) -> tuple[float, float]:
    """Seconds of the two products with the sequence in the forward pass, and of moving the scores where they are
    kept."""
    shape, seen = job.shape, job.document or job.seq
    products = 4 * job.tokens * seen * shape.queries / job.tp
    form = device.format_used("bf16" if job.format in NARROW else job.format)
    if job.program.attention == "scores":
        rate = device.peaks[form] * constants.get(f"matmul.{device.family}.{form}", device.reach[form]) * 0.6
        elements = job.tokens * seen * shape.heads / job.tp
        return products / rate, elements * 2 * constants["passes.scores"] / (device.bandwidth * MEMORY_REACH)
    kernel = job.program.attention
    share = constants.get(f"attention.{device.family}.{kernel}", constants[f"attention.{kernel}"])
    short = 1 + constants["tile.attention"] / seen
    return products / 2 / (device.peaks[form] * share) * short * (1 + constants["tile.head"] / shape.head_dim), 0.0


def _head(job: Job, device: HardwareSpec, constants: Mapping[str, float]) -> float:
    """Seconds of the output head and the loss of a micro batch."""
    rows, inner, columns = job.tokens, job.shape.hidden, job.shape.vocab / job.tp
    form = "bf16" if job.format in NARROW else job.format
    forward = matmul_seconds(rows, inner, columns, form, device, constants)
    products = forward * (2 if job.lora_parameters else 3)
    times = constants["passes.loss" if job.program.loss_in_steps else f"passes.{job.program.kernels}"]
    passes = rows * columns * LOSS_BYTES * times
    return products + passes / (device.bandwidth * MEMORY_REACH)


def _tensor_parallel(job: Job, device: HardwareSpec, constants: Mapping[str, float]) -> float:
    """Seconds of a block's sums over tp that nothing hides: two in the forward, two in the backward pass."""
    if job.tp == 1:
        return 0.0
    size = job.tokens * job.shape.hidden * job.inner_bytes
    sums = 4 + (2 * _again(job) if job.recompute == "full" else 0)
    exposed = constants["exposed.tp overlapped" if job.program.overlaps_tp else "exposed.tp"]
    return exposed * sums * all_reduce(size, job.tp, 1, device, constants)


def _context_parallel(job: Job, layer: _Work, device: HardwareSpec, constants: Mapping[str, float]) -> float:
    """Seconds of passing keys and values round in a block, as far as its attention does not hide them."""
    if job.cp == 1:
        return 0.0
    keys = 2 * job.tokens * job.shape.keys / job.tp * job.inner_bytes
    bandwidth = bus_bandwidth(device, job.cp, job.tp, constants)
    passing = 3 * (job.cp - 1) * keys / bandwidth
    return constants["exposed.cp"] * passing + max(0.0, (1 - constants["exposed.cp"]) * passing - layer.attention)


def _messages(job: Job, device: HardwareSpec, constants: Mapping[str, float]) -> float:
    """Seconds of a micro batch's messages between stages that nothing hides."""
    if job.pp == 1:
        return 0.0
    size = job.tokens * job.shape.hidden * job.inner_bytes / job.tp
    across = job.tp * job.cp * job.dp >= device.per_node
    bandwidth = constants["network.share"] * device.network if across else device.link
    start = constants["latency.network"] if across else constants["latency.node"]
    return constants["exposed.pp"] * 2 * job.vpp * (start + size / bandwidth)


def _data_parallel(job: Job, stage: int, working: float, device: HardwareSpec, constants: Mapping[str, float]) -> float:
    """Seconds of gathering weights and reducing gradients that the passes do not hide."""
    ranks = job.dp * job.cp
    if ranks == 1:
        return 0.0
    held, trained = job.stage_parameters(stage), job.trained_parameters(stage)
    if job.exchanges_signs:  # to the rank that averages and back, a bit for each value, beside nothing
        return all_reduce(trained / 8, ranks, job.tp, device, constants)
    gradients = trained * (job.sent_gradient or min(job.state.gradient, 4))
    stored, weights = (held * size for size in (job.state.weight, job.gathered_weight or job.state.weight))
    stride, m, inside = job.tp, job.num_microbatches, job.reduce_group

    def scatter(size: float) -> float:  # half of a sum; an all_to_all is taken to be as fast
        if inside is None:
            return all_reduce(size, ranks, stride, device, constants) / 2
        across = all_reduce(size / inside, ranks // inside, stride * inside, device, constants)
        return (all_reduce(size, inside, stride, device, constants) + across) / 2

    if job.zero == 3:
        # Block by block: weights are gathered for each pass (two gathers move what one sum does), gradients scattered.
        blocks = job.layers_by_stage[stage]
        gathers = all_reduce(weights / blocks, ranks, stride, device, constants)
        if job.secondary_group:
            gathers = (gathers + all_reduce(stored / blocks, job.secondary_group, stride, device, constants)) / 2
        window, moving = working, m * blocks * (gathers + scatter(gradients / blocks))
    else:
        # Summed at the last micro batch; from stage 1 on scattered, and the new weights gathered; with 2 at each one.
        sums = m if job.zero == 2 else 1
        moving = sums * all_reduce(gradients, ranks, stride, device, constants)
        if job.zero:
            gathered = weights if job.program.shards_frozen else weights * trained / held
            moving = sums * scatter(gradients) + all_reduce(gathered, ranks, stride, device, constants) / 2
        window = working * sums / m
    if not job.program.overlaps_dp:
        return moving
    exposed = constants["exposed.dp"]
    return exposed * moving + max(0.0, (1 - exposed) * moving - window)


def _optimizer(job: Job, stage: int, device: HardwareSpec, constants: Mapping[str, float]) -> float:
    """Seconds of reading and writing gradients, weights and averages, and of the gradient's norm."""
    share = job.trained_parameters(stage) / (job.shard_size if job.zero else 1)
    state = job.state
    if job.exchanges_signs:
        return share * sign_bytes(job.dp) / (device.bandwidth * MEMORY_REACH)
    size = share * (2 * state.gradient + 2 * (state.master + state.moments) + state.weight)
    return size * constants[f"passes.{job.program.kernels}"] / (device.bandwidth * MEMORY_REACH)


def _offload(job: Job, stage: int, working: float) -> float:
    """Seconds that ``trainer.offload`` adds to ``working`` ones."""
    seconds = 0.0
    if job.offloads_activations:  # out in the forward pass, back in the backward pass
        copied = 2 * sum(kept_by_layer(job).values()) * job.layers_by_stage[stage] * job.num_microbatches
        seconds += max(0.0, copied / COPY_TO_HOST - working)
    if job.offloads_optimizer:
        share = job.trained_parameters(stage) / (job.shard_size if job.zero else 1)
        weight = job.state.master or job.state.weight
        # Gradients and weights go there, new weights come back; there all are read, weights and averages written too.
        seconds += share * 3 * weight / COPY_TO_HOST
        seconds += share * (3 * weight + 2 * job.state.moments) / HOST_BANDWIDTH
    return seconds


def sign_bytes(ranks: int) -> float:
    """Bytes that a step of 1-bit Adam reads and writes for each weight, one operation after the other, after its
    warm-up. Counted (tests/optim/test_onebit_adam.py): a rank compresses all momenta and averages its part of them."""
    return 360 + 152 / ranks if ranks > 1 else 100


# Seconds that collectives take: a start-up time and a bus bandwidth, inside a node or over its network.


RING_SHARE = 0.78
"""Of the link's speed: an all-reduce of some of a node's devices (eight may reduce in the switch, and go faster)."""


def bus_bandwidth(device: HardwareSpec, ranks: int, stride: int, constants: Mapping[str, float]) -> float:
    """Bytes/s of a large collective among ``ranks`` ranks that stand ``stride`` ranks apart.

    Within a node: the measured bus bandwidth for all its devices, for some of them the ring's. Over nodes: what the
    network cards of the group's ranks on a node carry together, at most what the node's links do.
    """
    inside = max(1, min(ranks, device.per_node // min(stride, device.per_node)))
    within = device.bus
    if inside < device.per_node:
        within = min(device.bus, RING_SHARE * device.link)
        if device.family == "mi300x":  # each pair of devices has a seventh of the links
            within *= max(inside - 1, 1) / (device.per_node - 1)
    if inside >= ranks:
        return within
    return min(within, constants["network.share"] * inside * device.network)


def all_reduce(size: float, ranks: int, stride: int, device: HardwareSpec, constants: Mapping[str, float]) -> float:
    """Seconds to sum ``size`` bytes among ``ranks``. An all-gather of, or reduce-scatter to, that size takes half."""
    if ranks == 1 or not size:
        return 0.0
    bandwidth = bus_bandwidth(device, ranks, stride, constants)
    outside = ranks * stride > device.per_node
    start = constants["latency.network"] if outside else constants["latency.node"]
    return start + 2 * (ranks - 1) / ranks * size / bandwidth


# What failures and checkpoints take of a long run's time.


COPY_TO_HOST = 20e9
"""Bytes/s from a device to its host's memory, for which training waits (PCIe 4 x16 carries 25)."""


@dataclass(frozen=True)
class Goodput:
    """Shares of the time of a run, and how often it saves."""

    useful: float
    """Share in which steps are done that count."""
    waiting: float
    """Share in which training waits for checkpoints."""
    lost: float
    """Share in which steps are done again, or the job starts again."""
    interval: float
    """Seconds between checkpoints."""
    failures_a_day: float


def goodput(
    devices: int,
    checkpoint_bytes_a_device: float,
    *,
    failure_hours: float,
    restart_seconds: float,
    write_seconds: float,
    interval: float | None = None,
) -> Goodput:
    """Of a run on ``devices`` that saves every ``interval`` seconds; None is the best interval, sqrt(2 * wait / rate)
    (Young 1974, Daly 2006), and no less than a checkpoint takes to write."""
    rate = devices / (failure_hours * 3600)
    wait = max(0.1, checkpoint_bytes_a_device / COPY_TO_HOST)
    every = interval or max(math.sqrt(2 * wait / rate), write_seconds)
    waiting = wait / every
    # A failure costs the start, half an interval, and the newest checkpoint if it was still being written.
    lost = min(1.0, rate * (restart_seconds + every / 2 + write_seconds / 2))
    return Goodput(max(0.0, (1 - waiting) * (1 - lost)), waiting, lost, every, rate * 86400)


# The fitted numbers of the time model: constants.json, which `python -m benchmarks fit_planner` writes.


CONSTANTS_FILE = Path(__file__).with_name("constants.json")


@functools.cache
def load_constants() -> dict[str, float]:
    """Each constant by its name; SPECIFICATION in benchmarks/fit_planner.py says what they mean."""
    return {name: float(entry["value"]) for name, entry in load_constants_file()["constants"].items()}


@functools.cache
def load_constants_file() -> dict[str, Any]:
    """The whole file: constants with their meaning, the date, the data, and the errors on rows that were held out."""
    found: dict[str, Any] = json.loads(CONSTANTS_FILE.read_text(encoding="utf-8"))
    return found
