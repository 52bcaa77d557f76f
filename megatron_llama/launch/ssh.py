"""launch.hosts: starts this program once on each host over ssh; there it starts the ranks of that host.

The line to each is its standard input: a word on it is a signal to pass on, its end means that this process has gone.
"""

from __future__ import annotations

import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from megatron_llama.config import Config, ConfigError, Host, Problem, hostfile_hosts, listed_hosts
from megatron_llama.devices import variable_prefixes
from megatron_llama.launch.process_context import NODE, NODES, RUN_ID, SLOTS, free_port_of
from megatron_llama.launch.rank_process import WATCHED
from megatron_llama.plan import Plan
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESTART, EXIT_USER

# Variables that go along to the hosts; what else they need comes from their own login environment.
FORWARDED = (*variable_prefixes(), *"FI_ GLOO_ LD_LIBRARY_PATH MASTER_ MKL_ OMP_ PYTHON RDMAV_ TORCH UCX_".split())
# After the first host that ended badly: the others may have a word to say, the cause among them.
GRACE_SECONDS = 1.5
INTERRUPT_GRACE_SECONDS = 4.0
RESTART_GRACE_SECONDS = 60.0
_POLL_SECONDS = 0.1
_WORDS_KEPT = 200


@dataclass
class Remote:
    """One host's part of the run, as it is seen from here."""

    host: Host
    process: subprocess.Popen[bytes]
    words: deque[str] = field(default_factory=lambda: deque(maxlen=_WORDS_KEPT))
    """Its last lines on stderr."""
    begun: bytes = b""
    """A line that has not ended yet."""
    ended_at: float | None = None

    @property
    def bad(self) -> bool:
        """Ended, and neither done nor saved."""
        return self.ended_at is not None and self.process.returncode not in (0, EXIT_RESTART)


def asked_for(config: Config) -> bool:
    """Whether ranks are to be started on other machines."""
    return bool(config.launch.hosts) or config.launch.hostfile is not None


def hosts_of(config: Config) -> list[Host]:
    """The hosts that the config names, the good ones where a rule will speak of the others. Raises ConfigError for a
    hostfile that can't be used."""
    launch = config.launch
    if launch.hosts or launch.hostfile is None:
        return listed_hosts(launch.hosts)
    try:
        return hostfile_hosts(Path(launch.hostfile).read_text(encoding="utf-8"))
    except OSError as error:
        rule, instead = f"it can't be read: {error.strerror}", "write its path, or launch.hosts=[a,b]"
    except ValueError as error:
        rule, instead = str(error), "correct it; each host has a line 'name slots=N'"
    raise ConfigError([Problem("launch.hostfile", launch.hostfile, rule, instead)])


def start_on_hosts(plan: Plan, overrides: Sequence[str]) -> int:
    """Starts the run on its hosts and waits for it; returns the exit status of the whole."""
    hosts = hosts_of(plan.config)
    ssh = shlex.split(plan.config.launch.ssh)
    common = _environment(hosts, f"{time.time_ns():x}")
    # The folder must be the same on all; resume=never was about the first start, which this need not be.
    settled = [("run.dir", plan.config.run.dir), ("checkpoint.resume", plan.config.checkpoint.resume)]
    command = [sys.executable, os.path.abspath(sys.argv[0]), *overrides, *(_override(*pair) for pair in settled)]
    with _Signals() as signals:
        for number, host in enumerate(hosts):
            line = _command_line(command, common | {NODE: str(number)})
            try:
                signals.remotes.append(_start([*ssh, host.name, line], host))
            except OSError as error:
                _end(signals.remotes)
                rule = f"this command can't be started: {error.strerror}"
                raise ConfigError([Problem("launch.ssh", plan.config.launch.ssh, rule, "write another")]) from error
        try:
            _watch(signals.remotes, signals)
        finally:
            _end(signals.remotes)
        return _verdict(signals.remotes, signals)


def obey_starter(end: Callable[[], None]) -> None:
    """On a host: passes signals on that come down the line from ``start_on_hosts``, and calls ``end`` with its end."""

    def listen() -> None:
        for word in sys.stdin:
            os.kill(os.getpid(), signal.Signals[word.strip()])
        end()

    threading.Thread(target=listen, name="starter's line", daemon=True).start()


def _override(name: str, value: str | None) -> str:
    """An override with a text of any kind, in Hydra's quotes."""
    text = re.sub(r"(\\+)(?='|$)", r"\1\1", str(value)).replace("'", "\\'")
    return f"{name}='{text}'"


