"""launch.hosts: runs this program once per host over ssh; each process starts the ranks of its host.

Standard input of the remote process is the control line. The first word is the job's secret; each further word is a
signal to forward; its end means that the local process has ended.
"""

from __future__ import annotations

import os
import secrets
import select
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.hostfile import Host
from megatron_llama.config.problems import write_override
from megatron_llama.devices import variable_prefixes
from megatron_llama.launch.environment import NODE, NODES, RUN_ID, SLOTS, port_for
from megatron_llama.launch.job_store import LaunchFailed
from megatron_llama.launch.start_log import RESTARTS, STARTED, command_of_process
from megatron_llama.launch.supervise import Child, Grace, Signals, supervise, with_restarts
from megatron_llama.plan import Plan
from megatron_llama.system.errors import program, reason_of
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESTART, EXIT_USER
from megatron_llama.system.interrupts import signal_name
from megatron_llama.system.rerun_command import COMMAND

# Prefixes of variables that are forwarded to the hosts, in addition to their login environment.
FORWARDED_VARIABLES = (
    *variable_prefixes(),
    *"FI_ GLOO_ LD_LIBRARY_PATH MASTER_ MKL_ OMP_ PYTHON RDMAV_ TORCH UCX_".split(),
)
# Longer than on one machine: the hosts' launchers wait for their ranks first.
GRACE = Grace(fault=1.5, restart=60.0, interrupt=4.0)


@dataclass
class Remote(Child):
    """The ssh process of one host."""

    host: Host
    process: subprocess.Popen[bytes]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    """Last lines of stderr."""
    partial_line: bytes = b""
    ended_at: float = 0.0

    def poll(self) -> bool:
        if self.ended or self.process.poll() is None:
            return False
        self.status, self.ended_at = self.process.returncode, time.monotonic()
        return True

    def send(self, number: int) -> None:
        self.write(signal.Signals(number).name)

    def write(self, word: str) -> None:
        """Send a word on the control line."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):  # the process has ended
            self.process.stdin.write(f"{word}\n".encode())

    def show_output(self, prefix: str) -> bool:
        """Print new stderr output of the host; return False at its end."""
        assert self.process.stderr is not None
        text = self.process.stderr.read(1 << 16)
        if text is None:  # nothing yet
            return True
        *lines, self.partial_line = (self.partial_line + text).split(b"\n")
        if not text and self.partial_line:
            lines, self.partial_line = [*lines, self.partial_line], b""
        for line in (part.decode(errors="replace") for part in lines):
            self.lines.append(line)
            sys.stderr.write(f"{prefix}{line}\n")
        sys.stderr.flush()
        return bool(text)


def run_on_hosts(plan: Plan, hosts: Sequence[Host], overrides: Sequence[str]) -> int:
    """Run the plan on the hosts, with restarts if configured; return the exit status."""
    received = set[int]()
    return with_restarts(plan, lambda: _run_once(plan, hosts, overrides, received), received)


def _run_once(plan: Plan, hosts: Sequence[Host], overrides: Sequence[str], received: set[int]) -> int:
    common = _environment(hosts, f"{time.time_ns():x}")
    # All hosts use one run folder. checkpoint.resume may have changed from "never" since the first start.
    fixed = [("run.dir", plan.config.run.dir), ("checkpoint.resume", plan.config.checkpoint.resume)]
    words = program()
    words = words if words[0] == "-m" else [os.path.abspath(words[0])]
    command = [sys.executable, *words, *overrides, *(write_override(*pair) for pair in fixed)]
    remotes: list[Remote] = []
    # Sent on the control line: other users of the hosts can read command lines.
    secret = secrets.token_hex(32)
    with Signals(received) as signals:
        try:
            for number, host in enumerate(hosts):
                # The same command in the same folder. ssh runs in a new session: Ctrl-C is forwarded once, on the
                # control line, and ssh stays alive for the host's output.
                variables = [f"{name}={value}" for name, value in (common | {NODE: str(number)}).items()]
                line = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *variables, *command])}"
                remotes.append(Remote(host, _start(plan, host.name, line)))
                remotes[-1].write(secret)
                signals.add(remotes[-1])
            _watch(remotes, signals)
        finally:
            _end(remotes)
        return _exit_status(remotes, signals)


def _start(plan: Plan, *arguments: str) -> subprocess.Popen[bytes]:
    try:
        command = [*shlex.split(plan.config.launch.ssh), *arguments]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, start_new_session=True
        )
    except (OSError, ValueError) as error:  # no such program; an unclosed quote
        rule = f"cannot start the command: {reason_of(error)}"
        raise ConfigError([Problem("launch.ssh", plan.config.launch.ssh, rule, "write launch.ssh=COMMAND")]) from error


@cache
def read_secret() -> str:
    """On a host: read the job's secret, the first word on the control line."""
    word = sys.stdin.readline().strip()
    if not word:
        raise LaunchFailed("no secret on stdin: the launching command ended, or its ssh does not forward stdin")
    return word


