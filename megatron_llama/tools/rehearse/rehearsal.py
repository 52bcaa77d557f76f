"""Measure a rank's training step with fake tensors (``rehearse``) or, as a reference, with real ones."""

from __future__ import annotations

import gc
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
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
from megatron_llama.devices.attention_inputs import Documents
from megatron_llama.devices.kernels import Kernels
from megatron_llama.model.inputs import MicroBatch
from megatron_llama.optim import Optimizer, build_optimizer
from megatron_llama.optim.eight_bit_states import BlockwiseState
from megatron_llama.parallel import ParallelModel, build_model, parallelize, process_groups, shards
from megatron_llama.plan import Plan
from megatron_llama.tools.forecast.rank_work import any_layer
from megatron_llama.tools.forecast.traffic import Amount, Traffic
from megatron_llama.tools.measured_steps import BACKWARD, FORWARD, RECOMPUTED, Modules, TrafficCounter, open_steps
from megatron_llama.tools.rehearse.report import DispatchedOperator, Flops, MemoryKind, OperatorCount, Rehearsal
from megatron_llama.tools.rehearse.step_recorder import Operation, StepWatcher, memory_of_step
from megatron_llama.topology import Topology

MAX_BLOCK_RUNS = 160
"""Limit of blocks times micro batches; longer steps run only the micro batches needed to extrapolate."""
_StepCounts = tuple[int, Mapping[tuple[str, str], int], Traffic]
"""Micro batches of a step, FLOPs by module and phase, traffic."""
_NO_KERNEL = {"lift_fresh", "_local_scalar_dense"}
"""lift_fresh makes a tensor of a host constant; reads of values are counted in ``synchronizations``."""


def rehearse(plan: Plan, rank: int) -> Rehearsal:
    """Run a step of ``rank`` at its true size with fake tensors, in seconds on one core for any world size.

    ``plan`` must use mock data (``data.mock``) and no compilation. No process group may exist. The device of the plan
    is not required: the CPU code runs. Raises ValueError for a rank outside the world.
    """
    topology = plan.topology(rank)
    with fake_world(topology, plan.config.device.name):
        return measure_rank(plan, topology, get_device(devices.HOST), fake=True)