def _environment(hosts: Sequence[Host], run_id: str) -> dict[str, str]:
    """What the process on each host is told, but for its own number."""
    forwarded = {name: value for name, value in os.environ.items() if name.startswith(tuple(FORWARDED))}
    slots = ",".join(str(host.slots) for host in hosts if host.slots is not None)
    return {
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(free_port_of(os.getpid(), time.time_ns())),
        "PYTHONUNBUFFERED": "1",
        **forwarded,
        NODES: str(len(hosts)),
        SLOTS: slots,
        RUN_ID: run_id,
    }


def _command_line(command: Sequence[str], environment: dict[str, str]) -> str:
    """What a host's shell is to run: the same command in the same folder."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *variables, *command])}"


def _start(command: list[str], host: Host) -> Remote:
    # A session of its own: Ctrl-C comes to the hosts down their line, once, and ssh lives to bring back the answer.
    return Remote(
        host,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=None, stderr=subprocess.PIPE, bufsize=0, start_new_session=True
        ),
    )


class _Signals:
    """This process's answer to signals while the hosts run: pass them on."""

    def __init__(self) -> None:
        self.remotes: list[Remote] = []
        self.interrupted_at: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._receive) for number in WATCHED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.interrupted_at is None:
            self.interrupted_at = time.monotonic()
        for remote in self.remotes:
            _write(remote, f"{signal.Signals(number).name}\n".encode())


def _write(remote: Remote, words: bytes) -> None:
    assert remote.process.stdin is not None
    try:
        remote.process.stdin.write(words)
    except (OSError, ValueError):  # it has ended
        pass


def _watch(remotes: Sequence[Remote], signals: _Signals) -> None:
    """Shows what the hosts say; returns when all have ended or the rest has to be ended."""
    deadline = float("inf")
    with selectors.DefaultSelector() as selector:
        for remote in remotes:
            assert remote.process.stderr is not None
            os.set_blocking(remote.process.stderr.fileno(), False)
            selector.register(remote.process.stderr, selectors.EVENT_READ, remote)
        while any(remote.ended_at is None for remote in remotes) and time.monotonic() < deadline:
            for key, _ in selector.select(_POLL_SECONDS):
                if not _show(key.data, key.data is remotes[0]):
                    selector.unregister(key.fileobj)
            for remote in remotes:
                if remote.ended_at is None and remote.process.poll() is not None:
                    remote.ended_at = time.monotonic()
                    if remote.process.returncode != 0:
                        grace = GRACE_SECONDS if remote.bad else RESTART_GRACE_SECONDS
                        deadline = min(deadline, remote.ended_at + grace)
            if signals.interrupted_at is not None:
                deadline = min(deadline, signals.interrupted_at + INTERRUPT_GRACE_SECONDS)
        for remote in remotes:
            _show(remote, remote is remotes[0])


def _show(remote: Remote, is_first: bool) -> bool:
    """Passes on what the host has said since, with its name but for the first one's; False at the end of it."""
    stream: IO[bytes] | None = remote.process.stderr
    assert stream is not None
    words = stream.read(1 << 16)
    if words is None:  # nothing yet
        return True
    *lines, remote.begun = (remote.begun + words).split(b"\n")
    if not words and remote.begun:
        lines, remote.begun = [*lines, remote.begun], b""
    for line in (part.decode(errors="replace") for part in lines):
        remote.words.append(line)
        sys.stderr.write(line + "\n" if is_first else f"[{remote.host.name}] {line}\n")
    sys.stderr.flush()
    return bool(words)


def _end(remotes: Sequence[Remote]) -> None:
    """Ends what still runs: without its line a host's process ends itself and its ranks; then ssh."""
    for remote in remotes:
        assert remote.process.stdin is not None
        remote.process.stdin.close()
    limit = time.monotonic() + 2.0
    for remote in remotes:
        try:
            remote.process.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            remote.process.kill()
            remote.process.wait()


def _verdict(remotes: Sequence[Remote], signals: _Signals) -> int:
    """The exit status of the whole; where it is not good, the host that ended first has the last word."""
    if signals.interrupted_at is not None:
        sys.stderr.write("Stopped by SIGINT.\n")
        return EXIT_INTERRUPTED
    bad = [remote for remote in remotes if remote.bad]
    if not bad:
        unfinished = any(remote.ended_at is None or remote.process.returncode for remote in remotes)
        return EXIT_RESTART if unfinished else 0
    cause = min(bad, key=lambda remote: remote.ended_at or 0.0)
    status = cause.process.returncode
    said = "\n".join(cause.words).strip()
    sys.stderr.write(f"\nHost {cause.host.name} ended first, with status {status}, and the others with it.\n")
    sys.stderr.write(f"Its last words:\n\n{said}\n" if said else "It said nothing.\n")
    return status if status == EXIT_USER else EXIT_FAILED
