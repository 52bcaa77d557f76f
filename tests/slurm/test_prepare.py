"""prepare.slurm under a real SLURM: an array prepares a corpus over nodes, and a killed task costs its part alone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data_prep.helpers import (
    manifest,
    some_texts,
    tokenizer,  # noqa: F401
    write_jsonl,
)
from tests.paths import ROOT
from tests.processes import environment
from tests.slurm.cluster import Job, Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
PARTS = 4
# Slow until a file exists, so that a task can be killed in the middle of its part.
SLOW_PYTHON = """#!{python}
import os, sys, time
sys.path[:0] = [{root!r}]
sys.argv = sys.argv[1:]
from data_prep.lib import encoding_run
take = encoding_run.EncodingRun._take
def slow(*arguments):
    if not os.path.exists({go!r}):
        time.sleep(0.5)
    return take(*arguments)
encoding_run.EncodingRun._take = slow
from megatron_llama.system.errors import run_main
from data_prep.preprocess import main
run_main(main)
"""


def tasks_of(lab: Lab, job: Job) -> dict[int, dict[str, str]]:
    """Return the fields of each task of an array."""
    lines = lab.command("scontrol", "-o", "show", "job", str(job.number)).splitlines()
    states = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines if line]
    return {int(facts["ArrayTaskId"]): facts for facts in states if facts["ArrayTaskId"].isdecimal()}


def ended(lab: Lab, job: Job) -> bool:
    """Return whether all tasks have ended; release requeued tasks from their two minutes of delay."""
    waiting = False
    for number, facts in tasks_of(lab, job).items():
        if facts["JobState"] == "PENDING" and facts["Reason"] == "BeginTime":
            with contextlib.suppress(AssertionError):  # it may start at this very moment
                lab.command("scontrol", "update", f"JobId={job.number}_{number}", "StartTime=now+1")
        waiting |= facts["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
    return not waiting


def logs(lab: Lab, job: Job) -> dict[int, str]:
    return {
        number: (lab.checkout / f"slurm-{job.number}_{number}.out").read_text(errors="replace")
        for number in range(1, PARTS + 1)
        if (lab.checkout / f"slurm-{job.number}_{number}.out").exists()
    }


def python_of(part: int, prefix: Path) -> int | None:
    """The process that does a part."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            of_parent = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if f"{part}/{PARTS}".encode() in words and str(prefix).encode() in words and words != of_parent:
            return int(pid)
    return None


def test_a_corpus_over_nodes_with_a_killed_task(
    lab: Lab,
    tokenizer: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    for number in range(3):
        write_jsonl(tmp_path / f"in/{number}.jsonl", some_texts(400, seed=number))
    args = ["--input", str(tmp_path / "in"), "--tokenizer-model", str(tokenizer), "--append-eod", "--workers", "1"]
    args += ["--block-mib", "0.02", "--checkpoint-seconds", "0"]
    one = [sys.executable, str(ROOT / "data_prep/preprocess.py"), *args, "--output-prefix", str(tmp_path / "one/x")]
    assert subprocess.run(one, env=environment(), capture_output=True, timeout=200).returncode == 0

    go, python, prefix = tmp_path / "go", tmp_path / "python", tmp_path / "nodes/x"
    python.write_text(SLOW_PYTHON.format(python=sys.executable, root=str(ROOT), go=str(go)))
    python.chmod(0o755)
    options = [f"--array=1-{PARTS}", f"--output={lab.checkout}/slurm-%A_%a.out"]
    words = ["preprocess.py", *args, "--output-prefix", str(prefix)]
    job = lab.submit(options, words, script="prepare.slurm", PYTHON=str(python))
    work = prefix.parent / ".x_text_document.parts"

    def has_begun(part: int) -> bool:
        journal = work / f"{part}-of-{PARTS}/journal.jsonl"
        return journal.exists() and len(journal.read_bytes().splitlines()) > 3

    job.wait(lambda: all(has_begun(part) for part in range(1, PARTS + 1)), 120, "part that has begun")
    nodes = {facts["NodeList"] for facts in tasks_of(lab, job).values()}
    assert len(nodes) == PARTS, f"a node for each part: {nodes}"
    pid = python_of(2, prefix)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    job.wait(lambda: "queued again" in logs(lab, job).get(2, ""), 60, "task 2 that is queued again")
    lost = next(f["NodeList"] for n, f in tasks_of(lab, job).items() if n == 3)
    lab.kill_node(lost)
    go.touch()
    job.wait(lambda: ended(lab, job) or int(tasks_of(lab, job)[3]["Restarts"]) > 0, 200, "requeue of the lost part")
    lab.set_up()  # the node comes back
    job.wait(lambda: ended(lab, job), 200, "end")
    output = logs(lab, job)
    assert all(facts["JobState"] == "COMPLETED" for facts in tasks_of(lab, job).values()), output
    assert "part 2/4: failed with status 137; queued again, restart 1, limit MAX_RESTARTS=10, 0 counted" in output[2]
    assert all("resuming after" in output[part] for part in (2, 3)), output
    assert [facts["Restarts"] for _, facts in sorted(tasks_of(lab, job).items())] == ["0", "1", "1", "0"]
    assert sum("joined 4 parts" in text for text in output.values()) == 1
    for suffix in ("bin", "idx", "json"):
        ours, theirs = (Path(f"{base}_text_document.{suffix}").read_bytes() for base in (prefix, tmp_path / "one/x"))
        assert ours == theirs, suffix
    assert manifest(prefix)["documents_read"] == 1200 and not work.exists()

    rerun = lab.submit(options, words, script="prepare.slurm")
    rerun.wait(lambda: ended(lab, rerun), 120, "end")
    assert all("already complete, nothing to do" in text for text in logs(lab, rerun).values())


def test_wrong_arrays_are_refused(lab: Lab) -> None:
    for options, words, reason in (
        (["--array=2-3"], ["preprocess.py"], "array tasks must be 1 to N"),
        ([], ["preprocess.py"], "array tasks must be 1 to N"),
        (["--array=1-1"], ["redpajama.py"], "not 'redpajama.py'"),
    ):
        name = f"{lab.checkout}/wrong-%j.out"
        job = lab.submit([*options, f"--output={name}"], words, script="prepare.slurm")
        job.wait(lambda job=job: job.facts["JobState"] == "FAILED", 60, "refusal")  # type: ignore[misc]
        assert any(reason in path.read_text() for path in lab.checkout.glob("wrong-*.out"))
