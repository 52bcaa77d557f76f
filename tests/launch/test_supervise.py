"""The end of a step: time that remaining children get after a failure or Ctrl-C, and run.slurm with stand-ins."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_llama.launch import ssh, start
from megatron_llama.launch import supervise as module
from megatron_llama.launch.supervise import Child, Grace, Signals, supervise
from tests.golden import GoldenFiles
from tests.paths import ROOT
from tests.processes import environment, run_command, wait_until

GRACE = Grace(fault=1.0, restart=30.0, interrupt=3.0)


class Fake(Child):
    """A child that ends at a time; ``finishing`` until then."""

    def __init__(self, clock: Clock, end: float, *, status: int = 0, finishing: bool = False) -> None:
        self.clock, self.end, self.result, self.finishing = clock, end, status, finishing
        self.received: list[int] = []

    def poll(self) -> bool:
        before, self.status = self.ended, self.result if self.clock.now >= self.end else None
        return self.ended and not before

    def send(self, number: int) -> None:
        self.received.append(number)

    @property
    def is_finishing(self) -> bool:
        return self.finishing and not self.ended


class Clock:
    """A clock that advances by each wait."""

    now = 1.0

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module.time, "monotonic", lambda: made.now)
    return made


NEVER = 1000.0


@pytest.mark.parametrize(
    ("status", "end", "interrupts", "grace", "over"),
    [
        # A background save, which ends after 50 s, is finished after a failure.
        *((1, 50.0, interrupts, GRACE, (49.9, 50.1)) for interrupts in ([], [0.0])),
        # After Ctrl-C, a rank that hangs does not hold the job when another one has ended.
        *((status, NEVER, [0.0], GRACE, (4.8, 5.2)) for status in (1, 130)),
        (75, NEVER, [0.0], GRACE, (31.8, 32.2)),
        # The first Ctrl-C has no limit: a step and a save may take minutes. The second one ends at once.
        (None, NEVER, [0.0, 600.0], GRACE, (600.0, 601.0)),
        # Children that never end have ten seconds.
        *((1, NEVER, [], grace, (2.0, 12.0)) for grace in (start.GRACE, ssh.GRACE)),
        *((None, NEVER, [4.0, 5.0], grace, (5.0, 15.0)) for grace in (start.GRACE, ssh.GRACE)),
    ],
)
def test_time_that_children_get(
    clock: Clock, status: int | None, end: float, interrupts: list[float], grace: Grace, over: tuple[float, float]
) -> None:
    """One child ends with ``status`` after 2 s; another one saves in the background, or runs on."""
    saves, signals, left = end < NEVER or 600.0 in interrupts, Signals(), list(interrupts)
    children = [Fake(clock, end, status=1, finishing=saves)]
    if status is not None:
        children.insert(0, Fake(clock, 2.0, status=status))

    def wait(seconds: float) -> None:
        clock.wait(seconds)
        while left and clock.now > left[0]:
            left.pop(0)
            signals._receive(signal.SIGINT, None)

    wait(0.0)
    supervise(children, signals, grace, wait=wait)
    assert over[0] < clock.now < over[1] and children[-1].ended == (end < NEVER)


def test_a_child_gets_the_signals_that_came_before_it(clock: Clock) -> None:
    first, second = Fake(clock, NEVER), Fake(clock, NEVER)
    with Signals() as signals:
        signals.add(first)
        os.kill(os.getpid(), signal.SIGUSR1)
        signals.add(second)
        os.kill(os.getpid(), signal.SIGTERM)
    assert first.received == second.received == [signal.SIGUSR1, signal.SIGTERM]


def test_signals_are_held_until_the_release() -> None:
    handler = signal.getsignal(signal.SIGUSR1)
    with Signals(hold=True) as signals:
        signal.raise_signal(signal.SIGUSR1)  # to this thread: others of the process take what it blocks
        assert not signals.received
        signals.release()
        assert signals.received == {signal.SIGUSR1}
    with Signals(hold=True):
        pass
    assert signal.getsignal(signal.SIGUSR1) == handler
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


# Writes the status of the first rank and its arguments, and exits with $ENDS.
SRUN = """#!/bin/bash
[[ " $* " != *" scripts/doctor.py "* ]] || { printf '%s\\n' "$@" >"$FOLDER/examined"; exit "${FINDS:-0}"; }
[ "${SLURM_EXPORT_ENV:-ALL}" != NONE ] || unset MEGATRON_LLAMA_SECRET NCCL_DEBUG
printf '%s\\n' "$@" >"$FOLDER/arguments"
[ -n "$MEGATRON_LLAMA_SECRET$NCCL_DEBUG" ] || exit 1
[ -z "$SAID" ] || printf '%s\\n%s\\n' "$SAID" "$FOLDER/run" >"$MEGATRON_LLAMA_STATUS"
[ -z "$SECOND" ] || printf '%s\\n' "$SECOND" >"${MEGATRON_LLAMA_STATUS%/*}/task_1.txt"
mkdir -p "$FOLDER/run"
[ -z "$STEP" ] || for event in loaded end; do
    echo "{\\"event\\": \\"$event\\", \\"time\\": 1.5, \\"step\\": $STEP, \\"status\\": 75, \\"reason\\": \\"step 9\\"}"
