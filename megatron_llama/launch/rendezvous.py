"""Before the start every process reports where it is to the first one: a wrong address is found here, by its name.

Without this a rank that can't reach the others waits in silence. The processes meet at a
``torch.distributed.TCPStore``: torchrun's, or one that the first process hosts at MASTER_ADDR and MASTER_PORT and that
the ranks use afterwards.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from megatron_llama.config import ConfigError, Problem
from megatron_llama.launch.environment import ProcessContext, addresses_of, is_loopback
from megatron_llama.launch.job_store import SECRET, Board, JobStore, LaunchFailed, StoreLost
from megatron_llama.launch.reports import NodeInfo, Opening, read_opening, read_report, same_number

# Starting Python on a thousand nodes from one disk takes minutes; a host without a route is known much sooner.
ARRIVAL_LIMIT_SECONDS = 300.0
NO_ROUTE_LIMIT_SECONDS = 30.0
_CONNECT_SECONDS, _RETRY_SECONDS = 5.0, 0.2
_SPEAK_SECONDS = 60.0  # torch looks up the name of who connects, and there may be a thousand
_LOOK_SECONDS = 2.0  # how often who waits looks whether something is wrong


class Rendezvous:
    """Where the processes of one start meet; the first one gathers the others' reports and then opens the start."""

    def __init__(self, context: ProcessContext, limit_seconds: float = ARRIVAL_LIMIT_SECONDS, secret: str = "") -> None:
        """Connects to the store, or hosts it; all processes must arrive within ``limit_seconds``. With a ``secret``
        (the same for all) nobody without it can pass for one of them.

        Raises ConfigError for an address or port that can't be used, and LaunchFailed where the first process can't be
        reached.
        """
        check_first_address(context)
        from torch.distributed import TCPStore

        self._context, self._limit = context, limit_seconds
        self._attempt = ""
        self._secret = bool(secret)
        self._listens: str | None = None

        def connect() -> Any:
            if context.rank > 0 or context.has_store:
                return TCPStore(context.master_addr, context.master_port, is_master=False)
            with listen(context) as listener:
                host, port, file = listener.getsockname()[0], context.master_port, os.dup(listener.fileno())
                everywhere = ipaddress.ip_address(host).is_unspecified
                self._listens = "all its addresses" if everywhere else f"{host} alone"
                host = "127.0.0.1" if everywhere else host  # it talks to itself where it listens
                return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=file)

        if context.rank > 0 and not context.has_store:
            wait_until_reachable(context, limit_seconds)
        try:
            job = f"{context.job}/{context.launcher}"
            self._store = JobStore(connect, job, secret, _SPEAK_SECONDS)
        except StoreLost as error:
            raise LaunchFailed(
                f"what listens at {context.master_addr}, port {context.master_port}, is not this job's first process "
                f"({error}); if another program has that port, set MASTER_PORT to a free one, the same on all nodes"
            ) from error

    def report(self, mine: NodeInfo) -> None:
        """Leaves this process's report for the first one."""
        self._mine = mine
        self._store.set(f"report/{mine.number}", json.dumps(asdict(mine)))

    def gather(self) -> list[NodeInfo]:
        """For the first process: all reports, in order. Raises LaunchFailed where one does not come in time, and
        ConfigError where two processes have the same number or were told of different numbers of processes."""
        found: dict[int, NodeInfo] = {}
        deadline = time.monotonic() + self._limit
        for number in range(self._context.world_size):
            while (node := self._reported(number, _limited(deadline))) is None and time.monotonic() < deadline:
                self._check_trouble()
            if node is not None:  # else the error names all that are missing
                found[number] = node
                self._check_count(node)
        self._check_trouble()
        if len(found) < self._context.world_size:
            raise LaunchFailed(_missing(self._context, found.values(), self._limit, len(self._store.forged)))
        return list(found.values())

    def agree_on_run_dir(self, run_dir: str) -> tuple[str, bool]:
        """For the first process: the folder that an earlier attempt of the same start has chosen (torchrun starts ranks
        again), else ``run_dir``; and whether there was such an attempt."""
        if not self._context.has_store:
            return run_dir, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        earlier = self._store.get("run.dir") is not None
        return self._store.first("run.dir", run_dir), earlier

    def open(self, nodes: Sequence[NodeInfo], run_dir: str, again: bool = False) -> Opening:
        """For the first process: lets the others continue, and returns once each has heard it. Raises as ``gather``.

        torchrun starts ranks again, and agents join and leave, in one store: what lies there may be of an earlier
        attempt, a report too. A report counts once its process has answered to this process's own token.
        """
        tokens = [node.token for node in nodes]
        deadline = time.monotonic() + self._limit
        silent = set(range(1, len(nodes)))
        while True:
            opening = Opening(run_dir, again, tuple(tokens))
            self._store.set("open", json.dumps(asdict(opening)))
            for number in sorted(silent):
                if self._store.wait(f"answer/{number}", _limited(deadline)) == opening.attempt:
                    silent.remove(number)
                elif (node := self._reported(number, 0.1)) is not None and node.token != tokens[number]:
                    if not self._context.has_store:
                        self._refuse(same_number(number, node, nodes[number]))
                    tokens[number] = node.token
            if not silent:
                self._attempt = opening.attempt
                return opening
            if time.monotonic() > deadline:
                lost = [node for node in nodes if node.number not in silent]
                raise LaunchFailed(_missing(self._context, lost, self._limit, len(self._store.forged)))
            self._check_trouble()

    def wait(self) -> Opening:
        """For the others: what the first process opens the start with. Raises EOFError where that process has ended
        instead, LaunchFailed where it says nothing, and ConfigError as ``gather``."""
        try:
            return self._heard()
        except StoreLost as error:
            raise EOFError(str(error)) from error

    def _heard(self) -> Opening:
        mine, deadline = self._mine, time.monotonic() + self._limit
        while time.monotonic() < deadline:
            opening = read_opening(self._store.wait("open", _limited(deadline)))
            meant = opening is not None and opening.tokens[mine.number : mine.number + 1] == (mine.token,)
            if opening is not None and meant:
                self._store.set(f"answer/{mine.number}", opening.attempt)
                self._attempt = opening.attempt
                return opening
            if not self._context.has_store:  # where nothing of an earlier attempt lies about
                if (first := self._reported(0, 0.1)) is not None:
                    self._check_count(first)
                other = self._reported(mine.number, 0.1)
                if opening is not None or (other is not None and other.token != mine.token):
                    self._refuse(same_number(mine.number, mine, other))
            self._check_trouble()
            time.sleep(_RETRY_SECONDS)
        said = f"the first process has not begun within {self._limit:g} s: it is stopped, or waits for one that is"
        forged = f"; a word came from somebody who has not this job's {SECRET}" if self._store.forged else ""
        raise LaunchFailed(said + forged)

    def _reported(self, number: int, seconds: float) -> NodeInfo | None:
        """The report of this number, if it comes within ``seconds`` and is one."""
        begin = time.monotonic()
        node = read_report(self._store.wait(f"report/{number}", seconds))
        if node is not None and node.number == number:
            return node
        time.sleep(max(0.0, min(seconds, _RETRY_SECONDS) - (time.monotonic() - begin)))  # nonsense comes at once
        return None

    def _check_count(self, other: NodeInfo) -> None:
        """Refuses a process that was told of another number of processes than this one."""
        if other.processes != self._context.world_size:
            here, there = f"{self._context.world_size} to {self._mine}", f"{other.processes} to {other}"
            rule = f"the number of processes is {here} (rank {self._context.rank}), and {there} (rank {other.number})"
            self._refuse(Problem("WORLD_SIZE", None, rule, "start all ranks with one command"))

    def _refuse(self, problem: Problem) -> NoReturn:
        """Tells the others, and raises ConfigError."""
        self._store.set("trouble", json.dumps([problem.field, problem.value, problem.rule, problem.instead]))
        raise ConfigError([problem])

    def _check_trouble(self) -> None:
        """Raises the ConfigError that another process has found."""
        if (found := self._store.get("trouble")) is None:
            return
        try:
            name, value, rule, instead = json.loads(found)
        except (ValueError, TypeError, RecursionError):
            return
        raise ConfigError([Problem(str(name), value, str(rule), str(instead))])

    def openness(self) -> str:
        """Where the first process listens, and whether strangers could pass for one of the job's; one line."""
        where = f"The first listens on {self._listens}. " if self._listens else ""
        who = (
            f"Only who has the job's {SECRET} counts."
            if self._secret
            else (f"There is no {SECRET}: whoever reaches that port can take a node's place (SECURITY.md).")
        )
        return where + who

    def board(self) -> Board:
        """Where the processes tell each other of hangs."""
        context = self._context
        host = "torchrun's first agent" if context.has_store else "rank 0's, or its starter's"
        return Board(self._store.again(self._attempt), context.rank, context.world_size, host)


