"""Small runs for tests of launchers: of train.py, and of a train.py whose ranks do something else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_llama.plan import Plan
from megatron_llama.system import phase
from tests.paths import ROOT
from tests.processes import announce, environment, pids, save_and_leave, steps, wait_until

TINY = ["data=mock", "device=cpu", "trainer.steps=1"]
TRAIN = str(ROOT / "train.py")
SMALL = (
    "data=mock device=cpu data.seq_length=32 model.num_hidden_layers=2 model.hidden_size=64 "
    "model.intermediate_size=96 device.peak_tflops=0.01 trainer.tp=2 logging.tensorboard=false"
).split()


def started(
    command: Sequence[str], folder: Path | None = None, *, terminal: bool = False, **variables: str
) -> subprocess.Popen[str]:
    """Start a command in the background, without launcher variables.

    With ``terminal``, in a separate process group, as a terminal starts it: Ctrl-C reaches all of it.
    """
    env, pipe = environment(**variables), subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=terminal
    )


def wait_for_step(run: subprocess.Popen[str], folder: Path, step: int, limit: float = 150.0) -> None:
    """Wait until the run has logged ``step``."""
    wait_until(lambda: run.poll() is not None or step in steps(folder), lambda: steps(folder), limit)
    assert run.returncode is None, f"the run has ended with {run.returncode}: {run.communicate()}"


def note_place(plan: Plan) -> None:
    """Write rank, local rank, world size and run folder to a file."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    place = {name: os.environ[name] for name in names} | {"dir": plan.config.run.dir}
    (Path(str(plan.config.run.dir)) / f"place{os.environ['RANK']}.json").write_text(json.dumps(place))


FAKE_TRAIN = """
import os, sys
sys.path.insert(0, {root!r})
from megatron_llama import cli
from megatron_llama.launch import other_launchers, rank
from tests.launch import small_runs
{before}
for module in (other_launchers, rank):
    module.CONSEQUENCE_DELAY_SECONDS *= {patience}
sys.exit(cli.main(sys.argv[1:], small_runs.{work}))
"""


def script(folder: Path, work: str, patience: int = 1, before: str = "") -> Path:
    """A train.py whose ranks run a function of this file, after the lines ``before``. A rank that only lost another one
    reports after ``patience`` times its delay: on a busy machine the launcher may see the cause late."""
    path = folder / "fake_train.py"
    path.write_text(FAKE_TRAIN.format(root=str(ROOT), before=before, work=work, patience=patience))
    return path


def meet(plan: Plan) -> None:
    """Join the process group at the launcher's address."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks = torch.tensor([float(os.environ["RANK"])])
    dist.all_reduce(ranks)
    dist.destroy_process_group()
    note_place(plan)
    (Path(str(plan.config.run.dir)) / f"sum{os.environ['RANK']}").write_text(str(ranks.item()))


def fail_on_the_last(plan: Plan) -> None:
    """The last rank fails after another one has noticed that it is gone."""
    import torch
    import torch.distributed as dist

    folder = Path(os.environ["PIDS"])
    dist.init_process_group("gloo")
    announce(folder)
    dist.barrier()  # all have announced themselves
    if int(os.environ["RANK"]) + 1 == plan.world_size:
        dist.destroy_process_group()
        wait_until((folder / "noticed").exists)
        raise ZeroDivisionError("the weights of the last rank")
    try:
        dist.all_reduce(torch.zeros(1))
    finally:
        (folder / "noticed").touch()


def announce_and_wait(plan: object) -> None:
    """Exit with status 75 after a stop signal."""
    save_and_leave(Path(os.environ["PIDS"]))


def stop_on_three(plan: object) -> None:
    """Rank 3, on the second host, is stopped; the others wait for it."""
    phase.enter("step 1")
    announce(Path(os.environ["PIDS"]))
    pids(Path(os.environ["PIDS"]), 4)
    if os.environ["RANK"] == "3":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
