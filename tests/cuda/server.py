"""A process that has imported torch and the project, and forks for each command: a run starts at once.

Each line of stdin is a request: {"words", "variables", "output"}. The answers are the process id, and at its end
the exit status. Ranks are forked too, which the runtime allows and a GPU does not.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from typing import Any, NoReturn

MODULES = ("tests.warm", "megatron_llama.train.loop", "megatron_llama.devices.cuda.kernels")
"""Modules that most runs import."""


def allow_forks() -> None:
    """Let ranks fork. ``runtime/fork.cpp`` lets torch use the device in them."""
    from megatron_llama.devices.cuda.device import Cuda

    Cuda.forkable = True


def import_modules() -> None:
    """Import ``MODULES`` without counting the devices: torch counts once, and each command may have other devices."""
    import torch

    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    for name in MODULES:
        importlib.import_module(name)
    torch.cuda.is_available = is_available


def run(request: dict[str, Any]) -> NoReturn:
    """Run the program of a request as its own process group; end the process."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["variables"])
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.argv = request["words"]
    status: int | str | None = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        status = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # for messages of imports
    import_modules()
    allow_forks()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(request)
        answers.write(f"{pid}\n")
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")


if __name__ == "__main__":
    main()
