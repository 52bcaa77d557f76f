"""Where watchers in several processes tell each other that they have given up: the store where they met."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from typing import TypeVar

from megatron_llama.launch.job_store import JobStore, StoreLost

T = TypeVar("T")

_GATHER_SECONDS = 15.0
_POLL_SECONDS = 0.2


class Board:
    """One watcher's view of the store: its note and everybody's, and the alarm."""

    def __init__(self, store: JobStore, number: int, count: int, host: str) -> None:
        """``count`` watchers share the store; this one is the ``number``-th. ``host`` names the process that has it."""
        self._store, self._number, self._count = store.again(), number, count
        self.host = host
        self.answers = True
        """False once the store has not answered in time; then the process that hosts it does not run."""

    def alarmed(self, note: str) -> bool:
        """Leaves ``note`` for the others; whether any of them has given up."""
        self._ask(lambda: self._store.set(f"hang/note/{self._number}", note))
        return self._ask(lambda: self._store.get("hang/alarm")) is not None

    def gather(self, mine: str) -> tuple[dict[int, str], dict[int, str]] | None:
        """Gives the alarm. For the first to do so: the texts of all who answer, by number, and the notes of the others;
        None for the rest. Alone with its own text where the store does not answer."""
        teller = self._ask(lambda: self._store.first("hang/alarm", str(self._number)))
        self._ask(lambda: self._store.set(f"hang/text/{self._number}", mine))
        if self.answers and teller != str(self._number):
            return None
        texts, notes = {self._number: mine}, dict[int, str]()
        for _ in range(round(_GATHER_SECONDS / _POLL_SECONDS)):
            if not self.answers or len(texts) == self._count:
                break
            texts |= self._all("text", but=texts)
            sleep(_POLL_SECONDS)
        if self.answers:
            notes = self._all("note", but=texts)
        return texts, notes

    def tell(self) -> None:
        """The first to give the alarm has printed what it gathered."""
        self._ask(lambda: self._store.set("hang/told", ""))

    def wait_until_told(self) -> None:
        """Returns when that has happened, or takes too long."""
        self._ask(lambda: self._store.wait("hang/told", 2 * _GATHER_SECONDS))

    def _all(self, kind: str, but: dict[int, str]) -> dict[int, str]:
        """What there is of all other numbers."""
        found = {}
        for number in range(self._count):
            if number not in but and (text := self._read(f"hang/{kind}/{number}")) is not None:
                found[number] = text
        return found

    def _read(self, name: str) -> str | None:
        return self._ask(lambda: self._store.get(name))

    def _ask(self, call: Callable[[], T]) -> T | None:
        """What ``call`` returns; None once the store is lost."""
        if not self.answers:
            return None
        try:
            return call()
        except StoreLost:
            self.answers = False
            return None
