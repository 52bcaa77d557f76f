"""Jobs under a real SLURM: losses equal a plain run, jobs survive cluster events, and report why they end."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from pathlib import Path

import pytest

from megatron_llama.devices import get_device
from megatron_llama.train.metrics_file import read_metrics
from tests.paths import ROOT
from tests.processes import losses, run_command, steps
from tests.slurm.cluster import TINY, Job, Lab, plain

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
# Enough work to be in the middle of it.
LONG = [*TINY, "trainer.global_batch_size=16", "trainer.steps=120"]


def reached(job: Job, folder: Path, step: int, limit: float = 150.0) -> None:
    """Waits until the run has logged ``step``."""
    job.wait(lambda: bool(steps(folder)) and steps(folder)[-1] >= step, limit, f"step {step}")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of three plain steps."""
    return plain(tmp_path_factory.mktemp("plain") / "run", *TINY, "trainer.steps=3")


@pytest.mark.parametrize(
    ("options", "table"),
    [
        (["--nodes=4"], ["0  n1  0  10.77.0.1  eth0", "3  n4  3  10.77.0.4  eth0"]),
        (["--nodes=2"], ["0  n1  0-1  10.77.0.1  eth0", "1  n2  2-3  10.77.0.2  eth0"]),
        (["--nodes=2", "--ntasks-per-node=2"], ["0  n1  0-1  10.77.0.1  eth0", "1  n2  2-3  10.77.0.2  eth0"]),
    ],
    ids=["4 nodes", "2 nodes, one task on each", "2 nodes, a task for each rank"],
)
def test_losses_equal_those_of_a_plain_run(
    lab: Lab, expected: list[float], options: list[str], table: list[str]
) -> None:
    job = lab.submit(options, [*TINY, "trainer.steps=3", "data.name='two words'"])
    assert job.wait_for_end() == "COMPLETED", job.log
    (folder,) = (lab.checkout / "runs").glob(f"llama_2m-two_words-{job.number}-*")
    assert losses(folder) == expected, "to the bit"
    shown = re.sub(r" {2,}", "  ", job.log)
    assert all(row in shown for row in table), job.log
    (logs,) = (lab.checkout / "logs" / str(job.number)).iterdir()
    assert "step 3/3" in (logs / "task_0.txt").read_text() and "step 3/3" in job.log


def test_compiled_by_one_job_trained_by_the_next(lab: Lab, expected: list[float], tmp_path: Path) -> None:
    if reason := get_device("cpu").compiler_missing():
        pytest.skip(reason)
    cache = f"trainer.compile_cache={tmp_path / 'cache'}"
    job = lab.submit(["--nodes=4"], [*TINY, cache, "trainer.val_every_steps=2"], script="compile.slurm")
    assert job.wait_for_end(300.0) == "COMPLETED", job.log
    assert "Total graphs: 4\nTotal successful compilations: 4\nTotal failed compilations: 0\n" in job.log
    arguments = [*TINY, cache, "trainer.steps=3", "trainer.compile=true", "trainer.compile_strict=true"]
    arguments += ["trainer.val_every_steps=2", "logging.tensorboard=true", f"run.dir={tmp_path / 'run'}"]
    job = lab.submit(["--nodes=4"], arguments)
    assert job.wait_for_end() == "COMPLETED", job.log
    # Lines of new graphs follow, with the reason.
    graphs = re.findall(r"compiled \d+ graph.*?(?= \()|  new: .*", job.log)
    assert graphs == ["compiled 4 graphs on 4 ranks: cache hits 16, misses 0"], graphs
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)
    assert list((tmp_path / "run" / "tensorboard").iterdir())


# A fast machine must not come to the end before Slurm looks at time limits, which it does every 30 s.
PACED_TRAIN = """
import os, sys, time
from megatron_llama.cli import main
from megatron_llama.train import loop

step = loop.training_step

def paced(*arguments):
    if not os.path.exists({go!r}):
        time.sleep({seconds})
    return step(*arguments)

loop.training_step = paced
sys.exit(main(sys.argv[1:]))
"""


