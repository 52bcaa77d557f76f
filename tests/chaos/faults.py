"""Faults in a run that trains, and damage to the files of a run that has ended.

Each fault waits for a moment, acts, and returns the permitted outcomes.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_llama.system.phase import PATIENT
from tests.chaos.attempts import POLL_SECONDS, SAVED_EVERY, STEPS, Attempt, cut
from tests.chaos.interposer import DISK_ERRORS, Interposer

NEWEST = STEPS - SAVED_EVERY
"""Step of the newest checkpoint of a run with a damaged file; one older checkpoint exists."""
# Kinds of files, by patterns below a folder that holds a run in run/ and its dataset in data/.
DAMAGED_FILES = {
    "shard": f"run/checkpoints/step_{NEWEST:08d}/*.safetensors",
    "checkpoint.json": f"run/checkpoints/step_{NEWEST:08d}/checkpoint.json",
    "latest": "run/checkpoints/latest",
    "metrics.jsonl": "run/metrics.jsonl",
    "config.yaml": "run/config.yaml",
    "plan.txt": "run/plan.txt",
    "TensorBoard": "run/tensorboard/*",
    ".idx": "data/*.idx",
    ".bin": "data/*.bin",
}


def damage_file(path: Path, chance: random.Random) -> str:
    """Damage a file; return a description."""
    content = bytearray(path.read_bytes())
    size = len(content)
    position, how = chance.randrange(size + 1), chance.choice(("flip", "flip", "cut", "insert", "zeros", "empty"))
    if how == "flip" and position < size:
        bit = chance.randrange(8)
        content[position] ^= 1 << bit
        description = f"bit {bit} of byte {position:,} turned over"
    elif how == "insert":
        new = chance.randbytes(chance.randint(1, 16))
        content[position:position] = new
        description = f"{len(new)} bytes put in at {position:,}"
    elif how == "zeros":
        count = min(chance.choice((1, 512, 4096)), size - position)
        content[position : position + count] = bytes(count)
        description = f"{count} bytes from {position:,} set to zero"
    else:
        position = 0 if how == "empty" else position
        del content[position:]
        description = f"cut off at byte {position:,} of {size:,}"
    path.write_bytes(content)
    return f"{path.name}: {description}"


HANG_SECONDS = 8
"""trainer.hang_timeout_seconds of runs with a fault that causes a hang."""


@dataclass
class Fault:
    """An injected fault and the permitted reactions of the run."""

    description: str
    statuses: frozenset[int]
    """Permitted exit statuses; negative for the signal that ended the launcher."""
    tracebacks: int = 0
    """Maximum number of printed tracebacks."""
    messages: tuple[str, ...] = ()
    """Texts that the output must contain if the run fails with status 1."""
    seconds: float = 60.0
    """Maximum time until the run ends."""
    saved: bool = False
    """Whether the last step must be saved if the status is 75."""


def _moment(attempt: Attempt, chance: random.Random) -> str | None:
    """Wait for a random time of the attempt; return its description, or None if the run has ended."""
    kind = chance.choice(("start", "step", "save", "end"))
    first = min(attempt.life.newest_checkpoint() + 1, STEPS)
    target = STEPS if kind == "end" else chance.randint(first, STEPS)
    if kind == "start":
        time.sleep(chance.uniform(0, 2.0))
    while kind != "start" and attempt.runs and attempt.step < target:
        time.sleep(POLL_SECONDS)
    if kind == "save":
        while attempt.runs and attempt.step < STEPS and not attempt.life.saving():
            time.sleep(POLL_SECONDS)
    time.sleep(chance.uniform(0, {"start": 0.0, "step": 0.03, "save": 0.01, "end": 0.2}[kind]))
    if not attempt.runs:
        return None
    where = f"after step {attempt.step}" if attempt.step else "before a step"
    return f"{where}{', saving' if attempt.life.saving() else ''}"


def kill(attempt: Attempt, chance: random.Random, _: Interposer | None) -> Fault | None:
    """Kill the launcher, one rank, or all processes with SIGKILL."""
    target_process = chance.choice(("launcher", "rank", "all"))
    moment = _moment(attempt, chance)
    ranks = attempt.ranks()
    if moment is None or (target_process == "rank" and not ranks):
        return None
    number = chance.randrange(len(ranks)) if ranks else 0
    pids = {"launcher": [attempt.pid], "rank": ranks[number : number + 1], "all": attempt.processes()}[target_process]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if target_process == "rank":
        return Fault(f"kill -9 of rank {number} {moment}", frozenset({0, 1}), messages=("was killed", "SIGKILL"))
    return Fault(f"kill -9 of {target_process} {moment}", frozenset({0, -signal.SIGKILL}))


def term(attempt: Attempt, chance: random.Random, _: Interposer | None) -> Fault | None:
    """Send a termination signal to the launcher, or to all processes as a terminal does."""
    number = chance.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT))
    group, moment = chance.random() < 0.5, _moment(attempt, chance)
    if moment is None:
        return None
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(attempt.pid, number)
    early = {128 + number, -number}  # before the ranks install handlers there is nothing to save
    statuses = {0, 75, *early}
    return Fault(
        f"{number.name} to {'all processes' if group else 'the launcher'} {moment}", frozenset(statuses), saved=True
    )


def stop(attempt: Attempt, chance: random.Random, _: Interposer | None) -> Fault | None:
    """Stop one rank with SIGSTOP: the run must detect it, report the rank, and end."""
    moment = _moment(attempt, chance)
    ranks = attempt.ranks()
    if moment is None or not ranks:
        return None
    number = chance.randrange(len(ranks))
    with contextlib.suppress(ProcessLookupError):
        os.kill(ranks[number], signal.SIGSTOP)
    messages = (f"Rank {number} of {attempt.life.ranks} failed", "it is stopped")
    return Fault(f"SIGSTOP of rank {number} {moment}", frozenset({0, 1}), 0, messages, PATIENT * HANG_SECONDS + 60)


def pause(attempt: Attempt, chance: random.Random, _: Interposer | None) -> Fault | None:
    """Stop and continue all processes, like Ctrl-Z and fg; the run must not fail."""
    moment = _moment(attempt, chance)
    if moment is None:
        return None
    pids, seconds = attempt.processes(), chance.uniform(0.1, 3)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(seconds if number == signal.SIGSTOP else 0)
    return Fault(f"all stopped for {seconds:.1f} s {moment}", frozenset({0}))


def disk(attempt: Attempt, chance: random.Random, interposer: Interposer | None) -> Fault | None:
    """Make all writes to the run's folder fail after a random number of writes, with one of DISK_ERRORS."""
    assert interposer is not None, "the campaign skips this kind without the interposer"
    name, moment = chance.choice(list(DISK_ERRORS)), _moment(attempt, chance)
    if moment is None:
        return None
    after = chance.choice((0, chance.randrange(20), chance.randrange(400)))
    interposer.disk_fails(attempt.life.folder, DISK_ERRORS[name], after)
    description = f"{name} after {after} writes {moment}"
    return Fault(description, frozenset({0, 1, 2}), 0, (os.strerror(DISK_ERRORS[name]),), 90)


