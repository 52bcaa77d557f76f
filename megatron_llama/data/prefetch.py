"""A thread that builds the next batches while the device trains.

It predicts the next positions; a batch of a wrong prediction is dropped. So each batch equals the result of
``Batches.at``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from megatron_llama.data.batches import Batches
from megatron_llama.model.inputs import MicroBatch

AHEAD = 2
"""Global batches that are built ahead. Two hide a slow read."""
_CLOSE_SECONDS = 5.0  # wait for the batch in progress when a run ends early; a hanging read is abandoned

_Built = Future[list[MicroBatch]]


class Prefetcher:
    """``Batches`` built ahead by a thread. Entering the context starts the thread, in the rank, after a fork."""

    def __init__(self, batches: Batches, end: int) -> None:
        """``end`` is the position after the last batch; no batch is built ahead from there on."""
        self.batches, self.end = batches, end
        self._coming: deque[tuple[int, _Built]] = deque()
        self._requests: SimpleQueue[tuple[int, _Built] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._build, name="prefetch", daemon=True)

    def __enter__(self) -> Prefetcher:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._drop()
        self._requests.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def at(self, consumed_samples: int) -> Sequence[MicroBatch]:
        """Return ``Batches.at``. An error of the thread is raised here, with its traceback.

        Copies to the device are issued by the calling thread, in the order of its other work.
        """
        if not self._coming or self._coming[0][0] != consumed_samples:
            self._drop()
            self._request(consumed_samples)
        while len(self._coming) <= AHEAD:
            following = self.batches.following(self._coming[-1][0])
            if following >= self.end:
                break
            self._request(following)
        _, built = self._coming.popleft()
        return self.batches.to_device(built.result())

    def _request(self, consumed_samples: int) -> None:
        built: _Built = Future()
        self._coming.append((consumed_samples, built))
        self._requests.put((consumed_samples, built))

    def _drop(self) -> None:
        """Cancel the requested batches."""
        for _, built in self._coming:
            built.cancel()
        self._coming.clear()

    def _build(self) -> None:
        while (request := self._requests.get()) is not None:
            consumed_samples, built = request
            if built.set_running_or_notify_cancel():
                try:
                    built.set_result(self.batches.on_host(consumed_samples))
                except BaseException as error:  # the training thread raises it, also SystemExit
                    built.set_exception(error)