def seconds_run(job: Job) -> int:
    """How long Slurm says that the job has been running, this time."""
    days, _, clock = job.facts["RunTime"].rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_job_survives_time_limit_preemption_and_a_lost_node(lab: Lab, tmp_path: Path) -> None:
    folder, go = tmp_path / "run", tmp_path / "go"
    checkout = lab.checkout_with(tmp_path, PACED_TRAIN.format(go=str(go), seconds=2.0))
    job = lab.submit(["--nodes=4", "--time=60", "--signal=B:USR1@100", checkout], [*LONG, f"run.dir={folder}"])

    reached(job, folder, 2)
    # In minutes since the job's start; the end is then 40 to 100 s away: time for Slurm's look and for saving.
    job.update(f"TimeLimit={-(-(seconds_run(job) + 40) // 60)}")
    job.wait_for_requeue(1, 200)
    assert "stopped, all ranks have saved; queued again, restart 1, limit MAX_RESTARTS=10, 0 counted" in job.log
    first = steps(folder)[-1]
    job.update("TimeLimit=60")

    reached(job, folder, first + 2)
    assert f"resuming from {folder}/checkpoints/step_{first:08d}" in job.log
    urgent = lab.command(
        "sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    ).split()[-1]
    job.wait_for_requeue(2, 200)
    assert "stopped, all ranks have saved; queued again, restart 2, limit MAX_RESTARTS=10, 0 counted" in job.log
    second = steps(folder)[-1]
    assert Job(lab, int(urgent)).wait_for_end() == "COMPLETED"

    reached(job, folder, second + 2)
    assert f"resuming from {folder}/checkpoints/step_{second:08d}" in job.log
    lab.kill_node("n3")
    job.wait_for_requeue(3, 200)
    assert re.search(r"n3.*(Node failure|NODE FAILURE)|NODE FAILURE|[Cc]onnection closed|failed with status", job.log)
    lab.set_up()  # the node comes back

    go.touch()
    assert job.wait_for_end(400) == "COMPLETED", job.log
    assert steps(folder) == list(range(1, 121)), "each step once"
    assert losses(folder) == plain(tmp_path / "plain", *LONG), "to the bit"


KILLS = int(os.environ.get("SLURM_LAB_KILLS", "3"))
"""Nodes that the test below kills: more for a campaign."""


@pytest.mark.long
@pytest.mark.timeout(600 + 100 * KILLS)
def test_copies_in_memory_survive_a_lost_node(lab: Lab, tmp_path: Path) -> None:
    folder, go, every, chance = tmp_path / "run", tmp_path / "go", 3, random.Random(KILLS)
    checkout = lab.checkout_with(tmp_path, PACED_TRAIN.format(go=str(go), seconds=0.3))
    lab.set_up_memory()
    settings = [*LONG, f"trainer.steps={40 + 12 * KILLS}"]
    arguments = [*settings, f"checkpoint.memory_every_steps={every}", f"run.dir={folder}"]
    arguments += [f"hook.on_event='cat >>{tmp_path}/events'"]
    # Slurm may requeue the job once more while a lost node returns.
    job = lab.submit(["--nodes=2", checkout], arguments, MAX_RESTARTS=str(3 * KILLS))
    reached(job, folder, 1)
    for number in range(1, KILLS + 1):
        reached(job, folder, steps(folder)[-1] + 2 * every)
        time.sleep(chance.uniform(0, 1))  # also while a copy is written
        lab.kill_node(chance.choice(job.nodes))
        job.wait_for_requeue(number, 200, lab.set_up_memory)  # the node comes back, its memory is empty
        before = steps(folder)[-1]
        reached(job, folder, before + 1, 300)
        # Sometimes Slurm stops the restarted job, which saves and resumes from the disk.
        resumed = re.findall(r"resuming from (.*), step (\d+)", job.log)
        assert before - int(resumed[-1][1]) <= every, job.log
    assert sum("in memory" in place for place, _ in resumed) > KILLS / 2, resumed
    go.touch()
    assert job.wait_for_end(400) == "COMPLETED", job.log
    assert steps(folder) == list(range(1, 41 + 12 * KILLS)), "each step once"
    assert losses(folder) == plain(tmp_path / "plain", *settings), "to the bit"
    events = [json.loads(line)["event"] for line in (tmp_path / "events").read_text().splitlines()]
    assert events[0] == "start" and events.count("restart") >= KILLS and events[-1] == "end"


def test_the_restart_limit_is_a_failure(lab: Lab, tmp_path: Path) -> None:
    job = lab.submit(["--nodes=2"], [*LONG, "trainer.steps=100000", f"run.dir={tmp_path}/run"], MAX_RESTARTS="0")
    reached(job, tmp_path / "run", 1)
    job.signal_batch("USR1")
    assert job.wait_for_end() == "FAILED"
    assert job.facts["ExitCode"] == "75:0"
    assert "MAX_RESTARTS=0: the end, with status 75" in job.log


FAILING_TRAIN = """
import os, sys
from megatron_llama.cli import main
from megatron_llama.train import loop

step = loop.training_step

def fail(number, *more):
    if number == 2 and os.environ["RANK"] == "2":
        raise ZeroDivisionError("the weights of rank two")
    return step(number, *more)

loop.training_step = fail
sys.exit(main(sys.argv[1:]))
"""


def test_a_rank_that_fails_shows_its_traceback(lab: Lab, tmp_path: Path) -> None:
    options = ["--nodes=4", lab.checkout_with(tmp_path, FAILING_TRAIN)]
    job = lab.submit(options, [*LONG, "trainer.steps=100000", f"run.dir={tmp_path}/run"], MAX_RESTARTS="0")
    assert job.wait_for_end() == "FAILED"
    assert job.facts["ExitCode"] == "1:0"
    assert "ZeroDivisionError: the weights of rank two" in job.log and "Traceback" in job.log
    assert steps(tmp_path / "run") == [1]


def test_config_error_is_not_requeued(lab: Lab) -> None:
    job = lab.submit(["--nodes=4"], [*TINY, "trainer.tp=3", "optim.lr=-1"])
    assert job.wait_for_end() == "FAILED"
    assert job.facts["ExitCode"] == "2:0" and job.facts["Restarts"] == "0"
    assert "trainer.tp" in job.log and "optim.lr" in job.log and "Traceback" not in job.log


def test_a_loopback_address_is_refused_by_name(lab: Lab) -> None:
    job = lab.submit(["--nodes=2"], TINY, MASTER_ADDR="localhost")
    assert job.wait_for_end() == "FAILED"
    assert job.facts["ExitCode"] == "2:0"
    text = re.sub(r"\s+", " ", job.log)
    assert "MASTER_ADDR = localhost" in text and "on node 0 (n1)" in text, job.log


def test_a_node_that_cannot_reach_the_first_is_named(lab: Lab) -> None:
    # An unused address: the first node listens on its own address, and the others cannot connect.
    job = lab.submit(["--nodes=2"], TINY, MASTER_ADDR="10.77.0.99", MAX_RESTARTS="0")
    assert job.wait_for_end() == "FAILED"
    assert re.search(r"node 1 \(n2\) cannot reach the first node at 10\.77\.0\.99", job.log), job.log


def test_launch_hosts_starts_ranks_on_other_nodes(lab: Lab, expected: list[float], tmp_path: Path) -> None:
    # Without Slurm: the nodes are machines with separate networks, entered directly instead of by ssh.
    enter = tmp_path / "enter"
    enter.write_text('#!/bin/sh\np=$(cat "$LAB/run/$1.pid")\nexec nsenter -t "$p" -n -u -m --wdns="$PWD" sh -c "$2"\n')
    enter.chmod(0o755)
    command = ["taskset", "-c", "0", sys.executable, str(ROOT / "train.py"), *TINY, "trainer.steps=3"]
    command += ["launch.hosts=[n2,n3]", f"launch.ssh={enter}", f"run.dir={tmp_path}/run"]
    command += [f"hook.on_event='cat >>{tmp_path}/events'"]
    done = run_command(*command, timeout=150, LAB=str(lab.home), PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == expected
    shown = re.sub(r" {2,}", "  ", done.stdout)
    assert "0  n2  0-1  10.77.0.2  eth0" in shown and "1  n3  2-3  10.77.0.3  eth0" in shown
    assert [json.loads(line)["event"] for line in (tmp_path / "events").read_text().splitlines()] == ["start", "end"]
    assert read_metrics(tmp_path / "run/metrics.jsonl") and os.path.exists(tmp_path / "run/config.yaml")
