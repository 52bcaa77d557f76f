"""Interrupted runs: the resumed result is byte-identical to an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data_prep.helpers import (
    Run,
    assert_refused,
    command,
    killer,
    listing,
    manifest,
    outputs,
    reference,
    some_texts,
    write_jsonl,
)
from tests.paths import ROOT
from tests.processes import state

# (where, function, which call): every phase of a run
PHASES = {
    "before the first block": ("encoding_run.EncodingRun", "_take", 1),
    "after some blocks": ("encoding_run.EncodingRun", "_take", 4),
    "between a block's tokens and lengths": ("workspace.Workspace", "append", 10),
    "in a checkpoint": ("workspace.Workspace", "checkpoint", 3),
    "while the journal begins": ("workspace.Workspace", "_write_journal", 1),
    "while the index is written": ("encoding_run", "write_index", 1),
    "before the index's hash": ("encoding_run", "sha256_file", 1),
    "before anything has its final name": ("encoding_run", "publish", 1),
    "after the first rename": ("encoding_run.os", "replace", 3),
    "after the second rename": ("encoding_run.os", "replace", 4),
    "after the third rename": ("encoding_run.os", "replace", 5),
    "before the work folder goes": ("workspace.Workspace", "remove", 1),
}


def arguments(tmp_path: Path, tokenizer: Path) -> list[str]:
    more = ["--append-eod", "--workers", "2", "--block-mib", "0.01", "--checkpoint-seconds", "0"]
    return [
        *("--input", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.gz")),
        *("--output-prefix", str(tmp_path / "out/x"), "--tokenizer-model", str(tokenizer)),
        *("--on-bad-line", "skip", *more),
    ]


@pytest.fixture
def documents(tmp_path: Path) -> list[str]:
    """Write two inputs, one compressed, with a bad line each; return the good texts in order."""
    import gzip

    texts = some_texts(120), some_texts(120, seed=1)
    for (name, opener), part in zip({"a.jsonl": open, "b.jsonl.gz": gzip.open}.items(), texts, strict=True):
        lines = [json.dumps({"text": text}) for text in part]
        lines.insert(50, '{"text": null}')
        with opener(tmp_path / name, "wt") as file:
            file.write("\n".join(lines))
    return texts[0] + texts[1]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("after", [pytest.param(False, marks=pytest.mark.slow), True])
def test_kill_9_in_each_phase(tmp_path: Path, documents: list[str], tokenizer: Path, phase: str, after: bool) -> None:
    owner, name, count = PHASES[phase]
    script = killer(owner, name, count, after=after)
    args = arguments(tmp_path, tokenizer)
    killed = subprocess.run([sys.executable, "-c", script, *args], cwd=ROOT, capture_output=True, timeout=100)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    # a manifest implies complete files; no partial file has a final name
    if (tmp_path / "out/x_text_document.json").exists():
        assert outputs(tmp_path / "out/x") == reference(tokenizer, documents)
    done = subprocess.run(command("preprocess.py", *args), cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    check_complete(tmp_path, documents, tokenizer)


def check_complete(tmp_path: Path, documents: list[str], tokenizer: Path) -> None:
    assert outputs(tmp_path / "out/x") == reference(tokenizer, documents)
    name = "x_text_document"
    assert listing(tmp_path / "out") == [f"{name}{end}" for end in (".bin", ".idx", ".json", ".quarantine.jsonl")]
    report = manifest(tmp_path / "out/x")
    assert (report["documents_read"], report["documents_skipped"]) == (len(documents) + 2, 2)
    quarantined = [json.loads(line) for line in (tmp_path / f"out/{name}.quarantine.jsonl").read_bytes().splitlines()]
    assert [(Path(entry["file"]).name, entry["line"]) for entry in quarantined] == [("a.jsonl", 51), ("b.jsonl.gz", 51)]


def test_resume_skips_finished_work(tmp_path: Path, documents: list[str], tokenizer: Path) -> None:
    """The second run must not repeat work of the first."""
    script = killer("encoding_run.EncodingRun", "_take", 12)
    args = arguments(tmp_path, tokenizer)
    subprocess.run([sys.executable, "-c", script, *args], cwd=ROOT, capture_output=True, timeout=100)
    done = subprocess.run(command("preprocess.py", *args), cwd=ROOT, capture_output=True, text=True, timeout=100)
    words = done.stdout.split("resuming after ")[1].split()
    assert int(words[0]) > 20, done.stdout
    check_complete(tmp_path, documents, tokenizer)


# For killer(): the worker processes.
CHILDREN = """
def children():
    from pathlib import Path
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
def killer"""
# For killer(): a kill some time after the first checkpoint.
TIMER = """
import threading
checkpoint = workspace.Workspace.checkpoint
def timed(*args, **kwargs):
    checkpoint(*args, **kwargs)
    workspace.Workspace.checkpoint = checkpoint
    threading.Timer({seconds}, os.kill, (os.getpid(), signal.SIGKILL)).start()
