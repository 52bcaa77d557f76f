"""Where watchers in several processes tell each other that they have given up: the store where they met."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import sleep
from typing import Any, TypeVar

T = TypeVar("T")

_STORE_SECONDS = 10.0
_GATHER_SECONDS = 15.0
_POLL_SECONDS = 0.2


class Board:
    """One watcher's view of the store: its note and everybody's, and the alarm."""

    def __init__(self, store: Any, prefix: str, number: int, count: int, host: str) -> None:
        """``store`` is a torch.distributed store that ``count`` watchers share; this one is the ``number``-th. ``host``
        names the process in which it is."""
        self.host = host
        self._store = store.clone()  # a connection of its own: the other one may be waiting for something
        self._prefix, self._number, self._count = f"{prefix}/hang", number, count
        self.answers = True
        """False once the store has not answered in time; then the process that hosts it does not run."""

    def alarmed(self, note: str) -> bool:
        """Leaves ``note`` for the others; whether any of them has given up."""

        def ask() -> bool:
            self._store.set(self._key("note", self._number), note)
            return bool(self._store.check([self._key("alarm")]))

        return bool(self._bounded(ask))

    def gather(self, mine: str) -> tuple[dict[int, str], dict[int, str]] | None:
        """Gives the alarm. For the first to do so: the texts of all who answer, by number, and the notes of the others;
        None for the rest. Alone with its own text where the store does not answer."""
        first = self._bounded(
            lambda: self._store.compare_set(self._key("alarm"), "", str(self._number)) == str(self._number).encode()
        )
        self._bounded(lambda: self._store.set(self._key("text", self._number), mine))
        if first is False:
            return None
        numbers, texts, notes = range(self._count), {self._number: mine}, dict[int, str]()
        for _ in range(round(_GATHER_SECONDS / _POLL_SECONDS)):
            if not self.answers or len(texts) == self._count:
                break
            texts |= {n: text for n in numbers if n not in texts and (text := self._read("text", n)) is not None}
            sleep(_POLL_SECONDS)
        if self.answers:
            notes = {n: note for n in numbers if n not in texts and (note := self._read("note", n)) is not None}
        return texts, notes

    def tell(self) -> None:
        """The first to give the alarm has printed what it gathered."""
        self._bounded(lambda: self._store.set(self._key("told"), "1"))

    def wait_until_told(self) -> None:
        """Returns when that has happened, or takes too long."""
        for _ in range(round(2 * _GATHER_SECONDS / _POLL_SECONDS)):
            if not self.answers or self._bounded(lambda: self._store.check([self._key("told")])):
                return
            sleep(_POLL_SECONDS)

    def _key(self, *words: object) -> str:
        return "/".join(map(str, (self._prefix, *words)))

    def _read(self, *words: object) -> str | None:
        key = self._key(*words)
        return self._bounded(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def _bounded(self, call: Callable[[], T]) -> T | None:
        """What ``call`` returns; None where it takes too long or fails, which is then true of all later calls: a store
        whose process is stopped keeps who asks it waiting for ever."""
        found: list[T] = []
        if not self.answers:
            return None

        def run() -> None:
            found.append(call())

        thread = threading.Thread(target=_quietly, args=(run,), name="hang watch's store", daemon=True)
        thread.start()
        thread.join(_STORE_SECONDS)
        self.answers = bool(found)
        return found[0] if found else None


def _quietly(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:  # torch raises RuntimeError and its kinds; the caller sees that there is no answer
        return
