"""Forecast time of a training step, by component.

A step consists of the micro batches of the slowest pipeline stage, the pipeline bubble, exposed communication and the
optimizer. GEMMs run at a fitted share of the device's peak, less on small shapes. Operations between GEMMs run at
memory bandwidth. constants.json has the fitted constants; docs/guides/tools/planning.md states the formulas.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_llama.arch.parameters import head_dim
from megatron_llama.plan.forecast_job import Job
from megatron_llama.plan.memory import layer_activations
from megatron_llama.tools.forecast.hardware import HardwareSpec

MEMORY_REACH = 0.85
"""Share of the memory bandwidth that elementwise kernels reach."""
FLASH_BACKWARD = 2.5
"""FLOPs of FlashAttention's backward over its forward: five GEMMs, scores recomputed, over two (arXiv:2205.14135)."""
OPERATIONS = {"eager": 40, "compiled": 8, "fused": 16}
"""Kernels of a block's forward pass other than GEMMs and attention: norms, rotary embeddings, residuals, copies."""
LOGIT_PASSES, FP32_BYTES = 4, 4
"""Reads and writes of QK-Clip's scores: the GEMM's result, the mask in place, the maximum."""
ATTENTION_OPERATIONS = {"scores": 9}
"""Kernels of attention that materializes the scores: two GEMMs, scale, mask, softmax, dropout, copies; else 1."""
REPEATED_OPERATIONS = 0.7
"""Share of OPERATIONS that elementwise recomputation repeats: norms, rotary embeddings, activation; no residuals."""
COLLECTIVE_OPERATIONS = 4
"""Host time of a collective, in kernels: buffers are registered and streams wait for each other."""
LOSS_BYTES = 24
"""Bytes that a fused loss reads and writes per logit: three reads and three writes in fp32."""
HOST_BANDWIDTH = 25e9
"""Host memory bandwidth of each of eight ranks, bytes/s: 200 GB/s, as eight channels of DDR4-3200. Not fitted: no
published run states the time of an optimizer on the host."""
COPY_TO_HOST = 20e9
"""Bytes/s from a device to its host's memory (PCIe 4 x16: 25 GB/s). Training waits for these copies."""
LOW_PRECISION = ("fp8", "fp4")
"""Formats to which GEMM inputs are cast."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest ranks by component, without overlapped time."""

    matmul: float = 0.0
    """GEMMs of the blocks."""
    head: float = 0.0
    """GEMMs of the output head, and the loss."""
    attention: float = 0.0
    memory_bound: float = 0.0
    """Norms, activations, residuals, rotary embeddings, casts."""
    launch: float = 0.0
    """Gaps between kernels, host time beyond the device time, and host work of each step."""
    tensor: float = 0.0
    """Tensor-parallel collectives."""
    context: float = 0.0
    """Context-parallel exchange of keys and values."""
    pipeline: float = 0.0
    """Messages between pipeline stages."""
    bubble: float = 0.0
    data_parallel: float = 0.0
    """Gathers of weights and reductions of gradients."""
    optimizer: float = 0.0
    offload: float = 0.0
    """Exposed copies to and from the host, and the optimizer step on the host."""
    waiting: float = 0.0
    """Waiting for the slowest node."""

    @property
    def total(self) -> float:
        """Total seconds of the step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the seconds of each component by field name."""
        return {part.name: getattr(self, part.name) for part in fields(self)}


