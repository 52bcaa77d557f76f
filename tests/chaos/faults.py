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
from tests.chaos.attempts import POLL_SECONDS, RANKS, SAVED_EVERY, STEPS, Attempt, cut
from tests.chaos.interposer import DISK_ERRORS, Interposer

NEWEST = STEPS - SAVED_EVERY
"""The checkpoint that a run with a damaged file begins with; one more is left."""
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


def harm(path: Path, chance: random.Random) -> str:
    """Damages a file; says how."""
    content = bytearray(path.read_bytes())
    size = len(content)
    position, how = chance.randrange(size + 1), chance.choice(("flip", "flip", "cut", "insert", "zeros", "empty"))
    if how == "flip" and position < size:
        bit = chance.randrange(8)
        content[position] ^= 1 << bit
        what = f"bit {bit} of byte {position:,} turned over"
    elif how == "insert":
        new = chance.randbytes(chance.randint(1, 16))
        content[position:position] = new
        what = f"{len(new)} bytes put in at {position:,}"
    elif how == "zeros":
        count = min(chance.choice((1, 512, 4096)), size - position)
        content[position : position + count] = bytes(count)
        what = f"{count} bytes from {position:,} set to zero"
    else:
        position = 0 if how == "empty" else position
        del content[position:]
        what = f"cut off at byte {position:,} of {size:,}"
    path.write_bytes(content)
    return f"{path.name}: {what}"


HANG_SECONDS = 8
"""trainer.hang_timeout_seconds of a run whose ranks are to wait for one another in vain."""


@dataclass
class Fault:
    """What was done, and what the run may do about it."""

    what: str
    statuses: frozenset[int]
    """Exit statuses that are right; -9 and the like for the signal that ended the first process."""
    tracebacks: int = 0
    """At most so many may be printed: the failing rank's own."""
    says: tuple[str, ...] = ()
    """Where it fails (status 1), each of these is said."""
    seconds: float = 60.0
    """Within which it must have ended."""
    saved: bool = False
    """With status 75, its last step is saved."""


def _moment(attempt: Attempt, chance: random.Random) -> str | None:
    """Waits for a random moment of the attempt; says which, or None where the run has ended before."""
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
    """kill -9 of the starter, of one rank, or of all processes."""
    whom = chance.choice(("starter", "rank", "all"))
    moment = _moment(attempt, chance)
    ranks = attempt.ranks()
    if moment is None or (whom == "rank" and not ranks):
        return None
    number = chance.randrange(len(ranks)) if ranks else 0
    pids = {"starter": [attempt.pid], "rank": ranks[number : number + 1], "all": attempt.processes()}[whom]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if whom == "rank":
        return Fault(f"kill -9 of rank {number} {moment}", frozenset({0, 1}), says=("was killed", "SIGKILL"))
    return Fault(f"kill -9 of {whom} {moment}", frozenset({0, -signal.SIGKILL}))


def term(attempt: Attempt, chance: random.Random, _: Interposer | None) -> Fault | None:
    """A signal that asks for an end: to the starter alone, or to all processes, as a terminal sends it."""
    number = chance.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT))
    group, moment = chance.random() < 0.5, _moment(attempt, chance)
    if moment is None:
        return None
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(attempt.pid, number)
    early = {128 + number, -number}  # before the ranks have handlers, nothing is to be saved
    statuses = {0, 130} if number == signal.SIGINT else {0, 75, *early}
    what = f"{number.name} to {'all processes' if group else 'the starter'} {moment}"
    return Fault(what, frozenset(statuses), saved=True)


def stop(attempt: Attempt, chance: random.Random, _: Interposer | None) -> Fault | None:
    """SIGSTOP of one rank: the run must find out, name the rank, and end."""
    moment = _moment(attempt, chance)
    ranks = attempt.ranks()
    if moment is None or not ranks:
        return None
    number = chance.randrange(len(ranks))
    with contextlib.suppress(ProcessLookupError):
        os.kill(ranks[number], signal.SIGSTOP)
    says = (f"Rank {number} of {RANKS[attempt.life.layout]} failed", "it is stopped")
    return Fault(f"SIGSTOP of rank {number} {moment}", frozenset({0, 1}), 0, says, PATIENT * HANG_SECONDS + 60)


def pause(attempt: Attempt, chance: random.Random, _: Interposer | None) -> Fault | None:
    """Ctrl-Z and fg: all processes stop for a while and go on; nothing comes of it."""
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
    """From a random write on, the run's folder is full, read-only, or broken."""
    assert interposer is not None, "the campaign leaves this kind out without it"
    name, moment = chance.choice(list(DISK_ERRORS)), _moment(attempt, chance)
    if moment is None:
        return None
    after = chance.choice((0, chance.randrange(20), chance.randrange(400)))
    interposer.disk_fails(attempt.life.folder, DISK_ERRORS[name], after)
    what = f"{name} from {after} writes on {moment}"
    return Fault(what, frozenset({0, 1, 2}), 0, (os.strerror(DISK_ERRORS[name]),), 90)


def garbage(attempt: Attempt, chance: random.Random, _: Interposer | None) -> Fault | None:
    """Strangers connect to every port that the run listens at; nothing comes of it."""
    moment, ports = _moment(attempt, chance), attempt.listening()
    if moment is None or not ports:
        return None
    texts = (b"", b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(64), b"\0" * 4096, b"\xff" * 9, chance.randbytes(100_000))
    held, sent = [], 0
    for host, port in ports:
        with contextlib.suppress(OSError):
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            held.append(socket.create_connection((host, port), timeout=1))
            held[-1].sendall(chance.choice(texts))
            sent += 1
    time.sleep(chance.uniform(0, 0.2))
    for connection in held:
        connection.close()
    return Fault(f"garbage to {sent} of {len(ports)} ports {moment}", frozenset({0}))


def drop(attempt: Attempt, chance: random.Random, _: Interposer | None) -> Fault | None:
    """One of the run's connections breaks."""
    moment, found = _moment(attempt, chance), attempt.connections()
    if moment is None or not found or not cut(*chance.choice(found)):
        return None
    return Fault(f"1 of {len(found)} connections cut {moment}", frozenset({0, 1}), 1, (), PATIENT * HANG_SECONDS + 60)


def clock(attempt: Attempt, chance: random.Random, interposer: Interposer | None) -> Fault | None:
    """The time of day jumps, forth or back; nothing comes of it."""
    assert interposer is not None, "the campaign leaves this kind out without it"
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
