"""Rendezvous before the start: each process reports to process 0, so wrong addresses give an error instead of a hang.

The store is a ``torch.distributed.TCPStore``: torchrun's, or one that process 0 hosts at MASTER_ADDR and MASTER_PORT.
The ranks use the same store for their process groups.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from megatron_llama.config import ConfigError, Problem
from megatron_llama.launch.environment import ProcessContext, addresses_of, interface_of, is_loopback, local_address_to
from megatron_llama.launch.job_store import SECRET, Board, JobStore, LaunchFailed, StoreLost
from megatron_llama.launch.start_log import has_loaded
from megatron_llama.launch.supervise import WATCHED
from megatron_llama.system.exit_status import EXIT_FAILED
from megatron_llama.system.signals import exit_with_parent
from megatron_llama.system.tables import text_table

# Starting Python on 1,000 nodes from one disk takes minutes; a missing route is detected sooner.
ARRIVAL_LIMIT_SECONDS = 300.0
NO_ROUTE_LIMIT_SECONDS = 30.0
_CONNECT_SECONDS, _RETRY_SECONDS = 5.0, 0.2
_CONNECT_LIMIT_SECONDS = 60.0  # torch resolves the host name of each client, up to 1,000
_CHECK_SECONDS = 2.0  # interval of checks for problems during a wait


@dataclass(frozen=True)
class NodeInfo:
    """Report of a process about itself."""

    number: int
    """Rank among the launched processes."""
    node: int
    name: str
    """Host name."""
    first_rank: int
    ranks: int
    """Ranks that the process is or starts."""
    world_size: int
    """Ranks in all, as this process counts."""
    address: str
    interface: str | None
    processes: int = 1
    """Processes in all, as its launcher reports."""
    pid: int = field(default_factory=os.getpid)
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random id of the process, different in each attempt."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.name}"


@dataclass(frozen=True)
class StartMessage:
    """Start message of process 0 to all processes."""

    run_dir: str
    restarted: bool
    """Whether an earlier attempt of this launch has loaded the state from which the run resumes."""
    tokens: tuple[str, ...]
    """Tokens of all processes by number: a process whose token is missing ignores the message."""

    @property
    def attempt(self) -> str:
        """Unique id of this attempt."""
        return self.tokens[0]


class Rendezvous:
    """Rendezvous of the processes of a launch: process 0 gathers all reports, then sends the start message."""

    def __init__(
        self,
        context: ProcessContext,
        limit_seconds: float = ARRIVAL_LIMIT_SECONDS,
        secret: str = "",
        listener: socket.socket | None = None,
        forks: bool = False,
    ) -> None:
        """Connect to the store, or host it.

        Args:
            limit_seconds: All processes must arrive within this time.
            secret: The job's secret, which authenticates the messages; empty: no authentication.
            listener: Bound socket of process 0, closed here; default: one on MASTER_ADDR and MASTER_PORT.
            forks: Host the store in a separate process, so that ranks forked from this one inherit no thread.

        Raises:
            ConfigError: Address or port cannot be used.
            LaunchFailed: Process 0 cannot be reached.
        """
        check_first_address(context)
        from torch.distributed import TCPStore

        self._context, self._limit = context, limit_seconds
        self._attempt = ""
        self._secret = bool(secret)
        self._listens: str | None = None

        host, port = context.master_addr, context.master_port
        if context.rank == 0 and not context.has_store:
            listener = listener or listen(context)
            host, port = listener.getsockname()[:2]
            everywhere = ipaddress.ip_address(host).is_unspecified
            self._listens = "all addresses" if everywhere else host
            host = "127.0.0.1" if everywhere else host  # connect to its listening address

        def connect() -> Any:
            if listener is None:
                return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_CONNECT_LIMIT_SECONDS))
            with listener:
                file = os.dup(listener.fileno())
                return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=file)

        if listener is not None and forks:
            _fork_store(connect)
            listener.close()
            listener = None  # this process connects as a client
        if context.rank > 0 and not context.has_store:
            wait_until_reachable(context, limit_seconds)
        try:
            self._store = JobStore(connect, f"{context.job}/{context.launcher}", secret, _CONNECT_LIMIT_SECONDS)
        except StoreLost as error:
            raise LaunchFailed(
                f"port {context.master_port} of {context.master_addr} does not belong to process 0 of this job "
                f"({error}); if another program uses it, set MASTER_PORT to a free port, equal on all nodes"
            ) from error

    def report(self, local: NodeInfo) -> None:
        """Store this process's report for process 0."""
        self._local = local
        self._store.set(f"report/{local.number}", json.dumps(asdict(local)))

    def gather(self) -> list[NodeInfo]:
        """On process 0: wait for all reports and return them by number.

        Raises:
            LaunchFailed: Reports are missing after the time limit.
            ConfigError: Two processes have one number, or the processes count different numbers of processes.
        """
        reports: dict[int, NodeInfo] = {}
        deadline = time.monotonic() + self._limit
        for number in range(self._context.world_size):
            while (node := self._read_report(number, _next_timeout(deadline))) is None and time.monotonic() < deadline:
                self._check_problem()
            if node is not None:  # otherwise the error below lists all missing processes
                reports[number] = node
                self._check_count(node)
        self._check_problem()
        if len(reports) < self._context.world_size:
            raise self._missing(reports.values())
        return list(reports.values())

    def agree_on_run_dir(self, run_dir: str) -> tuple[str, bool]:
        """On process 0: return the run folder, and whether torchrun restarts a run that had loaded its state."""
        earlier, began = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0", 0.0
        if self._context.has_store:  # a restart keeps the folder of the first attempt
            earlier, run_dir = self._store.get("run.dir") is not None, self._store.set_default("run.dir", run_dir)
            began = float(self._store.set_default("began", f"{time.time():.3f}"))
        return run_dir, earlier and has_loaded(Path(run_dir), since=began)

    def open(self, nodes: Sequence[NodeInfo], run_dir: str, restarted: bool = False) -> StartMessage:
        """On process 0: send the start message; return when all processes have confirmed it. Raises as ``gather``.

        torchrun restarts ranks with one store, which may have entries of earlier attempts. A report is current once its
        process has confirmed this attempt's token.
        """
        tokens = [node.token for node in nodes]
        deadline = time.monotonic() + self._limit
        unconfirmed = set(range(1, len(nodes)))
        while True:
            start = StartMessage(run_dir, restarted, tuple(tokens))
            self._store.set("open", json.dumps(asdict(start)))
            for number in sorted(unconfirmed):
                if self._store.wait(f"answer/{number}", _next_timeout(deadline)) == start.attempt:
                    unconfirmed.remove(number)
                elif (node := self._read_report(number, 0.1)) is not None and node.token != tokens[number]:
                    if not self._context.has_store:
                        self._reject(duplicate_rank(number, node, nodes[number]))
                    tokens[number] = node.token
            if not unconfirmed:
                self._attempt = start.attempt
                return start
            if time.monotonic() > deadline:
                raise self._missing([node for node in nodes if node.number not in unconfirmed])
            self._check_problem()

    def wait(self, check: Callable[[str], Problem | None] = lambda run_dir: None) -> StartMessage:
        """On other processes: wait for the start message.

        Args:
            check: Returns the problem of the run folder on this node, if any.

        Raises:
            StoreLost: Process 0 has ended.
            LaunchFailed: The time limit is exceeded.
            ConfigError: As ``gather``, or ``check`` has found a problem on a node.
        """
        local, deadline = self._local, time.monotonic() + self._limit
        while time.monotonic() < deadline:
            start = read_start_message(self._store.wait("open", _next_timeout(deadline)))
            if start is not None and start.tokens[local.number : local.number + 1] == (local.token,):
                if problem := check(start.run_dir):
                    self._reject(problem)
                self._store.set(f"answer/{local.number}", start.attempt)
                self._attempt = start.attempt
                return start
            if not self._context.has_store:  # a new store has no entries of earlier attempts
                if (first := self._read_report(0, 0.1)) is not None:
                    self._check_count(first)
                other = self._read_report(local.number, 0.1)
                if start is not None or (other is not None and other.token != local.token):
                    self._reject(duplicate_rank(local.number, local, other))
            self._check_problem()
            time.sleep(_RETRY_SECONDS)
        message = f"process 0 did not start within {self._limit:g} s: it, or a process that it waits for, is stopped"
        forged = f"; a message without this job's {SECRET} was ignored" if self._store.forged else ""
        raise LaunchFailed(message + forged)

    def _read_report(self, number: int, seconds: float) -> NodeInfo | None:
        """Return the report of process ``number``, if a valid one arrives within ``seconds``."""
        begin = time.monotonic()
        node = read_report(self._store.wait(f"report/{number}", seconds))
        if node is not None and node.number == number:
            return node
        # An invalid value is returned without a wait.
        time.sleep(max(0.0, min(seconds, _RETRY_SECONDS) - (time.monotonic() - begin)))
        return None

    def _missing(self, reports: Collection[NodeInfo]) -> LaunchFailed:
        """Return the error of processes that are not among ``reports`` at the time limit."""
        count, forged, numbers = self._context.world_size, len(self._store.forged), {node.number for node in reports}
        missing = [number for number in range(count) if number not in numbers]
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        arrived = ", ".join(dict.fromkeys(node.name for node in reports))
        kind = "nodes" if self._context.one_per_node else "ranks"
        message = f"{kind} {shown} of {count} missing after {self._limit:g} s; arrived: {arrived or 'none'}"
        return LaunchFailed(message + (f"; ignored {forged} reports without this job's {SECRET}" if forged else ""))

    def _check_count(self, other: NodeInfo) -> None:
        """Reject a process that counts another number of processes than this one."""
        if other.processes != self._context.world_size:
            local = f"{self._context.world_size} on rank {self._context.rank} ({self._local})"
            rule = f"differs: {local}, {other.processes} on rank {other.number} ({other})"
            self._reject(Problem("WORLD_SIZE", None, rule, "launch all ranks with one command"))

    def _reject(self, problem: Problem) -> NoReturn:
        """Store the problem for the other processes, and raise ConfigError."""
        self._store.set("problem", json.dumps([problem.field, problem.value, problem.rule, problem.instead]))
        raise ConfigError([problem])

    def _check_problem(self) -> None:
        """Raise the ConfigError of another process, if any."""
        if (text := self._store.get("problem")) is None:
            return
        try:
            name, value, rule, instead = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            return
        raise ConfigError([Problem(str(name), value, str(rule), str(instead))])

    def describe_security(self) -> str:
        """Describe the listening address and the authentication."""
        listens = f"Process 0 listens on {self._listens}. " if self._listens else ""
        if self._secret:
            return f"{listens}Messages carry an HMAC with {SECRET}."
        return f"{listens}{SECRET} is not set:\nany process that reaches the port can join (SECURITY.md)."

    def board(self) -> Board:
        """Open the board on which the watchdogs report hangs."""
        context = self._context
        host = "torchrun's first agent" if context.has_store else "rank 0 or its launcher"
        return Board(self._store.clone(self._attempt), context.rank, context.world_size, host)


