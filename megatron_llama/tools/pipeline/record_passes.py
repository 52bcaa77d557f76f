"""Record the passes of a rank while megatron-core's pipeline schedule runs.

The schedules call ``forward_step`` and ``backward_step`` of their module; ``record_passes`` wraps them. The recorded
order is the order of the schedule, with fake ranks (``recorded_order``) and with real ranks (``measure_pipeline``).
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.pipeline_parallel import schedules
from torch import nn

from megatron_llama import cli
from megatron_llama.arch.parameters import head_dim, matrices_per_layer
from megatron_llama.data.batches import build_data
from megatron_llama.devices import HOST, get_device
from megatron_llama.launch.world import find_world
from megatron_llama.parallel import build_model, open_device, process_groups
from megatron_llama.plan import Plan
from megatron_llama.plan.forecast_job import job_of_plan
from megatron_llama.tools.cluster_settings import ClusterConfig
from megatron_llama.tools.common import MOCK_RUN
from megatron_llama.tools.forecast.hardware import find_device
from megatron_llama.tools.forecast.step_time import StepModel, load_constants
from megatron_llama.tools.measured_steps import open_rank, rank_results
from megatron_llama.tools.pipeline.diagram import Pass, PipelineTimeline, Span, measured_timeline
from megatron_llama.tools.rehearse.rehearsal import fake_world


@contextmanager
def record_passes(chunks: Sequence[nn.Module], synchronize: Callable[[], None] = lambda: None) -> Iterator[list[Span]]:
    """Record the passes of the step that runs inside the context.

    Args:
        chunks: Chunks of this rank.
        synchronize: Waits for the device, so that host times are the end times of passes.
    """
    spans: list[Span] = []
    counts = Counter[int]()
    of_output: dict[int, Pass] = {}  # by id of the output, which the schedule keeps alive until its backward pass
    forward, backward = schedules.forward_step, schedules.backward_step

    def timed(pass_: Pass, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        synchronize()
        spans.append(Span(pass_, start, time.perf_counter()))
        return result

    def forward_step(step: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        chunk = next(number for number, module in enumerate(chunks) if module is model)
        pass_ = Pass(False, chunk, counts[chunk])
        counts[chunk] += 1
        result = timed(pass_, lambda: forward(step, data, model, *args, **kwargs))
        of_output[id(_tensor(result[0]))] = pass_
        return result

    def backward_step(received: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        pass_ = of_output.pop(id(_tensor(output)))._replace(backward=True)
        return timed(pass_, lambda: backward(received, output, *args, **kwargs))

    with patch.object(schedules, "forward_step", forward_step), patch.object(schedules, "backward_step", backward_step):
        yield spans


def _tensor(value: Any) -> torch.Tensor | None:
    """Unwrap a tensor: the schedules pass tensors and lists of one tensor."""
    while isinstance(value, list):
        (value,) = value
    return value  # type: ignore[no-any-return]


# Training steps on this machine, recorded with times.
STEPS = 6  # the first step is warm-up


def measure_pipeline(plan: Plan) -> tuple[int, PipelineTimeline | None]:
    """Run STEPS steps; return the one of median duration, without warm-up, of the ranks with dp and tp rank 0.

    The exit status precedes it; the timeline is None if a rank failed. Raises ConfigError as ``start_ranks``.
    """
    status, records = rank_results(plan, _record_steps)
    if status:
        return status, None
    steps = list(zip(*(records[rank] for rank in plan.grid.ranks(0, "pp")), strict=True))[1:]
    timelines = sorted(map(measured_timeline, steps), key=lambda timeline: timeline.seconds)
    return 0, timelines[(len(timelines) - 1) // 2]


def _record_steps(plan: Plan) -> list[list[Span]]:
    device, torch_device = open_device(plan)
    records: list[list[Span]] = []
    with open_rank(plan, int(os.environ["RANK"]), device, torch_device) as steps:
        for step in range(1, STEPS + 1):
            with record_passes(steps.model.chunks, device.synchronize) as spans:
                steps.run(step)
            records.append(spans)
    return records


# Order of passes: megatron-core's schedule, run once as each rank.
#
# One process runs as each rank in sequence, in a fake world where messages take no time. The schedule depends on the
# stages, chunks and number of micro batches, not on the model, so each chunk is one tiny Llama block, run by
# ``forward_backward`` as in training.
_TINY = (
    "model.hidden_size=8 model.num_attention_heads=1 model.num_key_value_heads=1 model.intermediate_size=8 "
    "model.vocab_size=8 trainer.micro_batch_size=1 trainer.zero=0 data.seq_length=8 data.name=pipeline device=cpu"
).split()


def recorded_order(pp: int, vpp: int, microbatches: int) -> list[list[Pass]]:
    """Record the passes of a step of each of ``pp`` ranks with ``vpp`` chunks. No process group may exist."""
    plan, device, cpu, orders = tiny_plan(pp, vpp, microbatches), get_device(HOST), torch.device(HOST), []
    for topology in map(plan.topology, range(pp)):
        with fake_world(topology), process_groups(plan, topology, device, cpu):
            data, model = build_data(plan, topology, cpu), build_model(plan, topology, device, cpu)
            with record_passes(model.chunks) as spans:
                model.forward_backward(data.train.at(0))
        orders.append([span.pass_ for span in spans])
    return orders


def tiny_plan(pp: int, vpp: int, microbatches: int) -> Plan:
    """Plan a Llama with one tiny block per chunk on ``pp`` ranks, on mock data."""
    sizes = [f"model.num_hidden_layers={pp * vpp}", f"trainer.pp={pp}", f"trainer.vpp={vpp}"]
    sizes.append(f"trainer.global_batch_size={microbatches}")
    return find_world(cli.parse_overrides([*_TINY, *sizes, "dry_run=true", *MOCK_RUN]), None).plan()


# Duration of each pass: by FLOPs, forecast for a device of the hardware table, or measured.
@dataclass(frozen=True)
class PassTimes:
    """Time of each chunk's passes, and the source of the numbers."""

    source: str
    unit: str
    forward: tuple[float, ...]
    """Time of a forward pass by virtual stage."""
    backward: tuple[float, ...]
    """Time of a backward pass by virtual stage."""

    def of(self, pp: int) -> Callable[[int, Pass], float]:
        """Return the durations for ``pp`` ranks: chunk c of rank r is virtual stage c * pp + r."""
        return lambda rank, pass_: (self.backward if pass_.backward else self.forward)[pass_.chunk * pp + rank]


