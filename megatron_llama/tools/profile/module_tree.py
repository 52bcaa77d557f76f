"""The profiles of all ranks as one tree of modules. No torch here.

Parameters are the whole model's, FLOPs those of all ranks together. A module's time is that of the slowest rank that
has it. Where a row stands for several, the layers of the model or the stages of a pipeline, it is the sum over them.
Shares and FLOP/s are of the time of all ranks together, so they say what a device achieves on average.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron_llama.plan import Plan
from megatron_llama.tools.forecast.module_work import any_layer, model_parameters
from megatron_llama.tools.profile.clock import BACKWARD, FORWARD, Zone
from megatron_llama.tools.profile.trace import Memory

ROOT = "model"
"""What a tree calls the whole model, and a rank's chunks of it."""


@dataclass(frozen=True)
class RankProfile:
    """A step of one rank, the mean of those that were timed."""

    rank: int
    place: dict[str, int]
    """The position along each axis."""
    steps: list[int]
    """The timed steps."""
    traced: int
    """The step that was traced."""
    seconds: dict[Zone, float]
    """Of a step, by zone; their sum is the step."""
    visits: dict[Zone, float]
    """How often a zone was entered."""
    flops: dict[str, tuple[int, int]]
    """(forward, backward) of the modules, without those inside them."""
    memory: Memory | None

    @property
    def step_seconds(self) -> float:
        """Of a whole step."""
        return sum(self.seconds.values())

    def spent(self, phase: str | None = None, axis: str | None = "") -> float:
        """Seconds in a phase, and waiting in collectives of an axis; "": not waiting; None: all."""
        return sum(
            seconds
            for zone, seconds in self.seconds.items()
            if phase in (None, zone.phase) and axis in (None, zone.wait.partition(" ")[0])
        )


@dataclass
class Node:
    """A module with all that is inside it, or several of the same kind."""

    name: str
    """Such as layers.3.mlp, or layers.*.mlp for that of all layers."""
    instances: int = 1
    parameters: int = 0
    forward_flops: int = 0
    """Of a step on all ranks."""
    backward_flops: int = 0
    forward: float = 0.0
    """Seconds of a step: the slowest rank's, summed over instances."""
    backward: float = 0.0
    waited: float = 0.0
    """Seconds of both in which the ranks waited for others, all ranks together."""
    busy: float = 0.0
    """Seconds of both, waits included, all ranks together."""
    own: float = 0.0
    """Of them, those that are not spent in the modules inside it."""

    @property
    def depth(self) -> int:
        """0 for the whole model."""
        return 0 if self.name == ROOT else len(_parts(self.name))

    @property
    def flops(self) -> int:
        """Forward and backward."""
        return self.forward_flops + self.backward_flops

    @property
    def flops_per_second(self) -> float | None:
        """What a device achieves while it is in this module and does not wait; None where that can't be told."""
        computing = self.busy - self.waited
        return self.flops / computing if self.flops and computing > 0 else None


@dataclass(frozen=True)
class Profile:
    """What was found out about the profiled steps."""

    plan: Plan = field(repr=False)
    ranks: Sequence[RankProfile]

    def nodes(self, *, folded: bool) -> list[Node]:
        """The tree from the root on, each node before those inside it. ``folded``: one row for all layers."""
        found: dict[str, Node] = {}
        for node in self._instances():
            name = any_layer(node.name) if folded else node.name
            if (row := found.get(name)) is None:
                found[name] = node
                node.name = name
                continue
            row.instances += 1
            for number in (
                "parameters",
                "forward_flops",
                "backward_flops",
                "forward",
                "backward",
                "waited",
                "busy",
                "own",
            ):
                setattr(row, number, getattr(row, number) + getattr(node, number))
        return list(found.values())

    def _instances(self) -> Iterator[Node]:
        """Each module once; the root is one."""
        nodes: dict[str, Node] = {}
        for name, parameters in model_parameters(self.plan).items():
            for ancestor in _ancestors(name):
                nodes.setdefault(ancestor, Node(ancestor)).parameters += parameters
        slowest: dict[tuple[str, str, int], float] = defaultdict(float)
        for rank in self.ranks:
            for name, (forward, backward) in rank.flops.items():
                for ancestor in _ancestors(name):
                    node = nodes.setdefault(ancestor, Node(ancestor))
                    node.forward_flops += forward
                    node.backward_flops += backward
            here: dict[tuple[str, str, int], float] = defaultdict(float)
            for zone, seconds in rank.seconds.items():
                if zone.phase not in (FORWARD, BACKWARD):
                    continue
                nodes.setdefault(zone.module or ROOT, Node(zone.module or ROOT)).own += seconds
                for ancestor in _ancestors(zone.module):
                    node = nodes.setdefault(ancestor, Node(ancestor))
                    node.busy += seconds
                    node.waited += seconds if zone.wait else 0.0
                    here[ancestor, zone.phase, rank.place["pp"]] += seconds
            for key, seconds in here.items():
                slowest[key] = max(slowest[key], seconds)
        for (name, phase, _), seconds in slowest.items():
            if phase == FORWARD:
                nodes[name].forward += seconds
            else:
                nodes[name].backward += seconds
        yield from nodes.values()


def _parts(name: str) -> list[str]:
    """layers.3.mlp.down_proj as layers.3, mlp, down_proj."""
    return re.findall(r"layers\.[^.]+|[^.]+", name)


def _ancestors(name: str) -> Iterator[str]:
    """The whole model, the modules around ``name``, and itself."""
    yield ROOT
    parts = _parts(name)
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])
