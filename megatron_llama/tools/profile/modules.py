"""Tells the clock which module is at work, in the forward and in the backward pass, and counts the tokens.

Forward, modules announce themselves by hooks. Backward, autograd runs the nodes that a module has made before those of
the module in front of it, so hooks on two kinds of nodes suffice: the one that made a module's output, and the one that
made its input, which belongs to whoever is in front. The hooks are on nodes, not on tensors, and change nothing in the
graph. What the backward pass recomputes is charged to it.
"""
from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_llama.arch.pattern import pattern_of
from megatron_llama.model.inputs import BlockInputs
from megatron_llama.model.llama import Llama
from megatron_llama.plan import Plan
from megatron_llama.tools.forecast.module_work import any_layer, model_parameters
from megatron_llama.tools.profile.trace import BACKWARD, FORWARD, REST, Clock, Memory, Zone

_MARK = "megatron_llama.profile"


class ModuleClock:
    """Follows the modules of some chunks while ``following``."""

    def __init__(self, chunks: Sequence[Llama], clock: Clock, *, compiled: bool) -> None:
        """``compiled``: blocks are one piece; hooks inside them would be part of their graphs."""
        self._clock, self._left = clock, list[Zone]()
        self._named = [
            (module, name)
            for chunk in chunks
            for name, module in chunk.named_modules()
            if not isinstance(module, nn.ModuleDict) and not (compiled and _is_inside_a_block(name))
        ]
        self._chunks = chunks
        self.tokens = [0] * len(chunks)
        """Tokens that each chunk has had in forward passes."""
        self.pairs = [0] * len(chunks)
        """Pairs of tokens of one document that attention is about, each with each, padding being a document too."""

    @contextmanager
    def following(self) -> Iterator[None]:
        """Listens to the modules inside the context."""
        hooks: list[Any] = []
        for module, name in self._named:
            # First and last: the hooks of fully_shard, which gather weights, are then the module's own time.
            hooks.append(module.register_forward_pre_hook(self._entering(name), prepend=True))
            hooks.append(module.register_forward_hook(self._leaving(name), always_call=True))
        hooks += [
            chunk.register_forward_pre_hook(self._counting(number), prepend=True)
            for number, chunk in enumerate(self._chunks)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._left.clear()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
            recomputes = torch._C._current_autograd_node() is not None
            if not recomputes and self._left:
                self._mark(args, self._clock.zone.module)
            self._left.append(self._clock.move(Zone(BACKWARD if recomputes else FORWARD, name)))

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(_: nn.Module, __: object, output: Any) -> None:
            if not self._left:  # the pass began before the profile
                return
            if torch._C._current_autograd_node() is None:
                self._mark(output, name)
            self._clock.move(self._left.pop())

        return leave

    def _mark(self, tensors: Any, name: str) -> None:
        """Has the backward pass say that it comes to ``name`` when it runs the node that made the first of
        ``tensors``. Of several names for a node the first counts, which is the innermost module's."""
        first = tensors[0] if isinstance(tensors, tuple | list) and tensors else tensors
        node = first.grad_fn if isinstance(first, torch.Tensor) else None
        known: dict[str, str] = {} if node is None else node.metadata  # type: ignore[assignment]
        if node is not None and _MARK not in known:
            known[_MARK] = name
            zone = Zone(BACKWARD, name)
            node.register_prehook(lambda _: self._backward(zone))

    def _backward(self, zone: Zone) -> None:
        if self._clock.zone.phase != BACKWARD:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)  # type: ignore[attr-defined]
        self._clock.move(zone)

    def _end_of_backward(self) -> None:
        self._clock.move(Zone(REST))

    def _counting(self, number: int) -> Callable[..., None]:
        pattern = pattern_of(self._chunks[number].model)

        def count(_: nn.Module, args: tuple[Any, ...]) -> None:
            if torch._C._current_autograd_node() is not None:
                return
            tokens, inputs = args[0], next((a for a in args if isinstance(a, BlockInputs)), None)
            documents = None if inputs is None else inputs.documents
            self.tokens[number] += tokens.numel()
            lengths = documents.lengths if documents is not None else [[tokens.shape[1]]] * len(tokens)
            self.pairs[number] += round(sum(n * pattern.span(n) for row in lengths for n in row))

        return count


def _is_inside_a_block(name: str) -> bool:
    """layers.3.mlp is, layers.3 is not."""
    return name.startswith("layers.") and name.count(".") > 1


# The profiles of all ranks as one tree of modules. No torch here.
#
# Parameters are the whole model's, FLOPs those of all ranks together. A module's time is that of the slowest rank that
# has it. Where a row stands for several, the layers of the model or the stages of a pipeline, it is the sum over them.
# Shares and FLOP/s are of the time of all ranks together, so they say what a device achieves on average.


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
