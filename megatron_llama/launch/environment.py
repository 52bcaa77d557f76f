"""The environment of this process: variables of torchrun, srun, mpirun or launch.hosts, and the network.

Reads variables and asks the system. It starts nothing and sends nothing.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_llama.config import ConfigError, Problem

# Slurm numbers the steps that are no srun of ours (batch script, interactive shell, ...) from here on.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
# Ports for rendezvous, below the range from which Linux hands out ports for outgoing connections (32768 on).
_FIRST_PORT, _PORTS = 15000, 15000
# torchrun's own, where nothing tells one job from another.
_USUAL_PORT = 29500
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_DISCARD_PORT = 9


# What launch.hosts tells the one process that it starts on each host.
NODE, NODES, SLOTS, RUN_ID = (f"MEGATRON_LLAMA_{name}" for name in ("NODE", "NODES", "SLOTS", "RUN_ID"))

# What an mpirun calls a process's rank, the number of processes, and both again among those of the same machine.
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""Of MPICH and Intel MPI."""

# Starters whose processes are not run as ranks, because none of these could be tried: rank, size, local rank ("": there
# is no such variable). Under Slurm its own variables decide, whichever PMI it speaks.
_OTHERS = {
    "PALS": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),
    "Flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    "mpirun_rsh": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK"),
    "A PMI starter": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),
    "A PMIx starter": ("PMIX_RANK", "", "PMIX_LOCAL_RANK"),
    "pbsdsh": ("PBS_NODENUM", "", ""),
}


