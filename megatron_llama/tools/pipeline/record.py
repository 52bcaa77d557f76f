"""Records what a rank does while megatron-core's schedule runs: passes, and what it receives and sends for them.

The schedules call three functions for all of it: ``forward_step`` and ``backward_step`` of their module, and
``P2PCommunicator._communicate``. A ``Recorder`` stands in front of these three. Tensors are told apart by identity: the
one that a rank receives is the argument of the pass that needs it, and the one that it sends is the result of a pass.
So the order is what the schedule did, with fake ranks (``recorded_order``) and with real ones (``measured``) alike.
"""
from __future__ import annotations

import os
import pickle
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import nn

from megatron_llama import cli
from megatron_llama.arch.shapes import head_dim, matrices_per_layer
from megatron_llama.data.batches import build_data
from megatron_llama.devices import HOST, get_device
from megatron_llama.launch.start import Share, start_ranks
from megatron_llama.launch.world import find_world
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan
from megatron_llama.plan.job import job_of_plan
from megatron_llama.tools.common import MOCK_RUN
from megatron_llama.tools.forecast.hardware import find_device
from megatron_llama.tools.forecast.step_time import load_constants, microbatch_seconds
from megatron_llama.tools.pipeline.lanes import NEXT, PREVIOUS, Done, Pass, RankRecord, Timeline, as_measured
from megatron_llama.tools.rehearse.rehearsal import fake_world
from megatron_llama.tools.settings import ClusterConfig


class _Received(NamedTuple):
    """A received tensor: the ``number``-th one from that side."""

    side: int
    number: int


@dataclass
class Recorder:
    """Records the schedules that run inside ``recording``."""

    chunks: Sequence[nn.Module]
    synchronize: Callable[[], None] = lambda: None
    """Waits for the device, so that the host's clock tells when a pass ended."""
    record: RankRecord = field(default_factory=RankRecord)
    _of_tensor: dict[int, Pass] = field(default_factory=dict)
    """The pass that made a tensor, by the tensor's identity. The schedule keeps it until it is used."""
    _received: dict[int, _Received] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)

    def new_step(self) -> None:
        """Forgets the last step."""
        self.record = RankRecord()
        for kept in (self._of_tensor, self._received, self._counts):
            kept.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Stands in front of megatron-core's three functions inside the context."""
        forward, backward = schedules.forward_step, schedules.backward_step
        communicate = P2PCommunicator._communicate

        def forward_step(step: Any, data: Any, model: Any, count: int, received: Any, *args: Any, **kwargs: Any) -> Any:
            chunk = next(number for number, one in enumerate(self.chunks) if one is model)
            what = Pass(False, chunk, self._counts.get(chunk, 0))
            self._counts[chunk] = what.microbatch + 1
            result = self._timed(what, received, lambda: forward(step, data, model, count, received, *args, **kwargs))
            self._of_tensor[id(_tensor(result[0]))] = what
            return result

        def backward_step(received: Any, made: Any, gradient: Any, *args: Any, **kwargs: Any) -> Any:
            what = self._of_tensor.pop(id(_tensor(made)))._replace(backward=True)
            result = self._timed(what, gradient, lambda: backward(received, made, gradient, *args, **kwargs))
            self._of_tensor[id(_tensor(result))] = what
            return result

        def _communicate(communicator: Any, **asked: Any) -> Any:
            for side, name in ((NEXT, "tensor_send_next"), (PREVIOUS, "tensor_send_prev")):
                if asked[name] is not None:
                    self.record.sent[side].append(self._of_tensor[id(_tensor(asked[name]))])
            result = communicate(communicator, **asked)
            for side, tensor in ((PREVIOUS, result[0]), (NEXT, result[1])):
                if tensor is not None:
                    self._received[id(tensor)] = _Received(side, self.record.received[side])
                    self.record.received[side] += 1
            return result

        with (
            patch.object(schedules, "forward_step", forward_step),
            patch.object(schedules, "backward_step", backward_step),
            patch.object(P2PCommunicator, "_communicate", _communicate),
        ):
            yield

    def _timed(self, what: Pass, received: Any, run: Callable[[], Any]) -> Any:
        message = self._received.pop(id(_tensor(received)), None)
        start = time.perf_counter()
        result = run()
        self.synchronize()
        self.record.done.append(Done(what, start, time.perf_counter(), message))
        return result


