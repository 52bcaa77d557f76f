"""One rank's training step, watched: with fake tensors (``rehearse``) or, to check that, with real ones."""
from __future__ import annotations

import gc
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from megatron_llama import devices
from megatron_llama.config.precision import quantized_bytes
from megatron_llama.data.batches import Batches, build_data
from megatron_llama.devices import INDUCTOR, Device, device_named, find_device, get_device
from megatron_llama.devices.kernels import Kernels
from megatron_llama.devices.visibility import Documents
from megatron_llama.model.inputs import MicroBatch
from megatron_llama.optim import Optimizer, build_optimizer
from megatron_llama.optim.blockwise import BlockwiseState
from megatron_llama.parallel import ParallelModel, build_model, parallelize, process_groups, shards
from megatron_llama.plan import Plan
from megatron_llama.tools.forecast.module_work import any_layer
from megatron_llama.tools.forecast.traffic import Amount, Traffic
from megatron_llama.tools.rehearse.modules import BACKWARD, FORWARD, RECOMPUTED, Modules
from megatron_llama.tools.rehearse.report import (
    BATCH,
    GATHERED,
    GRADIENTS,
    HOST,
    OPTIMIZER,
    WEIGHTS,
    DispatchedOperator,
    Flops,
    Rehearsal,
    Sighting,
)
from megatron_llama.tools.rehearse.text import History
from megatron_llama.tools.rehearse.watch import Operation, Watch
from megatron_llama.tools.steps import open_steps
from megatron_llama.tools.traffic.count import TrafficCounter
from megatron_llama.topology import Topology

MOST_BLOCK_RUNS = 160
"""Blocks times micro batches that a rehearsal runs; of a longer step only as many micro batches as it needs."""
_NO_KERNEL = {"lift_fresh", "_local_scalar_dense"}
"""A constant on the host becomes a tensor; a value is read, which ``synchronizations`` counts."""


def rehearse(plan: Plan, rank: int) -> Rehearsal:
    """``rank``'s step of ``plan`` at its true size, with fake tensors; seconds on one core, of any world.

    ``plan`` must train on made-up data (``data.mock``), uncompiled. No process group may exist. The plan's device need
    not be here: the CPU's code runs. Raises ValueError for a rank outside the world.
    """
    topology = plan.topology(rank)
    with fake_world(topology, plan.config.device.name):
        return watch_rank(plan, topology, get_device(devices.HOST), fake=True)


