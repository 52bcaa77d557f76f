"""The errors that a user can cause, and how a script reports them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_RESTART, EXIT_USER


class UserError(ValueError):
    """Bad input or a setting that can't work: shown as one message, exit status 2."""


class MachineError(RuntimeError):
    """The machine gave up (full disk, a worker killed): shown as one message, exit status 1."""


class Stopped(Exception):
    """A signal asked for an end; what was done is kept. Exit status 75: start me again."""


def run_main(main: Callable[[], int]) -> None:
    """Runs a script's main function and turns its errors into one message and an exit status.

    Anything that is not one of the errors above, or of the operating system, is ours and keeps its traceback.
    """
    try:
        status = main()
        sys.stdout.flush()
    except UserError as error:
        status = _report("error", str(error), EXIT_USER)
    except MachineError as error:
        status = _report("error", str(error), EXIT_FAILED)
    except (Stopped, KeyboardInterrupt) as error:
        status = _report("stopped", str(error) or "interrupted", EXIT_RESTART)
    except BrokenPipeError:
        # The reader of our output (head, less) has gone: not an error, but stdout can't be flushed any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_FAILED
    except PermissionError as error:
        status = _report("error", f"{error.filename}: {error.strerror}", EXIT_USER)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        status = _report("error", f"{where}{error.strerror or error}", EXIT_FAILED)
    sys.exit(status)


def _report(kind: str, message: str, status: int) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"{os.path.basename(sys.argv[0])}: {kind}: {message}\n")
    return status
