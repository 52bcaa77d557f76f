"""Start the programs of a benchmark, compare their work, and run them alternately on one machine.

The matrix peak is measured before and after each turn. A program that does other work than its task is excluded by
name.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness.environments import OURS, ROOT, Peer
from benchmarks.harness.task import Facts, Task, checksum
from megatron_llama.system.errors import MachineError
from megatron_llama.topology import AXIS_NAMES
from megatron_llama.train.console import duration

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
LOSS_TOLERANCE = 0.1
"""The first loss is the logarithm of the vocabulary within this share: initial weights differ, random tokens can't be
guessed, and another normalization or shift would show."""
FIRST_STEP_SECONDS = 900.0
"""A contestant that has not trained a step by then is left out; compilers have taken minutes."""
WARM_UP_STEPS = 2
"""Steps that no turn counts. In a process's first three memory still grows: the second takes up to a third longer."""
WAKING_STEPS = 1
"""Steps at the start of each turn that it does not count. While a process sleeps it loses caches and pages, and its
first step afterwards takes up to twice as long; a run does not sleep."""


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function to call with what begins next, ``total`` times in all."""
    console = Console(stderr=True)
    columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task, begin, done = bar.add_task("", total=total), time.monotonic(), -1

    def advance(text: str) -> None:
        nonlocal done
        done += 1
        left = f", {duration((time.monotonic() - begin) / done * (total - done))} left" if done else ""
        line = f"{done}/{total}{left}  {text}"
        bar.update(task, completed=done, description=line)
        if not console.is_terminal:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    with bar:
        yield advance


def unfair(task: Task, facts: Facts, first_loss: float, torch_version: str) -> list[str]:
    """What a contestant does otherwise than its task says, a sentence each; empty for a fair one."""
    tokens = task.text(1)[:, :-1]
    wanted: dict[str, tuple[object, object]] = {
        "parameters": (facts.parameters, task.parameters),
        "dtype of the weights": (facts.weight_dtype, "float32"),
        "dtype of the products": (facts.compute_dtype, DTYPES[task.precision]),
        "tokens of a step": (facts.tokens_per_step, tokens.numel()),
        "checksum of the first tokens": (facts.tokens_checksum, checksum(tokens)),
        "largest gradient norm": (facts.clip, task.optimizer["clip"]),
        "torch": (facts.versions.get("torch"), torch_version),
    }
    found = [f"{what}: {has}, not {should}" for what, (has, should) in wanted.items() if has != should]
    expected = math.log(task.model["vocab_size"])
    if not abs(first_loss - expected) < LOSS_TOLERANCE * expected:
        found.append(f"first loss: {first_loss:.4f}, not within {LOSS_TOLERANCE:.0%} of {expected:.4f}")
    return found


class Failed(MachineError):
    """A contestant ended, or did not answer; the message has the end of what it printed."""


@dataclass
class Turn:
    """Some steps of one contestant, with the machine to itself."""

    step_seconds: list[float]
    """Each step's, by the clock."""
    processor_seconds: float
    """User and system time of a step, all ranks together."""
    peak_bytes: int
    """Most resident memory during the turn, all ranks together; on an accelerator the allocator's."""
    peak_flops: float
    """FLOP/s of a matrix product on the idle machine: the mean of before and after the turn."""
    loss: float


@dataclass
class Start:
    """From the start of the program to the end of its first step, seconds."""

    seconds: float
    parts: dict[str, float]
    """What it took until each mark after the one before it."""
    graphs: int
    """Graphs compiled, those found in the cache not counted."""


@dataclass
class Result:
    """What was measured of one contestant."""

    name: str
    task: Task
    facts: Facts
    first_loss: float
    starts: list[Start] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    live_bytes: int = 0
    """Most bytes of live tensors in a step, all ranks together."""


def contestant_name(peer: str, task: Task) -> str:
    """Such as ``ours compiled tp2`` or ``ours recompute=full``."""
    axes = {axis: getattr(task.layout, axis) for axis in AXIS_NAMES}
    layout = "".join(f" {axis}{size}" for axis, size in axes.items() if size > 1)
    zero = f" zero={task.zero}" if task.zero != 1 else ""
    bits = f" state_bits={task.state_bits}" if task.state_bits != 32 else ""
    again = f" recompute={task.recompute}" if task.recompute != "none" else ""
    return f"{peer}{' compiled' if task.mode == 'compiled' else ''}{layout}{zero}{bits}{again}"


