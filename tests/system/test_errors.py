"""Messages and statuses of programs: output that is lost, SIGINT at every moment, limits of the shell; no traceback."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_llama.launch.failure_cause import describe
from megatron_llama.system import ulimits
from megatron_llama.system.rerun_command import ArgumentParser
from tests.paths import ROOT
from tests.processes import DEFAULTS, run_command

PROGRAM = """
import sys
from megatron_llama.system.errors import Stopped, UserError, run_main
def main():
    {body}
    return 3
run_main(main{options})
"""


def run(
    body: str, redirection: str, *, encoding: str = "utf-8", options: str = ""
) -> subprocess.CompletedProcess[bytes]:
    """A program in a shell; its output goes to ``redirection``, its status is the pipe's first."""
    program = PROGRAM.format(body=body, options=options)
    line = f'set -o pipefail; {sys.executable} -c "$0" {redirection}'
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    return subprocess.run(["bash", "-c", line, program], capture_output=True, env=environment, timeout=60)


@pytest.mark.parametrize(
    ("body", "redirection", "status"),
    [
        ("print('x' * 300_000)", "| true", 141),
        ("print('x')", "| (exec <&-)", 141),  # only the last flush fails
        ("import argparse; argparse.ArgumentParser(description='x' * 300_000).parse_args(['-h'])", "| true", 0),
        ("sys.stderr.write('y' * 300_000)", "2>&1 >/dev/null | true", 141),
        ("print('x' * 300_000)", ">&-", 3),
        ("sys.stderr.write('y')", "2>&-", 3),
        ("raise UserError('no')", "2>&-", 2),
        ("raise KeyboardInterrupt", "2>/dev/null", 130),
        ("raise Stopped('x')", "2>/dev/null", 75),
    ],
)
def test_a_lost_output_is_no_traceback(body: str, redirection: str, status: int) -> None:
    done = run(body, redirection)
    assert (done.returncode, done.stderr) == (status, b""), done.stderr.decode()


@pytest.mark.parametrize("redirection", ["2>&1", "2>&1 & wait $!"], ids=["alone", "in the background"])
def test_sigterm_interrupts_a_program_with_processes(redirection: str) -> None:
    done = run("import os; os.kill(os.getpid(), 15)", redirection, options=", raises_sigterm=True")
    assert (done.returncode, done.stdout) == (130, b"-c: stopped: interrupted\n")


def test_messages_are_wrapped_and_printable() -> None:
    """A full disk is one message, and any character can be printed."""
    done = run(f"raise UserError('{'word ' * 40}/a/{'long/' * 20}path')", "2>&1")
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 2 and lines[0].startswith("-c: error: word word")
    assert max(map(len, lines[:-1])) <= 79 and lines[-1] == f"    /a/{'long/' * 20}path", "paths can be copied"
    assert " ".join(" ".join(lines).split()) == f"-c: error: {'word ' * 40}/a/{'long/' * 20}path"
    done = run("print('x')", ">/dev/full")
    assert done.returncode == 1 and done.stderr == b"-c: error: No space left on device\n", done.stderr.decode()
    assert rb"-c: error: a\x1b[31m\u202eb" in run(r"raise UserError('a\x1b[31m\u202eb')", "2>&1").stdout
    assert run("open('x' * 256)", "2>&1 | tail -c 20").stdout == b" File name too long\n"
    done = run("print('\\u2192')", "", encoding="ascii")
    assert (done.returncode, done.stdout) == (3, b"\\u2192\n"), done.stderr.decode()


@pytest.mark.parametrize(
    "script", ["compare.py", "traffic.py", "import_config.py", "verify_checkpoint.py", "plan.py", "generate.py"]
)
def test_scripts_end_quietly_with_their_reader(script: str, tmp_path: Path) -> None:
    line = f"set -o pipefail; {sys.executable} {ROOT}/scripts/{script} --help | (exec <&-)"
    done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=100)
    assert done.returncode in (0, 141) and done.stderr == b"", done.stderr.decode()  # argparse swallows some errors


def test_options_given_twice_and_urls_of_paths_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser(prog="x")
    parser.add_argument("files", nargs="*")
    for name, more in (("--one", {}), ("--several", {"action": "append"}), ("--flag", {"action": "store_true"})):
        parser.add_argument(name, **more)
    given = parser.parse_args(["--one", "1", "--several", "1", "--several", "2", "--flag", "--flag"])
    assert (given.one, given.several, given.flag) == ("1", ["1", "2"], True) and not capsys.readouterr().err
    assert parser.parse_args(["--one", "1", "a", "--one=2"]).one == "2"
    assert capsys.readouterr().err == "x: --one is given more than once; the last value is used\n"
    parser.add_argument("--path", type=Path)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--path", "s3://me:secret@bucket/x"])
    assert "argument --path: s3://...@bucket/x must be a local path" in capsys.readouterr().err


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


