"""--part: the dataset is byte-identical to a single run after kills, repeats and any order of parts."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from data_prep import preprocess, sft
from data_prep.lib.find_inputs import find_sources
from data_prep.lib.join_parts import split_input
from megatron_llama.system.errors import MachineError, UserError
from megatron_llama.system.files import wait_for_lock
from tests.data_prep.helpers import (
    GOOD,
    arguments,
    cut_lines,
    listing,
    manifest,
    run_interrupted,
    sft_arguments,
    some_texts,
    write_jsonl,
)

Make = Callable[..., None]
SUFFIXES = ("bin", "idx", "json", "quarantine.jsonl")
OPTIONS = ("--workers", 1, "--block-mib", 0.01, "--on-bad-line", "skip")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Files of each kind of cut (plain lines, a stream, an empty file), with bad lines."""
    folder = tmp_path / "in"
    for number, name in enumerate(("a.jsonl", "b.jsonl", "d.jsonl")):
        path = write_jsonl(folder / name, some_texts(90, seed=number))
        lines = path.read_text().split("\n")
        for line in (3, 30, 31, 70, 89):
            lines[line] = '{"text": null}'
        path.write_text("\n".join(lines))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress((folder / "b.jsonl").read_bytes()))
    (folder / "b.jsonl").write_bytes(b"")
    return folder


@pytest.fixture
def make(tokenizer: Path, corpus: Path) -> Make:
    """Return a function that runs preprocess.py on the corpus in this process and skips bad lines."""

    def run(prefix: Path, part: str | None = None, *more: str) -> None:
        args = arguments(tokenizer, prefix, corpus, *OPTIONS, *more)
        assert preprocess.main([*map(str, args), *(["--part", part] if part else [])]) == 0

    return run


def made(prefix: Path, suffixes: tuple[str, ...] = SUFFIXES) -> list[bytes]:
    return [Path(f"{prefix}_text_document.{suffix}").read_bytes() for suffix in suffixes]


@pytest.mark.parametrize("count", [1, 3, 14])
def test_parts_match_a_single_run(tmp_path: Path, make: Make, count: int) -> None:
    make(tmp_path / "one/x")
    for number in [*range(2, count + 1), 1]:
        assert not (tmp_path / "parts/x_text_document.bin").exists()
        make(tmp_path / "parts/x", f"{number}/{count}")
    assert made(tmp_path / "parts/x") == made(tmp_path / "one/x")
    assert listing(tmp_path / "parts") == listing(tmp_path / "one"), "the parts' folders are gone"
    lines_of_parts = manifest(tmp_path / "parts/x")
    assert (lines_of_parts["documents_read"], lines_of_parts["documents_skipped"]) == (270, 15)