def _fork_store(host: Callable[[], Any]) -> None:
    """Fork a process that hosts the store until this process ends."""
    launcher = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # the ranks may save after a signal
    if os.fork() == 0:
        try:
            exit_with_parent(launcher)
            store = host()  # serves in a thread
            while store is not None:
                signal.pause()
        finally:
            os._exit(EXIT_FAILED)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def check_first_address(context: ProcessContext) -> None:
    """Raise ConfigError if the first node's address is unknown on this node, or resolves to this node itself.

    Several torchrun "nodes" may share a machine: then the loopback is valid, and the agent's store answers there.
    """
    if context.nodes == 1:
        return
    instead = "set MASTER_ADDR to a name or address of the first node that other nodes can reach"
    try:
        addresses = addresses_of(context.master_addr)
    except OSError as error:
        rule = f"node {context.node} ({socket.gethostname()}) cannot resolve it: {error.strerror}"
        raise ConfigError([Problem("MASTER_ADDR", context.master_addr, rule, instead)]) from error
    # The first node may resolve its own name to 127.0.1.1 (Debian); only the other nodes must reach it.
    wrong = is_loopback(context.master_addr) if context.node == 0 else all(map(is_loopback, addresses))
    if wrong and not (context.has_store and _accepts_connections(context)):
        rule = f"resolves to the loopback {addresses[0]} on node {context.node} ({socket.gethostname()})"
        raise ConfigError([Problem("MASTER_ADDR", context.master_addr, rule, instead)])