def measure_rank(plan: Plan, topology: Topology, device: Device, *, fake: bool = False) -> Rehearsal:
    """Measure the second step of a rank. With real tensors all ranks must call this."""
    start = time.perf_counter()
    cpu = torch.device(devices.HOST)
    watch = StepWatcher(plan.padded_vocab_size // plan.config.trainer.tp)
    with process_groups(plan, topology, device, cpu), ExitStack() as stack:
        data = build_data(plan, topology, cpu)
        mode = stack.enter_context(FakeTensors()) if fake else None
        gc.collect()  # garbage of an earlier rehearsal must not be freed during this one
        stack.enter_context(watch.watching())
        model = build_model(plan, topology, device, cpu)
        optimizer = build_optimizer(plan, model)
        watch.label((shard.local for shard in model.shards), MemoryKind.WEIGHTS)
        compute_copies = [copies for copies in model.compute_copies if copies is not None]
        watch.label((copy for copies in compute_copies for copy in copies.master_of), MemoryKind.GATHERED)
        _label_states(watch, optimizer)
        built = watch.alive
        watch.modules = modules = Modules(model.chunks)
        batches = _Batches(data.train.with_length(), watch, mode)
        reduced = _record_gradients(stack, watch, model, optimizer)
        stack.enter_context(modules.following())
        watch.counter = counter = TrafficCounter()
        steps = stack.enter_context(open_steps(plan, topology, model, optimizer, data, batches))
        few, many = _microbatches(plan, topology, len(batches.all_of_a_step()))
        counts = [(few, False), (few, True), (many, False)] if batches.documents else [(few, False), (many, False)]
        counts_of_steps, shapes = [], []
        for step, (count, other_documents) in enumerate(counts, start=1):
            batches.count, batches.other_documents = count, other_documents
            watch.new_step()
            steps.run(step)
            counts_of_steps.append((count, dict(watch.flops), counter.take()))
            shapes.append(watch.shapes)
            _label_states(watch, optimizer)
        at_rest = watch.alive
        total = len(batches.all_of_a_step())
    flops, traffic = _whole_step(counts_of_steps[0], counts_of_steps[-1], total)
    return Rehearsal(
        rank=topology.rank,
        place=topology.place,
        world_size=topology.world_size,
        microbatches=total,
        rehearsed_microbatches=many,
        built=built,
        at_rest=at_rest,
        reduced=reduced[-1],
        **memory_of_step(watch, modules.runs),
        flops=flops,
        traffic=traffic,
        synchronizations=_operator_counts(watch.host_waits),
        dynamic=(*_operator_counts(watch.shapes_from_values), *_new_shapes(shapes[-2], shapes[-1], batches.documents)),
        operators=tuple(_operators(watch)),
        order=tuple(modules.order),
        seconds=time.perf_counter() - start,
    )


def _record_gradients(stack: ExitStack, watch: StepWatcher, model: ParallelModel, optimizer: Optimizer) -> list[int]:
    """Label the reduced gradients and record their bytes in each step."""
    gradient_norm, reduced = optimizer.gradient_norm, list[int]()

    def labelled() -> torch.Tensor:
        """Label the gradients before the norm, when they are complete."""
        watch.label((shard.grad for shard in model.shards), MemoryKind.GRADIENTS)
        reduced.append(sum(shard.grad.nbytes for shard in model.shards if shard.grad is not None))
        return gradient_norm()

    stack.enter_context(patch.object(optimizer, "gradient_norm", labelled))
    return reduced


class _Batches:
    """Micro batches of the run; a step uses the first ``count``, but all stay alive."""

    def __init__(self, batches: Batches, watch: StepWatcher, mode: FakeTensorMode | None) -> None:
        self._batches, self._watch, self._mode = batches, watch, mode
        self._alive: list[MicroBatch] = []
        self.count = 0
        self.other_documents = False
        """Whether the first document of each sequence is one token longer."""
        self.documents = self.all_of_a_step()[0].documents is not None

    def all_of_a_step(self) -> list[MicroBatch]:
        """Return the micro batches of the largest step, with values."""
        with _disable_current_modes():
            shapes = self._batches.positions_by_shape()
            largest = max(shapes, key=lambda cut: cut.tokens if cut else 0)
            return self._batches.on_host(shapes[largest])

    def at(self, consumed_samples: int) -> Sequence[MicroBatch]:
        self._alive = []
        for batch in self.all_of_a_step():
            self._alive.append((_with_other_documents(batch) if self.other_documents else batch).on(self._labelled))
        return self._alive[: self.count]

    def _labelled(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor if self._mode is None else self._mode.from_tensor(tensor)
        self._watch.label([moved], MemoryKind.BATCH)
        return moved


def _with_other_documents(batch: MicroBatch) -> MicroBatch:
    assert batch.documents is not None
    with _disable_current_modes():
        ids = batch.documents.ids.clone()
        for row in ids:
            row[int((row == row[0]).sum())] = row[0]
        return replace(batch, documents=Documents.of(ids))


def _microbatches(plan: Plan, topology: Topology, total: int) -> tuple[int, int]:
    """Return the numbers of micro batches of the first step (warm-up) and of the second step (measured).

    Once the pipeline is full, later micro batches do not change the memory. Interleaved schedules need multiples of pp.
    """
    pp = topology.sizes["pp"]
    layers = sum(len(plan.stage_layers[stage]) for stage in topology.virtual_stages())
    first, enough = (1, pp + 1) if topology.vpp == 1 else (pp, 2 * pp)
    affordable = MAX_BLOCK_RUNS // max(1, layers) // pp * pp
    return min(total, first), min(total, max(enough, affordable))


def _label_states(watch: StepWatcher, optimizer: Optimizer) -> None:
    watch.label(_states(optimizer), MemoryKind.HOST if optimizer.on_host else MemoryKind.OPTIMIZER)
    if not optimizer.inner.counts_on_device:
        watch.keep_on_host(state["step"] for state in optimizer.inner.state.values() if "step" in state)
    if optimizer.on_host:
        watch.label((weight for group in optimizer.inner.param_groups for weight in group["params"]), MemoryKind.HOST)


def _states(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the optimizer states, including step counts."""
    for state in optimizer.inner.state.values():
        for value in state.values():
            if isinstance(value, BlockwiseState):
                yield from (value.codes, value.scales)
            elif isinstance(value, torch.Tensor):
                yield value


def _whole_step(few: _StepCounts, many: _StepCounts, total: int) -> tuple[dict[str, Flops], Traffic]:
    """Extrapolate the FLOPs by module and the traffic linearly to ``total`` micro batches."""
    (first_count, first_flops, first_traffic), (last_count, last_flops, last_traffic) = few, many

    def extrapolate(first: int, last: int) -> int:
        if last_count == total:
            return last
        return last + (last - first) // (last_count - first_count) * (total - last_count)

    flops: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for (module, phase), count in last_flops.items():
        whole = extrapolate(first_flops.get((module, phase), 0), count)
        flops[any_layer(module)][(FORWARD, BACKWARD, RECOMPUTED).index(phase)] += whole
    none = Amount(0, 0)
    traffic = {
        line: Amount(*map(extrapolate, first_traffic.get(line, none), amount)) for line, amount in last_traffic.items()
    }
    return {module: Flops(*counts) for module, counts in flops.items()}, traffic


def _new_shapes(previous: set[Operation], current: set[Operation], compare: bool) -> Iterator[OperatorCount]:
    """Yield modules with shapes that occurred only in the batch with other documents."""
    places = Counter(any_layer(module) for module, _, _ in previous - current) if compare else Counter()
    for module, count in places.most_common():
        yield OperatorCount("other shapes in the next batch", module or "the chunk itself", count)


def _operators(watch: StepWatcher) -> Iterator[DispatchedOperator]:
    for (operator, module), (place, count) in watch.operators.items():
        namespace, name = operator._schema.name.split("::")
        view = operator.is_view or name in _NO_KERNEL
        yield DispatchedOperator(namespace, name, view, module, place, count)


def _operator_counts(counts: Counter[tuple[str, str]]) -> tuple[OperatorCount, ...]:
    return tuple(OperatorCount(name, place, count) for (name, place), count in counts.most_common())


# Replacements in a rehearsal. Everything else is the training code.
#
# process group           torch's fake one: collectives return at once and move no data
# tensors                 FakeTensorMode: shapes, dtypes and storages, but no values and no memory
# other ranks' groups     not created: the cost does not depend on the world size
# data-parallel mesh      created outside the mode, because it computes with the values of its ranks
# initial weights         left empty: fake tensors have no values
# kernels                 plain torch, unless the plan's device is the host; documents use a dense mask or tiles
# quantization            only allocates the result
# values read by the host 1.0 for losses, norms and step counts; 0 for token counts and flags
# data                    mock data (``data.mock``) with the run's shapes


class _PlainKernels(Kernels):
    """Kernels of an accelerator's rehearsal."""

    def rows_at_once(self, width: int) -> int:
        """Return the host's number of rows: the optimizer's states may be in the host's memory."""
        return device_named(devices.HOST).kernel_type().rows_at_once(self, width)  # type: ignore[arg-type]


@contextmanager
def fake_world(topology: Topology, device: str = devices.HOST) -> Iterator[None]:
    """Create a fake world with this rank only; ``parallel.process_groups`` destroys the process group.

    Args:
        device: Name of the plan's device.
    """
    _clear_sharding_prop_cache()  # DTensor's cache holds meshes of an earlier world in this process
    dist.init_process_group("fake", store=FakeStore(), rank=topology.rank, world_size=topology.world_size)
    new_group = dist.new_group
    planned = find_device(device)
    kind = device_named(devices.HOST).kernel_type() if device == devices.HOST else _PlainKernels
    uses_mask = planned is not None and planned.attention == "mask"

    def kernels(self: Device, compiled: bool) -> Kernels:
        attention = "mask" if uses_mask else "tiles"  # varlen kernels run on their device only
        return kind(attention=attention, compiled=compiled, fuses_loss=compiled and self.compiler == INDUCTOR)

    def data_groups(*args: Any, create: Callable[..., Any] = parallelize.data_groups) -> Any:
        with _disable_current_modes():
            return create(*args)

    def quantized_size(values: torch.Tensor, kind: str) -> torch.Tensor:
        return values.new_empty(len(values), quantized_bytes(kind, values.shape[1]), dtype=torch.uint8)

    def new_local_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and topology.rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return new_group(ranks, *args, **kwargs)

    with (
        patch.object(dist, "new_group", new_local_group),
        patch.object(dist.distributed_c10d, "new_group", new_local_group),
        patch.object(device_mesh, "new_group", new_local_group),
        patch.object(parallelize, "data_groups", data_groups),
        patch.object(parallelize, "initial_values", lambda piece, model, seed: torch.empty(piece.size)),
        patch.object(Device, "kernels", kernels),
        patch.object(kind, "is_one", lambda self, factor: False),  # fake tensors have no values
        patch.object(shards, "quantize", quantized_size),
    ):
        yield


class FakeTensors(FakeTensorMode):
    """Fake tensors whose values read as 1.0, 0 or False on the host. Pinning returns the same tensor."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see StepWatcher

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0
        if func is torch.ops.aten._pin_memory.default:
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)
