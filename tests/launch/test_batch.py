"""run.slurm after the end of a step. Slurm commands are replaced by stand-ins."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.paths import ROOT
from tests.processes import environment

# Writes the status of the first rank and its arguments, and exits with $ENDS.
SRUN = """#!/bin/bash
[[ " $* " != *" scripts/doctor.py "* ]] || { printf '%s\\n' "$@" >"$FOLDER/examined"; exit "${FINDS:-0}"; }
[ "${SLURM_EXPORT_ENV:-ALL}" != NONE ] || unset MEGATRON_LLAMA_SECRET NCCL_DEBUG
printf '%s\\n' "$@" >"$FOLDER/arguments"
[ -n "$MEGATRON_LLAMA_SECRET$NCCL_DEBUG" ] || exit 1
[ -z "$SAID" ] || printf '%s\\n%s\\n' "$SAID" "$FOLDER/run" >"$MEGATRON_LLAMA_STATUS"
[ -z "$SECOND" ] || printf '%s\\n' "$SECOND" >"${MEGATRON_LLAMA_STATUS%/*}/task_1.txt"
[ -z "$CHECKPOINT" ] || mkdir -p "$FOLDER/run/checkpoints/$CHECKPOINT"
[ -z "$WAIT" ] || { trap 'touch "$FOLDER/told"; kill $!; exit $ENDS' USR1; sleep 30 & touch "$FOLDER/waiting"; wait; }
exit $ENDS
"""
# The last command before srun; the signal comes while it runs.
MKDIR = '#!/bin/bash\n[ -z "$EARLY" ] || kill -s "$EARLY" "$PPID"\nexec /bin/mkdir "$@"\n'
# The script's own looks once a second whether srun has ended.
TAIL = f'#!/bin/sh\nexec {shutil.which("tail")} -s 0.02 "$@"\n'
SCONTROL = '#!/bin/sh\necho "$@" >>"$FOLDER/scontrol"\n'


class Batch(NamedTuple):
    """The batch script's end."""

    status: int
    printed: str
    requeued: bool


