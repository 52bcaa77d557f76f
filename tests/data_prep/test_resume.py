"""Interrupted runs: the resumed result is byte-identical to an uninterrupted run."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path

import pytest

from data_prep.lib.blocks import TextBlock
from data_prep.lib.pool import Pool
from data_prep.lib.run_options import BlockResult
from megatron_llama.system.errors import MachineError
from tests.data_prep.helpers import (
    GOOD,
    Run,
    arguments,
    assert_refused,
    kill_this_process,
    listing,
    manifest,
    output_of,
    outputs,
    reference,
    run_in_fork,
    run_interrupted,
    run_script,
    sft_arguments,
    some_texts,
    start,
    write_jsonl,
)
from tests.processes import gone

# (where, function, which call): every phase of a run
PHASES = {
    "before the first block": ("encoding_run.EncodingRun", "_take", 1),
    "after some blocks": ("encoding_run.EncodingRun", "_take", 4),
    "between a block's tokens and lengths": ("workspace.Workspace", "append", 10),
    "in a checkpoint": ("workspace.Workspace", "checkpoint", 3),
    "while the journal begins": ("workspace.Workspace", "_write_journal", 1),
    "while the index is written": ("output_files", "write_index", 1),
    "before the index's hash": ("output_files", "sha256_file", 1),
    "before anything has its final name": ("output_files", "publish", 1),
    "after the first rename": ("output_files.os", "replace", 3),
    "after the second rename": ("output_files.os", "replace", 4),
    "after the third rename": ("output_files.os", "replace", 5),
    "before the work folder goes": ("workspace.Workspace", "remove", 1),
}


@pytest.fixture
def documents(tmp_path: Path) -> list[str]:
    """Write two inputs, one compressed, with a bad line each; return the good texts in order."""
    texts = some_texts(120), some_texts(120, seed=1)
    for (name, opener), part in zip({"a.jsonl": open, "b.jsonl.gz": gzip.open}.items(), texts, strict=True):
        lines = [json.dumps({"text": text}) for text in part]
        lines.insert(50, '{"text": null}')
        with opener(tmp_path / name, "wt") as file:
            file.write("\n".join(lines))
    return texts[0] + texts[1]


@pytest.fixture
def args(tmp_path: Path, tokenizer: Path) -> list[object]:
    """The arguments of preprocess.py for ``documents``."""
    inputs, options = (tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"), ("--on-bad-line", "skip", "--workers", 2)
    more = (*options, "--block-mib", 0.01, "--checkpoint-seconds", 0)
    return arguments(tokenizer, tmp_path / "out/x", *inputs, *more)


def killed(args: list[object], where: str, function: str, call: int, *, after: bool = False) -> None:
    """Run preprocess.py until it is killed at a function call."""
    done = run_interrupted("preprocess.py", *args, at=(where, function, call), after=after)
    assert done.returncode == -signal.SIGKILL, done.stderr


def check_complete(tmp_path: Path, documents: list[str], tokenizer: Path) -> None:
    assert outputs(tmp_path / "out/x") == reference(tokenizer, documents)
    name = "x_text_document"
    assert listing(tmp_path / "out") == [f"{name}{end}" for end in (".bin", ".idx", ".json", ".quarantine.jsonl")]
    report = manifest(tmp_path / "out/x")
    assert (report["documents_read"], report["documents_skipped"]) == (len(documents) + 2, 2)
    quarantined = [json.loads(line) for line in (tmp_path / f"out/{name}.quarantine.jsonl").read_bytes().splitlines()]
    assert [(Path(entry["file"]).name, entry["line"]) for entry in quarantined] == [("a.jsonl", 51), ("b.jsonl.gz", 51)]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("after", [pytest.param(False, marks=pytest.mark.slow), True])
def test_kill_9_in_each_phase(
    tmp_path: Path, documents: list[str], tokenizer: Path, args: list[object], phase: str, after: bool
) -> None:
    killed(args, *PHASES[phase], after=after)
    # a manifest implies complete files; no partial file has a final name
    if (tmp_path / "out/x_text_document.json").exists():
        assert outputs(tmp_path / "out/x") == reference(tokenizer, documents)
    output_of(run_script("preprocess.py", *args))
    check_complete(tmp_path, documents, tokenizer)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_finished_work_is_skipped_unless_damaged(
    tmp_path: Path, documents: list[str], tokenizer: Path, args: list[object], is_damaged: bool
) -> None:
    """If the data differ from the journal, e.g. after a power failure, the run starts over."""
    killed(args, "encoding_run.EncodingRun", "_take", 12)
    other = [arg for arg in args if arg != "--append-eod"]
    assert_refused(run_script("preprocess.py", *other), "append_eod was true and is now false", ".partial")
    if is_damaged:
        binary = tmp_path / "out/.x_text_document.partial/x_text_document.bin"
        data = bytearray(binary.read_bytes())
        data[100] ^= 1
        binary.write_bytes(data)
    output = output_of(run_script("preprocess.py", *args))
    if is_damaged:
        assert "starting over" in output
    else:
        assert int(output.split("resuming after ")[1].split()[0]) > 20, output
    check_complete(tmp_path, documents, tokenizer)


@pytest.mark.parametrize(
    ("which", "to"),
    [(signal.SIGHUP, "process"), (signal.SIGUSR2, "process"), (signal.SIGINT, "group"), (signal.SIGTERM, "group")],
)
def test_signal_exits_with_75_and_run_resumes(
    tmp_path: Path, documents: list[str], tokenizer: Path, args: list[object], which: signal.Signals, to: str
) -> None:
    """Schedulers and Ctrl-C signal the process group, including the workers."""
    args = [*args[:-1], 1000]
    if to == "process":
        at, act = ("encoding_run.EncodingRun", "_take", 9), lambda: os.kill(os.getpid(), which)
    else:  # from a worker, so that this process waits
        at, act = ("encoding_run.TextEncoder", "run", 9), lambda: os.killpg(os.getpgrp(), which)
    stopped = run_interrupted("preprocess.py", *args, at=at, after=to == "process", act=act)
    assert_refused(stopped, which.name, "rerun the same command", status=75)
    assert "resuming after" in output_of(run_script("preprocess.py", *args))
    check_complete(tmp_path, documents, tokenizer)


ManyTexts = tuple[list[str], list[object]]


@pytest.fixture
def many_texts(tmp_path: Path, tokenizer: Path) -> ManyTexts:
    """Texts, and the arguments that prepare them with three workers."""
    texts = some_texts(2000, seed=3)
    args = arguments(tokenizer, tmp_path / "x", write_jsonl(tmp_path / "a.jsonl", texts))
    return texts, [*args, "--workers", 3, "--encoder", "sentencepiece", "--block-mib", 0.1]


def worker_pids() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


TAKE_3 = ("encoding_run.EncodingRun", "_take", 3)


def test_workers_end_with_their_parent(tmp_path: Path, many_texts: ManyTexts) -> None:
    def kill_after_listing() -> None:
        (tmp_path / "pids").write_text(" ".join(worker_pids()))
        kill_this_process()

    assert run_interrupted("preprocess.py", *many_texts[1], at=TAKE_3, act=kill_after_listing).returncode == -9
    workers = (tmp_path / "pids").read_text().split()
    assert len(workers) == 3 and all(gone(int(worker)) for worker in workers)


def test_a_killed_worker_is_reported_and_nothing_lost(tmp_path: Path, many_texts: ManyTexts, tokenizer: Path) -> None:
    def kill_a_worker() -> None:
        os.kill(int(worker_pids()[1]), signal.SIGKILL)

    texts, args = many_texts
    stopped = run_interrupted("preprocess.py", *args, at=TAKE_3, act=kill_a_worker)
    assert_refused(stopped, "signal 9", "rerun the same command", status=1)
    output_of(run_script("preprocess.py", *args))
    assert outputs(tmp_path / "x") == reference(tokenizer, texts)


@pytest.mark.parametrize("limit", [2_000, 60_000, 300_000])
def test_a_full_disk(tmp_path: Path, tokenizer: Path, limit: int) -> None:
    """A file size limit emulates a full disk. Without the limit, the run resumes."""
    texts = some_texts(1200)
    args = arguments(tokenizer, tmp_path / "out/x", write_jsonl(tmp_path / "a.jsonl", texts))
    args += ["--workers", 1, "--block-mib", 0.02, "--checkpoint-seconds", 0]

    def on_a_small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        start("preprocess.py", *args)

    assert_refused(run_in_fork(on_a_small_disk), "cannot write", "rerun the same command", status=1)
    assert not [name for name in listing(tmp_path / "out") if not name.startswith(".")]
    assert ("resuming after" in output_of(run_script("preprocess.py", *args))) == (limit >= 60_000)
    assert outputs(tmp_path / "out/x") == reference(tokenizer, texts)


def test_a_fine_tuning_set_resumes_after_kill_9(folder: Path, tmp_path: Path) -> None:
    """Resume with two outputs of different dtypes."""
    source = tmp_path / "chat.jsonl"
    source.write_text("\n".join(GOOD * 60) + "\n")
    whole, args = (
        sft_arguments(folder, source, tmp_path / name, "--checkpoint-seconds", 0) for name in ("whole", "killed")
    )
    output_of(run_script("sft.py", *whole))
    at = ("workspace.Workspace", "checkpoint", 1)
    assert run_interrupted("sft.py", *args, at=at, after=True).returncode == -signal.SIGKILL
    assert (tmp_path / ".killed_sft+killed_sft_mask.partial" / "journal.jsonl").exists()
    assert "resuming after" in output_of(run_script("sft.py", *args))
    for suffix in ("_sft.bin", "_sft.idx", "_sft_mask.bin", "_sft_mask.idx"):
        assert (tmp_path / f"whole{suffix}").read_bytes() == (tmp_path / f"killed{suffix}").read_bytes()


def test_finished_is_not_redone_and_other_options_are_refused(tmp_path: Path, preprocess: Run) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(50))
    args = ("--input", source, "--output-prefix", tmp_path / "x")
    (tmp_path / "x_text_document.bin").write_bytes(b"precious")
    assert_refused(preprocess(*args), "x_text_document.bin", "--overwrite")
    assert (tmp_path / "x_text_document.bin").read_bytes() == b"precious"
    output_of(preprocess(*args, "--overwrite"))
    before = os.stat(tmp_path / "x_text_document.bin").st_mtime_ns
    assert "already complete" in output_of(preprocess(*args, workers=2))
    assert os.stat(tmp_path / "x_text_document.bin").st_mtime_ns == before
    other = preprocess(*args, "--max-line-mib", 5)
    assert_refused(other, "max_line_bytes was 67108864 and is now 5242880", "--overwrite")
    write_jsonl(source, some_texts(51))
    assert_refused(preprocess(*args), "the size or time of an input file changed", "--overwrite")
    output_of(preprocess(*args, "--overwrite"))
    assert manifest(tmp_path / "x")["documents_read"] == 51


def die_while_sending(block: TextBlock) -> BlockResult:
    """Kill this worker on block 3 when half of the result is in the pipe."""
    if block.number == 3:
        connection.Connection._send = _send_half  # type: ignore[attr-defined]
    return BlockResult(tokens=[bytes(1000)])


def _send_half(self: connection.Connection, buffer: bytes) -> None:
    os.write(self.fileno(), buffer[: len(buffer) // 2])
    kill_this_process()


def _blocks() -> Iterator[TextBlock]:
    for number in range(100):
        yield TextBlock(number, [])


@pytest.mark.timeout(60)
def test_a_worker_killed_while_it_sends_a_result_is_reported() -> None:
    done: list[int] = []
    with pytest.raises(MachineError, match="a worker ended by signal 9"):
        with Pool(2, die_while_sending) as pool:
            for block, _ in pool.run(_blocks(), lambda: None):
                done.append(block.number)
    assert done == list(range(len(done))) and len(done) < 100  # in order
    assert not any(process.is_alive() for process in pool.processes)