def garbage(attempt: Attempt, chance: random.Random, _: Interposer | None) -> Fault | None:
    """Send garbage to all ports on which the run listens; the run must not fail."""
    moment, ports = _moment(attempt, chance), attempt.listening()
    if moment is None or not ports:
        return None
    texts = (b"", b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(64), b"\0" * 4096, b"\xff" * 9, chance.randbytes(100_000))
    connections_to_ports, sent = [], 0
    for host, port in ports:
        with contextlib.suppress(OSError):
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            connections_to_ports.append(socket.create_connection((host, port), timeout=1))
            connections_to_ports[-1].sendall(chance.choice(texts))
            sent += 1
    time.sleep(chance.uniform(0, 0.2))
    for connection in connections_to_ports:
        connection.close()
    return Fault(f"garbage to {sent} of {len(ports)} ports {moment}", frozenset({0}))


def drop(attempt: Attempt, chance: random.Random, _: Interposer | None) -> Fault | None:
    """Break one of the run's connections."""
    moment, open_connections = _moment(attempt, chance), attempt.connections()
    if moment is None or not open_connections or not cut(*chance.choice(open_connections)):
        return None
    return Fault(
        f"1 of {len(open_connections)} connections cut {moment}", frozenset({0, 1}), 1, (), PATIENT * HANG_SECONDS + 60
    )


def clock(attempt: Attempt, chance: random.Random, interposer: Interposer | None) -> Fault | None:
    """Move the wall clock forward or backward; the run must not fail."""
    assert interposer is not None, "the campaign skips this kind without the interposer"
    moment = _moment(attempt, chance)
    if moment is None:
        return None
    seconds = chance.choice((-1, 1)) * chance.choice((1, 3600, 86_400, 20 * 365 * 86_400))
    interposer.clock_jumps(seconds)
    return Fault(f"the clock jumps by {seconds:+,} s {moment}", frozenset({0}))


Inject = Callable[[Attempt, random.Random, "Interposer | None"], "Fault | None"]
FAULTS: dict[str, Inject] = {
    function.__name__: function for function in (kill, term, stop, pause, disk, garbage, drop, clock)
}
NEED_INTERPOSER = ("disk", "clock")
MAKE_HANG = ("stop", "drop")
