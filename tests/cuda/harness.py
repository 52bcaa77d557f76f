"""Runs commands of the project on the CUDA runtime of ``runtime/``, and returns their output and logs."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.cuda.build import LIBRARIES, NOT_PRELOADED, build
from tests.cuda.log import ProcessLog, read_logs
from tests.paths import ROOT, TRAIN_PY
from tests.processes import environment

SERVER = "tests.cuda.server"
STARTUP = Path(__file__).with_name("startup")
SHARED_MEMORY = "/dev/shm"
LIMIT_SECONDS = 400  # a busy machine may need minutes for what takes 10 s
SECONDS_AFTER_FAILURE = 5  # peers of a failed process report their errors
BUILT = "HOST_CUDA_BUILT"
"""Variable with a folder of ``python -m tests.cuda.build``, which saves the build in repeated sessions."""
Action = Callable[[int], None]
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


class Server:
    """The process of ``server.py``."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", SERVER], cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def start(self, words: Sequence[str], variables: dict[str, str], output: Path) -> int:
        """Start a command; return its process id, which is its process group too."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"words": words, "variables": variables, "output": str(output)}).encode())
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return self._read(LIMIT_SECONDS)

    def wait(self, pid: int, seconds: float = LIMIT_SECONDS) -> int:
        """Wait for the end of the command; kill its processes that remain. Return its exit status."""
        try:
            return self._read(seconds)
        except TimeoutError:
            os.killpg(pid, signal.SIGKILL)
            return self._read(SECONDS_AFTER_FAILURE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _read(self, seconds: float) -> int:
        answers = self._process.stdout
        assert answers
        if not select.select([answers], [], [], seconds)[0]:
            raise TimeoutError(f"no answer in {seconds} s")
        text = b""
        while not text.endswith(b"\n"):
            part = os.read(answers.fileno(), 1)
            assert part, "the server has ended"
            text += part
        return int(text)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Runtime:
    """The libraries that ``build`` wrote to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server: Server | None = None

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

    @property
    def server(self) -> Server:
        if self._server is None:
            # The allocator of torch reads its settings at the import. The project sets this one for each rank.
            self._server = Server(self.environment(1, PYTORCH_ALLOC_CONF="expandable_segments:True"))
        return self._server

    def environment(self, devices: int, **settings: str) -> dict[str, str]:
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
            **settings,
        )

    def train(self, folder: Path, *overrides: str, devices: int = 1, act: Action | None = None, **settings: str) -> Run:
        """Run three steps of train.py in the run folder ``folder / "run"``."""
        return self.command(folder, *train_words(folder, overrides), devices=devices, act=act, **settings)

    def command(self, folder: Path, *words: str, devices: int = 1, act: Action | None = None, **settings: str) -> Run:
        """Run a program in a fork of the server. ``act``: called with the process id after the start."""
        log = _next_log(folder)
        output = folder / f"{log.name}.0.output"
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="host-cuda-") as shared:
            more = {"HOST_CUDA_LOG": str(log), "HOST_CUDA_SHARED": shared, **settings}
            pid = self.server.start(words, self.environment(devices, **more), output)
            if act is not None:
                act(pid)
            status = self.server.wait(pid)
        return Run(status, output.read_text(errors="replace"), read_logs(log))

    def spawn(self, folder: Path, *overrides: str, devices: int, **settings: str) -> Run:
        """Run ``train`` with a Python process for the command and for each rank, as on a GPU."""
        return self.start(train_words(folder, overrides), folder, devices, settings)

    def start(self, words: Sequence[str], folder: Path, devices: int, settings: dict[str, str]) -> Run:
        """Run Python with the arguments ``words``, for at most LIMIT_SECONDS."""
        log, status = _next_log(folder), -signal.SIGKILL
        output = folder / f"{log.name}.0.output"
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="host-cuda-") as shared, output.open("w") as file:
            more = {"HOST_CUDA_LOG": str(log), "HOST_CUDA_SHARED": shared, **settings}
            run = partial(subprocess.run, cwd=ROOT, env=self.environment(devices, **more), stdout=file, stderr=file)
            with suppress(subprocess.TimeoutExpired):  # which kills the process, as does an exception of the test
                status = run([sys.executable, *words], timeout=LIMIT_SECONDS).returncode
        return Run(status, output.read_text(errors="replace"), read_logs(log))


def train_words(folder: Path, overrides: Sequence[str]) -> list[str]:
    """Return the command line of a small run in the run folder ``folder / "run"``."""
    return [str(TRAIN_PY), *SMALL, f"run.dir={folder / 'run'}", *overrides]


def _next_log(folder: Path) -> Path:
    """Return the prefix of the logs of the next run in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"log{len(list(folder.glob('*.0.output')))}"


def open_runtime(folder: Path) -> Runtime:
    """Build the runtime in ``folder``, or return the one that the user has built."""
    if built := os.environ.get(BUILT):
        return Runtime(Path(built))
    build(folder)
    return Runtime(folder)
