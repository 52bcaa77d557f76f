"""Tells the clock which module is at work, in the forward and in the backward pass, and counts the tokens.

Forward, modules announce themselves by hooks. Backward, autograd runs the nodes that a module has made before those of
the module in front of it, so hooks on two kinds of nodes suffice: the one that made a module's output, and the one that
made its input, which belongs to whoever is in front. The hooks are on nodes, not on tensors, and change nothing in the
graph. What the backward pass recomputes is charged to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron_llama.devices.visibility import Documents
from megatron_llama.model.llama import Llama
from megatron_llama.plan.attention_pattern import pattern_of
from megatron_llama.train.profile.clock import BACKWARD, FORWARD, REST, Clock, Zone

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
            tokens, documents = args[0], next((a for a in args if isinstance(a, Documents)), None)
            self.tokens[number] += tokens.numel()
            lengths = documents.lengths if documents is not None else [[tokens.shape[1]]] * len(tokens)
            self.pairs[number] += round(sum(n * pattern.span(n) for row in lengths for n in row))

        return count


def _is_inside_a_block(name: str) -> bool:
    """layers.3.mlp is, layers.3 is not."""
    return name.startswith("layers.") and name.count(".") > 1
