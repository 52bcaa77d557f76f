"""torchrun that starts ranks again: a rank killed, an agent killed, an environment that is wrong. The real programs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.small_runs import SMALL
from tests.paths import ROOT
from tests.processes import children, environment, gone, losses, run_train_py, steps, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# train.py that waits before a step for as long as a file of the step's number is there.
GATED_TRAIN = """
import os, sys, time
sys.path.insert(0, {root!r})
from megatron_llama.cli import main
from megatron_llama.train import loop

step = loop.training_step

def gated(number, *more):
    while os.path.exists(os.path.join({gates!r}, str(number))):
        time.sleep(0.02)
    return step(number, *more)

loop.training_step = gated
sys.exit(main(sys.argv[1:]))
"""
STEPS = 12
WORDS = [word for word in SMALL if word != "trainer.tp=2"]
WORDS += ["trainer.global_batch_size=4", f"trainer.steps={STEPS}", "checkpoint.every_steps=2"]
LIMIT_SECONDS = 300.0


class Torchrun:
    """Agents of one job; each has a rank or more."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.gates = folder / "run", folder / "gates"
        self.script, self.log = folder / "gated.py", folder / "log.txt"
        self.gates.mkdir()
        self.script.write_text(GATED_TRAIN.format(root=str(ROOT), gates=str(self.gates)))
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """An agent in the background."""
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(self.script)]
        with self.log.open("ab") as log:
            variables = environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
            words = [*command, *WORDS, f"run.dir={self.run_dir}"]
            self.agents.append(subprocess.Popen(words, env=variables, stdout=log, stderr=log))
        return self.agents[-1]

    def close(self, step: int) -> None:
        """No rank goes beyond the step before ``step``."""
        (self.gates / str(step)).touch()

    def open(self, step: int) -> None:
        (self.gates / str(step)).unlink()

    def wait(self, done: Callable[[], bool], condition: str) -> None:
        wait_until(done, lambda: f"no {condition}:\n{self.log.read_text()}", LIMIT_SECONDS)

    def reached(self, step: int, ranks: int) -> list[int]:
        """Wait until ``ranks`` ranks have finished ``step``; return their pids."""
        results: list[int] = []

        def there() -> bool:
            results[:] = [pid for agent in self.agents for pid in children(agent.pid)]
            assert any(agent.poll() is None for agent in self.agents), self.log.read_text()
            return len(results) == ranks and steps(self.run_dir)[-1:] == [step]

        self.wait(there, f"step {step} with {ranks} ranks")
        return results


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Torchrun]:
    made = Torchrun(tmp_path)
    yield made
    for agent in made.agents:
        agent.kill()
        agent.wait()


@pytest.mark.long
def test_a_killed_rank_is_started_again_to_the_bit(torchrun: Torchrun, tmp_path: Path) -> None:
    torchrun.close(6)
    agent = torchrun.start("--standalone", "--nproc_per_node=2", "--max-restarts=1")
    ranks = torchrun.reached(5, 2)
    os.kill(ranks[1], signal.SIGKILL)
    torchrun.open(6)
    torchrun.wait(lambda: agent.poll() is not None, "end")
    output = torchrun.log.read_text()
    assert agent.returncode == 0, output
    # Ranks hear of each other's writing between steps: that of step 4 may not have been done after step 5.
    assert len(re.findall(r"checkpoint: resuming from .*step_0000000[24]", output)) == 1, output
    assert steps(torchrun.run_dir) == list(range(1, STEPS + 1)), "each step once"
    status, printed = run_train_py(tmp_path / "plain", *WORDS, "trainer.dp=2")
    assert status == 0, printed
    assert losses(torchrun.run_dir) == losses(tmp_path / "plain"), "to the bit"


@pytest.mark.long
def test_an_agent_that_is_killed_leaves_the_job_to_the_other(torchrun: Torchrun, tmp_path: Path) -> None:
    options = ["--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv-id=elastic", "--rdzv-backend=c10d"]
    # last_call_timeout: time to wait for further nodes; unused if both are present.
    options += [f"--rdzv-endpoint={tmp_path}/store", "--rdzv-conf=store_type=file,last_call_timeout=5"]
    torchrun.close(6)
    first, second = torchrun.start(*options), torchrun.start(*options)
    ranks = torchrun.reached(5, 2)
    second.kill()
    assert all(gone(pid) for pid in ranks[1:]), "its rank dies with it"
    torchrun.open(6)
    torchrun.wait(lambda: first.poll() is not None, "end")
    output = torchrun.log.read_text()
    assert first.returncode == 0, output
    assert steps(torchrun.run_dir) == list(range(1, STEPS + 1)), "each step once"
    status, printed = run_train_py(tmp_path / "plain", *WORDS)
    assert status == 0, printed
    results, alone = losses(torchrun.run_dir), losses(tmp_path / "plain")
    assert results == pytest.approx(alone, rel=2e-6), "for any number of ranks"
    assert results[6:] != alone[6:] or results[:4] != alone[:4], "two ranks have summed some of it"
