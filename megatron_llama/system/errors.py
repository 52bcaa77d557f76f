"""Exceptions of this project and the exit statuses that scripts turn them into."""

from __future__ import annotations

import errno
import gc
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PIPE, EXIT_RESTART, EXIT_USER
from megatron_llama.system.interrupts import raise_interrupts, settle_status
from megatron_llama.system.programs import name_commands, running_command
from megatron_llama.system.ulimits import MOST_FILES, explain_limit
from megatron_llama.system.wrapping import escape_controls, wrap

PACKAGES = {"megatron_llama", "data_prep", "scripts", "benchmarks", "tests"}
"""Packages with command lines of this project."""


def program() -> list[str]:
    """Return the interpreter's arguments that start this program: its file, or ``-m``, the module and the command."""
    if command := running_command():
        return ["-m", "megatron_llama", command]
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name.partition(".")[0] in PACKAGES:
        return ["-m", spec.name.removesuffix(".__main__")]
    return sys.argv[:1]


def program_name() -> str:
    """Return the program's name in messages: ``train.py``, ``benchmarks`` or ``megatron-llama train``."""
    return sys.argv[0] if running_command() else os.path.basename(program()[-1])


class UserError(ValueError):
    """Invalid input or settings. Scripts print one message and exit with status 2."""


class MachineError(RuntimeError):
    """Failure of the host (full disk, killed worker). Scripts print one message and exit with status 1."""


class TrainingFault(RuntimeError):
    """Training stops: a value or a copy of a weight is wrong. Checkpoints have the last good state."""


class LaunchFailed(RuntimeError):
    """Failed rendezvous of a job's processes. The message has the rank and the reason, so no traceback is printed."""


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's message; without one, its type."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip().splitlines()[0]


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
PATHS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)  # errors of a path that the user has chosen


def machine_fault(error: BaseException) -> str | None:
    """Return the message for an unusable path or disk, a killed worker or a limit; else None."""
    if isinstance(error, MachineError) and isinstance(error.__cause__, OSError | None):
        return str(error)
    if isinstance(error, OSError) and error.errno in (*_DISK, *PATHS) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):  # of tempfile
        return f"{error.strerror}: set TMPDIR to a folder that can be written"
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return f"too many open files: run `ulimit -n {MOST_FILES}` before this command, or ask the administrator"
    return explain_limit(error)


class Stopped(Exception):
    """Stop by a signal after all work was saved. Exit status 75: run the same command to continue."""


def run_main(main: Callable[[], int], *, raises_sigterm: bool = False) -> None:
    """Run a script's main function; turn its errors into one message and an exit status.

    Errors of other types are bugs of this project and keep their traceback. With ``raises_sigterm``, SIGTERM raises
    KeyboardInterrupt too, so that the program ends its processes.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None if it was closed
    sys.stderr = sys.stderr or open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    raise_interrupts(at_sigterm=raises_sigterm)
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
    except OSError as error:
        text = f"{error.filename}: " * bool(error.filename) + str(error.strerror or error)
        status = _report("error", text, EXIT_USER if error.errno in PATHS else EXIT_FAILED)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # else Python flushes at exit and prints a second error
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    settle_status(status if isinstance(status, int) else EXIT_FAILED if status else 0)
    leave(status)


def leave(status: int | str | None) -> NoReturn:
    """Exit without Python's search for cycles in all objects, which takes a second after torch is imported."""
    gc.freeze()
    sys.exit(status)


def _report(kind: str, message: str, status: int) -> int:
    with suppress(OSError):
        sys.stdout.flush()
    with suppress(OSError):
        sys.stderr.write(wrap(escape_controls(f"{program_name()}: {kind}: {name_commands(message)}")) + "\n")
    return status
