"""Inference commands as a user starts them, in a forked process."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import transformers.models.auto.tokenization_auto  # noqa: F401  imported before the fork

import megatron_llama.tools.inference.chat  # noqa: F401  the same
from megatron_llama.launch.start import start_ranks
from megatron_llama.tools.inference import evaluate_cli, generate_cli
from tests.threads import check_threads

Main = Callable[[Sequence[str]], int]


@dataclass
class Ended:
    """A command that has ended."""

    status: int
    out: str
    err: str


def command(main: Main, *arguments: object, stdin: str = "", timeout: float = 150, reader: bool = True) -> Ended:
    """Run ``main`` with arguments and stdin (``surrogateescape`` for other bytes).

    Without ``reader`` its stdout is a pipe whose read end is closed.
    """
    with (
        tempfile.TemporaryFile("w+", errors="surrogateescape") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        given.write(stdin)
        given.flush()
        given.seek(0)
        check_threads()
        pid = os.fork()
        if pid == 0:
            status = -1
            try:
                for number, file in enumerate((given, out, err)):
                    os.dup2(file.fileno(), number)
                if not reader:
                    read_end, pipe = os.pipe()
                    os.close(read_end)
                    os.dup2(pipe, 1)
                sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
                sys.stderr = open(2, "w", buffering=1, closefd=False)
                torch.set_num_threads(1)
                status = main([str(argument) for argument in arguments])
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else 1
            finally:
                sys.stdout.flush()
                os._exit(status)
        deadline = time.monotonic() + timeout
        while not (waited := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
                raise AssertionError("no end")
            time.sleep(0.02)
        out.seek(0)
        err.seek(0)
        return Ended(os.waitstatus_to_exitcode(waited[1]), out.read(), err.read())


CPU = ("--device", "cpu")


def generate(argv: Sequence[str]) -> int:
    """scripts/generate.py."""
    return generate_cli.main(argv, start_ranks)


def evaluate(argv: Sequence[str]) -> int:
    """scripts/evaluate.py."""
    return evaluate_cli.main(argv, start_ranks)