class StepModel:
    """Time of a step of ``job``; benchmarks/published has subclasses for other programs.

    Args:
        device: the share of a device that one rank uses (``HardwareSpec.per_rank``).
        constants: fitted constants by name (``load_constants``).
    """

    def __init__(self, job: Job, device: HardwareSpec, constants: Mapping[str, float]) -> None:
        self.job, self.device, self.constants = job, device, constants

    def step(self) -> StepTime:
        """Return the forecast of one step."""
        job, device, constants = self.job, self.device, self.constants
        layer, head = self.layer(), self.head()
        layers, m = job.layers_by_stage, job.num_microbatches
        on_device = [count * layer.total + (stage == job.pp - 1) * head for stage, count in enumerate(layers)]
        kernels = kernel_count(job)
        on_host = [count * kernels * constants["host.operation"] / device.host_speed for count in layers]
        per_stage = [self.overlap(*both) for both in zip(on_device, on_host, strict=True)]
        slowest = max(range(job.pp), key=per_stage.__getitem__)
        count, has_head = layers[slowest], slowest == job.pp - 1
        bubble = (sum(per_stage) - per_stage[slowest]) / job.vpp
        working = m * per_stage[slowest]
        context = m * count * self.context_parallel(layer)
        pipeline = m * self._messages()
        data = self._data_parallel(slowest, working)
        host = constants["launch.step"]
        optimizer = 0.0 if job.offloads_optimizer else self._optimizer(slowest)
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

    def overlap(self, on_device: float, on_host: float) -> float:
        """Return the seconds of a stage and micro batch. The host launches ahead, so the slower of the two counts."""
        return max(on_device, on_host)

    def layer(self) -> StepTime:
        """Return the seconds of one block and micro batch: forward, backward and recomputation."""
        job, device, constants = self.job, self.device, self.constants
        rows, hidden, ffn, kernels = job.tokens, job.model.hidden_size, job.model.intermediate_size, job.kernels
        forward = weights = 0.0
        for inner, columns in job.matmuls:
            forward += matmul_seconds(rows, inner, columns, job.format, device, constants)
            weights += matmul_seconds(columns, rows, inner, job.format, device, constants)
        recomputed = _gemms_recomputed(job)
        matmul = forward * (2 + recomputed)
        if job.lora_parameters:
            # Frozen weights have no gradient. The adapters' thin GEMMs are bound by reading their inputs.
            thin = 3 * rows * sum(inner + columns for inner, columns in job.matmuls) * 2
            memory = thin / (device.bandwidth * MEMORY_REACH)
        else:
            matmul, memory = matmul + weights, 0.0
        attention = self.attention(max(_blocks_recomputed(job), job.attention_recomputed)) + self._largest_logits()
        split = job.tp if job.sp else 1
        whole = 10 * rows * hidden / split
        inside = rows * (job.ffn_streams * ffn + 2 * (job.queries + job.keys)) / job.tp
        passes = (whole + inside) * job.inner_bytes * constants[f"passes.{kernels}"]
        if job.format in LOW_PRECISION:
            passes += rows * (2 * hidden + 2 * ffn / job.tp) * 3 * constants[f"passes.{job.scaling}"]
        memory += passes * (2.5 + max(recomputed, job.elementwise_recomputed)) / (device.bandwidth * MEMORY_REACH)
        gaps = kernel_count(job) * constants[f"gap.{kernels}"]
        return StepTime(matmul, attention=attention, memory_bound=memory, launch=gaps, tensor=self._tensor_parallel())

    def attention(self, recomputed: float) -> float:
        """Return the seconds of the attention core, of which the backward pass recomputes a share."""
        job, device, constants, keys = self.job, self.device, self.constants, self.job.document or self.job.seq
        flops = 4 * job.tokens * keys * job.queries / job.tp
        form = device.format_used("bf16" if job.format in LOW_PRECISION else job.format)
        kernel = job.attention_kernel
        share = constants.get(f"attention.{device.family}.{kernel}", constants[f"attention.{kernel}"])
        short, head = 1 + constants["tile.attention"] / keys, 1 + constants["tile.head"] / head_dim(job.model)
        core = flops / 2 / (device.peaks[form] * share) * short * head
        return core * (1 + FLASH_BACKWARD + recomputed)

    def _largest_logits(self) -> float:
        """Return the seconds of QK-Clip's scores: a GEMM in fp32, and the mask and maximum of its results in memory."""
        job, device = self.job, self.device
        if not job.records_logits:
            return 0.0
        form = device.format_used("fp32")
        scores = job.tokens * (job.document or job.seq) * job.model.num_attention_heads / job.tp / 2
        gemm = 2 * scores * head_dim(job.model) / (device.peaks[form] * device.reach[form])
        return gemm + scores * FP32_BYTES * LOGIT_PASSES / (device.bandwidth * MEMORY_REACH)

    def head(self) -> float:
        """Return the seconds of the output head and the loss of a micro batch."""
        job = self.job
        rows, columns = job.tokens, job.vocab / job.tp
        form = "bf16" if job.format in LOW_PRECISION else job.format
        forward = matmul_seconds(rows, job.model.hidden_size, columns, form, self.device, self.constants)
        passes = rows * columns * LOSS_BYTES * self.constants[f"passes.{job.loss_kernels}"]
        return forward * (2 if job.lora_parameters else 3) + passes / (self.device.bandwidth * MEMORY_REACH)

    def _tensor_parallel(self) -> float:
        """Return the exposed seconds of a block's all-reduces over tp: two in forward, two in backward."""
        job = self.job
        if job.tp == 1:
            return 0.0
        size = job.tokens * job.model.hidden_size * job.inner_bytes
        exposed = self.constants["exposed.tp overlapped" if job.overlaps_tp else "exposed.tp"]
        return exposed * _sums_over_tp(job) * all_reduce(size, job.tp, 1, self.device, self.constants)

    def context_parallel(self, layer: StepTime) -> float:
        """Return the seconds of a block's exchange over context-parallel ranks that its attention does not overlap.

        Nothing overlaps: keys and values are gathered forward and backward and their gradients scattered, or heads are
        exchanged for tokens.
        """
        job = self.job
        if job.cp == 1:
            return 0.0
        bandwidth = bus_bandwidth(self.device, job.cp, job.tp, self.constants)
        recomputed = job.recompute in ("full", "selective")
        if job.exchanges_heads:
            heads = 2 * job.queries / job.tp + 2 * max(job.keys / job.tp, job.cp * head_dim(job.model))
            size = job.tokens * heads * job.inner_bytes * (job.cp - 1) / job.cp
            return (2 + recomputed) * size / bandwidth
        return (3 + recomputed) * (job.cp - 1) * key_bytes(job) / bandwidth

    def _messages(self) -> float:
        """Return the exposed seconds of a micro batch's messages between stages."""
        job, device, constants = self.job, self.device, self.constants
        if job.pp == 1:
            return 0.0
        size = job.tokens * job.model.hidden_size * job.inner_bytes / job.tp
        across = job.tp * job.cp * job.dp >= device.per_node
        bandwidth = constants["network.share"] * device.network if across else device.link
        start = constants["latency.network"] if across else constants["latency.node"]
        return constants["exposed.pp"] * 2 * job.vpp * (start + size / bandwidth)

    def _data_parallel(self, stage: int, working: float) -> float:
        """Return the seconds of weight gathers and gradient reductions that forward and backward do not overlap."""
        job, device, constants = self.job, self.device, self.constants
        ranks = job.dp * job.cp
        if ranks == 1:
            return 0.0
        held, trained = job.stage_parameters(stage), job.trained_parameters(stage)
        if job.exchanges_signs:  # to the averaging rank and back, one bit per value, not overlapped
            return all_reduce(trained / 8, ranks, job.tp, device, constants)
        gradients = trained * (job.sent_gradient or min(job.state.gradient, 4))
        stored, weights = (held * size for size in (job.state.weight, job.gathered_weight or job.state.weight))
        stride, m, inside = job.tp, job.num_microbatches, job.reduce_group

        def scatter(size: float) -> float:  # half of an all-reduce; an all_to_all is assumed to be as fast
            if inside is None:
                return all_reduce(size, ranks, stride, device, constants) / 2
            across = all_reduce(size / inside, ranks // inside, stride * inside, device, constants)
            return (all_reduce(size, inside, stride, device, constants) + across) / 2

        if job.zero == 3:
            # Per block: weights are gathered for forward and backward (two gathers cost one all-reduce).
            blocks = job.layers_by_stage[stage]
            gathers = all_reduce(weights / blocks, ranks, stride, device, constants)
            if job.secondary_group:
                gathers = (gathers + all_reduce(stored / blocks, job.secondary_group, stride, device, constants)) / 2
            window, moving = working, m * blocks * (gathers + scatter(gradients / blocks))
        else:
            # ZeRO 0: all-reduce after the last micro batch. ZeRO 1: reduce-scatter, and the new weights are gathered.
            # ZeRO 2: reduce-scatter at each micro batch.
            sums = m if job.zero == 2 else 1
            moving = sums * all_reduce(gradients, ranks, stride, device, constants)
            if job.zero:
                gathered = self.gathered_bytes(weights, trained / held)
                moving = sums * scatter(gradients) + all_reduce(gathered, ranks, stride, device, constants) / 2
            window = working * sums / m
        return self.exposed_data(moving, window)

    def gathered_bytes(self, weights: float, trained: float) -> float:
        """Return the bytes of new weights that ZeRO 1 and 2 gather: of all ``weights``, a share of them ``trained``."""
        return weights

    def exposed_data(self, moving: float, window: float) -> float:
        """Return the exposed seconds of ``moving`` seconds of data-parallel communication during ``window`` seconds."""
        exposed = self.constants["exposed.dp"]
        return exposed * moving + max(0.0, (1 - exposed) * moving - window)

    def _optimizer(self, stage: int) -> float:
        """Return the seconds of the update: gradients, weights and moments are read and written, and the norm."""
        job, device = self.job, self.device
        share = job.trained_parameters(stage) / (job.shard_size if job.zero else 1)
        state = job.state
        if job.exchanges_signs:
            return share * sign_bytes(job.dp * job.cp) / (device.bandwidth * MEMORY_REACH)
        size = share * (2 * state.gradient + 2 * (state.master + state.moments) + state.weight)
        matrices = orthogonalization(job, device) if job.matrix_flops else 0.0
        matrices += all_reduce(job.matrix_bytes, job.tp * job.cp * job.dp, 1, device, self.constants) / 2
        return matrices + size * self.constants[f"passes.{job.kernels}"] / (device.bandwidth * MEMORY_REACH)


def step_time(job: Job, device: HardwareSpec, constants: Mapping[str, float]) -> StepTime:
    """Return the forecast of one step of a run of this project. Arguments as ``StepModel``."""
    return StepModel(job, device, constants).step()


def key_bytes(job: Job) -> float:
    """Return the bytes of a rank's keys and values of a micro batch in one block."""
    return 2 * job.tokens * job.keys / job.tp * job.inner_bytes


def matmul_seconds(
    rows: float, inner: float, columns: float, form: str, device: HardwareSpec, constants: Mapping[str, float]
) -> float:
    """Return the seconds of a GEMM [rows, inner] x [inner, columns].

    Its 2 * rows * inner * columns FLOPs run at the device's share of the peak, less if a side is short relative to a
    kernel's tile.
    """
    form = device.format_used(form)
    share = constants.get(f"matmul.{device.family}.{form}", constants["matmul"] * device.reach[form])
    tile = constants["tile.bf16" if form in ("bf16", "fp32") else "tile.fp8"]
    filled = (1 + tile / rows) * (1 + tile / inner) * (1 + tile / columns)
    return 2 * rows * inner * columns / (device.peaks[form] * share) * filled


def _blocks_recomputed(job: Job) -> float:
    """Return the share of the blocks that the backward pass recomputes."""
    return job.block_recomputed / job.recompute_every


def _gemms_recomputed(job: Job) -> float:
    """Return the share of a block's GEMMs that the backward pass recomputes, averaged over the blocks."""
    blocks = _blocks_recomputed(job)
    if job.mlp_chunks == 1:
        return blocks
    sizes = [rows * columns for rows, columns in job.matmuls]
    mlp = 1 - sum(sizes[:2]) / sum(sizes)  # after qkv and o
    return mlp + blocks * (1 - mlp)


def kernel_count(job: Job) -> float:
    """Return the number of kernels that a block launches per micro batch: forward, backward and recomputation.

    The backward pass launches two kernels for each one of the forward pass.
    """
    forward = len(job.matmuls) + OPERATIONS[job.kernels] + ATTENTION_OPERATIONS.get(job.attention_kernel, 1)
    forward += 6 * len(job.adapted)
    count = forward * (3 + _gemms_recomputed(job))
    count += OPERATIONS[job.kernels] * job.elementwise_recomputed * REPEATED_OPERATIONS
    if job.tp > 1:
        count += COLLECTIVE_OPERATIONS * _sums_over_tp(job)
    return count


def _sums_over_tp(job: Job) -> float:
    """Return the all-reduces of a block, or pairs of gather and scatter: two forward, two backward, two recomputed."""
    if job.mlp_chunks > 1:  # each network is recomputed
        return 5 + (job.recompute == "full") / job.recompute_every
    return 4 + 2 * (job.recompute == "full") / job.recompute_every


def orthogonalization(job: Job, device: HardwareSpec) -> float:
    """Return the seconds of Muon's Newton-Schulz steps, as GEMMs in the compute format."""
    form = device.format_used("bf16" if job.format == "fp8" else job.format)
    return job.matrix_flops / (device.peaks[form] * device.reach[form])


def _offload(job: Job, stage: int, working: float) -> float:
    """Return the seconds that ``trainer.offload`` adds to ``working`` seconds of computing."""
    seconds = 0.0
    if job.offloads_activations:  # out in the forward pass, back in the backward pass
        copied = 2 * sum(layer_activations(job).values()) * job.layers_by_stage[stage] * job.num_microbatches
        seconds += max(0.0, copied / COPY_TO_HOST - working)
    if job.offloads_optimizer:
        share = job.trained_parameters(stage) / (job.shard_size if job.zero else 1)
        weight = job.state.master or job.state.weight
        # Gradients and weights are copied to the host, new weights back. The host reads all of them and writes weights
        # and moments.
        seconds += share * 3 * weight / COPY_TO_HOST
        seconds += share * (3 * weight + 2 * job.state.moments) / HOST_BANDWIDTH
    return seconds


def sign_bytes(ranks: int) -> float:
    """Return the bytes that a step of 1-bit Adam reads and writes per weight, after its warm-up.

    Counted in tests/optim/test_onebit_adam.py: a rank compresses all momenta and averages its share.
    """
    return 360 + 152 / ranks if ranks > 1 else 100


# Time of collectives: a latency and a bus bandwidth, within a node or between nodes.
RING_SHARE = 0.78
"""Share of the link bandwidth that a ring of some of a node's devices reaches. All eight may reduce in the switch."""


def bus_bandwidth(device: HardwareSpec, ranks: int, stride: int, constants: Mapping[str, float]) -> float:
    """Return the bus bandwidth, bytes/s, of a large collective among ``ranks`` ranks at a distance of ``stride`` ranks.

    Within a node: the measured value for all devices, or a ring's for some of them. Between nodes: the sum of the
    network cards of the group's ranks on a node, limited by the node's links.
    """
    inside = max(1, min(ranks, device.per_node // min(stride, device.per_node)))
    within = device.bus
    if inside < device.per_node:
        within = min(device.bus, RING_SHARE * device.link)
        if device.family == "mi300x":  # each pair of devices has one seventh of the links
            within *= max(inside - 1, 1) / (device.per_node - 1)
    if inside >= ranks:
        return within
    return min(within, constants["network.share"] * inside * device.network)


def all_reduce(size: float, ranks: int, stride: int, device: HardwareSpec, constants: Mapping[str, float]) -> float:
    """Return the seconds of an all-reduce of ``size`` bytes. An all-gather or reduce-scatter takes half."""
    if ranks == 1 or not size:
        return 0.0
    bandwidth = bus_bandwidth(device, ranks, stride, constants)
    outside = ranks * stride > device.per_node
    start = constants["latency.network"] if outside else constants["latency.node"]
    return start + 2 * (ranks - 1) / ranks * size / bandwidth


# Fitted constants: constants.json, written by `python -m benchmarks fit_planner`.
CONSTANTS_FILE = Path(__file__).with_name("constants.json")


@functools.cache
def load_constants() -> dict[str, float]:
    """Return the fitted constants by name; benchmarks/planner/constants.csv documents them."""
    return {name: float(entry["value"]) for name, entry in load_constants_file()["constants"].items()}


@functools.cache
def load_constants_file() -> dict[str, Any]:
    """Return the parsed file: constants with their meaning, the date, the data, and errors on held-out rows."""
    content: dict[str, Any] = json.loads(CONSTANTS_FILE.read_text(encoding="utf-8"))
    return content