class Job:
    """A job that runs the batch script, here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("train.py", "scripts", "run.slurm", "compile.slurm"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "bin").mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("mkdir", MKDIR), ("tail", TAIL)):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    def start(self, ends: int, run_status: str, script: str = "run.slurm", **more: str) -> subprocess.Popen[str]:
        """Starts the script; srun will end with ``ends``, and the first rank will have ``said``."""
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_NUM_NODES": "2"}
        outcome = {"FOLDER": str(self.folder), "ENDS": str(ends), "SAID": run_status}
        outcome |= {"WAIT": "", "CHECKPOINT": "", "EARLY": "", "SECOND": ""}
        variables = environment() | slurm | outcome | {"PATH": path} | more
        piped, joined = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(
            ["bash", script, "a=b c", "it's"], cwd=self.folder, env=variables, stdout=piped, stderr=joined, text=True
        )

    def end(self, script: subprocess.Popen[str]) -> Batch:
        printed, _ = script.communicate(timeout=30)
        scontrol_calls = self.folder / "scontrol"
        requeued = scontrol_calls.exists() and "requeue 7" in scontrol_calls.read_text()
        scontrol_calls.unlink(missing_ok=True)
        return Batch(script.returncode, printed, requeued)

    def run(self, ends: int, run_status: str, **more: str) -> Batch:
        return self.end(self.start(ends, run_status, **more))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize(
    ("ends", "run_status", "status", "requeued"),
    [
        (0, "0", 0, False),
        (0, "running", 1, True),  # a rank was lost: never COMPLETED
        (0, "", 1, True),
        (75, "75", 75, True),
        (143, "75", 75, True),  # the others were ended while they left
        (1, "1", 1, True),
        (137, "running", 1, True),
        (1, "0", 1, True),  # a rank failed after the first one had finished
        (2, "2", 2, False),  # a config error is not retried
        (137, "2", 2, False),
    ],
)
def test_what_the_end_of_a_step_means(job: Job, ends: int, run_status: str, status: int, requeued: bool) -> None:
    end = job.run(ends, run_status)
    assert (end.status, end.requeued) == (status, requeued), end.printed


@pytest.mark.parametrize(("ends", "run_status", "status"), [(75, "75", 75), (1, "1", 1), (0, "running", 1)])
def test_the_restart_limit_ends_with_a_failure(job: Job, ends: int, run_status: str, status: int) -> None:
    last = job.run(ends, run_status, SLURM_RESTART_COUNT="2", MAX_RESTARTS="3")
    assert last.requeued
    over = job.run(ends, run_status, SLURM_RESTART_COUNT="3", MAX_RESTARTS="3")
    assert (over.status, over.requeued) == (status, False)
    assert "MAX_RESTARTS=3" in over.printed
    # Slurm's own restarts count too.
    assert job.run(0, "0", SLURM_RESTART_COUNT="4", MAX_RESTARTS="3").status == 1


def test_stops_that_saved_a_new_checkpoint_do_not_count(job: Job) -> None:
    for restart in range(4):
        count, checkpoint = str(restart), f"step_{restart + 1:08d}"
        end = job.run(75, "75", SLURM_RESTART_COUNT=count, MAX_RESTARTS="1", CHECKPOINT=checkpoint)
        assert end.requeued and "0 counted" in end.printed, "each run made progress"
    assert job.run(75, "75", SLURM_RESTART_COUNT="4", MAX_RESTARTS="1").requeued, "the stop before saved"
    over = job.run(75, "75", SLURM_RESTART_COUNT="5", MAX_RESTARTS="1")
    assert (over.status, over.requeued) == (75, False), "no new checkpoint twice"
    assert not job.run(75, "75", MAX_RESTARTS="0").requeued


def test_the_default_limit_is_ten(job: Job) -> None:
    assert job.run(75, "75", SLURM_RESTART_COUNT="9").requeued
    assert not job.run(75, "75", SLURM_RESTART_COUNT="10").requeued


def test_a_failure_that_comes_back_each_time_ends_the_job(job: Job) -> None:
    assert job.run(1, "1", CHECKPOINT="step_00000010").requeued
    for restart, checkpoint in enumerate(["step_00000010", "step_00000020", "step_00000020"], 1):
        assert job.run(1, "1", CHECKPOINT=checkpoint, SLURM_RESTART_COUNT=str(restart)).requeued, "there was progress"
    end = job.run(1, "1", SLURM_RESTART_COUNT="4")
    assert (end.status, end.requeued) == (1, False)
    assert "3 times without a new checkpoint" in end.printed
    assert job.run(1, "1").requeued, "another job with this id starts from zero"


def test_a_config_error_of_another_node_is_shown(job: Job) -> None:
    """srun ends the first task before it can report anything."""
    batch = job.run(143, "", SECOND="This config can't work, for one reason: no such dataset")
    assert "last lines of" in batch.printed and "task_1.txt\nThis config can't work" in batch.printed


def test_a_folder_that_cannot_be_written_ends_the_job(job: Job) -> None:
    """Restarts would not help."""
    (job.folder / "logs").touch()
    batch = job.run(0, "0")
    assert (batch.status, batch.requeued) == (2, False), batch.printed
    assert f"cannot write to {job.folder}/logs" in batch.printed


def test_nodes_are_examined_and_only_what_is_sure_to_break_ends_the_job(job: Job) -> None:
    end = job.run(0, "0", FINDS="2")
    assert (end.status, end.requeued) == (2, False) and "DOCTOR=0 skips it" in end.printed
    assert not (job.folder / "arguments").exists(), "nothing is trained"
    examined = (job.folder / "examined").read_text().splitlines()
    assert examined[-4:] == ["scripts/doctor.py", "--quick", "a=b c", "it's"]
    assert {"--ntasks=2", "--ntasks-per-node=1"} <= set(examined), "one process on each node"
    (job.folder / "examined").unlink()
    assert job.run(0, "0", FINDS="2", DOCTOR="0").status == 0 and not (job.folder / "examined").exists()
    for strange in ("1", "124", "137"):  # it failed, took too long, was killed
        assert job.run(0, "0", FINDS=strange).status == 0


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_reaches_the_step_and_the_job_comes_back(job: Job, number: str) -> None:
    script = job.start(138, "running", WAIT="1")
    deadline = time.monotonic() + 60
    while not (job.folder / "waiting").exists():
        assert script.poll() is None and time.monotonic() < deadline, "srun was not started"
        time.sleep(0.02)
    script.send_signal(number)
    end = job.end(script)
    assert (job.folder / "told").exists(), "as SIGUSR1: SIGTERM would have srun kill the ranks"
    assert (end.status, end.requeued) == (75, True)
    assert "stopped before it could save" in end.printed


@pytest.mark.parametrize("number", ["USR1", "TERM"])
def test_a_signal_before_the_step_starts_nothing_and_the_job_comes_back(job: Job, number: str) -> None:
    end = job.run(0, "0", EARLY=number)
    assert not (job.folder / "arguments").exists(), "srun was started"
    assert (end.status, end.requeued) == (75, True)
    assert "stopped before it could save" in end.printed


def test_variables_reach_the_ranks_without_the_users_environment(job: Job) -> None:
    end = job.run(0, "0", SLURM_EXPORT_ENV="NONE")  # of sbatch --export=NONE
    assert end.status == 0, end.printed


def test_arguments_arrive_untouched(job: Job) -> None:
    job.run(0, "0")
    arguments = (job.folder / "arguments").read_text().splitlines()
    assert arguments[-3:] == ["train.py", "a=b c", "it's"]
    assert {"--kill-on-bad-exit=1", "--wait=60", "--ntasks-per-node=1", "--ntasks=2"} <= set(arguments)
    job.run(0, "0", SLURM_NTASKS_PER_NODE="8")
    assert {"--ntasks-per-node=8", "--ntasks=16"} <= set((job.folder / "arguments").read_text().splitlines())


@pytest.mark.parametrize(("ends", "run_status", "status"), [(0, "0", 0), (0, "running", 1), (1, "1", 1), (137, "2", 2)])
def test_compilation_is_not_requeued(job: Job, ends: int, run_status: str, status: int) -> None:
    end = job.end(job.start(ends, run_status, "compile.slurm"))
    assert (end.status, end.requeued) == (status, False)
    assert "scripts/compile.py" in (job.folder / "arguments").read_text()


def test_the_users_own_settings_win(job: Job) -> None:
    script = ". scripts/slurm_env.sh; echo $NCCL_DEBUG $NCCL_SOCKET_IFNAME $PYTHON"
    variables = environment(NCCL_DEBUG="INFO", PYTHON="bash", NCCL_SOCKET_IFNAME="")
    done = subprocess.run(["bash", "-c", script], cwd=job.folder, env=variables, capture_output=True, text=True)
    assert done.stdout == "INFO bash\n", done.stderr


@pytest.mark.parametrize("script", ["run.slurm", "compile.slurm"])
def test_a_missing_interpreter_is_named_and_not_requeued(job: Job, script: str) -> None:
    run = job.start(0, "0", script, PYTHON="/nowhere/python")
    end = job.end(run)
    assert (end.status, end.requeued) == (2, False)
    assert end.printed.startswith("PYTHON=/nowhere/python is not a program on ") and "make venv" in end.printed
    assert not (job.folder / "arguments").exists(), "srun was called"
