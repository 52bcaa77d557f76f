"""Hang watchdog: ends a job without progress, and reports each rank's phase, its stacks, and the culprit rank.

Ranks record their phases (system/phase.py). The launcher of a machine watches its ranks; a rank of torchrun or srun
watches itself. Watchdogs exchange their states on the board in the job's store (job_store.py); one prints the report.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
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

# Maximum time counted between two polls: a suspended job (Ctrl-Z, VM migration) also suspends its watchdog.
_MAX_POLL_SECONDS = 5.0
_SHOWN_SECONDS = 10.0
_ANSWER_SECONDS = 5.0
_STOPPED = "it is stopped (by SIGSTOP or a debugger)"
_SILENT = "it does not answer"
_LAST_HEARD = "it does not answer; last seen there"


class WatchedRank(Protocol):
    """A rank under a watchdog."""

    number: int

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""

    @property
    def phase(self) -> Phase:
        """Current phase."""

    @property
    def awaited(self) -> str:
        """Collective in which the rank waits; empty if none."""

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped."""

    def request_stacks(self) -> None:
        """Request the stacks of all threads."""

    def stacks(self) -> str:
        """Stacks written so far."""


@dataclass(frozen=True)
class RankState:
    """State of a rank at the time of a hang."""

    rank: int
    phase: int
    """Number of the phase."""
    name: str
    seconds: float | None
    """Seconds in this phase; None if unknown."""
    fault: str = ""
    """Why the rank cannot continue by itself; empty if it runs."""
    stacks: str = ""
    ended: bool = False
    awaited: str = ""
    """Collective in which the rank waits, such as "tp all_reduce"."""
    host: str = ""


class Hang(Exception):
    """No progress. The message is the report; ``shown_elsewhere``: another process prints the full report."""

    def __init__(self, text: str, shown_elsewhere: bool = False) -> None:
        super().__init__(text)
        self.shown_elsewhere = shown_elsewhere


_TO_END_SECONDS = 3.0
"""Time for the process with the full report to end."""


class Watchdog:
    """Watches the ranks of a machine, or the own rank. A phase may last ``limit_seconds`` times its patience.

    None: no limit.
    """

    def __init__(
        self, ranks: Sequence[WatchedRank], world_size: int, limit_seconds: float | None, board: Board | None = None
    ) -> None:
        self.ranks, self.world_size, self.limit, self.board = ranks, world_size, limit_seconds, board
        self._clock, self._last, self._next_post = 0.0, monotonic(), 0.0
        self._entered: dict[int, tuple[int, float]] = {}
        self._trains, self._first_step, self._shown = False, "", -1

    def wait(self, seconds: float) -> None:
        """Sleep, then check the ranks. Raises Hang."""
        sleep(seconds)
        now = monotonic()
        self._clock += min(now - self._last, _MAX_POLL_SECONDS)
        self._last = now
        running = [rank for rank in self.ranks if not rank.ended]
        self._show_start(running)
        if self.limit is None:
            return
        # Check all ranks: _seconds also records new phases.
        late = [rank for rank in running if self._seconds(rank) > self.limit * rank.phase.patience]
        if late or self._is_alarm_raised(running):
            self._raise_hang(running)

    def _show_start(self, running: Sequence[WatchedRank]) -> None:
        """Show rank 0's phase once if it takes long and the first step has not ended, which would print a line."""
        first = next((rank for rank in running if rank.number == 0), None)
        if first is None or self._trains:
            return
        current, seconds = first.phase, self._seconds(first)
        if current.name.startswith("step "):
            self._trains, self._first_step = self._first_step not in ("", current.name), current.name
        if seconds >= _SHOWN_SECONDS and current.number > self._shown and not self._trains:
            self._shown = current.number
            sys.stderr.write(f"rank 0: {current.name}, {seconds:.0f} s so far\n")
            sys.stderr.flush()

    def _seconds(self, rank: WatchedRank) -> float:
        """Return the seconds of the rank in its phase."""
        number, since = self._entered.get(rank.number, (-1, 0.0))
        if number != rank.phase.number:
            self._entered[rank.number] = rank.phase.number, self._clock
            return 0.0
        return self._clock - since

    def _is_alarm_raised(self, running: Sequence[WatchedRank]) -> bool:
        """Post the local states to the board at intervals; return whether another watchdog has raised the alarm."""
        if self.board is None or self.limit is None or self._clock < self._next_post or not self.board.answers:
            return False
        self._next_post = self._clock + min(10.0, self.limit / 4)
        return self.board.post_note(_to_json([self._state(rank) for rank in running]))

    def _raise_hang(self, running: Sequence[WatchedRank]) -> None:
        states = self._collect_states(running)
        states += [self._state(rank) for rank in self.ranks if rank.ended]
        if self.board is not None:
            gathered = self.board.gather(_to_json(states))
            if gathered is None:
                phases = "; ".join(f"rank {state.rank} is in {state.name}" for state in states)
                raise Hang(f"No progress: {phases}. See another rank's report.", shown_elsewhere=True)
            answers, notes = gathered
            states = [state for text in answers.values() for state in _from_json(text)]
            states += [state for text in notes.values() for state in _from_json(text, _LAST_HEARD)]
            if not self.board.answers:
                lost = f"The rendezvous store does not answer: its host ({self.board.host}) is stopped or lost."
                raise Hang(f"{describe(states, self.world_size)}\n{lost}")
        raise Hang(describe(states, self.world_size))

    def _collect_states(self, ranks: Sequence[WatchedRank]) -> list[RankState]:
        """Return the states of the ranks, with stacks if they answer."""
        for rank in ranks:
            rank.request_stacks()
        recorders = {rank.number: recorder for rank in ranks if (recorder := request_collectives(rank.number))}
        for _ in range(round(_ANSWER_SECONDS / POLL_SECONDS)):
            recorded = all(recorder.collectives(number) for number, recorder in recorders.items())
            if recorded and all(rank.stopped or rank.stacks() for rank in ranks):
                break
            sleep(POLL_SECONDS)
        sleep(POLL_SECONDS)  # stacks are written in several calls
        states = []
        for rank in ranks:
            stacks = rank.stacks()
            fault = _STOPPED if rank.stopped else "" if stacks else _SILENT
            if recorder := recorders.get(rank.number):
                if last := recorder.collectives(rank.number):
                    stacks = f"{stacks}\n\nLast collectives, the first of them finished:\n{last}".strip()
                recorder.remove_recordings(rank.number)
            states.append(self._state(rank, self._seconds(rank), fault, stacks))
        return states

    @staticmethod
    def _state(rank: WatchedRank, seconds: float | None = None, fault: str = "", stacks: str = "") -> RankState:
        now, host = rank.phase, socket.gethostname()
        return RankState(rank.number, now.number, now.name, seconds, fault, stacks, rank.ended, rank.awaited, host)


