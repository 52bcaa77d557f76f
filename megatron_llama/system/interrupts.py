"""Ctrl-C (SIGINT) in the programs of this project: one line and status 130, never a traceback, never lost.

Imported first of all files, so it imports little.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

PROGRAM_FOLDERS = ("", "scripts", "data_prep", "benchmarks", "benchmarks/verify", "tests/chaos", "tests/fuzz", "docs")
"""Folders with command lines of this project, below its root."""


def is_own_program() -> bool:
    """Return whether this process runs a command line of this project, not a user's program that imports it."""
    package = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None:  # with -m, while this package is imported
        return sys.argv[:1] == ["-m"] and "megatron_llama" in sys.orig_argv
    roots = (os.path.dirname(package), os.path.join(package, "share"))  # of a checkout, of a wheel
    folders = [os.path.normpath(os.path.join(root, folder)) for root in roots for folder in PROGRAM_FOLDERS]
    return os.path.dirname(os.path.realpath(main)) in folders or os.path.basename(main) == "megatron-llama"


def exit_on_early_interrupt() -> None:
    """Let SIGINT end a program of this project while it imports its packages; leave other programs' handlers."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler and is_own_program():
        signal.signal(signal.SIGINT, leave)


def raise_interrupts(*, at_sigterm: bool = False) -> None:
    """Raise KeyboardInterrupt at SIGINT, unless an import is in progress: that may print or swallow an exception.

    ``at_sigterm``: also at SIGTERM, even where SIGINT is ignored, as in a shell's background command.
    """
    if at_sigterm:
        signal.signal(signal.SIGTERM, _raise_or_leave)
    if signal.getsignal(signal.SIGINT) in (leave, signal.default_int_handler):
        signal.signal(signal.SIGINT, _raise_or_leave)
        exit_on_lost_interrupt(lambda: leave(signal.SIGINT, None))


def settle_status(status: int) -> None:
    """Let SIGINT end this process with its status: the work is done, and only functions of ``atexit`` follow."""
    if signal.getsignal(signal.SIGINT) is _raise_or_leave:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(status))


def leave(number: int, frame: FrameType | None) -> None:
    """End this process at a signal: one line, status 128 + the signal's number."""
    if os.environ.get("RANK", "0") == "0":
        try:
            os.write(2, f"Stopped by {signal_name(number)}.\n".encode())
        except OSError:
            pass
    try:
        sys.stdout.flush()
    except Exception:  # the signal may have interrupted a flush
        pass
    os._exit(128 + number)


def _raise_or_leave(number: int, frame: FrameType | None) -> None:
    caller = frame
    while caller is not None:
        if caller.f_code.co_filename.startswith("<frozen importlib"):
            leave(number, frame)
        caller = caller.f_back
    raise KeyboardInterrupt


def signal_name(number: int) -> str:
    """Return the signal's name in messages."""
    return "Ctrl-C" if number == signal.SIGINT and os.isatty(2) else signal.Signals(number).name


def exit_on_lost_interrupt(leave: Callable[[], None]) -> None:
    """Call ``leave`` for a KeyboardInterrupt that Python would only print, as in a weakref callback."""
    previous = sys.unraisablehook

    def hook(lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is not None and issubclass(lost.exc_type, KeyboardInterrupt):
            leave()
        else:
            previous(lost)

    sys.unraisablehook = hook
