"""A real SLURM with four virtual nodes, each with its own network; its jobs; and a small run of four ranks.

$SLURM_LAB_SETUP names the script that sets it up; default: next to the repository.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.processes import environment, losses

SETUP = Path(os.environ.get("SLURM_LAB_SETUP", ROOT.parent / "shared" / "slurm" / "setup_slurm.sh"))
# Each node has one core, so that nodes do not share cores. nproc prints OMP_NUM_THREADS, which is 1 in a job: it would
# put all nodes on the first core.
PYTHON = (
    f'#!/bin/sh\nexec taskset -c $((${{SLURM_NODEID:-0}} % $(env -u OMP_NUM_THREADS nproc))) {sys.executable} "$@"\n'
)


TINY = (
    "model=llama_2m data=mock device=cpu data.seq_length=32 model.num_hidden_layers=2 model.hidden_size=64 "
    "model.intermediate_size=96 logging.tensorboard=false trainer.tp=2 trainer.dp=2 trainer.global_batch_size=4 "
    "optim=constant optim.warmup_steps=0"
).split()


def plain(folder: Path, *arguments: str) -> list[float]:
    """The losses of an uninterrupted run on this machine, by hand, without Slurm: a thread a rank, as on its nodes."""
    command = [sys.executable, str(ROOT / "train.py"), *arguments, f"run.dir={folder}"]
    done = subprocess.run(command, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return losses(folder)


class Lab:
    """The cluster, and a folder that looks like a checkout to submit from."""

    def __init__(self, folder: Path) -> None:
        self.home = Path(f"/tmp/sl{os.getpid()}")  # short: unix sockets lie in it
        self.variables = environment(
            SLURM_LAB=str(self.home), SLURM_LAB_NET="netns", SLURM_LAB_NS=f"s{os.getpid()}", SLURM_LAB_GPUS="0"
        )
        self.checkout = folder
        self.link(folder)
        self.python = folder / "python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def link(self, folder: Path, train: Path = ROOT / "train.py") -> None:
        """Makes ``folder`` look like a checkout whose train.py is another one."""
        (folder / "train.py").symlink_to(train)
        for name in ("scripts", "conf", "data_prep", "run.slurm", "compile.slurm", "prepare.slurm"):
            (folder / name).symlink_to(ROOT / name)

    def checkout_with(self, folder: Path, train: str) -> str:
        """Make a checkout whose train.py has this text; return the option of sbatch that submits from there."""
        (folder / "checkout").mkdir()
        (folder / "train.py").write_text(train)
        self.link(folder / "checkout", folder / "train.py")
        return f"--chdir={folder}/checkout"

    def set_up(self) -> None:
        """Starts what does not run; skips the test where that fails."""
        done = subprocess.run(["bash", str(SETUP)], env=self.variables, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"{SETUP} failed here: {done.stdout[-400:]}{done.stderr[-400:]}")

    def stop(self) -> None:
        """Ends it and leaves nothing."""
        stop = SETUP.with_name("stop_slurm.sh")
        subprocess.run(["bash", str(stop), "--purge"], env=self.variables, capture_output=True, timeout=120)
        subprocess.run(["rm", "-rf", str(self.home)], timeout=60)

    @property
    def client(self) -> dict[str, str]:
        """The variables of a shell on its login node."""
        return self.variables | {
            "SLURM_CONF": f"{self.home}/etc/slurm.conf",
            "PATH": f"{self.home}/bin:{self.variables['PATH']}",
            "PYTHON": str(self.python),
            "PYTHONPATH": str(ROOT),
        }

    def command(self, *words: str, **more: str) -> str:
        variables = self.client | more
        done = subprocess.run(
            words, env=variables, cwd=self.checkout, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, options: list[str], arguments: list[str], script: str = "run.slurm", **more: str) -> Job:
        printed = self.command("sbatch", f"--output={self.checkout}/slurm-%j.out", *options, script, *arguments, **more)
        return Job(self, int(printed.split()[-1]))

    def kill_node(self, name: str) -> None:
        """A power loss."""
        os.kill(self._pid(name), 9)

    def set_up_memory(self) -> None:
        """Start the nodes that were killed, and give each node its own RAM disk."""
        self.set_up()
        for name in ("n1", "n2", "n3", "n4"):
            inside = ("nsenter", "-t", str(self._pid(name)), "-m")
            if self.command(*inside, "stat", "-c", "%d", "/dev/shm") == self.command("stat", "-c", "%d", "/dev/shm"):
                self.command(*inside, "mount", "-t", "tmpfs", "-o", "size=1g", "memory", "/dev/shm")

    def _pid(self, name: str) -> int:
        return int((self.home / "run" / f"{name}.pid").read_text())


class Job:
    """A submitted job."""

    def __init__(self, lab: Lab, number: int) -> None:
        self.lab, self.number = lab, number

    @property
    def facts(self) -> dict[str, str]:
        """Return the fields of ``scontrol show job``."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.lab.command("scontrol", "-o", "show", "job", str(self.number))))

    @property
    def nodes(self) -> list[str]:
        return self.lab.command("scontrol", "show", "hostnames", self.facts["NodeList"]).split()

    @property
    def state(self) -> str:
        return self.facts["JobState"]

    @property
    def log(self) -> str:
        path = self.lab.checkout / f"slurm-{self.number}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def update(self, setting: str) -> None:
        self.lab.command("scontrol", "update", f"JobId={self.number}", setting)

    def signal_batch(self, name: str) -> None:
        """Sends a signal to the batch script only, as --signal=B: does."""
        self.lab.command("scancel", "--batch", f"--signal={name}", str(self.number))

    def wait(self, done: Callable[[], bool], limit: float, label: str) -> None:
        begin = time.monotonic()
        while not done():
            if time.monotonic() - begin > limit:
                raise AssertionError(f"no {label} within {limit} s: {self.facts}\n{self.log}")
            time.sleep(0.2)

    def wait_for_end(self, limit: float = 150.0) -> str:
        """The state it ends in; on the way it may be queued again, and then need not wait for two minutes."""

        def ended() -> bool:
            facts = self.facts
            if facts["JobState"] == "PENDING" and facts["Reason"] == "BeginTime":
                self.update("StartTime=now+2")
                time.sleep(2)
            return facts["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")

        self.wait(ended, limit, "end")
        return self.state

    def wait_for_requeue(self, restarts: int, limit: float, prepare: Callable[[], None] = lambda: None) -> None:
        """Waits until it has been queued again so often, calls ``prepare``, and ends the two minutes of waiting."""
        self.wait(
            lambda: (f := self.facts)["JobState"] == "PENDING" and int(f["Restarts"]) >= restarts, limit, "requeue"
        )
        prepare()
        self.update("StartTime=now+2")
