"""Training steps without the files of a run, for tools that measure a step, and recorders of a step.

``Modules`` attributes operators and autograd nodes to modules. ``TrafficCounter`` counts the bytes that a rank sends.
Bytes come from the arguments of the operators, not from the plan, to verify tools/forecast/traffic.py. Training uses
neither.
"""

from __future__ import annotations

import bisect
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.data.batches import Data, build_data
from megatron_llama.devices import Device
from megatron_llama.launch.start import LocalRanks, start_ranks
from megatron_llama.optim import Optimizer, build_optimizer
from megatron_llama.optim.gradient_norm import parameter_norm
from megatron_llama.parallel import ParallelModel, build_model, open_device, process_groups
from megatron_llama.parallel.groups import axis_of
from megatron_llama.plan import Plan
from megatron_llama.tools.forecast.traffic import Traffic, TrafficKey, add_traffic, bytes_leaving_node, sort_traffic
from megatron_llama.topology import Topology
from megatron_llama.train.loop import training_step
from megatron_llama.train.step_checks import StepGuard
from megatron_llama.train.waits import KIND_OF_OPERATOR, CollectiveMode


@dataclass
class Steps:
    """Steps of the training loop, without metrics and checkpoints."""

    plan: Plan
    model: ParallelModel
    optimizer: Optimizer
    batches: Any
    """Source of a step's micro batches: ``Batches``, or an object with its method ``at``."""
    checkpointer: Checkpointer
    guard: StepGuard

    def run(self, step: int) -> float:
        """Run step ``step``, counted from 1, and return its loss. All ranks must call it."""
        metrics = training_step(step, self.plan, self.model, self.optimizer, self.batches, self.guard)
        if self.plan.config.logging.parameter_norm:
            parameter_norm(self.model.shards, self.model.device)
        self.checkpointer.after_step(step)
        return metrics["reduced_train_loss"]


@contextmanager
def open_steps(
    plan: Plan, topology: Topology, model: ParallelModel, optimizer: Optimizer, data: Data, batches: Any = None
) -> Iterator[Steps]:
    """Yield steps that log, save and compare nothing.

    They train on ``batches`` or ``data``, at random-LTD's largest length.
    """
    with tempfile.TemporaryDirectory() as folder:
        without_saves = replace(plan.config.checkpoint, every_steps=None, every_minutes=0.0)
        trainer = replace(plan.config.trainer, check_copies_every=None)
        run = replace(plan.config.run, dir=folder)
        config = replace(plan.config, run=run, checkpoint=without_saves, trainer=trainer)
        checkpointer = Checkpointer(replace(plan, config=config), topology, model, optimizer, data)
        guard = StepGuard(plan.config.trainer.skip_nonfinite_steps)
        yield Steps(plan, model, optimizer, batches or data.train.with_length(), checkpointer, guard)


@contextmanager
def build_steps(
    plan: Plan, topology: Topology, device: Device, torch_device: torch.device, batches: Any = None
) -> Iterator[Steps]:
    """Build the model, the optimizer and the data of a rank, and yield its steps. All ranks must call it."""
    model = build_model(plan, topology, device, torch_device)
    optimizer, data = build_optimizer(plan, model), build_data(plan, topology, torch_device)
    with open_steps(plan, topology, model, optimizer, data, batches) as steps:
        yield steps


@contextmanager
def open_rank(plan: Plan, rank: int, device: Device, torch_device: torch.device) -> Iterator[Steps]:
    """Join the process groups, and yield the steps of ``build_steps``."""
    topology = plan.topology(rank)
    with process_groups(plan, topology, device, torch_device):
        with build_steps(plan, topology, device, torch_device) as steps:
            yield steps


def rank_results(plan: Plan, work: Callable[[Plan], Any]) -> tuple[int, list[Any]]:
    """Start the ranks of a plan here; return the exit status and the results of ``work``, [] if a rank failed.

    Raises ConfigError as ``start_ranks``.
    """
    with tempfile.TemporaryDirectory() as folder:
        share = LocalRanks(plan.world_size, output_dir=Path(folder))
        if status := start_ranks(plan, partial(_store_result, work, Path(folder)), share):
            return status, []
        files = [Path(folder) / f"{rank}.pickle" for rank in range(plan.world_size)]
        return 0, [pickle.loads(file.read_bytes()) for file in files]


def _store_result(work: Callable[[Plan], Any], folder: Path, plan: Plan) -> None:
    (folder / f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(work(plan)))


# Modules of operators in the forward pass, the backward pass and recomputation.
#
# Hooks mark the modules of the forward pass. A node of the backward pass belongs to the module of the forward operator
# that it differentiates. Autograd nodes have increasing sequence numbers, so the numbers at the start and end of a
# module identify its nodes. torch's profiler links forward and backward in the same way.
FORWARD, BACKWARD, RECOMPUTED = "forward", "backward", "recomputed"