class Contestant:
    """A started program that waits for its turns. Use it in a ``with`` block: it is ended with it."""

    def __init__(self, peer: Peer, python: Path, task: Task) -> None:
        """Starts the program and waits for its first step. Raises Failed."""
        self.name = contestant_name(peer.name, task)
        self._folder = tempfile.mkdtemp(prefix="bench-")
        try:
            ready = self._first_answer(peer, python, task)
        except Failed:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self.facts, self.first_loss = Facts(**ready["facts"]), float(ready["loss"])
        marks = {"start": self.task.started, **ready["marks"]}
        moments = sorted(marks.items(), key=lambda mark: mark[1])
        parts = {name: moment - earlier for (_, earlier), (name, moment) in zip(moments, moments[1:], strict=False)}
        self.start = Start(marks["first_step"] - self.task.started, parts, ready["graphs"])

    def _first_answer(self, peer: Peer, python: Path, task: Task) -> dict[str, Any]:
        """Starts the program; returns what it reports after its first step."""
        self._output = Path(self._folder) / "output"
        Path(task.cache).mkdir(parents=True, exist_ok=True)
        with Listener(str(Path(self._folder) / "socket"), "AF_UNIX") as listener, open(self._output, "wb") as output:
            self.task = replace(task, address=str(listener.address), started=time.time())
            variables = {
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": str(task.threads),
                "TORCHINDUCTOR_CACHE_DIR": task.cache,  # torch may have set this process's
            }
            self._process = subprocess.Popen(
                [str(python), "-m", peer.program, self.task.to_json()],
                cwd=self._folder,  # whatever a peer leaves
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            self._connection = self._accept(listener)
        return self._answer()

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None and not exception[0]:
            self._tell(steps=0)
        try:
            self._process.wait(0 if exception[0] else 30)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its ranks die with it
            self._process.wait()
        self._connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def train(self, steps: int) -> dict[str, Any]:
        """Trains ``steps`` steps; returns what worker.py measured."""
        self._tell(steps=steps)
        return self._answer()

    def live_bytes(self) -> int:
        """Most bytes of live tensors during one more step, which is watched and slow."""
        self._tell(steps=1, watch=True)
        return int(self._answer()["live_bytes"])

    def _tell(self, steps: int, watch: bool = False) -> None:
        self._connection.send_bytes(json.dumps({"steps": steps, "watch": watch}).encode())

    def _accept(self, listener: Listener) -> Connection:
        socket = listener._listener._socket  # type: ignore[attr-defined]  # a Listener can't be waited for otherwise
        end = time.monotonic() + FIRST_STEP_SECONDS
        while not wait([socket], timeout=1.0):
            if self._process.poll() is not None or time.monotonic() > end:
                raise self._failed()
        return listener.accept()

    def _answer(self) -> dict[str, Any]:
        try:
            if self._connection.poll(FIRST_STEP_SECONDS):
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
                return answer
        except (EOFError, ConnectionError):
            pass
        raise self._failed()

    def _failed(self) -> Failed:
        self._process.kill()
        status = self._process.wait()
        text = self._output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
        return Failed(f"{self.name} ended with status {status}:\n" + "\n".join(f"    {line}" for line in text))


@dataclass(frozen=True)
class Course:
    """How a cell is run."""

    rounds: int
    """Turns of each contestant; none leaves it at the start."""
    steps: int
    """Steps of a turn."""
    cold: bool
    """Whether each contestant is started once with an empty cache of compiled graphs before it competes."""
    peak: Callable[[], float]
    """Measures FLOP/s of a matrix product on the machine, which is idle then."""
    advance: Callable[[str], None]
    """Is told what comes next: rounds + 2 times for each contestant."""
    left_out: dict[str, str]
    """Takes the contestants that fail or do other work, with the reason."""


def compete(entries: Sequence[tuple[Peer, Path, Task]], course: Course) -> list[Result]:
    """The contestants of one cell: starts each alone and warms it up, then gives them their turns.

    All stay in memory between their turns, asleep.
    """
    running: list[tuple[Contestant, Result]] = []
    with ExitStack() as stack:
        for peer, python, task in entries:
            name = contestant_name(peer.name, task)
            course.advance(f"{name} starts")
            starts = []
            try:
                if course.cold:
                    shutil.rmtree(task.cache, ignore_errors=True)
                    with Contestant(peer, python, task) as first:
                        starts.append(first.start)
                contestant = stack.enter_context(Contestant(peer, python, task))
            except Failed as failed:
                course.left_out[name] = str(failed)
                continue
            if found := unfair(task, contestant.facts, contestant.first_loss, torch.__version__):
                course.left_out[name] = f"does other work than its task says: {'; '.join(found)}"
                continue
            starts.append(contestant.start)
            if course.rounds:
                contestant.train(WARM_UP_STEPS)
            running.append((contestant, Result(name, contestant.task, contestant.facts, contestant.first_loss, starts)))
        before = course.peak()
        for number in range(course.rounds):
            for contestant, result in running:
                course.advance(f"{result.name}, round {number + 1}")
                contestant.train(WAKING_STEPS)
                told = contestant.train(course.steps)
                after = course.peak()
                result.turns.append(Turn(**told, peak_flops=(before + after) / 2))
                before = after
        for contestant, result in running if course.rounds else ():
            course.advance(f"{result.name}, memory")
            result.live_bytes = contestant.live_bytes()
    return [result for _, result in running]


def is_ours(name: str) -> bool:
    """Whether a contestant is this project, in any mode and layout."""
    return name.split()[0] == OURS