def pass_times_by_flops(plan: Plan) -> PassTimes:
    """Weight blocks and output head by FLOPs; a forward pass of a block takes 1."""
    model, seq = plan.model, plan.config.data.length
    block = matrices_per_layer(model) + model.num_attention_heads * head_dim(model) * seq
    head = model.vocab_size * model.hidden_size / block
    return _passes(plan, 1.0, head, "by their floating-point operations", "forward passes of a block")


def pass_times_on_cluster(plan: Plan, cluster: ClusterConfig) -> PassTimes:
    """Forecast the times for the cluster's device in milliseconds, as scripts/plan.py does.

    The total is split into forward and backward pass by FLOPs.
    """
    hardware = find_device(cluster.device)
    assert hardware is not None, "checked by the caller"
    model = StepModel(job_of_plan(plan), hardware.per_rank(), load_constants())
    totals = 1000 * model.layer().total, 1000 * model.head()
    block, head = (total / (1 + ratio) for total, ratio in zip(totals, _backward_ratios(plan), strict=True))
    return _passes(plan, block, head, f"as forecast on {hardware.name}", "ms")


def median_pass_times(measured: PipelineTimeline, vpp: int) -> PassTimes:
    """Return the median time of each chunk's passes over micro batches, in milliseconds."""
    times: dict[tuple[int, bool], list[float]] = defaultdict(list)
    pp = len(measured.ranks)
    for rank, spans in enumerate(measured.ranks):
        for pass_, start, end in spans:
            times[pass_.chunk * pp + rank, pass_.backward].append(1000 * (end - start))
    stages = range(pp * vpp)
    forward, backward = (tuple(statistics.median(times[stage, kind]) for stage in stages) for kind in (False, True))
    return PassTimes("measured, median of each chunk", "ms", forward, backward)


def _backward_ratios(plan: Plan) -> tuple[float, float]:
    """Return the ratio of backward to forward matmul FLOPs: (of a block, of the head)."""
    lora = plan.config.finetune.method == "lora"  # frozen weights have no gradient
    trainer = plan.config.trainer
    recompute = (trainer.recompute == "full") / trainer.recompute_every
    return (1 if lora else 2) + recompute, 1 if lora else 2


def _passes(plan: Plan, block: float, head: float, source: str, unit: str) -> PassTimes:
    """Compute the times of all virtual stages from the forward times of a block and of the head."""
    blocks = [len(stage) * block for stage in plan.stage_layers]
    stages = list(zip(blocks, [*[0.0] * (len(blocks) - 1), head], strict=True))
    of_block, of_head = _backward_ratios(plan)
    forward, backward = ([a * each + b * more for each, more in stages] for a, b in ((1, 1), (of_block, of_head)))
    return PassTimes(source, unit, tuple(forward), tuple(backward))
