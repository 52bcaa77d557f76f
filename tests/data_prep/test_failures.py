"""Machine failures (full disk, unwritable output) are reported and leave no partial output."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data_prep.helpers import (
    Run,
    assert_refused,
    command,
    listing,
    outputs,
    reference,
    run_script,
    some_texts,
    write_jsonl,
)
from tests.paths import ROOT


@pytest.mark.parametrize("limit", [2_000, 60_000, 300_000])
def test_a_full_disk(tmp_path: Path, preprocess: Run, tokenizer: Path, limit: int) -> None:
    """A file size limit emulates a full disk. Without the limit, the run resumes."""
    texts = some_texts(1200)
    args = (
        *("--input", write_jsonl(tmp_path / "a.jsonl", texts), "--output-prefix", tmp_path / "out/x"),
        *("--block-mib", 0.02, "--checkpoint-seconds", 0),
    )

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    full = preprocess(*args, preexec_fn=small_disk)
    assert_refused(full, "cannot write", "rerun the same command", status=1)
    assert not [name for name in listing(tmp_path / "out") if not name.startswith(".")]
    done = preprocess(*args)
    assert done.returncode == 0, done.stderr
    assert ("resuming after" in done.stdout) == (limit >= 60_000)
    assert outputs(tmp_path / "out/x") == reference(tokenizer, texts)


def test_unwritable_output_is_rejected(tmp_path: Path, preprocess: Run) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    for prefix, words in [
        (source / "x", ["cannot write to the output folder"]),
        ("/proc/nowhere/x", ["cannot write to the output folder"]),
        (str(tmp_path) + "/", ["must end in a file name"]),
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
        (("--tokenizer-library", "nltk"), "write sentencepiece, huggingface or tiktoken"),
        (("--tokenizer-type", "BertWordPieceLowerCase"), "or one of gptsentencepiecetokenizer"),
        (("--split-sentences",), "--split-sentences"),
        (("--block-mib", 0), "--block-mib"),
        (("--dataset-impl", "lazy"), "mmap"),
        (("--no-such-flag",), "--no-such-flag"),
    ]:
        assert_refused(preprocess(*base, *flags), word)
    assert listing(tmp_path) == ["a.jsonl"]


def test_all_wrong_flags_are_reported_at_once(tmp_path: Path, preprocess: Run) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    flags = ("--split-sentences", "--prepend-bos", "--ftfy", "--workers", 0, "--block-mib", 0, "--part", "3/2")
    more = ("--json-keys", "a/b", "a/b")
    done = preprocess("--input", source, "--output-prefix", tmp_path / "x", *flags, *more)
    names = ("--split-sentences", "--prepend-bos", "--ftfy", "--workers", "--block-mib", "--part", "a/b", "twice")
    assert_refused(done, *names)
    base = ("--input", source, "--tokenizer-model", "none", "--output-prefix", tmp_path / "x", "--workers", 0)
    chat = run_script("sft.py", *base, "--seq-length", 0, "--split", "1")
    assert_refused(chat, "--seq-length", "--workers", "--split 1")
    assert listing(tmp_path) == ["a.jsonl"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path, tokenizer: Path) -> None:
    """Compare peak memory for 12 and 48 MB; python -m benchmarks.verify.data uses a gigabyte."""
    texts = some_texts(500)
    peaks = []
    script = (
        f"import resource, sys; sys.path[0] = {str(ROOT)!r}\n"
        "from data_prep.preprocess import main\n"
        "main(sys.argv[1:])\n"
        "main_peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1]\n"
        "print('peaks', main_peak, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
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
        main_peak, largest_worker = map(int, done.stdout.rpartition("peaks")[2].split())
        peaks.append(1024 * (main_peak + 2 * largest_worker))
    assert peaks[0] > 10e6
    grown = os.path.getsize(tmp_path / "32.jsonl") - os.path.getsize(tmp_path / "8.jsonl")
    assert peaks[1] < 600e6 and peaks[1] - peaks[0] < 0.4 * grown, (peaks, grown)


def test_scripts_run_from_any_folder(tmp_path: Path) -> None:
    """inspect.py in the scripts' folder must not hide the standard library's inspect."""
    for script in ("preprocess.py", "inspect.py", "redpajama.py", "train_tokenizer.py", "python_stdlib.py"):
        code = f"import runpy, sys; sys.argv = ['x', '--help']; runpy.run_path({str(ROOT / 'data_prep' / script)!r}, "
        code += "run_name='__main__')"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        direct = subprocess.run(command(script, "--help"), cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert direct.returncode == 0, direct.stderr
