"""Attribution of operators to modules in the forward pass, the backward pass and recomputation.

Hooks mark the modules of the forward pass. An operator of the backward pass belongs to the module of the forward
operator that it differentiates. Autograd nodes have increasing sequence numbers, so the numbers at the start and end of
a module identify its nodes. torch's profiler links forward and backward in the same way.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

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
    """Tracker of the place of the current operator inside ``following``."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._names = {id(module): name for chunk in chunks for name, module in chunk.named_modules()}
        self._chunks = {id(chunk): number for number, chunk in enumerate(chunks)}
        self._counts = [0] * len(chunks)
        self.runs: list[tuple[int, int]] = []
        """(chunk, micro batch) of each forward pass of a chunk in this step."""
        self.order: list[tuple[str, int, int]] = []
        """(phase, chunk, micro batch) in order of their start."""
        self._stack: list[Place] = []
        # Sequence numbers of autograd nodes at which the place changes, and the places.
        self._numbers: list[int] = []
        self._places: list[Place] = []

    def new_step(self) -> None:
        """Discard the runs of the last step."""
        self._counts = [0] * len(self._counts)
        for container in (self.runs, self.order, self._stack, self._numbers, self._places):
            container.clear()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Hook all modules inside the context."""
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),  # recomputation stops early by an exception
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def place(self) -> Place:
        """Return the place of the operator that is being dispatched."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self._stack[-1] if self._stack else OUTSIDE
        if type(node).__name__ == "AccumulateGrad":
            variable = node.variable  # type: ignore[attr-defined]
            return Place(BACKWARD, "", -1, accumulates=True, of_weight=isinstance(variable, nn.Parameter))
        if self._stack:
            return self._stack[-1]
        if torch.is_grad_enabled():  # recomputation between the modules of a block
            return self._of_node(node)._replace(phase=RECOMPUTED)
        place_of_node = self._of_node(node)._replace(phase=BACKWARD)
        if place_of_node.run >= 0:
            chunk, microbatch = self.runs[place_of_node.run]
            if not self.order or self.order[-1] != (BACKWARD, chunk, microbatch):
                self.order.append((BACKWARD, chunk, microbatch))
        return place_of_node

    def _of_node(self, node: Any) -> Place:
        at = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._places[at] if at >= 0 else OUTSIDE

    def _enter(self, module: nn.Module, _: object) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        node = torch._C._current_autograd_node()
        if node is not None:
            outer = self._stack[-1] if self._stack else self._of_node(node)
            self._push(Place(RECOMPUTED, name, outer.run))
            return
        if id(module) in self._chunks:
            chunk = self._chunks[id(module)]
            self.runs.append((chunk, self._counts[chunk]))
            self.order.append((FORWARD, chunk, self._counts[chunk]))
            self._counts[chunk] += 1
        self._push(Place(FORWARD, name, len(self.runs) - 1))

    def _leave(self, module: nn.Module, *_: object) -> None:
        if id(module) in self._names and self._stack:
            exited = self._stack.pop()
            if exited.phase == RECOMPUTED:  # the outermost module is followed by the rest of its block
                following = exited._replace(module=".".join(exited.module.split(".")[:2]))
            else:  # a chunk is followed by the sum of its losses
                following = exited._replace(module="loss")
            self._note(self._stack[-1] if self._stack else following)

    def _push(self, place: Place) -> None:
        self._stack.append(place)
        self._note(place)

    def _note(self, place: Place) -> None:
        number = torch.autograd._get_sequence_nr()
        if self._numbers and self._numbers[-1] == number:
            self._places[-1] = place
        else:
            self._numbers.append(number)
            self._places.append(place)