def check_first_address(context: ProcessContext) -> None:
    """Raises ConfigError, naming this node, where it takes the first node's address for its own or for nothing.

    Several of torchrun's nodes may share a machine, as people try it: then the store of the first one's agent, which is
    there before any rank, answers on the loopback of all of them.
    """
    if context.nodes == 1:
        return
    instead = "set MASTER_ADDR to the first node's name or address as the other nodes know it"
    try:
        addresses = addresses_of(context.master_addr)
    except OSError as error:
        rule = f"node {context.node}, {socket.gethostname()}, finds no address for it: {error.strerror}"
        raise ConfigError([Problem("MASTER_ADDR", context.master_addr, rule, instead)]) from error
    # The first node may well know its own name as 127.0.1.1 (Debian does that): the others are who must reach it.
    wrong = is_loopback(context.master_addr) if context.node == 0 else all(map(is_loopback, addresses))
    if wrong and not (context.has_store and _answers(context)):
        rule = f"on node {context.node}, {socket.gethostname()}, this is {addresses[0]}: every node takes it for itself"
        raise ConfigError([Problem("MASTER_ADDR", context.master_addr, rule, instead)])


def _answers(context: ProcessContext) -> bool:
    try:
        socket.create_connection((context.master_addr, context.master_port), _SPEAK_SECONDS).close()
    except OSError:
        return False
    return True


