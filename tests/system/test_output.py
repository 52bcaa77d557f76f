"""Terminal output: tables, progress, wrapped lines; a program whose output is lost writes the rest to a file."""

from __future__ import annotations

import io
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_llama.system import output
from megatron_llama.system import progress as progress_module
from megatron_llama.system.progress import ProgressBar, duration
from megatron_llama.system.tables import GIB, gib, text_table, wrapped_table
from megatron_llama.system.wrapping import WIDTH, fill, wrap, wrap_command, wrap_lines
from megatron_llama.tools.inference import evaluate_cli, evaluation
from megatron_llama.topology import Grid
from tests.processes import status_of_fork

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

    assert status_of_fork(work) == 0
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

    assert status_of_fork(work) == 0


def test_unbuffered_streams_stay_unbuffered(tmp_path: Path) -> None:
    """Remote hosts run with PYTHONUNBUFFERED; unbuffered streams stay so."""

    def work() -> None:
        os.dup2(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT), 1)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)  # type: ignore[type-var]
        output.protect_output()
        sys.stdout.write("at once")
        assert (tmp_path / "out").read_text() == "at once"

    assert status_of_fork(work) == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_the_encoding_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    def work() -> None:
        os.dup2(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT), 1)
        sys.stdout = open(1, "w", encoding=encoding, closefd=False)
        output.protect_output()
        print(LINE)

    assert status_of_fork(work) == 0
    written = (tmp_path / "out").read_text(encoding=encoding)
    assert written == LINE.encode(encoding, "backslashreplace").decode(encoding) + "\n" and "\\u2192" in written