class Place(NamedTuple):
    """Phase and module of an operator."""

    phase: str
    """FORWARD, BACKWARD or RECOMPUTED; FORWARD also outside of any pass."""
    module: str
    """Name in its chunk; "" for the chunk itself and outside of modules."""
    run: int
    """Index of the forward pass, counted over all chunks; -1 outside."""
    accumulates: bool = False
    """Whether it accumulates a gradient: of a weight, a received activation or an embedding output."""
    of_weight: bool = False
    """Whether this gradient is of a weight."""


OUTSIDE = Place(FORWARD, "", -1)


class Modules:
    """Tracker of the modules of some chunks inside ``following``: by ``place``, or by the methods of a subclass."""

    def __init__(self, chunks: Sequence[nn.Module], *, compiled: bool = False) -> None:
        """Args:
        compiled: Track blocks as a unit, because hooks inside would become part of their graphs.
        """
        self._names = {
            module: name
            for chunk in chunks
            for name, module in chunk.named_modules()
            if not isinstance(module, nn.ModuleDict)
            and not (compiled and name.startswith("layers.") and name.count(".") > 1)  # layers.3.mlp, not layers.3
        }
        self._chunks = {chunk: number for number, chunk in enumerate(chunks)}
        self._counts = [0] * len(chunks)
        self.runs: list[tuple[int, int]] = []
        """(chunk, micro batch) of each forward pass of a chunk in this step."""
        self.order: list[tuple[str, int, int]] = []
        """(phase, chunk, micro batch) in order of their start."""
        self.stack: list[Place] = []
        """Places of the current module and of the modules around it."""
        # Sequence numbers of autograd nodes at which the place changes, and the places.
        self._numbers: list[int] = []
        self._places: list[Place] = []

    def new_step(self) -> None:
        """Discard the runs of the last step."""
        self._counts = [0] * len(self._counts)
        for container in (self.runs, self.order, self.stack, self._numbers, self._places):
            container.clear()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Hook all modules inside the context."""
        with ExitStack() as hooks:
            for module in self._names:
                # Before the hooks of fully_shard, so that gathers of weights belong to the module. Always, because
                # recomputation ends with an exception.
                hooks.enter_context(module.register_forward_pre_hook(self._enter, prepend=True))
                hooks.enter_context(module.register_forward_hook(self._leave, prepend=True, always_call=True))
            yield

    def place(self) -> Place:
        """Return the place of the operator that is being dispatched."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self.stack[-1] if self.stack else OUTSIDE
        if type(node).__name__ == "AccumulateGrad":
            variable = node.variable  # type: ignore[attr-defined]
            return Place(BACKWARD, "", -1, accumulates=True, of_weight=isinstance(variable, nn.Parameter))
        if self.stack:
            return self.stack[-1]
        if torch.is_grad_enabled():  # recomputation between the modules of a block
            return self._of_node(node)._replace(phase=RECOMPUTED)
        place_of_node = self._of_node(node)._replace(phase=BACKWARD)
        if place_of_node.run >= 0:
            chunk, microbatch = self.runs[place_of_node.run]
            if not self.order or self.order[-1] != (BACKWARD, chunk, microbatch):
                self.order.append((BACKWARD, chunk, microbatch))
        return place_of_node

    def entered(self, place: Place, args: tuple[Any, ...]) -> None:
        """Extend in a subclass: a module begins, inside the module on top of ``stack``."""

    def left(self, place: Place, output: Any) -> None:
        """Extend in a subclass: a module ends; ``output`` is None after an exception."""

    def _of_node(self, node: Any) -> Place:
        at = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._places[at] if at >= 0 else OUTSIDE

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        name, node = self._names[module], torch._C._current_autograd_node()
        if node is not None:
            outer = self.stack[-1] if self.stack else self._of_node(node)
            place = Place(RECOMPUTED, name, outer.run)
        else:
            if module in self._chunks:
                chunk = self._chunks[module]
                self.runs.append((chunk, self._counts[chunk]))
                self.order.append((FORWARD, chunk, self._counts[chunk]))
                self._counts[chunk] += 1
            place = Place(FORWARD, name, len(self.runs) - 1)
        self.entered(place, args)
        self.stack.append(place)
        self._note(place)

    def _leave(self, module: nn.Module, _: object, output: Any) -> None:
        if not self.stack:  # the pass started before the recorder
            return
        place = self.stack.pop()
        self.left(place, output)
        if place.phase == RECOMPUTED:  # the outermost module is followed by the rest of its block
            following = place._replace(module=".".join(place.module.split(".")[:2]))
        else:  # a chunk is followed by the sum of its losses
            following = place._replace(module="loss")
        self._note(self.stack[-1] if self.stack else following)

    def _note(self, place: Place) -> None:
        number = torch.autograd._get_sequence_nr()
        if self._numbers and self._numbers[-1] == number:
            self._places[-1] = place
        else:
            self._numbers.append(number)
            self._places.append(place)


