"""SIGINT in the programs of this project: one line, status 130, no traceback, at every moment."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.processes import environment

# Runs a program in a process that gets the signal when it first imports a module.
IMPORTING = """
import os, runpy, sys
class Signaller:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), 2)
sys.meta_path.insert(0, Signaller())
sys.argv[:] = [{program!r}, "--help"]
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


@pytest.mark.parametrize(
    ("program", "module"),
    [
        ("train.py", "megatron_llama.system.installed"),
        ("train.py", "megatron_llama.system.output"),
        ("scripts/plan.py", "megatron_llama.system.errors"),
        ("scripts/compare.py", "megatron_llama.tools.compare.cli"),
        ("scripts/generate.py", "megatron_llama.launch.start"),
        ("data_prep/preprocess.py", "argparse"),
        ("data_prep/inspect.py", "megatron_llama.system.errors"),
    ],
)
def test_during_imports(program: str, module: str) -> None:
    path = ROOT / program
    done = run_python(IMPORTING.format(module=module, program=str(path), folder=str(path.parent)))
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "Stopped by SIGINT.\n")


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


@pytest.mark.parametrize(
    "path", [p for p in (ROOT / "data_prep").glob("*.py") if "__main__" in p.read_text()], ids=lambda path: path.stem
)
def test_data_preparation_handles_the_signal_before_other_imports(path: Path) -> None:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    first = next(node for node in body if isinstance(node, ast.If))
    assert any(isinstance(node, ast.Import) and node.names[0].name == "megatron_llama" for node in first.body)
    before = [node for node in body[: body.index(first)] if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {ast.unparse(node) for node in before} <= {"import os", "import sys"}
