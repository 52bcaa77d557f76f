"""Attribute the time of the forward and backward passes to modules, and count tokens.

In the backward pass autograd runs the nodes of a module before the nodes of the preceding module. So hooks on two nodes
suffice for its time: the node of the output, and the node of the input, which belongs to the preceding module. Hooks on
nodes do not change the graph. Recomputation counts as backward.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megatron_llama.arch.attention_pattern import pattern_of
from megatron_llama.model.inputs import BlockInputs
from megatron_llama.model.llama import Llama
from megatron_llama.plan import Plan
from megatron_llama.tools.figures import MemoryTimeline
from megatron_llama.tools.forecast.rank_work import any_layer, model_parameters
from megatron_llama.tools.measured_steps import BACKWARD, FORWARD, Modules, Place
from megatron_llama.tools.profile.trace import REST, Clock, Zone

_MARK = "megatron_llama.profile"


class ModuleClock(Modules):
    """Clock of the modules of some chunks inside ``following``."""

    def __init__(self, chunks: Sequence[Llama], clock: Clock, *, compiled: bool) -> None:
        """Args as ``Modules``."""
        super().__init__(chunks, compiled=compiled)
        self._clock, self._outer_zones = clock, list[Zone]()
        self._models = [chunk.model for chunk in chunks]
        self.tokens = [0] * len(chunks)
        """Tokens in the forward passes of each chunk."""
        self.pairs = [0] * len(chunks)
        """Pairs of tokens in attention, counted over full squares of documents; padding counts as a document."""

    def entered(self, place: Place, args: tuple[Any, ...]) -> None:
        if place.phase == FORWARD:
            if self.stack:
                self._mark(args, self.stack[-1].module)
            else:
                self._count(self.runs[place.run][0], args)
        self._outer_zones.append(self._clock.move(Zone(FORWARD if place.phase == FORWARD else BACKWARD, place.module)))

    def left(self, place: Place, output: Any) -> None:
        if place.phase == FORWARD:
            self._mark(output, place.module)
        self._clock.move(self._outer_zones.pop())

    def _mark(self, tensors: Any, name: str) -> None:
        """Hook the autograd node of the first of ``tensors``, so that the backward pass enters ``name`` there.

        A node keeps its first name, which is the innermost module.
        """
        first = tensors[0] if isinstance(tensors, tuple | list) and tensors else tensors
        node = first.grad_fn if isinstance(first, torch.Tensor) else None
        metadata: dict[str, str] = {} if node is None else node.metadata  # type: ignore[assignment]
        if node is not None and _MARK not in metadata:
            metadata[_MARK] = name
            node.register_prehook(lambda _: self._backward(Zone(BACKWARD, name)))

    def _backward(self, zone: Zone) -> None:
        if self._clock.zone.phase != BACKWARD:
            engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            engine.queue_callback(partial(self._clock.move, Zone(REST)))  # type: ignore[arg-type]
        self._clock.move(zone)

    def _count(self, chunk: int, args: tuple[Any, ...]) -> None:
        """Count the tokens of a forward pass with the arguments of ``Llama``."""
        pattern, tokens = pattern_of(self._models[chunk]), args[0]
        inputs = next((a for a in args if isinstance(a, BlockInputs)), None)
        documents = None if inputs is None else inputs.documents
        self.tokens[chunk] += tokens.numel()
        lengths = documents.lengths if documents is not None else [[tokens.shape[1]]] * len(tokens)
        self.pairs[chunk] += round(sum(n * pattern.span(n) for row in lengths for n in row))


# Tree of modules from the profiles of all ranks.
#
# Parameters are of the full model, FLOPs are summed over ranks. The time of a module is the time of its slowest rank. A
# row for several layers or stages is their sum. Shares and FLOP/s use the time summed over ranks: averages per device.
ROOT = "model"
"""Name of the root: the model, or the chunks of a rank."""


@dataclass(frozen=True)
class RankProfile:
    """Mean of the timed steps of one rank."""

    rank: int
    place: dict[str, int]
    """Position along each parallel axis."""
    steps: list[int]
    """The timed steps."""
    traced: int
    """The step that was traced."""
    seconds: dict[Zone, float]
    """Seconds of a step by zone; their sum is the step."""
    visits: dict[Zone, float]
    """Number of entries into each zone."""
    flops: dict[str, tuple[int, int]]
    """(forward, backward) FLOPs by module, without submodules."""
    memory: MemoryTimeline | None

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    def spent(self, phase: str | None = None, axis: str | None = "") -> float:
        """Return the seconds in a phase (None: all) that wait for an axis ("": not waiting, None: both)."""
        return sum(
            seconds
            for zone, seconds in self.seconds.items()
            if phase in (None, zone.phase) and axis in (None, zone.wait.partition(" ")[0])
        )


@dataclass
class ModuleNode:
    """A module with its submodules, or the same module of several layers."""

    name: str
    """Such as layers.3.mlp, or layers.*.mlp for all layers."""
    instances: int = 1
    parameters: int = 0
    forward_flops: int = 0
    """Forward FLOPs of a step, summed over ranks."""
    backward_flops: int = 0
    forward: float = 0.0
    """Forward seconds of a step on the slowest rank, summed over instances."""
    backward: float = 0.0
    waited: float = 0.0
    """Seconds of waits for other ranks, forward and backward, summed over ranks."""
    busy: float = 0.0
    """Seconds forward and backward, including waits, summed over ranks."""
    own: float = 0.0  # key of profile.json  prose: ok
    """Seconds of ``busy`` outside of submodules."""

    @property
    def depth(self) -> int:
        """Depth in the tree; 0 for the root."""
        return 0 if self.name == ROOT else len(_parts(self.name))

    @property
    def flops(self) -> int:
        """Forward and backward FLOPs."""
        return self.forward_flops + self.backward_flops

    @property
    def flops_per_second(self) -> float | None:
        """FLOP/s of a device in this module without waits; None if not measurable."""
        computing = self.busy - self.waited
        return self.flops / computing if self.flops and computing > 0 else None


@dataclass(frozen=True)
class Profile:
    """Profiles of all ranks."""

    plan: Plan = field(repr=False)
    ranks: Sequence[RankProfile]

    def nodes(self, *, folded: bool) -> list[ModuleNode]:
        """Return the tree in preorder. ``folded``: one row for all layers."""
        rows: dict[str, ModuleNode] = {}
        for node in self._instances():
            name = any_layer(node.name) if folded else node.name
            if (row := rows.get(name)) is None:
                rows[name] = node
                node.name = name
                continue
            row.instances += 1
            sums = "parameters forward_flops backward_flops forward backward waited busy own"  # prose: ok
            for field_name in sums.split():
                setattr(row, field_name, getattr(row, field_name) + getattr(node, field_name))
        return list(rows.values())

    def _instances(self) -> Iterator[ModuleNode]:
        """Yield each module once, including the root."""
        nodes: dict[str, ModuleNode] = {}
        for name, parameters in model_parameters(self.plan).items():
            for ancestor in _ancestors(name):
                nodes.setdefault(ancestor, ModuleNode(ancestor)).parameters += parameters
        slowest: dict[tuple[str, str, int], float] = defaultdict(float)
        for rank in self.ranks:
            for name, (forward, backward) in rank.flops.items():
                for ancestor in _ancestors(name):
                    node = nodes.setdefault(ancestor, ModuleNode(ancestor))
                    node.forward_flops += forward
                    node.backward_flops += backward
            rank_seconds: dict[tuple[str, str, int], float] = defaultdict(float)
            for zone, seconds in rank.seconds.items():
                if zone.phase not in (FORWARD, BACKWARD):
                    continue
                nodes.setdefault(zone.module or ROOT, ModuleNode(zone.module or ROOT)).own += seconds
                for ancestor in _ancestors(zone.module):
                    node = nodes.setdefault(ancestor, ModuleNode(ancestor))
                    node.busy += seconds
                    node.waited += seconds if zone.wait else 0.0
                    rank_seconds[ancestor, zone.phase, rank.place["pp"]] += seconds
            for key, seconds in rank_seconds.items():
                slowest[key] = max(slowest[key], seconds)
        for (name, phase, _), seconds in slowest.items():
            if phase == FORWARD:
                nodes[name].forward += seconds
            else:
                nodes[name].backward += seconds
        yield from nodes.values()


def _parts(name: str) -> list[str]:
    """Split layers.3.mlp.down_proj into layers.3, mlp, down_proj."""
    return re.findall(r"layers\.[^.]+|[^.]+", name)


def _ancestors(name: str) -> Iterator[str]:
    """Yield the root, the ancestors of ``name``, and ``name``."""
    yield ROOT
    parts = _parts(name)
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])