workspace.Workspace.checkpoint = timed
"""


@pytest.mark.slow
def test_kills_at_random_times_until_done(tmp_path: Path, tokenizer: Path) -> None:
    texts = some_texts(2500, seed=7)
    write_jsonl(tmp_path / "a.jsonl", texts)
    args = [
        *("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "out/x", "--tokenizer-model", tokenizer),
        *("--append-eod", "--workers", 2, "--block-mib", 0.02, "--checkpoint-seconds", 0),
    ]
    # Its own clock runs from its first checkpoint on, so that each attempt gets on; and none comes to its end alive.
    kills_itself = killer("encoding_run", "write_index", 1)
    chance, work = random.Random(7), tmp_path / "out/.x_text_document.partial"
    done_before = -1
    for _ in range(12):
        script = kills_itself.replace(
            "from data_prep.preprocess", TIMER.format(seconds=chance.uniform(0, 0.1)) + "from data_prep.preprocess"
        )
        killed = subprocess.run(
            [sys.executable, "-c", script, *map(str, args)], cwd=ROOT, capture_output=True, timeout=100
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
        last = json.loads((work / "journal.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()[-1])
        assert last["ledger"]["documents_read"] >= max(done_before, 1)
        done_before = last["ledger"]["documents_read"]
    done = subprocess.run(command("preprocess.py", *args), cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path / "out/x") == reference(tokenizer, texts)


def as_a_script(killer: str) -> str:
    """Return killer() code that reports errors as the script does."""
    return killer.replace(
        "sys.exit(main(sys.argv[1:]))",
        "from megatron_llama.system.errors import run_main\nrun_main(lambda: main(sys.argv[1:]))",
    )


@pytest.mark.parametrize(
    ("which", "to"),
    [(signal.SIGHUP, "process"), (signal.SIGUSR2, "process"), (signal.SIGINT, "group"), (signal.SIGTERM, "group")],
)
def test_signal_exits_with_75_and_run_resumes(
    tmp_path: Path, documents: list[str], tokenizer: Path, which: signal.Signals, to: str
) -> None:
    """Schedulers and Ctrl-C signal the process group, including the workers."""
    args = [*arguments(tmp_path, tokenizer)[:-2], "--checkpoint-seconds", "1000"]
    if to == "process":
        script = killer("encoding_run.EncodingRun", "_take", 9, after=True)
    else:  # from a worker, so that this process waits
        script = killer("encoding_run.TextEncoder", "run", 9).replace("os.kill(os.getpid()", "os.killpg(os.getpgrp()")
    script = script.replace("SIGKILL", which.name)
    stopped = subprocess.run(
        [sys.executable, "-c", as_a_script(script), *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        start_new_session=True,
    )
    assert_refused(stopped, which.name, "rerun the same command", status=75)
    done = subprocess.run(command("preprocess.py", *args), cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert "resuming after" in done.stdout
    check_complete(tmp_path, documents, tokenizer)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_workers_end_with_their_parent(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", some_texts(2000, seed=3))
    args = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "x", "--tokenizer-model", tokenizer]
    args += ["--workers", 3, "--encoder", "sentencepiece", "--block-mib", 0.1]
    script = killer("encoding_run.EncodingRun", "_take", 3)
    script = script.replace("os.kill(", "print(*children(), flush=True)\n        os.kill(", 1).replace(
        "def killer", CHILDREN
    )
    with open(tmp_path / "pids", "wb") as file:  # no pipe: it would stay open as long as a worker lives
        killed = subprocess.run([sys.executable, "-c", script, *map(str, args)], cwd=ROOT, stdout=file, timeout=100)
    workers = (tmp_path / "pids").read_text().split()
    assert killed.returncode == -signal.SIGKILL and len(workers) == 3
    deadline = time.monotonic() + 60
    while any(state(worker) not in "ZX" for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(state(worker) not in "ZX" for worker in workers)


def test_a_killed_worker_is_reported_and_nothing_lost(tmp_path: Path, tokenizer: Path) -> None:
    texts = some_texts(2000, seed=3)
    write_jsonl(tmp_path / "a.jsonl", texts)
    args = [
        *("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "x", "--tokenizer-model", tokenizer),
        *("--append-eod", "--workers", 2, "--encoder", "sentencepiece", "--block-mib", 0.1),
    ]
    script = killer("encoding_run.EncodingRun", "_take", 3)
    script = script.replace("os.kill(os.getpid()", "os.kill(int(children()[1])", 1).replace(
        "    if calls == count:\n        os.kill(os.getpid(), signal.SIGKILL)\n", ""
    )
    script = script.replace("def killer", CHILDREN)
    stopped = subprocess.run(
        [sys.executable, "-c", as_a_script(script), *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert_refused(stopped, "signal 9", "rerun the same command", status=1)
    done = subprocess.run(command("preprocess.py", *args), cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path / "x") == reference(tokenizer, texts)


def test_finished_is_not_redone_and_other_options_are_refused(tmp_path: Path, preprocess: Run) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(50))
    args = ("--input", source, "--output-prefix", tmp_path / "x")
    preprocess(*args)
    before = os.stat(tmp_path / "x_text_document.bin").st_mtime_ns
    second = preprocess(*args, workers=2)
    assert second.returncode == 0 and "already complete" in second.stdout
    assert os.stat(tmp_path / "x_text_document.bin").st_mtime_ns == before
    assert_refused(
        preprocess(*args, "--max-line-mib", 5), "max_line_bytes was 67108864 and is now 5242880", "--overwrite"
    )
    write_jsonl(source, some_texts(51))
    assert_refused(preprocess(*args), "the content of the input changed", "--overwrite")
    done = preprocess(*args, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert manifest(tmp_path / "x")["documents_read"] == 51


def test_files_of_another_program_are_not_overwritten(tmp_path: Path, preprocess: Run) -> None:
    (tmp_path / "x_text_document.bin").write_bytes(b"precious")
    args = ("--input", write_jsonl(tmp_path / "a.jsonl", ["a"]), "--output-prefix", tmp_path / "x")
    assert_refused(preprocess(*args), "x_text_document.bin", "--overwrite")
    assert (tmp_path / "x_text_document.bin").read_bytes() == b"precious"


def test_an_unfinished_run_with_other_options_is_refused(tmp_path: Path, documents: list[str], tokenizer: Path) -> None:
    script = killer("encoding_run.EncodingRun", "_take", 9)
    args = arguments(tmp_path, tokenizer)
    subprocess.run([sys.executable, "-c", script, *args], cwd=ROOT, capture_output=True, timeout=100)
    args.remove("--append-eod")
    other = subprocess.run(command("preprocess.py", *args), cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert_refused(other, "append_eod was true and is now false", ".partial")


def test_a_damaged_work_folder_is_noticed(tmp_path: Path, documents: list[str], tokenizer: Path) -> None:
    """If the data differ from the journal, e.g. after a power failure, the run starts over."""
    script = killer("encoding_run.EncodingRun", "_take", 12)
    args = arguments(tmp_path, tokenizer)
    subprocess.run([sys.executable, "-c", script, *args], cwd=ROOT, capture_output=True, timeout=100)
    binary = tmp_path / "out/.x_text_document.partial/x_text_document.bin"
    data = bytearray(binary.read_bytes())
    data[100] ^= 1
    binary.write_bytes(data)
    done = subprocess.run(command("preprocess.py", *args), cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert "starting over" in done.stdout
    check_complete(tmp_path, documents, tokenizer)


def test_two_runs_on_one_output_at_a_time_are_refused(tmp_path: Path, preprocess: Run) -> None:
    import fcntl

    work = tmp_path / ".x_text_document.partial"
    work.mkdir()
    with open(work / "lock", "wb") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        source = write_jsonl(tmp_path / "a.jsonl", ["a"])
        assert_refused(preprocess("--input", source, "--output-prefix", tmp_path / "x"), "another run")