class ThisProcess:
    """This process as a WatchedRank."""

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
    """Watch this process, a rank of torchrun or srun, in a thread; a hang ends the process.

    If all ranks are stopped, no watchdog runs: only the job's time limit ends them.
    """
    if limit_seconds is None:
        return
    watchdog = Watchdog([ThisProcess(rank)], world_size, limit_seconds, board)

    def run() -> None:
        try:
            while True:
                watchdog.wait(min(1.0, limit_seconds / 10))
        except Hang as hang:
            wait_for_full_report(hang, board)
            print_report(hang, board)
            if rank == 0:
                report_to_batch_script(EXIT_FAILED)
            os._exit(EXIT_FAILED)

    threading.Thread(target=run, name="watchdog", daemon=True).start()


def wait_for_full_report(hang: Hang, board: Board | None) -> None:
    """Wait until the process with the full report has ended: launchers take the first end for the cause."""
    if board is not None and hang.shown_elsewhere:
        board.wait_until_reported()
        sleep(_TO_END_SECONDS)


def print_report(hang: Hang, board: Board | None) -> None:
    """Print the report last on stderr."""
    report(f"\n{hang}")
    if board is not None and not hang.shown_elsewhere:
        board.mark_reported()


def culprits(states: Sequence[RankState]) -> list[RankState]:
    """Return the culprits: ranks with a fault, otherwise ranks in the earliest phase."""
    running = [state for state in states if not state.ended]
    earliest = min(state.phase for state in running)
    return [s for s in running if s.fault] or [s for s in running if s.phase == earliest]


def describe(states: Sequence[RankState], world_size: int) -> str:
    """Format the hang report: stacks, a table of all ranks, and last the culprit ranks."""
    known = {state.rank: state for state in states}
    ranks = [known.get(rank) or RankState(rank, -1, "unknown", None, _SILENT) for rank in range(world_size)]
    lines = [f"Stacks of rank {state.rank}:\n\n{state.stacks}\n" for state in ranks if state.stacks]
    rows = [("rank", "host", "phase", "for", "waits in", "state")]
    for state in ranks:
        seconds = "" if state.seconds is None else f"{state.seconds:.0f} s"
        status = "ended" if state.ended else state.fault or "runs"
        rows.append((str(state.rank), state.host, state.name, seconds, state.awaited, status))
    blamed = culprits(ranks)
    lines += [*text_table(rows), ""]
    if len(blamed) == world_size > 1 and not blamed[0].fault:
        # If a rank does not wait, the table shows it: it works, or it is the cause.
        waits = _describe_waits(blamed, "they wait") if all(state.awaited for state in blamed) else ""
        return "\n".join([*lines, f"All {world_size} ranks failed: no progress in {blamed[0].name}{waits}"])
    several = len({state.host for state in ranks} - {""}) > 1
    waiting = _describe_waits([state for state in ranks if state not in blamed], "others wait for it")
    for state in blamed:
        fault = state.fault or ("it runs" if world_size == 1 else "it runs, behind the others")
        seconds = "" if state.seconds is None else f" for {state.seconds:.0f} s"
        where = f"{state.name} on {state.host}" if several and state.host else state.name
        lines.append(f"Rank {state.rank} of {world_size} failed: no progress{seconds} in {where}; {fault}{waiting}")
    return "\n".join(lines)


def _describe_waits(states: Sequence[RankState], subject: str) -> str:
    """Return a clause with the collectives in which the ranks wait; empty if none is known."""
    awaited = list(dict.fromkeys(state.awaited for state in states if state.awaited))
    return f"; {subject} in {' and '.join(awaited)}" if awaited else ""


def _to_json(states: Sequence[RankState]) -> str:
    return json.dumps([asdict(state) for state in states])


def _from_json(text: str, fault: str = "") -> list[RankState]:
    try:
        states = [RankState(**fields) for fields in json.loads(text)]
    except (ValueError, TypeError, RecursionError):  # not written by this program
        return []
    return [replace(state, fault=state.fault or fault) for state in states]