def _tensor(value: Any) -> torch.Tensor | None:
    """The schedules hand over tensors, and lists of one."""
    while isinstance(value, list):
        (value,) = value
    return value  # type: ignore[no-any-return]


# Training steps on this machine, recorded: when each stage of the pipeline computed what.


STEPS = 6
"""The first one warms up."""


def measured(plan: Plan) -> Timeline | int:
    """The step of the median length among those after the first, of the first data- and tensor-parallel ranks.

    An exit status other than 0 if a rank failed. Raises ConfigError as ``start_ranks``.
    """
    with tempfile.TemporaryDirectory() as folder:
        entry, share = partial(_record_one_rank, Path(folder)), Share(plan.world_size, output_dir=Path(folder))
        if status := start_ranks(plan, entry, share):
            return status
        stages = plan.grid.ranks(0, "pp")
        records = [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in stages]
    steps = sorted((as_measured(step) for step in list(zip(*records, strict=True))[1:]), key=lambda step: step.seconds)
    return steps[(len(steps) - 1) // 2]


def _record_one_rank(folder: Path, plan: Plan) -> None:
    from megatron_llama.data.batches import build_data
    from megatron_llama.devices import get_device
    from megatron_llama.optim import build_optimizer
    from megatron_llama.parallel import build_model, process_groups
    from megatron_llama.tools.steps import open_steps

    rank = int(os.environ["RANK"])
    topology, device = plan.topology(rank), get_device(plan.config.device.name)
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    found: list[RankRecord] = []
    with process_groups(plan, topology, device, torch_device):
        model = build_model(plan, topology, device, torch_device)
        optimizer = build_optimizer(plan, model)
        data = build_data(plan, topology, torch_device)
        recorder = Recorder(model.chunks, device.synchronize)
        with open_steps(plan, topology, model, optimizer, data) as steps, recorder.recording():
            for step in range(1, STEPS + 1):
                recorder.new_step()
                steps.run(step)
                found.append(recorder.record)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))


# The order in which the ranks of a pipeline compute and send: megatron-core's schedule, run once for each of them.
#
# One process plays each rank in turn, in a world of fake ranks where messages go nowhere and arrive at once. A schedule
# knows the stages, their chunks and the number of micro batches, but not the model, so it runs a Llama of one tiny
# block for each chunk, through ``forward_backward``, as training does.


_TINY = ("hidden_size=8", "num_attention_heads=1", "num_key_value_heads=1", "intermediate_size=8", "vocab_size=8")


def recorded_order(pp: int, vpp: int, microbatches: int) -> list[RankRecord]:
    """What each of ``pp`` ranks with ``vpp`` chunks does in a step. No process group may exist."""
    plan = tiny_plan(pp, vpp, microbatches)
    return [_rank(plan, rank) for rank in range(pp)]


def tiny_plan(pp: int, vpp: int, microbatches: int) -> Plan:
    """A Llama of one tiny block a chunk on ``pp`` ranks, on made-up data."""
    overrides = [
        *(f"model.{shape}" for shape in _TINY),
        f"model.num_hidden_layers={pp * vpp}",
        f"trainer.pp={pp}",
        f"trainer.vpp={vpp}",
        f"trainer.global_batch_size={microbatches}",
        "trainer.micro_batch_size=1",
        "trainer.zero=0",
        "data.seq_length=8",
        "data.name=pipeline",
        "device=cpu",
        "dry_run=true",
        *MOCK_RUN,
    ]
    return find_world(cli.parse_overrides(overrides), None).plan()


