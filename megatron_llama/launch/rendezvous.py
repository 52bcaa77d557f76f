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
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_llama.config import ConfigError, Problem
from megatron_llama.launch.board import Board
from megatron_llama.launch.environment import ProcessContext
from megatron_llama.launch.job_store import SECRET, JobStore, LaunchFailed, StoreLost
from megatron_llama.launch.network import addresses_of, interface_of, is_loopback, own_address_towards
from megatron_llama.system.text_table import text_table

# Starting Python on a thousand nodes from one disk takes minutes; a host without a route is known much sooner.
ARRIVAL_LIMIT_SECONDS = 300.0
NO_ROUTE_LIMIT_SECONDS = 30.0
_CONNECT_SECONDS, _RETRY_SECONDS = 5.0, 0.2
_SPEAK_SECONDS = 60.0  # torch looks up the name of who connects, and there may be a thousand


@dataclass(frozen=True)
class NodeInfo:
    """What one process reports about itself."""

    number: int
    """Its rank among the processes that were started."""
    node: int
    name: str
    """The machine's own name."""
    first_rank: int
    ranks: int
    """Ranks that it is or will start."""
    world_size: int
    """Ranks in all, by its own count."""
    address: str
    interface: str | None


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
        # What an earlier attempt of torchrun's has left must not count again, but for the folder that it chose.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._reports, self._opening = f"{attempt}/report", f"{attempt}/open"

        self._secret = bool(secret)
        self._listens: str | None = None

        def connect() -> Any:
            if context.rank > 0 or context.has_store:
                return TCPStore(context.master_addr, context.master_port, is_master=False)
            with _listen(context) as listener:
                host, port, file = listener.getsockname()[0], context.master_port, os.dup(listener.fileno())
                everywhere = ipaddress.ip_address(host).is_unspecified
                self._listens = "all its addresses" if everywhere else f"{host} alone"
                host = "127.0.0.1" if everywhere else host  # it talks to itself where it listens
                return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=file)

        if context.rank > 0 and not context.has_store:
            _wait_until_reachable(context, limit_seconds)
        try:
            job = f"{context.job}/{context.starter}/{context.world_size}"
            self._store = JobStore(connect, job, secret, _SPEAK_SECONDS)
        except StoreLost as error:
            raise LaunchFailed(
                f"what listens at {context.master_addr}, port {context.master_port}, is not this job's first process "
                f"({error}); if another program has that port, set MASTER_PORT to a free one, the same on all nodes"
            ) from error

    def report(self, mine: NodeInfo) -> None:
        """Leaves this process's report for the first one."""
        self._store.set(f"{self._reports}/{mine.number}", json.dumps(asdict(mine)))

    def gather(self) -> list[NodeInfo]:
        """For the first process: all reports, in order. Raises LaunchFailed where one does not come in time."""
        found: dict[int, NodeInfo] = {}
        deadline = time.monotonic() + self._limit
        for number in range(self._context.world_size):
            left = max(0.1, deadline - time.monotonic())
            node = _read_report(self._store.wait(f"{self._reports}/{number}", left))
            if node is not None and node.number == number:  # else the error names all that are missing
                found[number] = node
        if len(found) < self._context.world_size:
            raise LaunchFailed(_missing(self._context, found.values(), self._limit, len(self._store.forged)))
        return list(found.values())

    def agreed_run_dir(self, run_dir: str) -> str:
        """The folder that an earlier attempt of the same start has chosen (torchrun starts ranks again), else
        ``run_dir``."""
        return self._store.first("run.dir", run_dir) if self._context.has_store else run_dir

    def open(self, run_dir: str) -> None:
        """For the first process: lets the others continue."""
        self._store.set(self._opening, run_dir)

    def wait(self) -> str:
        """For the others: the run's folder, once the first process opens the start. Raises EOFError where that process
        has ended instead, and LaunchFailed where it says nothing."""
        try:
            run_dir = self._store.wait(self._opening, self._limit)
        except StoreLost as error:
            raise EOFError(str(error)) from error
        if run_dir is None:
            said = f"the first process has not begun within {self._limit:g} s: it is stopped, or waits for one that is"
            forged = f"; a word came from somebody who has not this job's {SECRET}" if self._store.forged else ""
            raise LaunchFailed(said + forged)
        return run_dir

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
        return Board(self._store, context.rank, context.world_size, host)


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