done >>"$FOLDER/run/starts.jsonl"
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
        outcome |= {"WAIT": "", "STEP": "", "EARLY": "", "SECOND": ""}
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


def test_end_of_a_step(tmp_path: Path) -> None:
    """For each status of srun, status that the first rank reports, variables, and script."""
    page = ""
    for number, line in enumerate(GoldenFiles.commands("launch/ends.txt")):
        (folder := tmp_path / str(number)).mkdir()
        job, (ends, *words) = Job(folder), line.split(maxsplit=1 if "SECOND" in line else -1)
        variables = dict(word.split("=") for word in words if "=" in word)
        rest = [word for word in words if "=" not in word]
        script = rest.pop() if "compile.slurm" in rest else "run.slurm"
        end = job.end(job.start(int(ends), *(rest or [""]), script, **variables))
        started, examined = (folder / "arguments").exists(), ", examined" * (folder / "examined").exists()
        page += f"$ {line}\nstatus {end.status}{', requeued' * end.requeued}{examined}{', no srun' * (not started)}\n"
        page += end.printed.replace(str(folder), "FOLDER")
        if script != "run.slurm" and started:
            assert "scripts/compile.py" in (folder / "arguments").read_text()
    hidden = {r"\d{4}-\d\d-\d\d \S{8}|\d{8}-\d{6}": "TIME", r"(?<=not a program on )[\w.-]+": "HOST"}
    GoldenFiles.check("launch/ends.txt", page, hidden)


def test_stops_that_saved_a_new_checkpoint_do_not_count(job: Job) -> None:
    for restart in range(4):
        end = job.run(75, "75", SLURM_RESTART_COUNT=str(restart), MAX_RESTARTS="1", STEP=str(restart + 1))
        assert end.requeued and "0 counted" in end.printed, "each run made progress"
    assert job.run(75, "75", SLURM_RESTART_COUNT="4", MAX_RESTARTS="1").requeued, "the stop before saved"
    over = job.run(75, "75", SLURM_RESTART_COUNT="5", MAX_RESTARTS="1")
    assert (over.status, over.requeued) == (75, False), "no new checkpoint twice"
    for restart, requeued in enumerate((True, True, True, False)):
        end = job.run(
            *((1, "1") if restart in (0, 3) else (75, "75")),
            STEP=str(restart),
            MAX_RESTARTS="1",
            SLURM_RESTART_COUNT=str(restart),
        )
        assert end.requeued == requeued, "stops after as many failures as the limit allows"


def test_a_failure_that_comes_back_each_time_ends_the_job(job: Job) -> None:
    assert job.run(1, "1", STEP="10").requeued
    for restart, step in enumerate(["10", "20", "20"], 1):
        assert job.run(1, "1", STEP=step, SLURM_RESTART_COUNT=str(restart)).requeued, "there was progress"
    end = job.run(1, "1", SLURM_RESTART_COUNT="4")
    assert (end.status, end.requeued) == (1, False)
    assert "3 times from the same step" in end.printed
    assert job.run(1, "1").requeued, "another job with this id starts from zero"


def test_fatal_problems_before_the_step_end_the_job(job: Job) -> None:
    """Restarts would not help."""
    fatal = job.run(0, "0", FINDS="2")
    examined = (job.folder / "examined").read_text().splitlines()
    assert examined[-4:] == ["scripts/doctor.py", "--quick", "a=b c", "it's"]
    assert {"--ntasks=2", "--ntasks-per-node=1"} <= set(examined), "one process on each node"
    (job.folder / "logs").touch()
    full = job.run(0, "0")
    assert f"cannot write to {job.folder}/logs" in full.printed
    assert [(end.status, end.requeued) for end in (fatal, full)] == [(2, False)] * 2
    assert not (job.folder / "arguments").exists(), "srun was called"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_reaches_the_step_and_the_job_comes_back(job: Job, number: int) -> None:
    script = job.start(138, "running", WAIT="1")
    wait_until((job.folder / "waiting").exists, "srun was not started")
    script.send_signal(number)
    end = job.end(script)
    assert (job.folder / "told").exists(), "as SIGUSR1: SIGTERM would have srun kill the ranks"
    assert (end.status, end.requeued) == (75, True) and "stopped before it could save" in end.printed


def test_arguments_and_variables_of_the_user_are_unchanged(job: Job) -> None:
    job.run(0, "0")
    arguments = (job.folder / "arguments").read_text().splitlines()
    assert arguments[-3:] == ["train.py", "a=b c", "it's"]
    assert {"--kill-on-bad-exit=1", "--wait=60", "--ntasks-per-node=1", "--ntasks=2"} <= set(arguments)
    job.run(0, "0", SLURM_NTASKS_PER_NODE="8")
    assert {"--ntasks-per-node=8", "--ntasks=16"} <= set((job.folder / "arguments").read_text().splitlines())
    script = ". scripts/slurm_env.sh; echo $NCCL_DEBUG $NCCL_SOCKET_IFNAME $PYTHON"
    done = run_command("bash", "-c", script, cwd=job.folder, NCCL_DEBUG="INFO", PYTHON="bash", NCCL_SOCKET_IFNAME="")
    assert done.stdout == "INFO bash\n", done.stderr
