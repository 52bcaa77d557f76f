"""Environment of this process: variables of torchrun, srun, mpirun or launch.hosts, and network interfaces.

Starts no process and sends no packet.
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
from typing import Any

from megatron_llama.config import ConfigError, Problem

# Slurm step ids from here on are not srun steps (batch script, interactive shell, ...).
_FIRST_RESERVED_STEP = 0xFFFFFFF0
# Rendezvous ports, below Linux's ephemeral port range (32768 and up).
_FIRST_PORT, _PORTS = 15000, 15000
# torchrun's default, if nothing distinguishes jobs.
_DEFAULT_PORT = 29500
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_DISCARD_PORT = 9


# Variables that launch.hosts sets for its process on each host.
NODE, NODES, SLOTS, RUN_ID = (f"MEGATRON_LLAMA_{name}" for name in ("NODE", "NODES", "SLOTS", "RUN_ID"))

# mpirun's variables for rank, world size, local rank, local world size.
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""MPICH and Intel MPI."""

# Unsupported launchers (not tested): variables of rank, world size, local rank; "": no such variable. Under Slurm its
# own variables are used, with any PMI.
_UNSUPPORTED = {
    "PALS": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),
    "Flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    "mpirun_rsh": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK"),
    "A PMI launcher": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),
    "A PMIx launcher": ("PMIX_RANK", "", "PMIX_LOCAL_RANK"),
    "pbsdsh": ("PBS_NODENUM", "", ""),
}


