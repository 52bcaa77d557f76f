"""Start the programs of a benchmark, and run them alternately on one machine.

Matmul FLOP/s are measured before and after each turn. Programs that do different work are excluded and reported.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.comparison import ProgramResult, StartupTime, TurnMeasurement, find_mismatches
from benchmarks.harness.environments import BENCH_DIR, Peer
from benchmarks.harness.task import Facts, TrainingTask
from benchmarks.results import ROOT
from megatron_llama.devices.private_folder import make_private
from megatron_llama.system.errors import MachineError
from megatron_llama.system.signals import exit_with_parent
from megatron_llama.topology import AXIS_NAMES

FIRST_STEP_SECONDS = 900.0
"""Timeout of the first step, compiling included. Slower programs are excluded."""
WARM_UP_STEPS = 2
"""Untimed steps after the start. Memory still grows in a process's first three steps; the second takes up to a third
longer."""
UNTIMED_STEPS = 1
"""Untimed steps at the start of each turn. The first step after a sleep takes up to twice as long."""


class ProgramFailed(MachineError):
    """A program ended or timed out; the message has the end of its output."""


def program_name(peer: str, task: TrainingTask) -> str:
    """Return a name such as ``ours compiled tp2`` or ``ours recompute=full``."""
    axes = {axis: getattr(task.layout, axis) for axis in AXIS_NAMES}
    layout = "".join(f" {axis}{size}" for axis, size in axes.items() if size > 1)
    zero = f" zero={task.zero}" if task.zero != 1 else ""
    bits = f" state_bits={task.state_bits}" if task.state_bits != 32 else ""
    recompute = f" recompute={task.recompute}" if task.recompute != "none" else ""
    return f"{peer}{' compiled' if task.mode == 'compiled' else ''}{layout}{zero}{bits}{recompute}"


def import_path(python: Path, checkout: Path = ROOT) -> str:
    """Return PYTHONPATH of a program: its checkout, and this process's folders if it is the same Python."""
    inherited = os.environ.get("PYTHONPATH") if python == Path(sys.executable) else None
    return os.pathsep.join(filter(None, [str(checkout), inherited]))


