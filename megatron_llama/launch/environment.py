"""What torchrun, srun or launch.hosts say about this process. Reads an environment, starts nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_llama.config import ConfigError, Problem

# Slurm numbers the steps that are no srun of ours (batch script, interactive shell, ...) from here on.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
# Ports for rendezvous, below the range from which Linux hands out ports for outgoing connections (32768 on).
_FIRST_PORT, _PORTS = 15000, 15000


# What launch.hosts tells the one process that it starts on each host.
NODE, NODES, SLOTS, RUN_ID = (f"MEGATRON_LLAMA_{name}" for name in ("NODE", "NODES", "SLOTS", "RUN_ID"))


@dataclass(frozen=True)
class ProcessContext:
    """Where a process that somebody else started stands: a rank, or the one task on its node, which may start ranks."""

    starter: str
    """torchrun, srun or hosts."""
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
        return self.starter == "hosts" or (self.starter == "srun" and self.nodes == self.world_size)

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

    Raises ConfigError when the variables contradict each other.
    """
    if NODE in environ:
        return _from_hosts(environ)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _from_torchrun(environ)
    if _is_srun_task(environ):
        return _from_srun(environ)
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


def _from_hosts(environ: Mapping[str, str]) -> ProcessContext:
    """Of the process that launch.hosts started on this host."""
    numbers = _numbers(environ, (NODE, NODES, "MASTER_PORT"))
    slots = tuple(int(count) for count in environ[SLOTS].split(",")) if environ.get(SLOTS) else None
    return ProcessContext(
        starter="hosts",
        rank=numbers[NODE],
        local_rank=0,
        local_ranks=1,
        world_size=numbers[NODES],
        master_addr=environ["MASTER_ADDR"],
        master_port=numbers["MASTER_PORT"],
        job=environ[RUN_ID],
        has_store=False,
        node=numbers[NODE],
        nodes=numbers[NODES],
        slots=slots,
    )


def _from_torchrun(environ: Mapping[str, str]) -> ProcessContext:
    """From torchrun's variables, which other starters (mpirun wrappers, job services) use as well."""
    numbers = _numbers(environ, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
    if "MASTER_ADDR" not in environ:
        raise _missing("MASTER_ADDR", environ)
    # torchrun's own default for the id is the word "none"; it says nothing about the job.
    job = environ.get("TORCHELASTIC_RUN_ID", "none")
    local_ranks = int(environ.get("LOCAL_WORLD_SIZE", numbers["WORLD_SIZE"]))
    return _checked(
        ProcessContext(
            starter="torchrun",
            rank=numbers["RANK"],
            local_rank=numbers["LOCAL_RANK"],
            local_ranks=local_ranks,
            world_size=numbers["WORLD_SIZE"],
            master_addr=environ["MASTER_ADDR"],
            master_port=numbers["MASTER_PORT"],
            job=environ.get("SLURM_JOB_ID") if job == "none" else job,
            has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            node=int(environ.get("GROUP_RANK", numbers["RANK"] // local_ranks)),
            nodes=int(environ.get("GROUP_WORLD_SIZE", -(-numbers["WORLD_SIZE"] // local_ranks))),
        )
    )


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
    numbers = _numbers(environ, ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environ[name] for name in lists if name in environ), "")
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    count = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES")
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if count == "1" else first_node(nodes))
    if not address:
        raise _missing("SLURM_JOB_NODELIST", environ)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    node = int(environ.get("SLURM_NODEID", 0))
    local_ranks = tasks_on_node(tasks, node) or numbers["SLURM_NTASKS"]
    # A port that all tasks of a step agree on without talking; steps of one job on one node get different ones.
    digits = [int(re.sub(r"\D", "", text or "") or 0) for text in (job, environ.get("SLURM_STEP_ID"))]
    port = free_port_of(digits[0] * 10, digits[1])
    if environ.get("MASTER_PORT"):
        port = _numbers(environ, ("MASTER_PORT",))["MASTER_PORT"]
    return _checked(
        ProcessContext(
            starter="srun",
            rank=numbers["SLURM_PROCID"],
            local_rank=numbers["SLURM_LOCALID"],
            local_ranks=local_ranks,
            world_size=numbers["SLURM_NTASKS"],
            master_addr=address,
            master_port=port,
            job=job,
            has_store=False,
            node=node,
            nodes=int(count) if count else -(-numbers["SLURM_NTASKS"] // local_ranks),
        )
    )


def free_port_of(*numbers: int) -> int:
    """A port for a rendezvous that follows from ``numbers``, so that different jobs get different ones."""
    return _FIRST_PORT + sum(numbers) % _PORTS


def _numbers(environ: Mapping[str, str], names: tuple[str, ...]) -> dict[str, int]:
    """The named variables as integers."""
    for name in names:
        if name not in environ:
            raise _missing(name, environ)
        if not environ[name].isdigit():
            rule = "the program that starts the ranks sets this variable to a number"
            raise ConfigError([Problem(name, environ[name], rule, f"unset {name}, or start with torchrun or srun")])
    return {name: int(environ[name]) for name in names}


def _missing(name: str, environ: Mapping[str, str]) -> ConfigError:
    """The error of a set of variables that is not complete."""
    there = " and ".join(n for n in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS") if n in environ)
    rule = f"{there} say that this is one rank of several, which needs {name} too"
    return ConfigError([Problem(name, None, rule, f"set {name}, or unset {there} to let this process start the ranks")])


def _checked(context: ProcessContext) -> ProcessContext:
    """``context``, if it can be."""
    if context.rank >= context.world_size:
        rule = f"a world of {context.world_size} has the ranks 0 to {context.world_size - 1}"
        raise ConfigError([Problem("RANK", context.rank, rule, "start all ranks with one torchrun or srun command")])
    if not 0 < context.master_port < 2**16:
        rule = "the ranks meet at this port, so all of them have to know it"  # 0 would be another one for each
        raise ConfigError([Problem("MASTER_PORT", context.master_port, rule, "set a free one from 1024 to 65535")])
    return context