@dataclass(frozen=True)
class ProcessContext:
    """Position of a process that another launcher started: a rank, or the only task of a node, which starts ranks."""

    launcher: str
    """torchrun, srun, mpirun or hosts."""
    rank: int
    local_rank: int
    """Index among the processes of this machine."""
    local_ranks: int
    """Processes on this machine."""
    world_size: int
    """Processes in all."""
    master_addr: str
    master_port: int
    job: str | None
    """Id of the job, if the launcher sets one."""
    has_store: bool = False
    """Whether the launcher hosts a TCPStore at master_addr:master_port."""
    node: int = 0
    """Index of this machine."""
    nodes: int = 1
    """Number of machines."""
    slots: tuple[int, ...] | None = None
    """Ranks per machine, if launch.hosts sets them."""

    @property
    def one_per_node(self) -> bool:
        """Whether each machine has one process."""
        return self.launcher == "hosts" or (self.launcher != "torchrun" and self.nodes == self.world_size)

    def ranks_of_nodes(self, world_size: int) -> tuple[int, ...]:
        """Return the ranks per machine, if each machine has one process."""
        return self.slots or (world_size // self.nodes,) * self.nodes

    def environment(self) -> dict[str, str]:
        """Return the variables that torch.distributed and ``run_rank`` read."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_ranks),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def process_context(environ: Mapping[str, str]) -> ProcessContext | None:
    """Return the context set by this process's launcher; None if the user started the process.

    Launchers can be nested (torchrun in srun, mpirun in a Slurm job): the innermost one is used.

    Raises:
        ConfigError: The variables contradict each other, or an unsupported launcher started several processes, each of
            which would start the whole run.
    """
    if NODE in environ:
        return _from_hosts(environ)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _from_torchrun(environ)
    for names in (_OPEN_MPI, _HYDRA):
        if set(names[:3]) <= environ.keys() and environ[names[1]] != "1":
            return _from_mpirun(environ, names)
    if _is_srun_task(environ):
        return _from_srun(environ)
    _reject_unsupported(environ)
    return None


def first_node(nodelist: str) -> str:
    """Return the first host of a Slurm node list: ``node[1-3,7]`` is node1, ``r[1-2]n[3-4]`` is r1n3."""
    head = re.match(r"(?:[^,\[\]]|\[[^\]]*\])*", nodelist)
    assert head is not None, "the pattern matches the empty string"
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", head.group())


def tasks_on_node(tasks_per_node: str, node: int) -> int | None:
    """Return the tasks on the ``node``-th host, from Slurm's ``4(x2),3``; None if unknown."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else None


class _Reader:
    """Reads variables as numbers and collects problems."""

    def __init__(self, environ: Mapping[str, str], launcher: str) -> None:
        self.environ, self.launcher = environ, launcher
        self.problems: list[Problem] = []

    def number(self, name: str, default: int | None = None) -> int:
        """Return the variable as a number, or ``default``; without both, add a problem and return 0."""
        text = self.environ.get(name, "")
        if text.isascii() and text.isdigit():
            return int(text)
        if text:
            rule = "must be a number: the launcher sets it"
            self.add(name, text, rule, f"unset {name}, or launch with {self.launcher}")
        elif default is not None:
            return default
        else:
            self.add_missing(name)
        return 0

    def add_missing(self, name: str, instead: str = "") -> None:
        """Add the problem of a missing variable."""
        known = (NODE, "RANK", "WORLD_SIZE", *_OPEN_MPI[:2], *_HYDRA[:2], "SLURM_PROCID", "SLURM_NTASKS")
        present = " and ".join(other for other in known if other in self.environ)
        rule = f"is required with {present}, which mark this process as one of several ranks"
        instead = instead or f"set {name}, or unset {present}: then this process starts the ranks"
        self.add(name, None, rule, instead)

    def add(self, name: str, value: object, rule: str, instead: str) -> None:
        self.problems.append(Problem(name, value, rule, instead))

    def require_below(self, name: str, number: int, count_name: str, count: int) -> None:
        """Add a problem unless 0 <= ``number`` < ``count``; skipped after other problems."""
        if not self.problems and number >= count:
            rule = f"must be less than {count_name}={count}"
            self.add(name, number, rule, f"launch all ranks with one {self.launcher} command")

    def context(self, ranks: Sequence[int], address: str, port: int, job: str | None, **more: Any) -> ProcessContext:
        """Return the context of (rank, world size, local rank, local ranks). Raises ConfigError with all problems.

        By default, each machine has as many ranks as this one.
        """
        if not self.problems and not 0 < port < 2**16:
            rule = "must be a port number: all ranks connect to it"  # 0 would be a different port on each rank
            self.add("MASTER_PORT", port, rule, "set a free port from 1024 to 65535")
        if self.problems:
            raise ConfigError(self.problems)
        rank, world_size, local_rank, local_ranks = ranks
        here = max(1, local_ranks)
        more = {"node": rank // here, "nodes": -(-world_size // here), **more}
        launcher = self.launcher.removeprefix("launch.")
        return ProcessContext(launcher, rank, local_rank, local_ranks, world_size, address, port, job, **more)


def _from_hosts(environ: Mapping[str, str]) -> ProcessContext:
    """Return the context of the process that launch.hosts started on this host."""
    read = _Reader(environ, "launch.hosts")
    node, nodes = read.number(NODE), read.number(NODES)
    for name in ("MASTER_ADDR", RUN_ID):
        if not environ.get(name):
            read.add_missing(name)
    counts = environ.get(SLOTS, "").split(",") if environ.get(SLOTS) else []
    if not all(count.isascii() and count.isdigit() for count in counts):
        read.add(SLOTS, environ[SLOTS], "must be numbers: the launcher sets it", f"unset {SLOTS} and {NODE}")
    port = read.number("MASTER_PORT")
    slots = tuple(int(count) for count in counts if not read.problems) or None
    return read.context((node, nodes, 0, 1), environ.get("MASTER_ADDR", ""), port, environ.get(RUN_ID), slots=slots)


def _from_torchrun(environ: Mapping[str, str]) -> ProcessContext:
    """Return the context from torchrun's variables, which accelerate, deepspeed and job services set too."""
    read = _Reader(environ, "torchrun")
    rank, world_size, local_rank = read.number("RANK"), read.number("WORLD_SIZE"), read.number("LOCAL_RANK")
    address, port = environ.get("MASTER_ADDR", ""), read.number("MASTER_PORT")
    if not address:
        read.add_missing("MASTER_ADDR")
    # deepspeed sets LOCAL_SIZE. Without both, a loopback address means that all ranks are on this machine.
    one_machine = world_size if address and is_loopback(address) else None
    local_ranks = read.number("LOCAL_WORLD_SIZE", read.number("LOCAL_SIZE", 0) or one_machine)
    read.require_below("RANK", rank, "WORLD_SIZE", world_size)
    read.require_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_ranks)
    _check_world_size(read, world_size)
    # torchrun's default id is "none".
    run_id = environ.get("TORCHELASTIC_RUN_ID", "none")
    job = environ.get("SLURM_JOB_ID") if run_id == "none" else run_id
    has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    groups = {"node": "GROUP_RANK", "nodes": "GROUP_WORLD_SIZE"}
    groups_given = {field: read.number(name) for field, name in groups.items() if environ.get(name)}
    ranks = rank, world_size, local_rank, local_ranks
    return read.context(ranks, address, port, job, has_store=has_store, **groups_given)


def _check_world_size(read: _Reader, world_size: int) -> None:
    """Add a problem if WORLD_SIZE is less than the number of started processes, which would then share ranks.

    Skipped under torchrun, which may run inside another launcher.
    """
    if "TORCHELASTIC_RUN_ID" in read.environ or read.problems:
        return
    for name in (_OPEN_MPI[1], _HYDRA[1], "SLURM_NTASKS"):
        count = read.environ.get(name, "")
        applies = name != "SLURM_NTASKS" or _is_srun_task(read.environ)
        if applies and count.isdigit() and int(count) > world_size:
            rule = f"is less than {name}={count}"
            read.add("WORLD_SIZE", world_size, rule, "unset RANK and WORLD_SIZE: the launcher sets its own variables")
            return


def _from_mpirun(environ: Mapping[str, str], names: Sequence[str]) -> ProcessContext:
    """Return the context from the variables ``names`` of an mpirun.

    On one machine the ranks connect to the loopback, at a port derived from mpirun's pid. On several machines mpirun
    does not report the host of rank 0: Slurm's variables or MASTER_ADDR do.
    """
    read = _Reader(environ, "mpirun")
    rank, world_size, local_rank, local_ranks = (read.number(name) for name in names)
    read.require_below(names[0], rank, names[1], world_size)
    read.require_below(names[2], local_rank, names[3], local_ranks)
    job = environ.get("SLURM_JOB_ID")
    address = environ.get("MASTER_ADDR", "")
    if local_ranks == world_size:
        address, port = address or "127.0.0.1", port_for(_launcher_pid(names[0]))
    elif job:
        address, port = address or first_node(environ.get("SLURM_JOB_NODELIST", "")), port_for(_digits(job) * 10)
    else:
        port = _DEFAULT_PORT
    if not address and not read.problems:
        option, separator = ("-x", "=") if names is _OPEN_MPI else ("-genv", " ")
        read.add_missing("MASTER_ADDR", f"write mpirun {option} MASTER_ADDR{separator}HOST ..., the host of rank 0")
    return read.context((rank, world_size, local_rank, local_ranks), address, read.number("MASTER_PORT", port), job)


def _launcher_pid(rank_variable: str) -> int:
    """Return the pid of this machine's launcher: the nearest ancestor without ``rank_variable``.

    Shells and wrappers between launcher and rank have the variable.
    """
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


def _reject_unsupported(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if an unsupported launcher started this process as one of several."""
    read = _Reader(environ, "torchrun, srun or mpirun")
    if "RANK" in environ or environ.get("WORLD_SIZE", "1") != "1":
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            if name not in environ:
                read.add_missing(name)
    is_single = "SLURM_JOB_ID" in environ or _OPEN_MPI[1] in environ  # these mark a single process
    for launcher, (rank, size, local_rank) in () if is_single else _UNSUPPORTED.items():
        several = environ.get(size, "1") != "1" if size else environ.get(rank, "0") != "0" or rank == "PMIX_RANK"
        if rank in environ and several:
            sources = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank}
            assignments = " ".join(f"{name}={f'${source}' if source else '...'}" for name, source in sources.items())
            rule = f"{launcher} is not supported, and each of its processes would start the whole run"
            instead = (
                f"launch with {read.launcher}; or set torchrun's variables: sh -c '{assignments} "
                "LOCAL_WORLD_SIZE=... MASTER_ADDR=... MASTER_PORT=29500 exec python train.py ...'; "
                f"or, for a single process, unset {rank}"
            )
            read.add(rank, environ[rank], rule, instead)
            break
    if read.problems:
        raise ConfigError(read.problems)


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of several tasks.

    Slurm also sets SLURM_PROCID in batch scripts and interactive shells, which have no peers. A single task starts its
    ranks itself, on all devices of its allocation.
    """
    if not {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"} <= environ.keys() or environ["SLURM_NTASKS"] == "1":
        return False
    step = environ.get("SLURM_STEP_ID")
    if step is None:
        return environ.get("ENVIRONMENT") != "BATCH"
    return not step.isdigit() or int(step) < _FIRST_RESERVED_STEP


def _from_srun(environ: Mapping[str, str]) -> ProcessContext:
    """Return the context from srun's variables; the first node of the step has rank 0 and the store."""
    read = _Reader(environ, "srun")
    rank, world_size, local_rank = (read.number(f"SLURM_{name}") for name in ("PROCID", "NTASKS", "LOCALID"))
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    node_list = next((environ[name] for name in lists if name in environ), "")
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    count = next((name for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if environ.get(name)), None)
    nodes = read.number(count) if count else None
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if nodes == 1 else first_node(node_list))
    if not address:
        read.add_missing("SLURM_JOB_NODELIST")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    node = read.number("SLURM_NODEID", 0)
    local_ranks = tasks_on_node(tasks, node) or world_size
    read.require_below("SLURM_PROCID", rank, "SLURM_NTASKS", world_size)
    # All tasks of a step derive the same port; steps of a job on one node get different ports.
    port = port_for(_digits(job) * 10, _digits(environ.get("SLURM_STEP_ID")))
    more = {"node": node} | ({"nodes": nodes} if nodes else {})
    ranks = rank, world_size, local_rank, local_ranks
    return read.context(ranks, address, read.number("MASTER_PORT", port), job, **more)


def _digits(text: str | None) -> int:
    return int(re.sub(r"\D", "", text or "") or 0)


def port_for(*numbers: int) -> int:
    """Return a rendezvous port derived from ``numbers``."""
    return _FIRST_PORT + sum(numbers) % _PORTS


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address or name: localhost, 127.x.y.z or ::1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.partition(".")[0] in ("localhost", "ip6-localhost")


def check_interface(environ: Mapping[str, str], variable: str) -> None:
    """Raise ConfigError if a variable such as GLOO_SOCKET_IFNAME names an interface that this machine lacks."""
    known = [name for _, name in socket.if_nameindex()]
    missing = [name for name in environ.get(variable, "").split(",") if name and name.partition(":")[0] not in known]
    if missing:
        rule = f"this machine has no interface {', '.join(missing)}"
        instead = f"unset {variable}, or set it to one of {', '.join(known)}"
        raise ConfigError([Problem(variable, environ[variable], rule, instead)])


def addresses_of(host: str) -> list[str]:
    """Resolve ``host``. Raises OSError if it has no address."""
    return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))


def local_address_to(host: str) -> str:
    """Return this machine's source address for packets to ``host``. Raises OSError without a route."""
    family, kind, _, _, target = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # a datagram socket picks a route without sending
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the network interface with ``address``; None if unknown."""
    if sys.platform != "linux":
        return None
    target = ipaddress.ip_address(address.partition("%")[0])
    if target.version == 6:
        with suppress(OSError):
            lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
            return next((line.split()[-1] for line in lines if line.startswith(target.packed.hex())), None)
        return None
    named = (name for _, name in socket.if_nameindex())
    return next((name for name in named if address_of_interface(name) == str(target)), None)


def address_of_interface(name: str) -> str | None:
    """Return the first IPv4 address of an interface; None if unknown."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
