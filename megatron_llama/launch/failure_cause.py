"""Why a rank ended: its own error, or only the loss of another rank."""

from __future__ import annotations

import re
import time
import traceback
from dataclasses import dataclass, field

from megatron_llama.config import ConfigError
from megatron_llama.launch.job_store import describe_lost_store
from megatron_llama.system.errors import machine_fault
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PIPE, EXIT_RESTART, EXIT_USER
from megatron_llama.system.wrapping import wrap

CONSEQUENCE_DELAY_SECONDS = 8.0
"""A rank that lost its peer waits before it reports: the launcher kills it first; the cause stays last on stderr."""
PEER_LOST = re.compile(
    r"connection (was )?(closed|reset)|closed by peer|broken pipe|connection refused|remote process exited"
    r"|likely closed|pair closure|communicator was aborted|socket timeout|wait timeout|timed out waiting|failed to recv"
    r"|DistNetworkError|DistStoreError|unhandled system error",
    re.IGNORECASE,
)
"""Messages of errors that only mean the loss of another rank."""


@dataclass
class Report:
    """A rank's report of its end."""

    code: int
    """Exit status: 0, EXIT_USER (ConfigError), EXIT_RESTART, EXIT_INTERRUPTED, EXIT_PIPE or EXIT_FAILED."""
    text: str = ""
    """Message or traceback."""
    consequence: bool = False
    """Whether the error only means that another rank was lost."""
    seconds: float = field(default_factory=time.monotonic)
    """End on the machine's monotonic clock, comparable between ranks."""

    @property
    def reason(self) -> str:
        """Short reason: the last line of a traceback, the last paragraph of another failure's text."""
        if self.code == EXIT_FAILED and "Traceback (most recent call last)" in self.text:
            return self.text.splitlines()[-1]
        return self.text.rpartition("\n\n")[2] if self.code == EXIT_FAILED else self.text


def describe(error: BaseException) -> Report:
    """Return the report of an entry that ended with ``error``."""
    if isinstance(error, ConfigError):
        return Report(EXIT_USER, str(error))
    if isinstance(error, KeyboardInterrupt):
        return Report(EXIT_INTERRUPTED)
    if isinstance(error, SystemExit) and error.code in (EXIT_RESTART, EXIT_PIPE):
        return Report(int(error.code))
    if fault := machine_fault(error):
        return Report(EXIT_FAILED, fault)
    if lost := describe_lost_store(error):
        return Report(EXIT_FAILED, wrap(lost), consequence=True)
    return Report(EXIT_FAILED, "".join(traceback.format_exception(error)).rstrip(), consequence=is_peer_lost(error))


def is_peer_lost(error: BaseException | None) -> bool:
    """Return whether ``error``, or an error it was raised from, only means that another rank was lost."""
    while error is not None:
        if PEER_LOST.search("".join(traceback.format_exception_only(error))):
            return True
        error = error.__cause__
    return False