def node_info(context: ProcessContext, first_rank: int, ranks: int, world_size: int) -> NodeInfo:
    """This process's report. The first node learns its own address only from the others'."""
    try:
        address = own_address_towards(context.master_addr)
    except OSError:
        address = ""  # connecting will say more
    return NodeInfo(
        number=context.rank,
        node=context.node,
        name=socket.gethostname(),
        first_rank=first_rank,
        ranks=ranks,
        world_size=world_size,
        address=address,
        interface=interface_of(address) if address else None,
    )


def check_consistent(reports: Sequence[NodeInfo]) -> list[NodeInfo]:
    """All reports, with the first node's address as the others see it. Raises LaunchFailed where the processes don't
    count the same number of ranks."""
    first = reports[0]
    odd = [node for node in reports if node.world_size != first.world_size]
    if odd:
        raise LaunchFailed(
            f"{odd[0].name} has {odd[0].ranks} ranks and so counts {odd[0].world_size} in all; {first.name} has "
            f"{first.ranks} and counts {first.world_size}. All nodes must have equally many devices, or launch.hosts "
            "must say how many each has"
        )
    others = [node for node in reports if node.node != 0 and node.address]
    if not others:
        return list(reports)
    address = own_address_towards(others[0].address)
    interface = interface_of(address)
    return [replace(node, address=address, interface=interface) if node.node == 0 else node for node in reports]


def node_table(reports: Sequence[NodeInfo], context: ProcessContext) -> str:
    """Which node has which ranks, and how it is reached; one row each."""
    rows = [("node", "name", "ranks", "address", "interface")]
    for number in sorted({node.node for node in reports}):
        here = [node for node in reports if node.node == number]
        first, last = min(n.first_rank for n in here), max(n.first_rank + n.ranks for n in here) - 1
        ranks = f"{first}-{last}" if last > first else f"{first}"
        rows.append((str(number), here[0].name, ranks, here[0].address, here[0].interface or "unknown"))
    return "\n".join([*text_table(rows), f"They meet at {context.master_addr}, port {context.master_port}."]) + "\n"


def _listen(context: ProcessContext) -> socket.socket:
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
        instead = "set MASTER_PORT to a free port, the same on all nodes"
        raise ConfigError([Problem("MASTER_PORT", context.master_port, rule, instead)]) from error


def _wait_until_reachable(context: ProcessContext, limit_seconds: float) -> None:
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


def _read_report(text: str | None) -> NodeInfo | None:
    """A report that has come; None where none has, or what came is none."""
    try:
        node = NodeInfo(**json.loads(text or ""))
    except (ValueError, TypeError, RecursionError):
        return None
    numbers = (node.number, node.node, node.first_rank, node.ranks, node.world_size)
    words = (node.name, node.address, node.interface or "")
    return node if all(type(n) is int for n in numbers) and all(type(word) is str for word in words) else None


def _missing(context: ProcessContext, reports: Collection[NodeInfo], limit_seconds: float, forged: int) -> str:
    numbers = {node.number for node in reports}
    missing = [number for number in range(context.world_size) if number not in numbers]
    shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    here = ", ".join(dict.fromkeys(node.name for node in reports))
    kind = "nodes" if context.one_per_node else "ranks"
    told = f"{kind} {shown} of {context.world_size} have not come within {limit_seconds:g} s; here are {here or 'none'}"
    return told + (f"; {forged} reports had not this job's {SECRET}, and were not counted" if forged else "")
