"""Inference commands as a user starts them, in a forked process."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers.models.auto.tokenization_auto  # noqa: F401  imported before the fork

import megatron_llama.tools.inference.chat  # noqa: F401  the same
from megatron_llama.tools.inference import evaluate_cli, generate_cli
from tests.golden import GoldenFiles
from tests.processes import run_forked

Main = Callable[[Sequence[str]], int]
CPU = ("--device", "cpu")


class Ended(NamedTuple):
    status: int
    out: str
    err: str


def command(main: Main, *arguments: object, stdin: str = "", timeout: float = 150, reader: bool = True) -> Ended:
    """Run ``main`` with arguments and stdin (``surrogateescape`` for other bytes).

    Without ``reader`` its stdout is a pipe whose read end is closed.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, out, err = (Path(folder, name) for name in ("stdin", "stdout", "stderr"))
        given.write_text(stdin, errors="surrogateescape")

        def program() -> None:
            os.dup2(os.open(given, os.O_RDONLY), 0)
            if not reader:
                read_end, pipe = os.pipe()
                os.close(read_end)
                os.dup2(pipe, 1)
            sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
            sys.stderr = open(2, "w", buffering=1, closefd=False)
            torch.set_num_threads(1)
            sys.exit(main([str(argument) for argument in arguments]))

        return Ended(run_forked(program, out, err, timeout), out.read_text(), err.read_text())


generate, evaluate = generate_cli.main, evaluate_cli.main


def check_refusals(
    name: str,
    main: Main,
    rows: Sequence[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Check the status 2 of command lines in ``folder``, and their messages with a golden file."""
    monkeypatch.chdir(folder)
    page = ""
    for row in rows:
        assert main([*CPU, *shlex.split(row)]) == 2, row
        page += f"$ {ascii(row)[1:-1][:79]}\n{capsys.readouterr().err}\n"
    assert "Traceback" not in page
    GoldenFiles.check(f"tools/inference/refused_{name}.txt", page, {r"found:\s+/\S+/": "found: FOLDER/"})
