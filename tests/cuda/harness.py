"""Runs commands of the project on the CUDA runtime of ``runtime/``, and returns their output and logs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cuda.build import LIBRARIES, NOT_PRELOADED, build
from tests.cuda.log import ProcessLog, read_logs
from tests.paths import ROOT, TRAIN_PY
from tests.processes import environment

STARTUP = Path(__file__).with_name("startup")
SHARED_MEMORY = "/dev/shm"
LIMIT_SECONDS = 400  # a busy machine may need minutes for what takes 10 s
SECONDS_AFTER_FAILURE = 5  # peers of a failed process report their errors
POLL_SECONDS = 0.05
BUILT = "HOST_CUDA_BUILT"
"""Variable with a folder of ``python -m tests.cuda.build``, which saves the build in repeated sessions."""
SMALL = (
    *("model=llama_2m", "data=mock", "device=cuda", "data.seq_length=256", "logging.tensorboard=false"),
    *("trainer.steps=3", "trainer.micro_batch_size=2", "trainer.global_batch_size=4", "checkpoint.save_last=false"),
)


@dataclass(frozen=True)
class Run:
    """A finished command: exit status, output, and the log of each process that used the device, by rank."""

    status: int
    output: str
    logs: list[ProcessLog]

    def check(self) -> Run:
        """Return this run, whose command must have succeeded."""
        assert self.status == 0, self.output[-4000:]
        return self


@dataclass(frozen=True)
class Runtime:
    """The libraries that ``build`` wrote to a folder."""

    folder: Path

    def environment(self, devices: int, log: Path, shared: str, settings: dict[str, str]) -> dict[str, str]:
        """Return the variables of a process on a machine with ``devices`` devices."""
        preloaded = [str(self.folder / library.file) for library in LIBRARIES if library.file not in NOT_PRELOADED]
        return environment(
            LD_PRELOAD=" ".join(preloaded),
            LD_LIBRARY_PATH=str(self.folder),
            PYTHONPATH=os.pathsep.join((str(STARTUP), str(ROOT))),
            OMP_NUM_THREADS="1",
            TORCH_CUDNN_SDPA_DEPRIORITIZED="1",  # cuDNN builds its kernels from the device's answers
            TRITON_LIBCUDA_PATH=str(self.folder),
            HOST_CUDA_LIBRARIES=str(self.folder),
            HOST_CUDA_DEVICES=str(devices),
            HOST_CUDA_LOG=str(log),
            HOST_CUDA_SHARED=shared,
            **settings,
        )

    def train(self, folder: Path, *overrides: str, devices: int = 1, **settings: str) -> Run:
        """Run three steps of train.py in the run folder ``folder / "run"``."""
        words = [str(TRAIN_PY), *SMALL, f"run.dir={folder / 'run'}", *overrides]
        return self.start([words], folder, devices, settings)

    def ranks(self, module: str, folder: Path, ranks: int, **settings: str) -> Run:
        """Run a module of the tests in ``ranks`` processes with torch.distributed's variables."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
        job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **settings}
        return self.start([["-m", module]] * ranks, folder, ranks, job)

    def start(self, commands: Sequence[Sequence[str]], folder: Path, devices: int, settings: dict[str, str]) -> Run:
        """Run Python once per command, at the same time; wait for all. The status is the first that is not 0."""
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"log{len(list(folder.glob('*.output')))}"
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="host-cuda-") as shared:
            processes, files = [], []
            for number, words in enumerate(commands):
                rank = {"RANK": str(number)} if len(commands) > 1 else {}
                variables = self.environment(devices, log, shared, {**settings, **rank})
                files.append(folder / f"{log.name}.{number}.output")
                with files[-1].open("w") as output:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, *words], cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT
                        )
                    )
            statuses = _wait(processes)
        text = "\n".join(file.read_text(errors="replace") for file in files)
        return Run(next(filter(None, statuses), 0), text, read_logs(log))


def open_runtime(folder: Path) -> Runtime:
    """Build the runtime in ``folder``, or return the one that the user has built."""
    if built := os.environ.get(BUILT):
        return Runtime(Path(built))
    build(folder)
    return Runtime(folder)


def _wait(processes: list[subprocess.Popen]) -> list[int]:
    """Wait for all processes; end the others soon after one has failed. Return their statuses."""
    deadline = time.monotonic() + LIMIT_SECONDS
    failed = False
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                break
            if not failed and any(process.returncode for process in processes):
                failed, deadline = True, time.monotonic() + SECONDS_AFTER_FAILURE
            time.sleep(POLL_SECONDS)
    finally:
        for process in processes:
            process.kill()
    return [process.wait() for process in processes]
