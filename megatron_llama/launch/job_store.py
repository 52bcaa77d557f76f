"""The store where the processes of a job meet, as we use it: bounded, and sealed with the job's secret.

On a ``Board`` in it, watchers of several processes report hangs to each other.

It is a ``torch.distributed.TCPStore``, which has no authentication: whoever reaches its port can read and write it, and
a store whose process is stopped keeps who asks it waiting for ever, whatever timeout it was given. So every call here
has a limit of time; our keys can't be guessed and our values not be forged without the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from megatron_llama.system.errors import LaunchFailed

T = TypeVar("T")

SECRET = "MEGATRON_LLAMA_SECRET"
"""The variable that has the job's secret where one of its starters has made one. Never part of a command line."""
ANSWER_SECONDS = 10.0
_SEAL_HEX = 64
# Of a board.
_GATHER_SECONDS = 15.0
_POLL_SECONDS = 0.2


class StoreLost(LaunchFailed):
    """The store does not answer, or is no store."""


class JobStore:
    """Texts by name. The processes that give the same ``job`` and the same secret see the same ones."""

    def __init__(self, connect: Callable[[], Any], job: str, secret: str, limit_seconds: float) -> None:
        """``connect`` makes the connection, within ``limit_seconds``. Raises StoreLost, and what ``connect`` raises but
        for torch's errors."""
        self._job, self._secret = job, secret.encode()
        self._store = _within(limit_seconds, connect)
        self.forged: list[str] = []
        """Names of values that did not carry the job's secret."""

    def again(self, part: str = "") -> JobStore:
        """Another connection to the same store, for another thread; with a ``part``, for texts of its own."""
        job = f"{self._job}/{part}" if part else self._job
        return JobStore(self._store.clone, job, self._secret.decode(), ANSWER_SECONDS)

    def set(self, name: str, text: str) -> None:
        """Leaves a text. Raises StoreLost, also where it is larger than the store takes (8 MiB)."""
        _within(ANSWER_SECONDS, lambda: self._store.set(self._key(name), self._sealed(name, text)))

    def get(self, name: str) -> str | None:
        """The text of this name; None where there is none, or one that nobody of this job has left. Raises
        StoreLost."""
        key = self._key(name)
        found = _within(ANSWER_SECONDS, lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else self._opened(name, found)

    def wait(self, name: str, seconds: float) -> str | None:
        """The text of this name, as soon as there is one; None where none comes within ``seconds``. Raises
        StoreLost."""
        key, deadline = self._key(name), time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            piece = min(left, ANSWER_SECONDS)
            # The store says itself that nothing has come; where it does not even do that, it is lost.
            if _within(piece + ANSWER_SECONDS, partial(self._came, key, piece)):
                return self.get(name)
        return None

    def first(self, name: str, text: str) -> str:
        """The text of this name, which becomes ``text`` where there is none yet. Raises StoreLost."""
        sealed = self._sealed(name, text)
        found = _within(ANSWER_SECONDS, lambda: self._store.compare_set(self._key(name), "", sealed))
        opened = self._opened(name, found)
        if opened is None:
            raise StoreLost(f"somebody without the job's secret has written {name}")
        return opened

    def _came(self, key: str, seconds: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError as error:
            if "timeout" in str(error).lower():
                return False
            raise
        return True

    def _key(self, name: str) -> str:
        return f"megatron_llama/{self._digest('key', name)}" if self._secret else f"megatron_llama/{self._job}/{name}"

    def _digest(self, *words: str) -> str:
        # With the number of letters before each word: no two lists of words give the same text.
        text = "".join(f"{len(word)} {word}" for word in (self._job, *words))
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def _sealed(self, name: str, text: str) -> str:
        return self._digest("value", name, text) + text if self._secret else text

    def _opened(self, name: str, found: bytes) -> str | None:
        text = found.decode(errors="replace")
        if not self._secret:
            return text
        seal, text = text[:_SEAL_HEX], text[_SEAL_HEX:]
        if hmac.compare_digest(seal.encode(), self._digest("value", name, text).encode()):
            return text
        self.forged.append(name)
        return None


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
            time.sleep(_POLL_SECONDS)
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


def _within(seconds: float, call: Callable[[], T]) -> T:
    """What ``call`` returns. Raises StoreLost where it takes longer, or torch says that the connection failed."""
    found: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="job's store", daemon=True)
    thread.start()
    thread.join(seconds)
    if found:
        return found[0]
    if not errors:
        raise StoreLost(f"the store where the processes meet has not answered within {seconds:g} s")
    if isinstance(errors[0], RuntimeError):  # torch's DistError and its kinds
        raise StoreLost(f"the store where the processes meet: {str(errors[0]).splitlines()[0]}") from errors[0]
    raise errors[0]
