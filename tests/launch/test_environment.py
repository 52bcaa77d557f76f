"""Variables of torchrun, srun and mpirun, and rejected launchers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.config import ConfigError
from megatron_llama.devices import get_device
from megatron_llama.launch.environment import (
    NODE,
    NODES,
    RUN_ID,
    SLOTS,
    check_interface,
    first_node,
    process_context,
    tasks_on_node,
)
from megatron_llama.launch.start import rank_environment
from tests.paths import ROOT
from tests.processes import environment, plan_of

TORCHRUN = {
    "RANK": "9",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "16",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_TASKS_PER_NODE": "8(x2)",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
OPEN_MPI |= {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_RANK": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
EIGHT = {name: "8" for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")}
ONE_EACH = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
HOSTS = {NODE: "1", NODES: "3", SLOTS: "4,2,2", RUN_ID: "x", "MASTER_ADDR": "a", "MASTER_PORT": "15001"}
FEW = {name: TORCHRUN[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node[1-3,7]", "node1"),
        ("a,b", "a"),
        ("node[001-128]", "node001"),
        ("node[7,1-3],other", "node7"),
        ("rack[1-2]n[3-4],x", "rack1n3"),
        ("trn1-dy-queue-[2-5].cluster", "trn1-dy-queue-2.cluster"),
        ("localhost", "localhost"),
        ("", ""),
    ],
)
def test_first_node(nodelist: str, first: str) -> None:
    assert first_node(nodelist) == first


@pytest.mark.parametrize(
    ("text", "node", "tasks"), [("4(x2),3", 0, 4), ("4(x2),3", 2, 3), ("8", 0, 8), ("8", 1, None), ("", 0, None)]
)
def test_tasks_on_node(text: str, node: int, tasks: int | None) -> None:
    assert tasks_on_node(text, node) == tasks


def ranks(launcher: str, rank: int, local_rank: int, world_size: int, **more: Any) -> dict[str, Any]:
    return {"launcher": launcher, "rank": rank, "local_rank": local_rank, "world_size": world_size, **more}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, ranks("torchrun", 9, 1, 16, has_store=True, job=None, node=1, nodes=2, one_per_node=False)),
        (TORCHRUN | {"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3"}, {"node": 2, "nodes": 3}),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "llama"}, {"job": "llama"}),
        (TORCHRUN | {"SLURM_JOB_ID": "4711"}, {"job": "4711"}),
        (TORCHRUN | SRUN, {"launcher": "torchrun"}),  # inside srun: the inner one counts
        (OPEN_MPI | TORCHRUN, {"launcher": "torchrun"}),
        (FEW | {"LOCAL_SIZE": "8"}, {"nodes": 2}),  # deepspeed
        (FEW | {"MASTER_ADDR": "127.0.0.1"}, {"nodes": 1}),  # the loopback reaches one machine only
        (SRUN, ranks("srun", 9, 1, 16, local_ranks=8, node=1, nodes=2, one_per_node=False)),
        (SRUN, {"master_addr": "gpu07", "job": "4711", "has_store": False}),
        (SRUN | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000", "SLURM_STEP_NODELIST": "gpu08"},
         {"master_addr": "10.0.0.7", "master_port": 4000}),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu08"}, {"master_addr": "gpu08"}),
        (without(SRUN, "SLURM_NODEID", "SLURM_TASKS_PER_NODE", "SLURM_JOB_ID", "SLURM_STEP_ID"),
         {"master_addr": "gpu07"}),
        *((environ, ranks("mpirun", 1, 1, 2, master_addr="127.0.0.1", node=0, nodes=1, has_store=False))
          for environ in (OPEN_MPI, HYDRA, SRUN | OPEN_MPI, SRUN | HYDRA)),
        *((environ | {"MASTER_PORT": "4000"}, {"master_port": 4000, "one_per_node": False})
          for environ in (OPEN_MPI, HYDRA)),
        *((environ | EIGHT | {"MASTER_ADDR": "n1"}, {"master_addr": "n1", "master_port": 29500, "nodes": 4})
          for environ in (OPEN_MPI, HYDRA)),
        *((SRUN | environ | EIGHT, {"master_addr": "gpu07", "job": "4711"}) for environ in (OPEN_MPI, HYDRA)),
        (OPEN_MPI | ONE_EACH | {"MASTER_ADDR": "n1"}, {"one_per_node": True}),
        (HOSTS | SRUN, ranks("hosts", 1, 0, 3, one_per_node=True)),
    ],
)  # fmt: skip
def test_context_of_a_process(environ: dict[str, str], expected: dict[str, Any]) -> None:
    context = process_context(environ)
    assert {name: getattr(context, name) for name in expected} == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1"},  # some containers set only this
        SRUN | {"SLURM_STEP_ID": "4294967290"},  # an interactive shell that salloc opened
        SRUN | {"SLURM_STEP_ID": "4294967291"},  # the batch script
        without(SRUN, "SLURM_STEP_ID") | {"SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},
        SRUN | {"SLURM_NTASKS": "1"},  # one task may start as many ranks as it has devices
        OPEN_MPI | ONE_EACH | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
        HYDRA | {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"},
        {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"},
        {"PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_JOBID": "1.head"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "PMIX_RANK": "0", "PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_single_processes_start_the_run(environ: dict[str, str]) -> None:
    assert process_context(environ) is None


def test_variables_of_a_rank() -> None:
    context = process_context(TORCHRUN)
    assert context is not None
    assert context.environment() == without(TORCHRUN, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")


def test_processes_of_a_job_use_one_port() -> None:
    jobs = [SRUN | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 8)} for rank in range(16)]
    contexts = [process_context(environ) for environ in jobs]
    ((address, port),) = {(context.master_addr, context.master_port) for context in contexts}
    assert address == "gpu07" and 15000 <= port < 30000
    assert process_context(SRUN | {"SLURM_STEP_ID": "1"}).master_port != port
    for environ in (OPEN_MPI, HYDRA):
        assert process_context(environ).master_port == process_context(environ | {"PMI_RANK": "0"}).master_port


@pytest.mark.parametrize(
    ("environ", "world_size", "expected"),
    [
        (SRUN | {"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
                 "SLURM_TASKS_PER_NODE": "1(x4)", "SLURM_NNODES": "4"}, 32, (8, 8, 8, 8)),
        (HOSTS, 8, (4, 2, 2)),
        (HOSTS | {SLOTS: ""}, 12, (4, 4, 4)),
    ],
)  # fmt: skip
def test_ranks_of_nodes(environ: dict[str, str], world_size: int, expected: tuple[int, ...]) -> None:
    context = process_context(environ)
    assert context is not None and context.one_per_node and context.ranks_of_nodes(world_size) == expected


LEFT_OVER = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
WHOLE_RUN = r"(?s)each\s+of\s+its\s+processes\s+would\s+start\s+the\s+whole\s+run"


@pytest.mark.parametrize(
    ("environ", "fields", "message"),
    [
        ({"WORLD_SIZE": "8"}, "RANK LOCAL_RANK MASTER_ADDR MASTER_PORT", "unset WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_PORT": "y"},
         "RANK MASTER_PORT MASTER_ADDR LOCAL_WORLD_SIZE", ""),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK MASTER_PORT MASTER_ADDR LOCAL_WORLD_SIZE", ""),
        (FEW, "LOCAL_WORLD_SIZE", ""),
        (TORCHRUN | {"RANK": "x"}, "RANK", ""),
        (TORCHRUN | {"RANK": "16"}, "RANK", ""),
        (TORCHRUN | {"LOCAL_RANK": "8"}, "LOCAL_RANK", ""),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR", ""),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT", ""),
        (without(SRUN, "SLURM_JOB_NODELIST"), "SLURM_JOB_NODELIST", ""),
        (SRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT", ""),
        (SRUN | {"MASTER_PORT": "some"}, "MASTER_PORT", ""),
        (SRUN | {"SLURM_NODEID": "x"}, "SLURM_NODEID", ""),
        (SRUN | {"SLURM_NNODES": "two"}, "SLURM_NNODES", ""),
        (without(HOSTS, "MASTER_ADDR"), "MASTER_ADDR", ""),
        (without(HOSTS, RUN_ID), RUN_ID, ""),
        (HOSTS | {SLOTS: "4,x"}, SLOTS, ""),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK", ""),
        (OPEN_MPI | EIGHT, "MASTER_ADDR", r"mpirun\s+-x MASTER_ADDR=HOST"),
        (HYDRA | EIGHT, "MASTER_ADDR", r"mpirun\s+-genv MASTER_ADDR HOST"),
        *((launcher | LEFT_OVER, "WORLD_SIZE", r"is less than \w+=(2|16)") for launcher in (OPEN_MPI, HYDRA, SRUN)),
        ({"PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0", "PMI_RANK": "0", "PMI_SIZE": "4"}, "PALS_RANKID", WHOLE_RUN),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1"}, "FLUX_TASK_RANK", WHOLE_RUN),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2"}, "JSM_NAMESPACE_RANK", WHOLE_RUN),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "prte"}, "PMIX_RANK", WHOLE_RUN),
        ({"PBS_NODENUM": "1"}, "PBS_NODENUM", r"RANK=\$PBS_NODENUM WORLD_SIZE="),
    ],
)  # fmt: skip
def test_contradictions_are_rejected(environ: dict[str, str], fields: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        process_context(environ)
    assert [problem.field for problem in error.value.problems] == fields.split()


def test_an_interface_that_does_not_exist_is_rejected_before_the_ranks_start() -> None:
    device, plan = get_device("cpu"), plan_of(1)
    for names in ("lo", "lo:1"):  # the second one has an alias
        check_interface({"GLOO_SOCKET_IFNAME": names}, "GLOO_SOCKET_IFNAME")
    check_interface({}, "GLOO_SOCKET_IFNAME")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError, match="has no interface nope\n"):
        patch.setenv("GLOO_SOCKET_IFNAME", "lo,nope")
        rank_environment(device, plan)


@pytest.mark.parametrize("name", ["TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG"])
def test_a_variable_that_torch_rejects_gives_no_traceback(name: str, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "train.py", "data=mock", "device=cpu", f"run.dir={tmp_path}/run"]
    done = subprocess.run(command, env=environment(**{name: "junk"}), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "torch rejects an environment variable" in done.stderr and "unset that variable" in done.stderr
