"""SIGINT in the programs of this project: one line, status 130, no traceback, at every moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.processes import DEFAULTS, environment

# Runs a program in a process that gets the signal when it first imports a module.
IMPORTING = """
import os, runpy, sys
class Signaller:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Signaller())
sys.argv[:] = [{program!r}, *{words!r}]
sys.path[0] = {folder!r}
runpy.run_path({program!r}, run_name="__main__")
"""
# A run of run_main that gets the signal at an awkward moment.
RUNNING = """
import atexit, os, sys, weakref
from megatron_llama.system.errors import run_main
class Thing: pass
def interrupt(*_): os.kill(os.getpid(), 2)
def main():
    {body}
    return 3
run_main(main)
"""


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=100
    )


PREPARATION = [f"data_prep/{p.name}" for p in sorted((ROOT / "data_prep").glob("*.py")) if "__main__" in p.read_text()]


@pytest.mark.parametrize(
    ("command", "module", "number"),
    [
        ("train.py --help", "megatron_llama.system.installed", signal.SIGINT),
        ("train.py --help", "megatron_llama.system.output", signal.SIGINT),
        ("train.py --help", "megatron_llama.cli", signal.SIGINT),
        ("train.py data=mock device=cpu", "omegaconf", signal.SIGTERM),
        ("train.py data=mock device=cpu run.dir={folder}", "torch", signal.SIGINT),  # when it claims the folder
        ("scripts/plan.py --help", "megatron_llama.system.errors", signal.SIGINT),
        ("scripts/compare.py --help", "megatron_llama.tools.compare.cli", signal.SIGINT),
        ("scripts/generate.py --help", "megatron_llama.launch.start", signal.SIGINT),
        *((f"{program} --help", "megatron_llama.system.errors", signal.SIGINT) for program in PREPARATION),
    ],
)
def test_during_imports(command: str, module: str, number: signal.Signals, tmp_path: Path) -> None:
    program, *words = command.format(folder=tmp_path / "run").split()
    path = ROOT / program
    text = IMPORTING.format(module=module, program=str(path), folder=str(path.parent), number=int(number), words=words)
    done = run_python(text)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", f"Stopped by {number.name}.\n")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("interrupt()", 130, "-c: stopped: interrupted\n"),
        ("thing = Thing(); one = weakref.ref(thing, interrupt); del thing", 130, "Stopped by SIGINT.\n"),
        ("setattr(Thing, '__del__', interrupt); Thing()", 130, "Stopped by SIGINT.\n"),
        (
            "sys.meta_path.insert(0, type('F', (), {'find_spec': interrupt})); import missing",
            130,
            "Stopped by SIGINT.\n",
        ),
        ("atexit.register(interrupt)", 3, ""),
    ],
    ids=["main", "weakref", "del", "import", "atexit"],
)
def test_while_a_program_runs(body: str, status: int, message: str) -> None:
    done = run_python(RUNNING.format(body=body))
    assert (done.returncode, done.stderr) == (status, message)


def test_a_users_program_keeps_its_handlers() -> None:
    done = run_python("import signal, megatron_llama; print(signal.getsignal(2) is signal.default_int_handler)")
    assert done.stdout == "True\n"


def test_tests_run_with_default_signals() -> None:
    """The suite may start in the background or under nohup (conftest.py)."""
    assert {number: signal.getsignal(number) for number in DEFAULTS} == DEFAULTS
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
