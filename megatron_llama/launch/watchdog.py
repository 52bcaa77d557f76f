"""Turns a hang into a failure that can be debugged: which rank is in which phase, all stacks, and who is to blame.

Ranks note their phases (system/phase.py). The process that started the ranks of a machine watches them; a rank that
torchrun or srun has started watches itself. Watchers in several processes reach each other through the store where they
met (job_store.py), and one of them tells all.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from time import monotonic, sleep
from typing import Protocol

from megatron_llama.devices import request_collectives
from megatron_llama.launch.job_store import Board
from megatron_llama.launch.run_dir import report_to_batch_script
from megatron_llama.launch.supervise import POLL_SECONDS, report
from megatron_llama.system import phase
from megatron_llama.system.exit_status import EXIT_FAILED
from megatron_llama.system.phase import Phase
from megatron_llama.system.tables import text_table

# Between two looks no more than this counts: when a job was suspended (Ctrl-Z, a virtual machine that was moved), its
# watcher was too, and no rank has lost time.
_LONGEST_LOOK_SECONDS = 5.0
_ANSWER_SECONDS = 5.0
_STOPPED = "it is stopped (by SIGSTOP or a debugger)"
_SILENT = "it does not answer"
_LAST_HEARD = "it does not answer, and was last heard of there"


class Watched(Protocol):
    """A rank, as its watcher sees it."""

    number: int
    ended: bool

    @property
    def phase(self) -> Phase:
        """What it does."""

    @property
    def awaited(self) -> str:
        """The collective in which it waits for others; empty where it does not."""

    @property
    def stopped(self) -> bool:
        """Whether the system says that it is stopped."""

    def request_stacks(self) -> None:
        """Has it write its stacks, if it still can."""

    def stacks(self) -> str:
        """What it has written."""


@dataclass(frozen=True)
class Position:
    """Where a rank was when its watcher gave up."""

    rank: int
    phase: int
    """The phase's number."""
    name: str
    seconds: float | None
    """In this phase; None where that is not known."""
    fault: str = ""
    """Why it can't go on by itself; empty where it can."""
    stacks: str = ""
    ended: bool = False
    awaited: str = ""
    """The collective in which it waits for others, such as "tp all_reduce"."""
    host: str = ""


class Hang(Exception):
    """No progress; the message is the report. ``shown_elsewhere``: another process prints more."""

    def __init__(self, text: str, shown_elsewhere: bool = False) -> None:
        super().__init__(text)
        self.shown_elsewhere = shown_elsewhere


_TO_END_SECONDS = 3.0
"""How long who has told the report may take to end."""


class Watch:
    """Looks after the ranks of one machine, or one rank after itself. Each may be in a phase for ``limit_seconds``
    times the phase's patience; None: for ever."""

    def __init__(
        self, ranks: Sequence[Watched], world_size: int, limit_seconds: float | None, board: Board | None = None
    ) -> None:
        self.ranks, self.world_size, self.limit, self.board = ranks, world_size, limit_seconds, board
        self._clock, self._last, self._next_word = 0.0, monotonic(), 0.0
        self._entered: dict[int, tuple[int, float]] = {}

    def wait(self, seconds: float) -> None:
        """Sleeps, then looks. Raises Hang."""
        sleep(seconds)
        if self.limit is None:
            return
        now = monotonic()
        self._clock += min(now - self._last, _LONGEST_LOOK_SECONDS)
        self._last = now
        running = [rank for rank in self.ranks if not rank.ended]
        # All are looked at: each look notes who has entered a new phase.
        late = [rank for rank in running if self._seconds(rank) > self.limit * rank.phase.patience]
        if late or self._others_have_given_up(running):
            self._give_up(running)

    def _seconds(self, rank: Watched) -> float:
        """How long the rank has been in its phase."""
        number, since = self._entered.get(rank.number, (-1, 0.0))
        if number != rank.phase.number:
            self._entered[rank.number] = rank.phase.number, self._clock
            return 0.0
        return self._clock - since

    def _others_have_given_up(self, running: Sequence[Watched]) -> bool:
        """Asks the board, now and then."""
        if self.board is None or self.limit is None or self._clock < self._next_word or not self.board.answers:
            return False
        self._next_word = self._clock + min(10.0, self.limit / 4)
        return self.board.alarmed(_as_text([self._position(rank) for rank in running]))

    def _give_up(self, running: Sequence[Watched]) -> None:
        positions = self._examine(running)
        positions += [self._position(rank) for rank in self.ranks if rank.ended]
        if self.board is not None:
            gathered = self.board.gather(_as_text(positions))
            if gathered is None:
                where = "; ".join(f"rank {position.rank} is in {position.name}" for position in positions)
                raise Hang(f"No progress: {where}. Another rank tells where all are.", shown_elsewhere=True)
            answers, notes = gathered
            positions = [position for text in answers.values() for position in _of_text(text)]
            positions += [position for text in notes.values() for position in _of_text(text, _LAST_HEARD)]
            if not self.board.answers:
                lost = "The store where the ranks met does not answer: the process that hosts it is stopped or lost"
                raise Hang(f"{describe(positions, self.world_size)}\n{lost}: {self.board.host}.")
        raise Hang(describe(positions, self.world_size))

    def _examine(self, ranks: Sequence[Watched]) -> list[Position]:
        """Where the ranks are, with the stacks of those that still write them."""
        for rank in ranks:
            rank.request_stacks()
        recorders = {rank.number: device for rank in ranks if (device := request_collectives(rank.number))}
        for _ in range(round(_ANSWER_SECONDS / POLL_SECONDS)):
            recorded = all(device.last_collectives(number) for number, device in recorders.items())
            if recorded and all(rank.stopped or rank.stacks() for rank in ranks):
                break
            sleep(POLL_SECONDS)
        sleep(POLL_SECONDS)  # stacks are not written in one call
        found = []
        for rank in ranks:
            stacks = rank.stacks()
            fault = _STOPPED if rank.stopped else "" if stacks else _SILENT
            if device := recorders.get(rank.number):
                if last := device.last_collectives(rank.number):
                    stacks = f"{stacks}\n\nIts last collectives, the first of them finished:\n{last}".strip()
                device.remove_recordings(rank.number)
            found.append(self._position(rank, self._seconds(rank), fault, stacks))
        return found

    @staticmethod
    def _position(rank: Watched, seconds: float | None = None, fault: str = "", stacks: str = "") -> Position:
        now, host = rank.phase, socket.gethostname()
        return Position(rank.number, now.number, now.name, seconds, fault, stacks, rank.ended, rank.awaited, host)