def _rank(plan: Plan, rank: int) -> RankRecord:
    topology, device, cpu = plan.topology(rank), get_device(HOST), torch.device(HOST)
    with fake_world(topology), process_groups(plan, topology, device, cpu):
        data = build_data(plan, topology, cpu)
        model = build_model(plan, topology, device, cpu)
        recorder = Recorder(model.chunks)
        with recorder.recording():
            model.forward_backward(data.train.at(0))
    return recorder.record


# How long each pass of a pipeline takes: by FLOPs, on a device of the hardware table, or as it was measured.


Durations = Callable[[int, Pass], float]
"""(pp rank, pass) to the time it takes."""
MILLISECONDS, BLOCKS = "ms", "forward passes of a block"


@dataclass(frozen=True)
class Passes:
    """The time of each chunk's passes, and where it is from."""

    source: str
    unit: str
    forward: tuple[float, ...]
    """Of each virtual stage."""
    backward: tuple[float, ...]

    def of(self, pp: int) -> Durations:
        """For ``pp`` ranks: chunk c of rank r is virtual stage c * pp + r."""
        return lambda rank, what: (self.backward if what.backward else self.forward)[what.chunk * pp + rank]


def by_flops(plan: Plan) -> Passes:
    """Blocks and output head in proportion to their FLOPs; one forward pass of a block is 1."""
    model, seq = plan.model, plan.config.data.length
    block = matrices_per_layer(model) + model.num_attention_heads * head_dim(model) * seq
    head = model.vocab_size * model.hidden_size / block
    return _passes(plan, 1.0, head, "by their floating-point operations", BLOCKS)


def on_cluster(plan: Plan, cluster: ClusterConfig) -> Passes:
    """As scripts/plan.py forecasts them for the cluster's device, in milliseconds; its total is divided into forward
    and backward pass by FLOPs."""
    whole = find_device(cluster.device)
    assert whole is not None, "load_cluster's caller has checked it"
    block, head = microbatch_seconds(job_of_plan(plan), whole.per_rank(), load_constants())
    times = _backward_times(plan)
    return _passes(
        plan, 1000 * block / (1 + times[0]), 1000 * head / (1 + times[1]), f"as forecast on {whole.name}", MILLISECONDS
    )


def as_medians(measured: Timeline, vpp: int) -> Passes:
    """The median over micro batches of each chunk's passes, in milliseconds."""
    found: dict[tuple[int, bool], list[float]] = defaultdict(list)
    pp = len(measured.ranks)
    for rank, spans in enumerate(measured.ranks):
        for what, start, end in spans:
            found[what.chunk * pp + rank, what.backward].append(1000 * (end - start))
    stages = range(pp * vpp)
    forward, backward = (tuple(statistics.median(found[stage, kind]) for stage in stages) for kind in (False, True))
    return Passes("as measured, the median of each chunk's", MILLISECONDS, forward, backward)


def _backward_times(plan: Plan) -> tuple[float, float]:
    """Products of the backward pass for each one of the forward pass: (of a block, of the head)."""
    lora = plan.config.finetune.method == "lora"  # frozen weights have no gradient
    trainer = plan.config.trainer
    once_more = (trainer.recompute == "full") / trainer.recompute_every
    return (1 if lora else 2) + once_more, 1 if lora else 2


def _passes(plan: Plan, block: float, head: float, source: str, unit: str) -> Passes:
    """From the forward passes of a block and of the head."""
    layers = [len(stage) for stage in plan.stage_layers]
    heads = [0.0] * (len(layers) - 1) + [head]
    of_block, of_head = _backward_times(plan)
    return Passes(
        source,
        unit,
        tuple(count * block + more for count, more in zip(layers, heads, strict=True)),
        tuple(count * block * of_block + more * of_head for count, more in zip(layers, heads, strict=True)),
    )