def follow_control_line(end: Callable[[], None]) -> None:
    """On a host: forward signals from the control line; call ``end`` when it closes."""

    def listen() -> None:
        for word in sys.stdin:
            os.kill(os.getpid(), signal.Signals[word.strip()])
        end()

    threading.Thread(target=listen, name="control line", daemon=True).start()


def control_line_closed(descriptor: int = 0) -> bool:
    """On a host: return whether the launcher has closed the control line. Reads nothing."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    return any(event & (select.POLLRDHUP | select.POLLHUP) for _, event in poll.poll(0))


def _environment(hosts: Sequence[Host], run_id: str) -> dict[str, str]:
    """Return the variables of the process on each host, without its index."""
    return {
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(port_for(os.getpid(), time.time_ns())),
        "PYTHONUNBUFFERED": "1",
        **{name: value for name, value in os.environ.items() if name.startswith(tuple(FORWARDED_VARIABLES))},
        NODES: str(len(hosts)),
        SLOTS: ",".join(str(host.slots) for host in hosts if host.slots is not None),
        RUN_ID: run_id,
        **{name: os.environ[name] for name in (COMMAND, RESTARTS) if name in os.environ},
        STARTED: command_of_process(),
    }


def _watch(remotes: Sequence[Remote], signals: Signals) -> None:
    """Print the hosts' output (with a host prefix, except the first host) until ``supervise`` returns."""
    prefixes = {id(remote): "" if remote is remotes[0] else f"[{remote.host.name}] " for remote in remotes}
    with selectors.DefaultSelector() as selector:
        for remote in remotes:
            assert remote.process.stderr is not None
            os.set_blocking(remote.process.stderr.fileno(), False)
            selector.register(remote.process.stderr, selectors.EVENT_READ, remote)

        def show(seconds: float) -> None:
            if not selector.get_map():  # all outputs are closed; select would not wait
                time.sleep(seconds)
            for key, _ in selector.select(seconds) if selector.get_map() else []:
                if not key.data.show_output(prefixes[id(key.data)]):
                    selector.unregister(key.fileobj)

        supervise(remotes, signals, GRACE, wait=show)
        for remote in remotes:
            remote.show_output(prefixes[id(remote)])


def _end(remotes: Sequence[Remote]) -> None:
    """End the hosts' processes by closing their control lines; kill ssh after 2 s."""
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


def _exit_status(remotes: Sequence[Remote], signals: Signals) -> int:
    """Return the exit status; after a failure print the output of the first failed host."""
    if signals.ends_at_once or any(remote.process.returncode == EXIT_INTERRUPTED for remote in remotes):
        sys.stderr.write(f"Stopped by {signal_name(signal.SIGINT)}.\n")
        return EXIT_INTERRUPTED
    bad = [remote for remote in remotes if remote.status not in (None, 0, EXIT_RESTART)]
    if not bad:
        return 0 if all(remote.status == 0 for remote in remotes) else EXIT_RESTART
    cause = min(bad, key=lambda remote: remote.ended_at)
    status, text = cause.status, "\n".join(cause.lines).strip()
    hint = f", ssh's own: correct the name, or let `ssh {cause.host.name} true` succeed without a password"
    sys.stderr.write(f"\nHost {cause.host.name} failed first, with exit status {status}{hint * (status == 255)}.\n")
    sys.stderr.write(f"Last output:\n\n{text}\n" if text else "It has no output.\n")
    return status if status == EXIT_USER else EXIT_FAILED