def test_columns_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No terminal changes them."""
    rows = [("axis", "calls", "bytes"), ("tp", "54", "110,592"), ("world", "4", "")]
    assert text_table(rows) == ["axis   calls  bytes", "tp     54     110,592", "world  4"]
    assert text_table(rows, left=1) == ["axis   calls    bytes", "tp        54  110,592", "world      4"]
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setenv("FORCE_COLOR", "1")
    long, markup = "x" * 300, "[bold]not markup[/bold] :smile:"
    assert text_table([(long, markup, "1.5")]) == [f"{long}  {markup}  1.5"]


def test_the_last_column_is_wrapped() -> None:
    rows = [("40 x fp32", "zeros_like in the optimizer and the loop"), ("1 x bf16", "mm")]
    assert wrapped_table(rows, 36) == [
        "40 x fp32  zeros_like in the",
        "           optimizer and the loop",
        "1 x bf16   mm",
    ]
    assert wrapped_table([("2", "layers.*.mlp", "mm in layers.*.gate_up_proj"), ("10", "", "")], 28) == [
        "2   layers.*.mlp",
        "       mm in",
        "       layers.*.gate_up_proj",
        "10",
    ]


MIB = 2**20


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 MiB"),
        (512 * MIB, "512 MiB"),
        (1002 * MIB, "1,002 MiB"),
        (GIB - 1, "1,024 MiB"),
        (GIB, "1 GiB"),
        (25.14 * GIB, "25.1 GiB"),
        (1024 * GIB, "1,024 GiB"),
    ],
)
def test_bytes(size: int, text: str) -> None:
    assert gib(size) == text


Captured = pytest.CaptureFixture[str]


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: self.now))


def test_without_a_terminal_a_line_replaces_the_bar(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    clock = Clock(monkeypatch)
    with ProgressBar("evaluate", "windows", 1000) as bar:
        for done in range(10, 110, 10):
            clock.now += 10
            bar.show(done)
    assert capsys.readouterr().err.splitlines() == [
        "evaluate: 30 of 1,000 windows, 1 a second, 16:10 left",
        "evaluate: 60 of 1,000 windows, 1 a second, 15:40 left",
        "evaluate: 90 of 1,000 windows, 1 a second, 15:10 left",
    ]


def test_evaluation_omits_its_first_batch_from_the_rate(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    clock = Clock(monkeypatch)
    with evaluate_cli._shown_progress() as progress:
        clock.now += 500  # a slow first batch
        progress(10, 1000)
        for done in (40, 70):
            clock.now += 30
            progress(done, 1000)
    assert capsys.readouterr().err.splitlines() == [
        "evaluate: 40 of 1,000 done, 1 a second, 16:00 left",
        "evaluate: 70 of 1,000 done, 1 a second, 15:30 left",
    ]


def test_a_small_vocabulary_has_several_batches() -> None:
    plan = SimpleNamespace(grid=Grid({"tp": 1, "cp": 1, "dp": 1, "pp": 1}), padded_vocab_size=384)
    generator: Any = SimpleNamespace(plan=plan, loss=lambda *_: 1.0)
    window = np.zeros(257, np.uint16), np.ones(257, np.uint8)
    calls = list[tuple[int, int]]()
    evaluation.perplexity(generator, [window] * 200, lambda done, of: calls.append((done, of)))
    assert len(calls) > 5 and calls[-1] == (200, 200)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (3 * 3600 + 7 * 60, "3:07:00"), (2 * 86400 + 15000, "2d 04:10"), (-3, "0:00")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


PATH = "/data/my own files/of the year 2026/it's a 'dataset' of chats/part 1.jsonl"
COMMAND = f"python data_prep/sft.py --input {shlex.quote(PATH)} --seq-length 64 --on-bad-line skip --x 'a b'"
COMMANDS = [
    COMMAND,
    f"hf download OWNER/NAME --local-dir {shlex.quote(PATH)}",
    f"make -C {shlex.quote(PATH)} venv",
    f"{shlex.quote('/my own/.venv/bin/python')} -m pip install -e '/a b/c[dev]' {'more ' * 20}numpy",
    f"/a/.venv/bin/python train.py model=llama_2m {'trainer.steps=1 ' * 8}{shlex.quote('run.dir=' + PATH)}",
    f"megatron-llama export-hf {shlex.quote(PATH)} --out X",
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("before", [0, 5, 20, 60])
@pytest.mark.parametrize("after", ["", ", or write data=mock", ". More is in the guide, which has many more words too"])
def test_a_command_in_a_text_can_be_pasted(command: str, before: int, after: str) -> None:
    text = f"{'w ' * before}do this: {command}{after}"
    for wrapped in (wrap(text), fill("    instead  ", text), "\n".join(wrap_lines(text, "  ", width=70))):
        start = wrapped.index(command.split()[0])
        pasted = wrapped[start:].replace("\\\n", " ")
        words, expected = shlex.split(pasted.partition("\n")[0]), shlex.split(command)
        is_cut = "\\\n" in wrapped
        assert words == expected if is_cut else words[: len(expected)][:-1] == expected[:-1]


def test_lines_have_79_columns_and_words_are_whole() -> None:
    """Quotes that fit, and commands in comments, are not broken; prose after a program has no backslash."""
    text = f"the user's file isn't there: {'word ' * 40}'{'quoted text ' * 20}' {'/path' * 20} and the ranks' files"
    lines = wrap(text).split("\n")
    assert max(len(line) for line in lines if "/path" not in line) <= WIDTH
    assert " ".join(" ".join(lines).split()) == text and f"{'/path' * 20}" in wrap(text).split()
    lines = wrap_lines(f"{'word ' * 13}write 'data.prefixes=[/a b/c]'")
    assert lines[-1] == "'data.prefixes=[/a b/c]'"
    lines = wrap_lines(f"{'word ' * 12}{COMMAND}", "# ", "#   ")
    assert len(lines) == 2 and lines[1] == f"#   {COMMAND}"
    text = f"{'word ' * 12}python train.py --help lists the recipes, which {'have more words ' * 8}"
    assert "\\" not in wrap(text) and "python train.py --help" in wrap(text)
    assert wrap_lines("a b", "- ", width=4) == ["- a", "  b"]
    assert wrap_lines("a b", "- ", "", width=4) == ["- a", "b"]
    assert wrap_lines("a\nb") == ["a b"] and wrap_lines("") == []
    assert fill("label ", "") == "label "
    assert wrap(f"  {'word ' * 20}\nsecond").split("\n")[1:] == ["      word word word word word", "second"]


def test_a_command_of_words_is_quoted_and_continued() -> None:
    words = ["python", "train.py", *["trainer.steps=1"] * 6, f"run.dir={PATH}"]
    wrapped = wrap_command(words)
    assert shlex.split(wrapped.replace("\\\n", " ")) == words
    assert all(line.endswith(" \\") and len(line) <= WIDTH for line in wrapped.split("\n")[:-1])
