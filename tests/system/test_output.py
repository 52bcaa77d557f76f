"""A program whose stdout or stderr is lost continues and writes the remaining output to a file."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_llama.system import output
from tests.threads import check_threads

LINE = "step 3: 5 × 7 → “35”"


def broken_pipe() -> int:
    """The reader has ended, as head does."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def closed_terminal() -> int:
    """Writing to it is an input/output error."""
    master, terminal = os.openpty()
    os.close(master)
    return terminal


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def nobody_reads() -> int:
    """A full pipe whose reader only waits."""
    _, writer = os.pipe()
    os.set_blocking(writer, False)
    while True:
        try:
            os.write(writer, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(writer, True)
            return writer


def in_a_fork(work: Callable[[], None]) -> int:
    """The exit status of a process that does ``work``."""
    check_threads()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            sys.stdout.flush()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("lost", [broken_pipe, closed_terminal, full_disk, nobody_reads, None])
@pytest.mark.parametrize("number", [1, 2])
def test_what_is_lost_goes_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: Callable[[], int] | None, number: int
) -> None:
    """None: the descriptor is closed from the start."""
    monkeypatch.setattr(output, "STALLED_SECONDS", 0.05)

    def work() -> None:
        for stream in (1, 2):
            os.dup2(os.open(tmp_path / f"stream{stream}", os.O_WRONLY | os.O_CREAT), stream)
        if lost is None:
            os.close(number)
        else:
            os.dup2(lost(), number)
        output.protect_output()
        sys.stdout.write("before the folder\n" * (number == 1))
        sys.stdout.flush()
        with open(tmp_path / "data", "w") as file:  # must not get the number that was closed
            output.set_spill_folder(tmp_path / "run")
            print(LINE, file=sys.stdout if number == 1 else sys.stderr, flush=True)
            os.write(number, b"from C\n")
            file.write("data")

    assert in_a_fork(work) == 0
    text = (tmp_path / "run" / output.FILE).read_text()
    assert text.startswith(f"std{'out' if number == 1 else 'err'} is lost: ") and text.count("is lost") == 1
    assert LINE in text and text.endswith("from C\n")
    assert ("before the folder" in text) == (number == 1)
    assert (tmp_path / "data").read_text() == "data"
    other = (tmp_path / f"stream{3 - number}").read_text()
    assert "The run continues and prints to" in other and output.FILE in other


def test_the_file_may_be_lost_too(tmp_path: Path) -> None:
    def work() -> None:
        for stream in (1, 2):
            os.dup2(broken_pipe(), stream)
        output.protect_output()
        (tmp_path / "run").touch()  # no folder can be made there
        output.set_spill_folder(tmp_path / "run")
        for _ in range(1000):
            print("x" * 10_000)
        warnings.warn("and a warning", stacklevel=1)

    assert in_a_fork(work) == 0


def test_unbuffered_streams_stay_unbuffered(tmp_path: Path) -> None:
    """Remote hosts run with PYTHONUNBUFFERED; unbuffered streams stay so."""

    def work() -> None:
        os.dup2(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT), 1)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)  # type: ignore[type-var]
        output.protect_output()
        sys.stdout.write("at once")
        assert (tmp_path / "out").read_text() == "at once"

    assert in_a_fork(work) == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_the_encoding_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    def work() -> None:
        os.dup2(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT), 1)
        sys.stdout = open(1, "w", encoding=encoding, closefd=False)
        output.protect_output()
        print(LINE)

    assert in_a_fork(work) == 0
    written = (tmp_path / "out").read_text(encoding=encoding)
    assert written == LINE.encode(encoding, "backslashreplace").decode(encoding) + "\n" and "\\u2192" in written
