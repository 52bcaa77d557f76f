"""Records what a rank does while megatron-core's schedule runs: passes, and what it receives and sends for them.

The schedules call three functions for all of it: ``forward_step`` and ``backward_step`` of their module, and
``P2PCommunicator._communicate``. A ``Recorder`` stands in front of these three. Tensors are told apart by identity: the
one that a rank receives is the argument of the pass that needs it, and the one that it sends is the result of a pass.
So the order is what the schedule did, in a world of fake ranks (``order.py``) and in a real one (``measure.py``) alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import nn

from megatron_llama.tools.pipeline.timeline import NEXT, PREVIOUS, Done, Pass, RankRecord


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
