"""A rank's time, every moment of which belongs to one zone: a pass of a module, a wait, the optimizer, the rest."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

FORWARD, BACKWARD, NORM, OPTIMIZER, REST = "forward", "backward", "gradient norm", "optimizer", "rest"


class Zone(NamedTuple):
    """What a rank is doing."""

    phase: str
    module: str = ""
    """In forward and backward: the module's name in its chunk, "" for the chunk itself."""
    wait: str = ""
    """What it waits for: the axis and kind of a collective, such as "tp all_reduce"."""


class Clock:
    """Charges time to zones. Only one thread at a time may use it: autograd's runs while the main one waits."""

    def __init__(self, settle: Callable[[], None]) -> None:
        """``settle`` waits until the device has done what it was given; without that, time would go to whichever zone
        happens to wait."""
        self._settle = settle
        self._since = 0.0
        self.zone = Zone(REST)
        self.seconds: dict[Zone, float] = defaultdict(float)
        self.visits: dict[Zone, int] = defaultdict(int)
        self.moves: list[tuple[float, Zone]] | None = None
        """When each zone was entered, seconds on ``time.perf_counter``; None unless wanted."""

    def start(self) -> None:
        """Time counts from here on."""
        self._settle()
        self.zone, self._since = Zone(REST), time.perf_counter()
        if self.moves is not None:
            self.moves.append((self._since, self.zone))

    def move(self, zone: Zone) -> Zone:
        """``zone`` begins; returns the one that ends."""
        self._settle()
        now, left = time.perf_counter(), self.zone
        self.seconds[left] += now - self._since
        self.visits[zone] += 1
        self.zone, self._since = zone, now
        if self.moves is not None:
            self.moves.append((now, zone))
        return left

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """The present zone, in which a wait for ``name`` lasts as long as the context."""
        return self.inside(self.zone._replace(wait=name))

    @contextmanager
    def inside(self, zone: Zone) -> Iterator[None]:
        """``zone`` for as long as the context lasts."""
        left = self.move(zone)
        try:
            yield
        finally:
            self.move(left)