@dataclass(frozen=True)
class ProcessContext:
    """Where a process that somebody else started stands: a rank, or the one task on its node, which may start ranks."""

    launcher: str
    """torchrun, srun, mpirun or hosts."""
    rank: int
    local_rank: int
    """Number among the processes that were started on this machine."""
    local_ranks: int
    """Processes that were started on this machine."""
    world_size: int
    """All processes that were started."""
    master_addr: str
    master_port: int
    job: str | None
    """A name that all ranks of the job share and no other job has, if the starter gives one."""
    has_store: bool
    """The starter hosts a store at master_addr:master_port."""
    node: int = 0
    """Number of this machine."""
    nodes: int = 1
    """Machines."""
    slots: tuple[int, ...] | None = None
    """Ranks on each machine, where launch.hosts says so."""

    @property
    def one_per_node(self) -> bool:
        """Whether this is the only process on its machine, among several machines."""
        return self.launcher == "hosts" or (self.launcher != "torchrun" and self.nodes == self.world_size)

    def ranks_of_nodes(self, world_size: int) -> tuple[int, ...]:
        """How many of ``world_size`` ranks each machine has, where there is one process on each."""
        return self.slots or (world_size // self.nodes,) * self.nodes

    def environment(self) -> dict[str, str]:
        """The variables that torch.distributed and ``run_rank`` read."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_ranks),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def process_context(environ: Mapping[str, str]) -> ProcessContext | None:
    """What the starter of this process has set; None where it was started by hand.

    Starters start one another, and the innermost one counts: torchrun as srun's or mpirun's task, mpirun in a job of
    Slurm's. Raises ConfigError with every problem when the variables contradict each other, or when a starter that is
    not known here has started several processes, each of which would begin the whole run.
    """
    if NODE in environ:
        return _from_hosts(environ)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _from_torchrun(environ)
    mpirun = next((names for names in (_OPEN_MPI, _HYDRA) if _is_one_of_several(environ, names)), None)
    if mpirun is not None:
        return _from_mpirun(environ, mpirun)
    if _is_srun_task(environ):
        return _from_srun(environ)
    _refuse_unknown_starter(environ)
    return None


def first_node(nodelist: str) -> str:
    """The first host in Slurm's short notation: ``node[1-3,7]`` is node1, ``a,b`` is a, ``r[1-2]n[3-4]`` is r1n3."""
    head = re.match(r"(?:[^,\[\]]|\[[^\]]*\])*", nodelist)
    assert head is not None, "the pattern matches the empty string"
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", head.group())


def tasks_on_node(tasks_per_node: str, node: int) -> int | None:
    """How many tasks run on the ``node``-th host, from Slurm's ``4(x2),3``; None if the text does not say."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[node] if node < len(counts) else None


class _Reader:
    """Reads variables as numbers, and collects what is wrong with them."""

    def __init__(self, environ: Mapping[str, str], launcher: str) -> None:
        self.environ, self.launcher = environ, launcher
        self.problems: list[Problem] = []

    def number(self, name: str, default: int | None = None) -> int:
        """The variable as a number; ``default`` where it is not set; 0, and a problem, where there is none."""
        text = self.environ.get(name, "")
        if text.isascii() and text.isdigit():
            return int(text)
        if text:
            rule = "the program that starts the ranks sets this variable to a number"
            self.add(name, text, rule, f"unset {name}, or start with {self.launcher}")
        elif default is not None:
            return default
        else:
            self.missing(name)
        return 0

    def missing(self, name: str, instead: str = "") -> None:
        """Notes a variable without which this rank has no place."""
        known = ("RANK", "WORLD_SIZE", *_OPEN_MPI[:2], *_HYDRA[:2], "SLURM_PROCID", "SLURM_NTASKS")
        there = " and ".join(other for other in known if other in self.environ)
        rule = f"with {there} this is one rank of several, which needs {name} too"
        instead = instead or f"set {name}, or unset {there} to let this process start the ranks"
        self.add(name, None, rule, instead)

    def add(self, name: str, value: object, rule: str, instead: str) -> None:
        self.problems.append(Problem(name, value, rule, instead))

    def below(self, name: str, number: int, count_name: str, count: int) -> None:
        """``number`` must be one of 0 to ``count`` - 1, if both could be read."""
        if not self.problems and number >= count:
            rule = f"{count_name}={count} means the numbers 0 to {count - 1}"
            self.add(name, number, rule, f"start all ranks with one command of {self.launcher}'s")

    def checked(self, context: ProcessContext) -> ProcessContext:
        """``context``, if there is no problem with it; raises ConfigError."""
        if not self.problems and not 0 < context.master_port < 2**16:
            rule = "the ranks meet at this port, so all of them have to know it"  # 0 would be another one for each
            self.add("MASTER_PORT", context.master_port, rule, "set a free one from 1024 to 65535")
        if self.problems:
            raise ConfigError(self.problems)
        return context


def _from_hosts(environ: Mapping[str, str]) -> ProcessContext:
    """Of the process that launch.hosts started on this host."""
    read = _Reader(environ, "launch.hosts")
    node, nodes = read.number(NODE), read.number(NODES)
    slots = tuple(int(count) for count in environ[SLOTS].split(",")) if environ.get(SLOTS) else None
    return read.checked(
        ProcessContext(
            launcher="hosts",
            rank=node,
            local_rank=0,
            local_ranks=1,
            world_size=nodes,
            master_addr=environ["MASTER_ADDR"],
            master_port=read.number("MASTER_PORT"),
            job=environ[RUN_ID],
            has_store=False,
            node=node,
            nodes=nodes,
            slots=slots,
        )
    )


def _from_torchrun(environ: Mapping[str, str]) -> ProcessContext:
    """From torchrun's variables, which other starters (accelerate, deepspeed, job services) use as well."""
    read = _Reader(environ, "torchrun")
    rank, world_size, local_rank = read.number("RANK"), read.number("WORLD_SIZE"), read.number("LOCAL_RANK")
    address, port = environ.get("MASTER_ADDR", ""), read.number("MASTER_PORT")
    if not address:
        read.missing("MASTER_ADDR")
    # deepspeed says LOCAL_SIZE. Where nobody says it, the loopback shows that all ranks are on this machine.
    one_machine = world_size if address and is_loopback(address) else None
    local_ranks = read.number("LOCAL_WORLD_SIZE", read.number("LOCAL_SIZE", 0) or one_machine)
    read.below("RANK", rank, "WORLD_SIZE", world_size)
    read.below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_ranks)
    _compare_with_starter(read, world_size)
    # torchrun's own default for the id is the word "none"; it says nothing about the job.
    job = environ.get("TORCHELASTIC_RUN_ID", "none")
    per_machine = max(1, local_ranks)
    return read.checked(
        ProcessContext(
            launcher="torchrun",
            rank=rank,
            local_rank=local_rank,
            local_ranks=local_ranks,
            world_size=world_size,
            master_addr=address,
            master_port=port,
            job=environ.get("SLURM_JOB_ID") if job == "none" else job,
            has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            node=read.number("GROUP_RANK", rank // per_machine),
            nodes=read.number("GROUP_WORLD_SIZE", -(-world_size // per_machine)),
        )
    )


def _compare_with_starter(read: _Reader, world_size: int) -> None:
    """Notes a WORLD_SIZE, left in the environment or written by hand, below the number of processes that were started:
    several of them would have the same rank. torchrun's agents know better than what has started them."""
    if "TORCHELASTIC_RUN_ID" in read.environ or read.problems:
        return
    for name in (_OPEN_MPI[1], _HYDRA[1], "SLURM_NTASKS"):
        started = read.environ.get(name, "")
        counts = name != "SLURM_NTASKS" or _is_srun_task(read.environ)
        if counts and started.isdigit() and int(started) > world_size:
            rule = f"{name}={started} processes were started"
            read.add("WORLD_SIZE", world_size, rule, "unset RANK and WORLD_SIZE: the starter's own numbers do")
            return


def _is_one_of_several(environ: Mapping[str, str], names: Sequence[str]) -> bool:
    """Whether a starter with these variables has started several processes. A single one may use all devices."""
    rank, size, local_rank = names[:3]
    return {rank, size, local_rank} <= environ.keys() and environ[size] != "1"


def _from_mpirun(environ: Mapping[str, str], names: Sequence[str]) -> ProcessContext:
    """From the variables ``names`` of an mpirun.

    On one machine the ranks meet at the loopback, at a port that follows from mpirun's process. Otherwise mpirun tells
    nobody where rank 0 is: Slurm or the user must.
    """
    read = _Reader(environ, "mpirun")
    rank, world_size, local_rank, local_ranks = (read.number(name) for name in names)
    read.below(names[0], rank, names[1], world_size)
    read.below(names[2], local_rank, names[3], local_ranks)
    job = environ.get("SLURM_JOB_ID")
    address = environ.get("MASTER_ADDR", "")
    if local_ranks == world_size:
        address, port = address or "127.0.0.1", port_for(_starter_pid(names[0]))
    elif job:
        address, port = address or first_node(environ.get("SLURM_JOB_NODELIST", "")), port_for(_digits(job) * 10)
    else:
        port = _USUAL_PORT
    if not address and not read.problems:
        option = "-x" if names is _OPEN_MPI else "-genv"
        separator = "=" if names is _OPEN_MPI else " "
        read.missing("MASTER_ADDR", f"write mpirun {option} MASTER_ADDR{separator}NAME ... with rank 0's host")
    per_machine = max(1, local_ranks)
    return read.checked(
        ProcessContext(
            launcher="mpirun",
            rank=rank,
            local_rank=local_rank,
            local_ranks=local_ranks,
            world_size=world_size,
            master_addr=address,
            master_port=read.number("MASTER_PORT", port),
            job=job,
            has_store=False,
            node=rank // per_machine,
            nodes=-(-world_size // per_machine),
        )
    )


def _starter_pid(rank_variable: str) -> int:
    """The process that has started this machine's ranks: the nearest ancestor that is not itself part of a rank, as
    shells and wrappers between the two are."""
    pid = os.getppid()
    try:
        while any(
            entry.startswith(f"{rank_variable}=".encode())
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # no /proc, or another user's process
        pass
    return pid


def _refuse_unknown_starter(environ: Mapping[str, str]) -> None:
    """Raises ConfigError where this process is one of several that nothing here can bring together."""
    read = _Reader(environ, "torchrun, srun or mpirun")
    if "RANK" in environ or environ.get("WORLD_SIZE", "1") != "1":
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            if name not in environ:
                read.missing(name)
    known = "SLURM_JOB_ID" in environ or _OPEN_MPI[1] in environ  # which say that it is a single one
    for starter, (rank, size, local_rank) in () if known else _OTHERS.items():
        several = environ.get(size, "1") != "1" if size else environ.get(rank, "0") != "0" or rank == "PMIX_RANK"
        if rank in environ and several:
            given = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank}
            words = " ".join(f"{name}={f'${source}' if source else '...'}" for name, source in given.items())
            rule = f"{starter} has started several processes, and is not known here: each would begin the whole run"
            instead = (
                f"start with {read.launcher}; or give each process torchrun's variables: sh -c '{words} "
                "LOCAL_WORLD_SIZE=... MASTER_ADDR=... MASTER_PORT=29500 exec python train.py ...'; "
                f"or, if it is the only one, unset {rank}"
            )
            read.add(rank, environ[rank], rule, instead)
            break
    if read.problems:
        raise ConfigError(read.problems)


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several tasks.

    Slurm sets SLURM_PROCID in batch scripts and interactive shells too; waiting for peers there would hang. A single
    task is not counted either: started as if by hand it may use all devices that Slurm gave it.
    """
    if not {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"} <= environ.keys() or environ["SLURM_NTASKS"] == "1":
        return False
    step = environ.get("SLURM_STEP_ID")
    if step is None:
        return environ.get("ENVIRONMENT") != "BATCH"
    return not step.isdigit() or int(step) < _FIRST_RESERVED_STEP


def _from_srun(environ: Mapping[str, str]) -> ProcessContext:
    """From srun's variables; the first node of the step holds rank 0 and the store."""
    read = _Reader(environ, "srun")
    rank, world_size, local_rank = (read.number(f"SLURM_{name}") for name in ("PROCID", "NTASKS", "LOCALID"))
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environ[name] for name in lists if name in environ), "")
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    count = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES")
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if count == "1" else first_node(nodes))
    if not address:
        read.missing("SLURM_JOB_NODELIST")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    node = int(environ.get("SLURM_NODEID", 0))
    local_ranks = tasks_on_node(tasks, node) or world_size
    read.below("SLURM_PROCID", rank, "SLURM_NTASKS", world_size)
    # A port that all tasks of a step agree on without talking; steps of one job on one node get different ones.
    port = port_for(_digits(job) * 10, _digits(environ.get("SLURM_STEP_ID")))
    return read.checked(
        ProcessContext(
            launcher="srun",
            rank=rank,
            local_rank=local_rank,
            local_ranks=local_ranks,
            world_size=world_size,
            master_addr=address,
            master_port=read.number("MASTER_PORT", port),
            job=job,
            has_store=False,
            node=node,
            nodes=int(count) if count else -(-world_size // max(1, local_ranks)),
        )
    )


def _digits(text: str | None) -> int:
    return int(re.sub(r"\D", "", text or "") or 0)


def port_for(*numbers: int) -> int:
    """A port for a rendezvous that follows from ``numbers``, so that different jobs get different ones."""
    return _FIRST_PORT + sum(numbers) % _PORTS


def is_loopback(host: str) -> bool:
    """Whether ``host`` means "this machine" on every machine: localhost, 127.x.y.z or ::1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.partition(".")[0] in ("localhost", "ip6-localhost")


def addresses_of(host: str) -> list[str]:
    """The addresses that this machine takes ``host`` for; raises OSError where it knows none."""
    return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))


def local_address_to(host: str) -> str:
    """This machine's address on the way to ``host``, as its routes say; raises OSError where there is no way."""
    family, kind, _, _, target = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # for a datagram socket this picks a route, and no packet leaves
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has ``address``; None where the system does not say."""
    if sys.platform != "linux":
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        with suppress(OSError):
            lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
            return next((line.split()[-1] for line in lines if line.startswith(wanted.packed.hex())), None)
        return None
    named = (name for _, name in socket.if_nameindex())
    return next((name for name in named if address_of_interface(name) == str(wanted)), None)


def address_of_interface(name: str) -> str | None:
    """The first IPv4 address of an interface; None where it has none, or the system does not say."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