# Bytes that a rank sends.
#
# Indices of the payload and the group in an operator's arguments, by dispatcher namespace and collective. The
# functional all_gather has no result argument: its payload is the input times the size of the group.
_FUNCTIONAL = "_c10d_functional"
_ARGUMENTS = {
    "all_reduce": (0, 1),
    "all_gather": (0, 2),
    "reduce_scatter": (1, 2),
    "all_to_all": (1, 2),
    "send": (0, 1),
    "recv": (0, 1),
}
_NAMESPACES = {
    "c10d": _ARGUMENTS,
    "shared_memory": _ARGUMENTS,
    _FUNCTIONAL: {"all_reduce": (0, 2), "all_gather": (0, 2), "reduce_scatter": (0, 3), "all_to_all": (0, 3)},
}
_NO_PAYLOAD = ("barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd", "check_for_nan")


class UnknownCollective(NotImplementedError):
    """An unknown collective or process group, which would make the count wrong."""


class TrafficCounter(CollectiveMode):
    """Context manager that counts traffic; ``take`` returns the counts since its last call."""

    def __init__(self, per_node: int | None = None) -> None:
        """Args:
        per_node: Also count traffic to other nodes, each with this number of consecutive ranks.
        """
        super().__init__()
        self._per_node = per_node
        self._traffic: Traffic = {}
        self._node_traffic: Traffic = {}

    def take(self) -> Traffic:
        """Return the traffic so far and reset it."""
        traffic, self._traffic = sort_traffic(self._traffic), {}
        return traffic

    def take_node_traffic(self) -> Traffic:
        """Return the traffic to other nodes so far (``bytes_leaving_node``) and reset it."""
        node_traffic, self._node_traffic = sort_traffic(self._node_traffic), {}
        return node_traffic

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.observe(func, args)
        return func(*args, **(kwargs or {}))

    def observe(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count ``func`` if it is a collective; for other dispatch modes that forward their operators."""
        if not isinstance(func, torch._ops.OpOverload) or func.namespace not in _NAMESPACES:
            return
        name = func._schema.name.split("::")[1]
        if name in _NO_PAYLOAD:
            return
        kind = KIND_OF_OPERATOR.get(name, "")
        if kind not in _NAMESPACES[func.namespace]:
            raise UnknownCollective(f"{func._schema.name} is not counted")
        payload, group_at = _NAMESPACES[func.namespace][kind]
        group = _group(args[group_at])
        size = sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(args[payload]))
        if func.namespace == _FUNCTIONAL and kind == "all_gather":
            size *= group.size()
        if group.size() == 1:
            return
        if kind in ("send", "recv"):  # with two stages megatron-core uses the world group for one direction
            line = TrafficKey("pp", kind, 2)
        elif (axis := axis_of(group)) is not None:
            line = TrafficKey(axis, kind, group.size())
        else:
            raise UnknownCollective(f"{kind} in a group of no axis: {dist.get_process_group_ranks(group)}")
        add_traffic(self._traffic, line, 1, size)
        if self._per_node is not None:
            me, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
            if kind in ("send", "recv"):
                ranks = [me, dist.get_global_rank(group, args[2])]
            if away := bytes_leaving_node(kind, ranks, me, size, self._per_node):
                add_traffic(self._node_traffic, line, 1, away)


def _group(argument: Any) -> dist.ProcessGroup:
    """Resolve a group by name: in a group that shares memory, the gloo backend is a separate object."""
    if not isinstance(argument, str):
        group = argument if isinstance(argument, dist.ProcessGroup) else dist.ProcessGroup.unbox(argument)
        argument = group.group_name
    return dist.distributed_c10d._resolve_process_group(argument)


STEPS = 2  # steps whose traffic is counted


def count_steps(
    plan: Plan, rank: int, device: Device, torch_device: torch.device, per_node: int | None = None
) -> list[Traffic]:
    """Return the traffic of ``rank`` in each of the first STEPS steps, without logging or saving.

    With ``per_node`` ranks per node, the traffic to other nodes in each step follows. All ranks must call it.
    """
    counted, node_traffic = [], []
    with open_rank(plan, rank, device, torch_device) as steps, TrafficCounter(per_node) as counter:
        for step in range(1, STEPS + 1):
            steps.run(step)
            counted.append(counter.take())
            node_traffic.append(counter.take_node_traffic())
    return counted if per_node is None else counted + node_traffic


def count_on_rank(plan: Plan) -> list[Traffic]:
    """Return the traffic of this rank in each of the first STEPS steps."""
    return count_steps(plan, int(os.environ["RANK"]), *open_device(plan))