def _accepts_connections(context: ProcessContext) -> bool:
    try:
        socket.create_connection((context.master_addr, context.master_port), _CONNECT_LIMIT_SECONDS).close()
    except OSError:
        return False
    return True


def listen(context: ProcessContext) -> socket.socket:
    """Open the port of process 0, only on the address of MASTER_ADDR if possible."""
    addresses = addresses_of(context.master_addr)
    # A loopback name (Debian's 127.0.1.1) or the address of a router cannot be used: then listen on all.
    usable = addresses and (context.nodes == 1 or not is_loopback(addresses[0]))
    return _listen_on(addresses[0] if usable else "", context)


def _listen_on(address: str, context: ProcessContext) -> socket.socket:
    """Open the port on ``address``; on all addresses if it is empty or not of this machine. Raises ConfigError."""
    backlog, port = max(128, 2 * context.world_size), context.master_port
    try:
        if not address and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=backlog)
    except OSError as error:
        if address and error.errno == errno.EADDRNOTAVAIL:
            return _listen_on("", context)
        rule = f"the first node ({socket.gethostname()}) cannot listen on it: {error.strerror}"
        instead = "set MASTER_PORT to a free port, equal on all nodes (or two processes have RANK=0)"
        raise ConfigError([Problem("MASTER_PORT", context.master_port, rule, instead)]) from error