def watch_rank(plan: Plan, topology: Topology, device: Device, *, fake: bool = False) -> Rehearsal:
    """A rank's second step, watched. With real tensors all ranks must call this."""
    start = time.perf_counter()
    cpu = torch.device(devices.HOST)
    watch = Watch(plan.padded_vocab_size // plan.config.trainer.tp)
    with process_groups(plan, topology, device, cpu), ExitStack() as inside:
        data = build_data(plan, topology, cpu)
        mode = inside.enter_context(FakeTensors()) if fake else None
        gc.collect()  # what an earlier rehearsal left behind must not die in this one
        inside.enter_context(watch.watching())
        model = build_model(plan, topology, device, cpu)
        optimizer = build_optimizer(plan, model)
        watch.label((shard.local for shard in model.shards), WEIGHTS)
        own_casts = [copies for copies in model.compute_copies if copies is not None]
        watch.label((copy for copies in own_casts for copy in copies.master_of), GATHERED)
        _label_states(watch, optimizer)
        built = watch.alive
        watch.modules = modules = Modules(model.chunks)
        batches = _Batches(data.train.with_length(), watch, mode)
        reduced = _watch_gradients(inside, watch, model, optimizer)
        inside.enter_context(modules.following())
        watch.counter = counter = TrafficCounter()
        steps = inside.enter_context(open_steps(plan, topology, model, optimizer, data, batches))
        few, many = _microbatches(plan, topology, len(batches.all_of_a_step()))
        counts = [(few, False), (few, True), (many, False)] if batches.documents else [(few, False), (many, False)]
        found, shapes = [], []
        for step, (count, other_documents) in enumerate(counts, start=1):
            batches.count, batches.other_documents = count, other_documents
            watch.new_step()
            history = History(watch.records, watch.changes)
            steps.run(step)
            found.append(_Counted(count, dict(watch.flops), counter.take()))
            shapes.append(watch.shapes)
            _label_states(watch, optimizer)
        at_rest = watch.alive
        total = len(batches.all_of_a_step())
    return Rehearsal(
        rank=topology.rank,
        place=topology.place,
        world_size=topology.world_size,
        microbatches=total,
        rehearsed_microbatches=many,
        built=built,
        at_rest=at_rest,
        reduced=reduced[-1],
        **history.summary(watch.marks, modules.runs),
        flops=_by_module(found, total),
        traffic=_traffic(found, total),
        synchronizations=_sightings(watch.host_waits),
        dynamic=(*_sightings(watch.shapes_from_values), *_new_shapes(shapes[-2], shapes[-1], batches.documents)),
        operators=tuple(_operators(watch)),
        order=tuple(modules.order),
        seconds=time.perf_counter() - start,
    )


def _watch_gradients(inside: ExitStack, watch: Watch, model: ParallelModel, optimizer: Optimizer) -> list[int]:
    """Labels the gradients that the optimizer gets, and notes their bytes, one for each step."""
    gradient_norm, reduced = optimizer.gradient_norm, list[int]()

    def labelled() -> torch.Tensor:
        """At this moment the shards' gradients are there and complete."""
        watch.label((shard.grad for shard in model.shards), GRADIENTS)
        reduced.append(sum(shard.grad.nbytes for shard in model.shards if shard.grad is not None))
        return gradient_norm()

    inside.enter_context(patch.object(optimizer, "gradient_norm", labelled))
    return reduced


class _Batches:
    """The run's micro batches, of which a step gets only the first ``count``; all are alive while it lasts."""

    def __init__(self, batches: Batches, watch: Watch, mode: FakeTensorMode | None) -> None:
        self._batches, self._watch, self._mode = batches, watch, mode
        self._alive: list[MicroBatch] = []
        self.count = 0
        self.other_documents = False
        """Whether the first document of each sequence is a token longer."""
        self.documents = self.all_of_a_step()[0].documents is not None

    def all_of_a_step(self) -> list[MicroBatch]:
        """The micro batches of the largest step, with values."""
        with _disable_current_modes():
            shapes = self._batches.positions_by_shape()
            largest = max(shapes, key=lambda cut: cut.tokens if cut else 0)
            return self._batches.on_host(shapes[largest])

    def at(self, consumed_samples: int) -> Sequence[MicroBatch]:
        self._alive = []
        for batch in self.all_of_a_step():
            if self.other_documents:
                batch = _with_other_documents(batch)
            kept = batch if self._mode is None else batch.on(self._mode.from_tensor)
            tensors = [kept.tokens, kept.labels, kept.loss_mask, kept.sizes]
            if kept.documents is not None:
                tensors += [kept.documents.ids, kept.documents.cu_seqlens]
            if kept.subsets is not None:
                tensors += [kept.subsets.rows, kept.subsets.inverse, kept.subsets.positions]
            self._watch.label(tensors, BATCH)
            self._alive.append(kept)
        return self._alive[: self.count]


class _Counted(NamedTuple):
    """What a step of so many micro batches did."""

    microbatches: int
    flops: Mapping[tuple[str, str], int]
    traffic: Traffic


def _with_other_documents(batch: MicroBatch) -> MicroBatch:
    assert batch.documents is not None
    with _disable_current_modes():
        ids = batch.documents.ids.clone()
        for row in ids:
            row[int((row == row[0]).sum())] = row[0]
        return replace(batch, documents=Documents.of(ids))


def _microbatches(plan: Plan, topology: Topology, total: int) -> tuple[int, int]:
    """How many micro batches the first step has, which only makes what lasts, and how many the second, which counts.

    Once the pipeline is full, later micro batches find the memory as it is then. Interleaved, they come in rounds of
    pp.
    """
    pp = topology.sizes["pp"]
    layers = sum(len(plan.stage_layers[stage]) for stage in topology.chunks())
    first, enough = (1, pp + 1) if topology.vpp == 1 else (pp, 2 * pp)
    affordable = MOST_BLOCK_RUNS // max(1, layers) // pp * pp
    return min(total, first), min(total, max(enough, affordable))


def _label_states(watch: Watch, optimizer: Optimizer) -> None:
    watch.label(_states(optimizer), HOST if optimizer.on_host else OPTIMIZER)
    if not optimizer.inner.counts_on_device:
        watch.keep_on_host(state["step"] for state in optimizer.inner.state.values() if "step" in state)
    if optimizer.on_host:
        watch.label((weight for group in optimizer.inner.param_groups for weight in group["params"]), HOST)


def _states(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """All that the optimizer keeps, its counts of updates too."""
    for state in optimizer.inner.state.values():
        for value in state.values():
            if isinstance(value, BlockwiseState):
                yield from (value.codes, value.scales)
            elif isinstance(value, torch.Tensor):
                yield value


def _of_all(found: Sequence[_Counted], total: int, of: Callable[[_Counted], int]) -> int:
    """A number of a step with ``total`` micro batches: it grows with each by the same amount."""
    few, many = found[0], found[-1]
    if many.microbatches == total:
        return of(many)
    each = (of(many) - of(few)) // (many.microbatches - few.microbatches)
    return of(many) + each * (total - many.microbatches)


def _by_module(found: Sequence[_Counted], total: int) -> dict[str, Flops]:
    sums: dict[str, dict[str, int]] = defaultdict(lambda: {FORWARD: 0, BACKWARD: 0, RECOMPUTED: 0})
    for module, phase in found[-1].flops:
        count = _of_all(found, total, lambda step: step.flops.get((module, phase), 0))  # noqa: B023
        sums[any_layer(module)][phase] += count
    return {module: Flops(count[FORWARD], count[BACKWARD], count[RECOMPUTED]) for module, count in sums.items()}


def _traffic(found: Sequence[_Counted], total: int) -> Traffic:
    none = Amount(0, 0)
    return {
        line: Amount(*(_of_all(found, total, lambda step: step.traffic.get(line, none)[part]) for part in (0, 1)))  # noqa: B023
        for line in found[-1].traffic
    }


def _new_shapes(before: set[Operation], now: set[Operation], compare: bool) -> Iterator[Sighting]:
    """Where the batch with other documents had shapes that the last one has not."""
    places = Counter(any_layer(module) for module, _, _ in before - now) if compare else Counter()
    for module, count in places.most_common():
        yield Sighting("other shapes in the next batch", module or "the chunk itself", count)


def _operators(watch: Watch) -> Iterator[DispatchedOperator]:
    for (operator, module), (place, count) in watch.operators.items():
        namespace, name = operator._schema.name.split("::")
        view = operator.is_view or name in _NO_KERNEL
        yield DispatchedOperator(namespace, name, view, module, place, count)


def _sightings(counts: Counter[tuple[str, str]]) -> tuple[Sighting, ...]:
    return tuple(Sighting(what, place, count) for (what, place), count in counts.most_common())


# All that a rehearsal replaces. Everything else is the program as it trains.
#
# process group           torch's fake one: a collective returns at once and moves nothing
# tensors                 FakeTensorMode: shapes, dtypes and storages, but no values and no memory
# other ranks' groups     are not made: a world of 16,384 ranks costs what one of 128 does
# the data-parallel mesh  is made outside the mode, because it computes with the values of its ranks
# initial weights         are left empty: drawing them costs time, and there are no values
# kernels                 plain torch, unless the plan's device is the host. Documents go through a dense mask or
# tiles
# quantization            the same: only the size of its result is needed
# values read by the host are answered: 1.0 for a loss, a norm, a count of updates; 0 for counts of tokens and flags
# the data                made up (``data.mock``), with the run's shapes


class _PlainKernels(Kernels):
    """Kernels of an accelerator's rehearsal."""

    def rows_at_once(self, width: int) -> int:
        """Return the host's number of rows: the optimizer's states may be in the host's memory."""
        return device_named(devices.HOST).kernel_type().rows_at_once(self, width)  # type: ignore[arg-type]


@contextmanager
def fake_world(topology: Topology, device: str = devices.HOST) -> Iterator[None]:
    """A world of which only this rank is there. The process group ends with ``parallel.process_groups``.

    ``device`` is the name of the plan's device.
    """
    _clear_sharding_prop_cache()  # DTensor's answers would bring the meshes of an earlier world in this process
    dist.init_process_group("fake", store=FakeStore(), rank=topology.rank, world_size=topology.world_size)
    new_group = dist.new_group
    planned = find_device(device)
    kind = device_named(devices.HOST).kernel_type() if device == devices.HOST else _PlainKernels
    masked = planned is not None and planned.attention == "mask"

    def kernels(self: Device, compiled: bool) -> Kernels:
        attention = "mask" if masked else "tiles"  # varlen needs its device
        return kind(attention=attention, compiled=compiled, fuses_loss=compiled and self.compiler == INDUCTOR)

    def own_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and topology.rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return new_group(ranks, *args, **kwargs)

    with (
        patch.object(dist, "new_group", own_group),
        patch.object(dist.distributed_c10d, "new_group", own_group),
        patch.object(device_mesh, "new_group", own_group),
        patch.object(parallelize, "data_groups", _without_modes(parallelize.data_groups)),
        patch.object(parallelize, "initial_values", lambda piece, model, seed: torch.empty(piece.size)),
        patch.object(Device, "kernels", kernels),
        patch.object(kind, "is_one", lambda self, factor: False),  # fake numbers have no value
        patch.object(shards, "quantize", _quantized_size),
    ):
        yield


class FakeTensors(FakeTensorMode):
    """Tensors that are made inside the context have no values; where the host reads one, it is 1.0, 0 or False."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see Watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0
        return super().__torch_dispatch__(func, types, args, kwargs)


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    def outside(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return outside


def _quantized_size(values: torch.Tensor, kind: str) -> torch.Tensor:
    return values.new_empty(len(values), quantized_bytes(kind, values.shape[1]), dtype=torch.uint8)
