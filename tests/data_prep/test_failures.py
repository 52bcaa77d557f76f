"""The machine's failures: a full disk, an output that can't be written. Clear, and nothing half-written or lost."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data_prep.helpers import Run, assert_refused, command, listing, outputs, reference, some_texts, write_jsonl
from tests.paths import ROOT


@pytest.mark.parametrize("limit", [2_000, 60_000, 300_000])
def test_a_full_disk(tmp_path: Path, preprocess: Run, tokenizer: Path, limit: int) -> None:
    """A limit on files' sizes stands for the full disk: the write fails in the same way. Room made, it goes on."""
    texts = some_texts(1200)
    args = (
        *("--input", write_jsonl(tmp_path / "a.jsonl", texts), "--output-prefix", tmp_path / "out/x"),
        *("--block-mib", 0.02, "--checkpoint-seconds", 0),
    )

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    full = preprocess(*args, preexec_fn=small_disk)
    assert_refused(full, "can't write", "the same command goes on", status=1)
    assert not [name for name in listing(tmp_path / "out") if not name.startswith(".")]
    done = preprocess(*args)
    assert done.returncode == 0, done.stderr
    assert ("going on after" in done.stdout) == (limit >= 60_000)
    assert outputs(tmp_path / "out/x") == reference(tokenizer, texts)


def test_an_output_that_cant_be_written(tmp_path: Path, preprocess: Run) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    for prefix, words in [
        (source / "x", ["can't write the output"]),
        ("/proc/nowhere/x", ["can't write the output"]),
        (str(tmp_path) + "/", ["must end in a name"]),
    ]:
        assert_refused(preprocess("--input", source, "--output-prefix", prefix), *words)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path, preprocess: Run) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "closed").mkdir(mode=0o500)
    assert_refused(preprocess("--input", source, "--output-prefix", tmp_path / "closed/x"), "Permission denied")


def test_wrong_flags_are_refused(tmp_path: Path, preprocess: Run) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    base = ("--input", source, "--output-prefix", tmp_path / "x")
    for flags, word in [
        (("--workers", 0), "--workers must be at least 1"),
        (("--json-keys", "text", "text"), "twice"),
        (("--json-keys", "a/b"), "a/b"),
        (("--tokenizer-library", "nltk"), "known are"),
        (("--tokenizer-type", "BertWordPieceLowerCase"), "known are"),
        (("--split-sentences",), "--split-sentences"),
        (("--block-mib", 0), "--block-mib"),
        (("--dataset-impl", "lazy"), "mmap"),
        (("--no-such-flag",), "--no-such-flag"),
    ]:
        assert_refused(preprocess(*base, *flags), word)
    assert listing(tmp_path) == ["a.jsonl"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path, tokenizer: Path) -> None:
    """The processes' own peaks, two workers, 12 and 48 MB; python -m benchmarks.verify.data measures a gigabyte."""
    texts = some_texts(500)
    peaks = []
    script = (
        f"import resource, sys; sys.path[0] = {str(ROOT)!r}\n"
        "from data_prep.preprocess import main\n"
        "main(sys.argv[1:])\n"
        "own = next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1]\n"
        "print('peaks', own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    for times in (8, 32):
        path = tmp_path / f"{times}.jsonl"
        part = write_jsonl(tmp_path / "part.jsonl", texts).read_bytes()
        with open(path, "wb") as file:
            for _ in range(times * 4):
                file.write(part)
        args = command(
            *("preprocess.py", "--input", path, "--output-prefix", tmp_path / f"x{times}", "--workers", 2),
            *("--tokenizer-model", tokenizer, "--block-mib", 1),
        )
        done = subprocess.run([sys.executable, "-c", script, *args[2:]], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert done.returncode == 0
        own, largest_worker = map(int, done.stdout.rpartition("peaks")[2].split())
        peaks.append(1024 * (own + 2 * largest_worker))
    assert peaks[0] > 10e6
    grown = os.path.getsize(tmp_path / "32.jsonl") - os.path.getsize(tmp_path / "8.jsonl")
    assert peaks[1] < 600e6 and peaks[1] - peaks[0] < 0.4 * grown, (peaks, grown)


def test_scripts_run_from_anywhere_and_hide_no_module_of_pythons(tmp_path: Path) -> None:
    """The folder of the scripts holds inspect.py; dataclasses and others import Python's own inspect."""
    for script in ("preprocess.py", "inspect.py", "redpajama.py", "train_tokenizer.py", "python_stdlib.py"):
        code = f"import runpy, sys; sys.argv = ['x', '--help']; runpy.run_path({str(ROOT / 'data_prep' / script)!r}, "
        code += "run_name='__main__')"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        direct = subprocess.run(command(script, "--help"), cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert direct.returncode == 0, direct.stderr