def test_each_line_is_in_exactly_one_part(tmp_path: Path) -> None:
    """Split into any number of parts, up to more than one per byte."""
    data = b"\n".join([b"a", b"", b"bcd", b"e" * 30, b"f\r", b"", b"gh" * 7]) + b"\nlast without a feed"
    for name in ("a.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    sources = find_sources([str(tmp_path)]).sources
    for count in range(1, sum(source.size for source in sources) + 3):
        lines: list[bytes] = []
        for begin, end in split_input(sources, count):
            lines += itertools.chain.from_iterable(each for each, _ in cut_lines(sources, begin, 20, end))
        assert lines == 3 * data.split(b"\n"), count


def test_a_fine_tuning_set_in_parts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text("\n".join(GOOD * 5))
    for prefix, parts in (("one", [[]]), ("parts", [["--part", "1/2"], ["--part", "2/2"]])):
        for part in parts:
            assert sft.main(sft_arguments(folder, tmp_path / "chat.jsonl", tmp_path / prefix / "x", *part)) == 0
    for end in ("_sft.bin", "_sft.idx", "_sft.json", "_sft_mask.bin", "_sft_mask.idx", "_sft_mask.json"):
        assert (tmp_path / f"parts/x{end}").read_bytes() == (tmp_path / f"one/x{end}").read_bytes()


# (where, function, which call) in the second of two parts: while it encodes, joins and publishes
PHASES = {
    "in the part": ("encoding_run.EncodingRun", "_take", 4),
    "before it is called done": ("workspace.Workspace", "close", 1),
    "while it joins": ("prepare_dataset", "join_parts", 1),
    "while the joined files grow": ("join_parts", "_renumbered", 2),
    "in the index": ("output_files", "write_index", 1),
    "among the final names": ("output_files.os", "replace", 5),
    "before the parts go": ("prepare_dataset.shutil", "rmtree", 2),
}


@pytest.mark.parametrize("phase", PHASES)
def test_part_resumes_after_kill(
    tmp_path: Path, make: Make, corpus: Path, tokenizer: Path, phase: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "one/x")
    make(tmp_path / "parts/x", "1/2")
    args = arguments(tokenizer, tmp_path / "parts/x", corpus, *OPTIONS, "--part", "2/2", "--checkpoint-seconds", 0)
    assert run_interrupted("preprocess.py", *args, at=PHASES[phase]).returncode == -signal.SIGKILL
    capsys.readouterr()
    make(tmp_path / "parts/x", "1/2")  # finished parts are not repeated, and joined if complete
    assert "part 1/2: already complete" in (output := capsys.readouterr().out) or "nothing to do" in output
    make(tmp_path / "parts/x", "2/2")
    output = capsys.readouterr().out
    assert "resuming after" in output if phase == "in the part" else "joined" in output or "nothing to do" in output
    assert made(tmp_path / "parts/x") == made(tmp_path / "one/x")
    assert listing(tmp_path / "parts") == listing(tmp_path / "one")


def test_parts_with_other_options_are_rejected(tmp_path: Path, make: Make, corpus: Path) -> None:
    make(tmp_path / "x", "1/3")
    make(tmp_path / "x", "2/3")
    with pytest.raises(UserError, match="max_line_bytes was 67108864 and is now 5242880"):
        make(tmp_path / "x", "2/3", "--max-line-mib", "5")
    with pytest.raises(UserError, match=r"part 1/3 has other options: max_line_bytes"):
        make(tmp_path / "x", "3/3", "--max-line-mib", "5")
    shutil.rmtree(tmp_path / ".x_text_document.parts/3-of-3")
    assert not list(tmp_path.glob("x_*"))
    write_jsonl(corpus / "d.jsonl", ["changed"])
    with pytest.raises(UserError, match=r"part 1/3 has other options: the size or time of an input file changed"):
        make(tmp_path / "x", "3/3")


def test_damaged_part_is_removed(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "one/x")
    make(tmp_path / "parts/x", "1/2")
    binary = tmp_path / "parts/.x_text_document.parts/1-of-2/x_text_document.bin"
    data = bytearray(binary.read_bytes())
    data[100] ^= 1
    binary.write_bytes(data)
    with pytest.raises(MachineError, match=r"x_text_document.bin of part 1/2 .* rerun with --part 1/2"):
        make(tmp_path / "parts/x", "2/2")
    make(tmp_path / "parts/x", "1/2")
    assert made(tmp_path / "parts/x") == made(tmp_path / "one/x")


@contextlib.contextmanager
def locked(work: Path) -> Iterator[None]:
    """Lock a work folder as another process does: a lock is an open file's."""
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "lock", "wb") as lock:
        wait_for_lock(lock)
        yield


def test_one_process_joins_the_parts(tmp_path: Path, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "x", "1/2")
    with locked(tmp_path / ".x_text_document.partial"):
        make(tmp_path / "x", "1/2")
        assert "another process is joining" in capsys.readouterr().out
        with pytest.raises(UserError, match="another run is writing"):
            make(tmp_path / "x", "2/2")
        with pytest.raises(UserError, match="another run is writing"):
            make(tmp_path / "x")
    with locked(tmp_path / ".x_text_document.parts/2-of-2"):
        make(tmp_path / "x", "1/2")
        with pytest.raises(MachineError, match="part 2/2: another run is writing"):  # MachineError: SLURM retries it
            make(tmp_path / "x", "2/2")
    make(tmp_path / "x", "2/2")
    assert manifest(tmp_path / "x")["documents_read"] == 270


def test_bad_line_of_a_part_is_located(tmp_path: Path, tokenizer: Path) -> None:
    lines = [json.dumps({"text": "word"})] * 100
    lines[80] = "null"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    args = arguments(tokenizer, tmp_path / "o/x", tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=r"a\.jsonl, line \d+ after byte \d+: not_an_object"):
        preprocess.main([*map(str, args), "--workers", "1", "--part", "2/2"])
    assert listing(tmp_path / "o/.x_text_document.parts") == []