class RunningProgram:
    """A started program that waits for requests. Leaving the ``with`` block ends it."""

    def __init__(self, peer: Peer, python: Path, task: TrainingTask) -> None:
        """Start the program and wait for its first step. Raises ProgramFailed."""
        self.name = program_name(peer.name, task)
        self._folder = tempfile.mkdtemp(prefix="bench-")
        try:
            ready = self._start(peer, python, task)
        except BaseException:  # also an interrupt
            self._end(now=True)
            raise
        self.facts, self.first_loss = Facts(**ready["facts"]), float(ready["loss"])
        self.start = StartupTime(time.time() - self.task.started, ready["graphs"])

    def _start(self, peer: Peer, python: Path, task: TrainingTask) -> dict[str, Any]:
        """Start the program; return its report after the first step."""
        self._output = Path(self._folder) / "output"
        # Inductor ignores TORCHINDUCTOR_CACHE_DIR for precompiled headers, whose folder in /tmp others could create.
        temporary = BENCH_DIR / "tmp"  # short: sockets in it have at most 107 characters
        make_private(temporary)
        with Listener(str(Path(self._folder) / "socket"), "AF_UNIX") as listener, open(self._output, "wb") as output:
            self.task = replace(task, address=str(listener.address), started=time.time())
            variables = {
                "PYTHONPATH": import_path(python, peer.checkout),
                "OMP_NUM_THREADS": str(task.threads),
                "TMPDIR": str(temporary),
                "TORCHINDUCTOR_CACHE_DIR": task.cache,  # torch may have set this process's
            }
            self._process = subprocess.Popen(
                [str(python), "-m", peer.program, self.task.to_json()],
                cwd=self._folder,  # collects files that a peer writes
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(exit_with_parent, os.getpid()),  # noqa: PLW1509  no thread of this process holds locks
            )
            self._connection = self._wait_for_connection(listener)
        return self._receive()

    def __enter__(self) -> RunningProgram:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None and not exception[0]:
            self._send_request(steps=0)
        self._end(now=exception[0] is not None)
        self._connection.close()

    def _end(self, now: bool) -> None:
        """Wait for the process, at most 30 s, or kill it ``now``; its ranks end too."""
        try:
            self._process.wait(0 if now else 30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def train(self, steps: int) -> dict[str, Any]:
        """Train ``steps`` steps; return the measurements of worker.py."""
        self._send_request(steps=steps)
        return self._receive()

    def live_bytes(self) -> int:
        """Train one more step under the profiler; return the peak bytes of live tensors."""
        self._send_request(steps=1, watch=True)
        return int(self._receive()["live_bytes"])

    def _send_request(self, steps: int, watch: bool = False) -> None:
        self._connection.send_bytes(json.dumps({"steps": steps, "watch": watch}).encode())

    def _wait_for_connection(self, listener: Listener) -> Connection:
        socket = listener._listener._socket  # type: ignore[attr-defined]  # wait() needs the socket
        end = time.monotonic() + FIRST_STEP_SECONDS
        while not wait([socket], timeout=1.0):
            if self._process.poll() is not None or time.monotonic() > end:
                raise self._failure()
        return listener.accept()

    def _receive(self) -> dict[str, Any]:
        try:
            if self._connection.poll(FIRST_STEP_SECONDS):
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
                return answer
        except (EOFError, ConnectionError):
            pass
        raise self._failure()

    def _failure(self) -> ProgramFailed:
        self._process.kill()
        status = self._process.wait()
        text = self._output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
        return ProgramFailed(f"{self.name} ended with status {status}:\n" + "\n".join(f"    {line}" for line in text))


def run_rounds(
    entries: Sequence[tuple[Peer, Path, TrainingTask]],
    rounds: int,
    steps: int,
    *,
    peak: Callable[[], float],
    advance: Callable[[str], None],
    excluded: dict[str, str],
    cold: bool = False,
) -> list[ProgramResult]:
    """Start and warm up each program alone, then run them round-robin. Programs sleep in memory between turns.

    Args:
        rounds: Turns of each program.
        steps: Timed steps per turn.
        peak: Measures matmul FLOP/s while all programs sleep.
        advance: Receives the name of each task: rounds + 2 times per program.
        excluded: Collects programs that fail or do different work, with the reason.
        cold: Whether to start each program once with an empty compile cache first.
    """
    running: list[tuple[RunningProgram, ProgramResult]] = []
    with ExitStack() as stack:
        for peer, python, task in entries:
            name = program_name(peer.name, task)
            advance(f"{name} starts")
            starts = []
            try:
                if cold:
                    shutil.rmtree(task.cache, ignore_errors=True)
                    with RunningProgram(peer, python, task) as first:
                        starts.append(first.start)
                program = stack.enter_context(RunningProgram(peer, python, task))
            except ProgramFailed as failure:
                excluded[name] = str(failure)
                continue
            if mismatches := find_mismatches(task, program.facts, program.first_loss, torch.__version__):
                excluded[name] = f"does different work: {'; '.join(mismatches)}"
                continue
            starts.append(program.start)
            program.train(WARM_UP_STEPS)
            running.append((program, ProgramResult(name, program.task, program.facts, program.first_loss, starts)))
        before = peak()
        for number in range(rounds):
            for program, result in running:
                advance(f"{result.name}, round {number + 1}")
                program.train(UNTIMED_STEPS)
                measured = program.train(steps)
                after = peak()
                result.turns.append(TurnMeasurement(**measured, peak_flops=(before + after) / 2))
                before = after
        for program, result in running:
            advance(f"{result.name}, memory")
            result.live_bytes = program.live_bytes()
    return [result for _, result in running]