def listen(context: ProcessContext) -> socket.socket:
    """The first process's port, on the address that the others were told, and on no other where that can be."""
    own = addresses_of(context.master_addr)
    # As a name it may be the loopback here only (Debian's 127.0.1.1), and as an address that of a router: then on all.
    usable = own and (context.nodes == 1 or not is_loopback(own[0]))
    return _listen_on(own[0] if usable else "", context)


def _listen_on(address: str, context: ProcessContext) -> socket.socket:
    """A port on ``address``, on all where it is empty. Where this machine has not that address, on all. Raises
    ConfigError."""
    backlog, port = max(128, 2 * context.world_size), context.master_port
    try:
        if not address and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=backlog)
    except OSError as error:
        if address and error.errno == errno.EADDRNOTAVAIL:
            return _listen_on("", context)
        rule = f"the first node, {socket.gethostname()}, can't listen there: {error.strerror}"
        instead = "set MASTER_PORT to a free port, the same on all nodes; or this is a second process with RANK=0"
        raise ConfigError([Problem("MASTER_PORT", context.master_port, rule, instead)]) from error


def wait_until_reachable(context: ProcessContext, limit_seconds: float) -> None:
    """Returns once the first process, which may start later than this one, accepts a connection."""
    begin = time.monotonic()
    while True:
        try:
            socket.create_connection((context.master_addr, context.master_port), timeout=_CONNECT_SECONDS).close()
            return
        except OSError as error:
            # Refused: the machine is there, its process is not there yet.
            refused = isinstance(error, ConnectionRefusedError)
            if time.monotonic() - begin > (limit_seconds if refused else NO_ROUTE_LIMIT_SECONDS):
                raise LaunchFailed(
                    f"node {context.node}, {socket.gethostname()}, can't reach the first node at "
                    f"{context.master_addr}, port {context.master_port}: {error.strerror or error}"
                ) from error
        time.sleep(_RETRY_SECONDS)


def _limited(deadline: float) -> float:
    """How long to wait for one thing, in seconds, before looking round."""
    return min(_LOOK_SECONDS, max(0.1, deadline - time.monotonic()))


def _missing(context: ProcessContext, reports: Collection[NodeInfo], limit_seconds: float, forged: int) -> str:
    numbers = {node.number for node in reports}
    missing = [number for number in range(context.world_size) if number not in numbers]
    shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    here = ", ".join(dict.fromkeys(node.name for node in reports))
    kind = "nodes" if context.one_per_node else "ranks"
    told = f"{kind} {shown} of {context.world_size} have not come within {limit_seconds:g} s; here are {here or 'none'}"
    return told + (f"; {forged} reports had not this job's {SECRET}, and were not counted" if forged else "")
