"""Runs that the campaign starts over and over, their processes as the kernel lists them, and their files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_llama.cli import main
from megatron_llama.system.exit_status import EXIT_FAILED
from megatron_llama.system.output import protect_output
from megatron_llama.system.signals import exit_on_signal
from tests.checkpoint.runner import losses
from tests.ranks import check_threads

POLL_SECONDS = 0.005
STEPS, SAVED_EVERY = 24, 2
# Small: a start takes most of the time. Steps, saves, validations and samples follow one another within milliseconds.
SETTINGS = (
    "model=llama_2m data=mock data.mock=false data.split='90,10,0' device=cpu model.vocab_size=64 model.hidden_size=32 "
    "model.intermediate_size=64 model.num_hidden_layers=2 model.num_attention_heads=4 model.num_key_value_heads=2 "
    f"data.seq_length=16 trainer.global_batch_size=4 trainer.micro_batch_size=2 trainer.steps={STEPS} optim.lr=0.003 "
    f"trainer.val_every_steps=5 trainer.val_steps=1 checkpoint.every_steps={SAVED_EVERY} checkpoint.keep=3 "
    "checkpoint.save_timeout_seconds=1 device.peak_tflops=0.1 logging.every_steps=1"
).split()
LAYOUTS = {
    "single": [],
    "tp2": ["trainer.tp=2"],
    "pp2": ["trainer.pp=2"],
    "dp2_zero3": ["trainer.dp=2", "trainer.zero=3"],
}
COPIED_EVERY = 3
for name in ("tp2", "pp2", "dp2_zero3"):  # the newest steps are in memory only
    copies = [f"checkpoint.memory_every_steps={COPIED_EVERY}", f"checkpoint.every_steps={STEPS}"]
    LAYOUTS[f"{name}_copies"] = [*LAYOUTS[name], *copies]
_PTRACE_GETFD, _LISTEN, _ESTABLISHED = 438, "0A", "01"


@dataclass
class Life:
    """A run's folder from the first start to the last step, through any number of attempts."""

    folder: Path
    layout: str
    dataset: Path
    attempts: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return 1 if self.layout == "single" else 2

    @property
    def output(self) -> Path:
        """File with the output of all attempts."""
        return self.folder.with_name(self.folder.name + ".out")

    def start(self, *overrides: str) -> Attempt:
        self.attempts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = [f"run.dir={self.folder}", f"data.prefixes=[{self.dataset}]"]
        return Attempt(self, [*SETTINGS, *LAYOUTS[self.layout], *paths, *overrides])

    def losses(self) -> list[tuple[int, float]]:
        """Return (step, loss) of each complete line of metrics.jsonl. Raises ValueError for an invalid line."""
        return losses(self.folder)

    def newest_checkpoint(self) -> int:
        """Return the step of the newest complete checkpoint; 0 without one."""
        names = (re.fullmatch(r"step_(\d{8})", path.name) for path in (self.folder / "checkpoints").glob("step_*"))
        return max((int(name[1]) for name in names if name), default=0)

    def resumable_steps(self) -> range:
        """Return the steps from which the next attempt may resume."""
        newest = self.newest_checkpoint()
        if not self.layout.endswith("_copies"):
            return range(newest, newest + 1)
        last = max((step for step, _ in self.losses()), default=0)
        return range(max(newest, last - COPIED_EVERY), last + 1)

    def saving(self) -> bool:
        return any((self.folder / "checkpoints").glob(".step_*"))


class Attempt:
    """One start of a run: a forked process that runs train.py in a new session, which identifies its processes."""

    def __init__(self, life: Life, arguments: Sequence[str]) -> None:
        self.life, self.status = life, None
        self.begin, self.first_line = time.monotonic(), len(self.said_by_all)
        sys.stdout.flush()
        check_threads()
        self.pid = os.fork()
        if self.pid == 0:
            status = EXIT_FAILED
            try:
                os.setsid()
                with life.output.open("ab") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                exit_on_signal()  # as in train.py
                protect_output()
                status = main(arguments)
                sys.stdout.flush()
            except BaseException:  # as Python does for uncaught exceptions
                traceback.print_exc()
            finally:
                os._exit(status)

    status: int | None
    """The exit status, negative for a signal; None while the process runs."""

    @property
    def said_by_all(self) -> bytes:
        """Output of this and all previous attempts."""
        return self.life.output.read_bytes() if self.life.output.exists() else b""

    @property
    def output(self) -> str:
        """Output of this attempt."""
        return self.said_by_all[self.first_line :].decode(errors="replace")

    @property
    def step(self) -> int:
        """The last logged step; 0 before the first."""
        return max(map(int, re.findall(rf"^step (\d+)/{STEPS}", self.output, re.MULTILINE)), default=0)

    @property
    def runs(self) -> bool:
        """Whether the launcher still runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is None

    def wait(self, seconds: float) -> bool:
        """Return whether the attempt ends within ``seconds``."""
        deadline = time.monotonic() + seconds
        while self.runs and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.runs

    def processes(self) -> list[int]:
        """Return the ids of running processes in the order of their start."""
        started = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    words = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(words[3]) == self.pid and words[0] not in "ZX":
                        started.append((int(words[19]), int(entry.name)))
        return [pid for _, pid in sorted(started)]

    def ranks(self) -> list[int]:
        """Return the process ids of the started ranks, in the order of ranks."""
        return [pid for pid in self.processes() if pid != self.pid][: self.life.ranks]

    def kill(self) -> None:
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if self.runs:
                time.sleep(POLL_SECONDS)

    def gone(self, seconds: float) -> bool:
        """Whether all its processes end within a time."""
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.processes()

    def listening(self) -> list[tuple[str, int]]:
        return sorted({address for _, _, state, address in self._sockets() if state == _LISTEN})

    def connections(self) -> list[tuple[int, int]]:
        """(process, file descriptor) of each of its connections."""
        return [(pid, file) for pid, file, state, _ in self._sockets() if state == _ESTABLISHED]

    def _sockets(self) -> Iterator[tuple[int, int, str, tuple[str, int]]]:
        for pid in self.processes():
            with contextlib.suppress(OSError):
                known = {inode: (state, address) for inode, state, address in _table(pid)}
                for link in Path(f"/proc/{pid}/fd").iterdir():
                    inode = os.readlink(link).removeprefix("socket:[").removesuffix("]")
                    if inode in known:
                        yield pid, int(link.name), *known[inode]


def _table(pid: int) -> Iterator[tuple[str, str, tuple[str, int]]]:
    """(inode, state, local address) of each TCP socket in the network of a process."""
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            digits, port = words[1].split(":")
            raw = b"".join(bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8))
            yield words[9], words[3], (socket.inet_ntop(family, raw), int(port, 16))


def cut(pid: int, file: int) -> bool:
    """Ends a connection of another process, as a network that breaks would; whether that could be done."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        copy = ctypes.CDLL(None, use_errno=True).syscall(_PTRACE_GETFD, handle, file, 0)
        if copy < 0:
            return False
        with socket.socket(fileno=copy) as connection:
            connection.shutdown(socket.SHUT_RDWR)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