def wait_until_reachable(context: ProcessContext, limit_seconds: float) -> None:
    """Wait until process 0, which may start later, accepts a connection. Raises LaunchFailed."""
    begin = time.monotonic()
    while True:
        try:
            socket.create_connection((context.master_addr, context.master_port), timeout=_CONNECT_SECONDS).close()
            return
        except OSError as error:
            # Refused: the machine is up, the process has not started.
            refused = isinstance(error, ConnectionRefusedError)
            if time.monotonic() - begin > (limit_seconds if refused else NO_ROUTE_LIMIT_SECONDS):
                raise LaunchFailed(
                    f"node {context.node} ({socket.gethostname()}) cannot reach the first node at "
                    f"{context.master_addr}, port {context.master_port}: {error.strerror or error}"
                ) from error
        time.sleep(_RETRY_SECONDS)


def _next_timeout(deadline: float) -> float:
    """Return the timeout of the next wait, in seconds."""
    return min(_CHECK_SECONDS, max(0.1, deadline - time.monotonic()))


def node_info(context: ProcessContext, first_rank: int, ranks: int, world_size: int) -> NodeInfo:
    """Return this process's report. The first node gets its address from the reports of the others."""
    try:
        address = local_address_to(context.master_addr)
    except OSError:
        address = ""  # connecting reports the error
    return NodeInfo(
        number=context.rank,
        node=context.node,
        name=socket.gethostname(),
        first_rank=first_rank,
        ranks=ranks,
        world_size=world_size,
        address=address,
        interface=interface_of(address) if address else None,
        processes=context.world_size,
    )


def check_consistent(reports: Sequence[NodeInfo]) -> list[NodeInfo]:
    """Return all reports, with the first node's address as seen by the others.

    Raises LaunchFailed if the processes count different numbers of ranks.
    """
    first = reports[0]
    odd = [node for node in reports if node.world_size != first.world_size]
    if odd:
        raise LaunchFailed(
            f"{odd[0].name} has {odd[0].ranks} ranks (world size {odd[0].world_size}), {first.name} has "
            f"{first.ranks} (world size {first.world_size}). Nodes must have the same number of devices; else write "
            "launch.hosts=[HOST:RANKS,...]"
        )
    others = [node for node in reports if node.node != 0 and node.address]
    if not others:
        return list(reports)
    address = local_address_to(others[0].address)
    interface = interface_of(address)
    return [replace(node, address=address, interface=interface) if node.node == 0 else node for node in reports]


def node_table(reports: Sequence[NodeInfo], context: ProcessContext) -> str:
    """Format a table of the nodes: ranks, address, interface."""
    rows = [("node", "name", "ranks", "address", "interface")]
    # Sorted by rank: a round-robin launcher gives a machine several rows.
    for (number, name), group in groupby(sorted(reports, key=lambda n: n.first_rank), lambda n: (n.node, n.name)):
        here = list(group)
        first, last = here[0].first_rank, here[-1].first_rank + here[-1].ranks - 1
        ranks = f"{first}-{last}" if last > first else f"{first}"
        rows.append((str(number), name, ranks, here[0].address, here[0].interface or "unknown"))
    return "\n".join([*text_table(rows), f"Rendezvous at {context.master_addr}, port {context.master_port}."]) + "\n"


def duplicate_rank(number: int, one: NodeInfo, other: NodeInfo | None) -> Problem:
    """Return the problem of two processes with one rank."""
    rule = f"two processes have this rank: {one} and {'another' if other is None else other}"
    return Problem("RANK", number, rule, "launch all ranks with one command, or set a different RANK for each")


def read_start_message(text: str | None) -> StartMessage | None:
    """Parse the start message; None if ``text`` is missing or invalid."""
    try:
        fields = json.loads(text or "")
        return StartMessage(str(fields["run_dir"]), bool(fields["restarted"]), tuple(map(str, fields["tokens"])))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def read_report(text: str | None) -> NodeInfo | None:
    """Parse a report; None if ``text`` is missing or invalid."""
    try:
        node = NodeInfo(**json.loads(text or ""))
    except (ValueError, TypeError, RecursionError):
        return None
    numbers = (node.number, node.node, node.first_rank, node.ranks, node.world_size, node.processes, node.pid)
    words = (node.name, node.address, node.interface or "", node.token)
    return node if all(type(n) is int for n in numbers) and all(type(word) is str for word in words) else None