PREPARATION = [f"data_prep/{p.name}" for p in sorted((ROOT / "data_prep").glob("*.py")) if "__main__" in p.read_text()]


@pytest.mark.parametrize(
    ("command", "module", "number"),
    [
        ("train.py --help", "megatron_llama.system.missing_packages", signal.SIGINT),
        ("train.py --help", "megatron_llama.system.output", signal.SIGINT),
        ("train.py --help", "megatron_llama.cli", signal.SIGINT),
        ("train.py data=mock device=cpu", "omegaconf", signal.SIGTERM),
        ("train.py data=mock device=cpu run.dir={folder}", "torch", signal.SIGINT),  # when it claims the folder
        ("scripts/plan.py --help", "megatron_llama.system.errors", signal.SIGINT),
        ("scripts/compare.py --help", "megatron_llama.tools.compare.cli", signal.SIGINT),
        ("scripts/generate.py --help", "megatron_llama.tools.inference.sampling", signal.SIGINT),
        *((f"{program} --help", "megatron_llama.system.errors", signal.SIGINT) for program in PREPARATION),
    ],
)
def test_during_imports(command: str, module: str, number: signal.Signals, tmp_path: Path) -> None:
    program, *words = command.format(folder=tmp_path / "run").split()
    path = ROOT / program
    text = IMPORTING.format(module=module, program=str(path), folder=str(path.parent), number=int(number), words=words)
    done = run_command(sys.executable, "-c", text)
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
    done = run_command(sys.executable, "-c", RUNNING.format(body=body))
    assert (done.returncode, done.stderr) == (status, message)


def test_a_users_program_keeps_its_handlers() -> None:
    program = "import signal, megatron_llama; print(signal.getsignal(2) is signal.default_int_handler)"
    assert run_command(sys.executable, "-c", program).stdout == "True\n"


def test_tests_run_with_default_signals() -> None:
    """The suite may start in the background or under nohup (conftest.py)."""
    assert {number: signal.getsignal(number) for number in DEFAULTS} == DEFAULTS
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


TINY = {"-v": 300_000 << 10, "-d": 200_000 << 10, "-s": 64 << 10, "-u": 40}


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Return the soft limits, by kind, which a test may set."""
    soft: dict[int, int] = {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft.get(kind, resource.RLIM_INFINITY),) * 2)
    return soft


@pytest.mark.parametrize("option", ["-v", "-d"])
def test_a_run_with_too_little_memory_ends_before_torch(option: str) -> None:
    line = f"ulimit {option} {TINY[option] >> 10}; exec {sys.executable} train.py data=mock device=cpu"
    done = run_command("bash", "-c", line)
    message = " ".join(done.stderr.split())
    assert done.returncode == 1 and message.startswith("The launch failed: The shell has the limit ulimit"), message
    assert f"ulimit {option} {TINY[option] >> 10} (" in message and f"Type ulimit {option} unlimited" in message


@pytest.mark.parametrize(
    ("error", "option"),
    [
        (MemoryError(), "-v"),
        (RuntimeError("Resource temporarily unavailable"), "-d"),
        (RuntimeError("can't start new thread"), "-u"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"), "-d"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "-v"),
        (OSError(12, "Cannot allocate memory"), "-v"),
    ],
)
def test_an_error_that_a_limit_explains(error: Exception, option: str, limited: dict[int, int]) -> None:
    assert ulimits.explain_limit(error) is None, "without a limit it is another fault"
    kind = ulimits._LIMITS[option][0]
    assert kind is not None
    limited[kind] = TINY[option]
    message = ulimits.explain_limit(error)
    assert message is not None and f"ulimit {option} " in message and f"Type ulimit {option} unlimited" in message
    report = describe(error)
    assert (report.code, report.text) == (1, message)


def test_other_errors_are_not_explained_by_a_limit(limited: dict[int, int]) -> None:
    """A crash names small limits."""
    limited.update({resource.RLIMIT_AS: TINY["-v"], resource.RLIMIT_NPROC: 60_000})
    assert ulimits.explain_limit(ValueError("wrong")) is None and ulimits.explain_limit(RuntimeError("")) is None
    del limited[resource.RLIMIT_AS]
    assert ulimits.explain_limit(MemoryError()) is None, "the usual limit of processes is no limit of memory"
    limited[resource.RLIMIT_STACK] = 8 << 20
    assert ulimits.explain_crash() == "" and ulimits.check_run() is None
    limited[resource.RLIMIT_STACK] = TINY["-s"]
    assert "ulimit -s 64 (0.0625 MiB of stack)" in ulimits.explain_crash()


def test_a_run_may_open_many_files() -> None:
    program = "import resource; from megatron_llama.system.ulimits import raise_file_limit; raise_file_limit()"
    line = f"ulimit -Sn 99; ulimit -Hn 999; {sys.executable} -c '{program}; print(resource.getrlimit(7))'"
    assert run_command("bash", "-c", line).stdout == "(999, 999)\n" and resource.RLIMIT_NOFILE == 7
