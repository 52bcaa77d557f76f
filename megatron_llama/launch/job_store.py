"""The store where the processes of a job meet, as we use it: bounded, and sealed with the job's secret.

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

T = TypeVar("T")

SECRET = "MEGATRON_LLAMA_SECRET"
"""The variable that has the job's secret where one of its starters has made one. Never part of a command line."""
ANSWER_SECONDS = 10.0
_SEAL_HEX = 64


class LaunchFailed(RuntimeError):
    """The processes could not be brought together; the message says which and why, and needs no traceback."""


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
