"""The errors that a user can cause, and how a script reports them."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PIPE, EXIT_RESTART, EXIT_USER

PACKAGES = {"megatron_llama", "data_prep", "scripts", "benchmarks", "tests"}
"""Packages with command lines of this project."""


def program() -> list[str]:
    """The interpreter's words for this program: its file, or ``-m`` and the module."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name.partition(".")[0] in PACKAGES:
        return ["-m", spec.name.removesuffix(".__main__")]
    return sys.argv[:1]


def program_name() -> str:
    """The name that begins a message: a file such as ``train.py``, or a module such as ``benchmarks``."""
    return os.path.basename(program()[-1])


class UserError(ValueError):
    """Bad input or a setting that can't work: shown as one message, exit status 2."""


class MachineError(RuntimeError):
    """The machine gave up (full disk, a worker killed): shown as one message, exit status 1."""


class LaunchFailed(RuntimeError):
    """The processes of a job could not be brought together; the message has rank and reason and needs no traceback."""


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


def machine_fault(error: BaseException) -> str | None:
    """What a disk that is full, read-only or broken did, or a worker that was killed: all that is to be said. None
    where the program may be at fault, and its traceback is of use."""
    if isinstance(error, MachineError) and isinstance(error.__cause__, OSError | None):
        return str(error)
    if isinstance(error, OSError) and error.errno in _DISK and error.filename:
        return f"{error.filename}: {error.strerror}"
    return None


class Stopped(Exception):
    """A signal asked for an end; what was done is kept. Exit status 75: start me again."""


def run_main(main: Callable[[], int]) -> None:
    """Runs a script's main function and turns its errors into one message and an exit status.

    Anything that is not one of the errors above, or of the operating system, is ours and keeps its traceback.
    """
    _mend_outputs()
    status: int | str | None
    try:
        try:
            status = main()
        except SystemExit as left:  # argparse
            status = left.code
        sys.stdout.flush()
    except UserError as error:
        status = _report("error", str(error), EXIT_USER)
    except MachineError as error:
        status = _report("error", str(error), EXIT_FAILED)
    except Stopped as error:
        status = _report("stopped", str(error), EXIT_RESTART)
    except KeyboardInterrupt:
        status = _report("stopped", "interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        status = EXIT_PIPE
    except PermissionError as error:
        status = _report("error", f"{error.filename}: {error.strerror}", EXIT_USER)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        status = _report("error", f"{where}{error.strerror or error}", EXIT_FAILED)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # Python would try again at its end, and tell
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(status)


def _mend_outputs() -> None:
    """Outputs that exist, though they were closed before the start, and that take any character."""
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _report(kind: str, message: str, status: int) -> int:
    with suppress(OSError):
        sys.stdout.flush()
    with suppress(OSError):
        sys.stderr.write(f"{program_name()}: {kind}: {message}\n")
    return status