class ThisProcess:
    """The rank that this process is, for its own watch."""

    ended, stopped = False, False

    def __init__(self, number: int) -> None:
        self.number = number
        self._file = tempfile.TemporaryFile()

    @property
    def phase(self) -> Phase:
        return phase.current()

    @property
    def awaited(self) -> str:
        return phase.awaited()

    def request_stacks(self) -> None:
        faulthandler.dump_traceback(self._file, all_threads=True)

    def stacks(self) -> str:
        self._file.seek(0)
        return self._file.read().decode(errors="replace").strip()


def watch_this_process(rank: int, world_size: int, limit_seconds: float | None, board: Board) -> None:
    """Watches this process, a rank that torchrun or srun has started, from a thread until it ends; a hang ends it.

    Where all ranks are stopped nobody is left to notice; then only the limit of the job ends them."""
    if limit_seconds is None:
        return
    watch = Watch([ThisProcess(rank)], world_size, limit_seconds, board)

    def look() -> None:
        try:
            while True:
                watch.wait(min(1.0, limit_seconds / 10))
        except Hang as hang:
            hold_back(hang, board)
            tell(hang, board)
            if rank == 0:
                report_to_batch_script(EXIT_FAILED)
            os._exit(EXIT_FAILED)

    threading.Thread(target=look, name="watchdog", daemon=True).start()


def hold_back(hang: Hang, board: Board | None) -> None:
    """Lets the process with the full report be the first to end: who ends first is taken for the cause. Between its
    report and its end it ends its ranks, of which one may be stopped."""
    if board is not None and hang.shown_elsewhere:
        board.wait_until_told()
        sleep(_TO_END_SECONDS)


def tell(hang: Hang, board: Board | None) -> None:
    """Prints the report as the last thing on stderr."""
    report(f"\n{hang}")
    if board is not None and not hang.shown_elsewhere:
        board.tell()


def culprits(positions: Sequence[Position]) -> list[Position]:
    """Who is to blame: the ranks that can't go on by themselves, else those that are furthest behind."""
    running = [position for position in positions if not position.ended]
    behind = min(position.phase for position in running)
    return [position for position in running if position.fault] or [p for p in running if p.phase == behind]


def describe(positions: Sequence[Position], world_size: int) -> str:
    """All stacks, a table of where the ranks are and what they wait for, and last who is to blame."""
    known = {position.rank: position for position in positions}
    everybody = [known.get(rank) or Position(rank, -1, "unknown", None, _SILENT) for rank in range(world_size)]
    lines = [f"Rank {position.rank}'s stacks:\n\n{position.stacks}\n" for position in everybody if position.stacks]
    rows = [("rank", "host", "phase", "for", "waits in", "state")]
    for position in everybody:
        seconds = "" if position.seconds is None else f"{position.seconds:.0f} s"
        state = "it has ended" if position.ended else position.fault or "it runs"
        rows.append((str(position.rank), position.host, position.name, seconds, position.awaited, state))
    blamed = culprits(everybody)
    lines += [*text_table(rows), ""]
    if len(blamed) == world_size > 1 and not blamed[0].fault:
        # Where one does not wait, the table says which: it may be at work, or the cause.
        in_which = _waits(blamed, "they wait") if all(position.awaited for position in blamed) else ""
        return "\n".join([*lines, f"All {world_size} ranks failed: no progress in {blamed[0].name}{in_which}"])
    several = len({position.host for position in everybody} - {""}) > 1
    waiting = _waits([position for position in everybody if position not in blamed], "others wait for it")
    for position in blamed:
        fault = position.fault or ("it runs" if world_size == 1 else "it runs, and the others are further")
        seconds = "" if position.seconds is None else f" for {position.seconds:.0f} s"
        where = f"{position.name} on {position.host}" if several and position.host else position.name
        lines.append(f"Rank {position.rank} of {world_size} failed: no progress{seconds} in {where}; {fault}{waiting}")
    return "\n".join(lines)


def _waits(positions: Sequence[Position], who: str) -> str:
    """The end of a sentence about the collectives in which ranks wait; empty where none is known to."""
    found = list(dict.fromkeys(position.awaited for position in positions if position.awaited))
    return f"; {who} in {' and '.join(found)}" if found else ""


def _as_text(positions: Sequence[Position]) -> str:
    return json.dumps([asdict(position) for position in positions])


def _of_text(text: str, fault: str = "") -> list[Position]:
    try:
        positions = [Position(**fields) for fields in json.loads(text)]
    except (ValueError, TypeError, RecursionError):  # not written by this program; who wrote nothing else has no answer
        return []
    return [replace(position, fault=position.fault or fault) for position in positions]
