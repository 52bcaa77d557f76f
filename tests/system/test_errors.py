"""Exit status and message of a program whose output is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_llama.system.command import ArgumentParser
from tests.paths import ROOT

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


def test_sigterm_interrupts_a_program_with_processes() -> None:
    done = run("import os; os.kill(os.getpid(), 15)", "2>&1", options=", raises_sigterm=True")
    assert (done.returncode, done.stdout) == (130, b"-c: stopped: interrupted\n")


def test_long_messages_are_wrapped() -> None:
    done = run(f"raise UserError('{'word ' * 40}/a/{'long/' * 20}path')", "2>&1")
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 2 and lines[0].startswith("-c: error: word word")
    assert max(map(len, lines[:-1])) <= 79 and lines[-1] == f"    /a/{'long/' * 20}path", "paths can be copied"
    assert " ".join(" ".join(lines).split()) == f"-c: error: {'word ' * 40}/a/{'long/' * 20}path"


def test_a_full_disk_is_one_message() -> None:
    done = run("print('x')", ">/dev/full")
    assert done.returncode == 1 and done.stderr == b"-c: error: No space left on device\n", done.stderr.decode()


def test_any_character_can_be_printed() -> None:
    assert rb"-c: error: a\x1b[31m\u202eb" in run(r"raise UserError('a\x1b[31m\u202eb')", "2>&1").stdout
    done = run("print('\\u2192')", "", encoding="ascii")
    assert (done.returncode, done.stdout) == (3, b"\\u2192\n"), done.stderr.decode()


@pytest.mark.parametrize(
    "script", ["compare.py", "traffic.py", "import_config.py", "verify_checkpoint.py", "plan.py", "rehearse.py"]
)
def test_scripts_end_quietly_with_their_reader(script: str, tmp_path: Path) -> None:
    line = f"set -o pipefail; {sys.executable} {ROOT}/scripts/{script} --help | (exec <&-)"
    done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=100)
    assert done.returncode in (0, 141) and done.stderr == b"", done.stderr.decode()  # argparse swallows some errors


def test_an_option_that_is_given_twice_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser(prog="x")
    parser.add_argument("files", nargs="*")
    for name, more in (("--one", {}), ("--several", {"action": "append"}), ("--flag", {"action": "store_true"})):
        parser.add_argument(name, **more)
    given = parser.parse_args(["--one", "1", "--several", "1", "--several", "2", "--flag", "--flag"])
    assert (given.one, given.several, given.flag) == ("1", ["1", "2"], True) and not capsys.readouterr().err
    assert parser.parse_args(["--one", "1", "a", "--one=2"]).one == "2"
    assert capsys.readouterr().err == "x: --one is given more than once; the last value is used\n"
