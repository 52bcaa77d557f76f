"""Key-value store of a job's processes: a ``torch.distributed.TCPStore`` with time limits and authentication.

TCPStore has no authentication: any process that reaches its port can read and write it. Keys and values here carry an
HMAC with the job's secret. A store whose process is stopped blocks its clients, despite their timeout: calls here run
in a thread with a time limit. On a ``Board`` in the store, watchdogs of several processes report hangs.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from megatron_llama.system.errors import LaunchFailed, reason_of
from megatron_llama.system.signals import run_in_thread

T = TypeVar("T")

SECRET = "MEGATRON_LLAMA_SECRET"
"""Variable with the job's secret. Never part of a command line."""
ANSWER_SECONDS = 10.0
_SEAL_HEX = 64
# Times of a Board.
_GATHER_SECONDS = 15.0
_POLL_SECONDS = 0.2


QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables to set before torch is imported: else each call of a lost store logs a C++ stack as a warning."""


class StoreLost(LaunchFailed):
    """The store does not answer, or is not a store of this job."""


def describe_lost_store(error: BaseException | None, address: str | None = None) -> str | None:
    """Return the message for an error of the job's store; None for other errors.

    The error is a consequence: the store's host or another rank has ended, or the network has failed.

    Args:
        address: Host and port; default: from the variables of a rank.
    """
    if not isinstance(error, StoreLost):
        distributed = sys.modules.get("torch.distributed")  # loaded, if torch raised the error in a call of a store
        kinds = () if distributed is None else (distributed.DistNetworkError, distributed.DistStoreError)
        # NCCL exchanges ids through the store.
        is_backend = distributed is not None and isinstance(error, distributed.DistBackendError)
        if not isinstance(error, kinds) and not (is_backend and "store->" in str(error)):
            return None
    address = address or f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    host = "torchrun's first agent" if "TORCHELASTIC_RUN_ID" in os.environ else "rank 0 or its launcher"
    reason = (str(error).splitlines() or [""])[0].removeprefix("rendezvous store: ").rstrip(". ")
    if "timeout" in reason.lower():
        start = f"No message from another rank in the rendezvous store at {address}"
        cause = "That rank has ended or is stopped"
    else:
        start = f"Lost the rendezvous store at {address}, through which the ranks find each other"
        cause = f"Its host ({host}) has ended, or the network to it has failed"
    return (
        f"{start}: {reason}. {cause}. Read the message of that process first, then run the same command: a run resumes "
        "from its newest checkpoint."
    )


class JobStore:
    """Stores texts by name, shared by the processes with the same job and secret."""

    def __init__(self, connect: Callable[[], Any], job: str, secret: str, limit_seconds: float) -> None:
        """Connect by calling ``connect``, within ``limit_seconds``. Raises StoreLost, also for torch's errors."""
        self._job, self._secret = job, secret.encode()
        self._store = _run_with_limit(limit_seconds, connect)
        self.forged: list[str] = []
        """Names of values without a valid HMAC."""

    def clone(self, part: str = "") -> JobStore:
        """Open another connection for another thread; ``part`` gives it a separate namespace."""
        job = f"{self._job}/{part}" if part else self._job
        return JobStore(self._store.clone, job, self._secret.decode(), ANSWER_SECONDS)

    def set(self, name: str, text: str) -> None:
        """Store a text. Raises StoreLost, also if the text exceeds the store's limit (8 MiB)."""
        _run_with_limit(ANSWER_SECONDS, lambda: self._store.set(self._key(name), self._seal(name, text)))

    def get(self, name: str) -> str | None:
        """Return the text of a name; None if it is missing or has no valid HMAC. Raises StoreLost."""
        key = self._key(name)
        value = _run_with_limit(ANSWER_SECONDS, lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if value is None else self._unseal(name, value)

    def wait(self, name: str, seconds: float) -> str | None:
        """Wait up to ``seconds`` for the text of a name; return it, or None. Raises StoreLost."""
        key, deadline = self._key(name), time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            timeout = min(left, ANSWER_SECONDS)
            # The store reports a timeout itself; if it does not, it is lost.
            if _run_with_limit(timeout + ANSWER_SECONDS, partial(self._wait_for_key, key, timeout)):
                return self.get(name)
        return None

    def set_default(self, name: str, text: str) -> str:
        """Store ``text`` if the name is missing; return the stored text. Raises StoreLost."""
        sealed = self._seal(name, text)
        value = _run_with_limit(ANSWER_SECONDS, lambda: self._store.compare_set(self._key(name), "", sealed))
        stored = self._unseal(name, value)
        if stored is None:
            raise StoreLost(f"{name} was written without the job's secret")
        return stored

    def _wait_for_key(self, key: str, seconds: float) -> bool:
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
        # The length before each word makes the text unique for a list of words.
        text = "".join(f"{len(word)} {word}" for word in (self._job, *words))
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def _seal(self, name: str, text: str) -> str:
        return self._digest("value", name, text) + text if self._secret else text

    def _unseal(self, name: str, value: bytes) -> str | None:
        text = value.decode(errors="replace")
        if not self._secret:
            return text
        seal, text = text[:_SEAL_HEX], text[_SEAL_HEX:]
        if hmac.compare_digest(seal.encode(), self._digest("value", name, text).encode()):
            return text
        self.forged.append(name)
        return None


class Board:
    """Exchange of hang reports between the watchdogs of a job: a note per watchdog, and an alarm."""

    def __init__(self, store: JobStore, number: int, count: int, host: str) -> None:
        """Open the board of watchdog ``number`` of ``count``. ``host`` names the process that hosts the store."""
        self._store, self._number, self._count = store.clone(), number, count
        self.host = host
        self.answers = True
        """False after a timeout: the process that hosts the store is stopped or lost."""

    def post_note(self, note: str) -> bool:
        """Store ``note``; return whether any watchdog has raised the alarm."""
        self._try_call(lambda: self._store.set(f"hang/note/{self._number}", note))
        return self._try_call(lambda: self._store.get("hang/alarm")) is not None

    def gather(self, report: str) -> tuple[dict[int, str], dict[int, str]] | None:
        """Raise the alarm and store ``report``.

        The first watchdog to raise the alarm gets the reports of watchdogs that answer, by number, and the notes of the
        others. Other watchdogs get None. If the store does not answer, returns only the local report.
        """
        reporter = self._try_call(lambda: self._store.set_default("hang/alarm", str(self._number)))
        self._try_call(lambda: self._store.set(f"hang/text/{self._number}", report))
        if self.answers and reporter != str(self._number):
            return None
        texts, notes = {self._number: report}, dict[int, str]()
        for _ in range(round(_GATHER_SECONDS / _POLL_SECONDS)):
            if not self.answers or len(texts) == self._count:
                break
            texts |= self._read_all("text", exclude=texts)
            time.sleep(_POLL_SECONDS)
        if self.answers:
            notes = self._read_all("note", exclude=texts)
        return texts, notes

    def mark_reported(self) -> None:
        """Store that the full report has been printed."""
        self._try_call(lambda: self._store.set("hang/reported", ""))

    def wait_until_reported(self) -> None:
        """Wait until the full report has been printed, at most 30 s."""
        self._try_call(lambda: self._store.wait("hang/reported", 2 * _GATHER_SECONDS))

    def _read_all(self, kind: str, exclude: dict[int, str]) -> dict[int, str]:
        """Return the stored texts of a kind, by number, without the numbers in ``exclude``."""
        texts = {}
        for number in range(self._count):
            text = None if number in exclude else self._try_call(partial(self._store.get, f"hang/{kind}/{number}"))
            if text is not None:
                texts[number] = text
        return texts

    def _try_call(self, call: Callable[[], T]) -> T | None:
        """Return the result of ``call``; None if the store is lost."""
        if not self.answers:
            return None
        try:
            return call()
        except StoreLost:
            self.answers = False
            return None


def _run_with_limit(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of ``call``. Raises StoreLost after ``seconds``, and for torch's connection errors."""
    try:
        return run_in_thread("job store", call).result(seconds)
    except TimeoutError:
        raise StoreLost(f"the rendezvous store did not answer within {seconds:g} s") from None
    except RuntimeError as error:  # torch's DistError and subclasses
        raise StoreLost(f"rendezvous store: {reason_of(error)}") from error
