"""Variables of torchrun, srun and mpirun, and rejected launchers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_started_by_hand() -> None:
    assert process_context({}) is None
    assert process_context({"WORLD_SIZE": "1"}) is None, "some containers set only this"


def test_torchrun() -> None:
    context = process_context(TORCHRUN)
    assert context is not None
    assert (context.launcher, context.rank, context.local_rank, context.world_size) == ("torchrun", 9, 1, 16)
    assert context.has_store and context.job is None
    assert context.environment() == {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "29500",
    }


def test_torchrun_names_the_job_by_its_id_or_slurms() -> None:
    assert process_context(TORCHRUN | {"TORCHELASTIC_RUN_ID": "llama"}).job == "llama"
    assert process_context(TORCHRUN | {"SLURM_JOB_ID": "4711"}).job == "4711"
    assert process_context(TORCHRUN | SRUN).launcher == "torchrun", "torchrun inside srun: the inner one counts"


def test_srun() -> None:
    context = process_context(SRUN)
    assert context is not None
    assert (context.launcher, context.rank, context.local_rank, context.local_ranks) == ("srun", 9, 1, 8)
    assert (context.master_addr, context.job, context.has_store) == ("gpu07", "4711", False)
    assert 15000 <= context.master_port < 30000
    others = [process_context(SRUN | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 8)}) for rank in range(16)]
    assert {(other.master_addr, other.master_port) for other in others} == {("gpu07", context.master_port)}


def test_two_steps_of_a_job_use_two_ports() -> None:
    assert process_context(SRUN).master_port != process_context(SRUN | {"SLURM_STEP_ID": "1"}).master_port


def test_srun_keeps_the_users_address_and_port() -> None:
    context = process_context(SRUN | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000", "SLURM_STEP_NODELIST": "gpu08"})
    assert (context.master_addr, context.master_port) == ("10.0.0.7", 4000)
    assert process_context(SRUN | {"SLURM_STEP_NODELIST": "gpu08"}).master_addr == "gpu08"


def test_srun_with_the_fewest_variables() -> None:
    few = {name: SRUN[name] for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_NODELIST")}
    assert process_context(few).master_addr == "gpu07"


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_STEP_ID": "4294967290"},  # an interactive shell that salloc opened
        {"SLURM_STEP_ID": "4294967291"},  # the batch script
        {"SLURM_NTASKS": "1"},  # one task may start as many ranks as it has devices
    ],
)
def test_slurm_shells_are_no_ranks(variables: dict[str, str]) -> None:
    assert process_context(SRUN | variables) is None


def test_a_batch_script_is_no_rank() -> None:
    script = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert process_context(script | {"SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}) is None


@pytest.mark.parametrize(
    ("environ", "field"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK"),
        (TORCHRUN | {"RANK": "x"}, "RANK"),
        (TORCHRUN | {"RANK": "16"}, "RANK"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, "MASTER_ADDR"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_JOB_NODELIST"}, "SLURM_JOB_NODELIST"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT"),
        ({**SRUN, "MASTER_PORT": "65536"}, "MASTER_PORT"),
        ({**SRUN, "MASTER_PORT": "some"}, "MASTER_PORT"),
        ({**SRUN, "SLURM_NODEID": "x"}, "SLURM_NODEID"),
        ({**SRUN, "SLURM_NNODES": "two"}, "SLURM_NNODES"),
        ({NODE: "0", NODES: "1", RUN_ID: "x", "MASTER_PORT": "15001"}, "MASTER_ADDR"),
        ({NODE: "0", NODES: "1", "MASTER_ADDR": "a", "MASTER_PORT": "15001"}, RUN_ID),
        ({NODE: "0", NODES: "1", SLOTS: "4,x", RUN_ID: "x", "MASTER_ADDR": "a", "MASTER_PORT": "15001"}, SLOTS),
    ],
)
def test_contradictions_are_config_errors(environ: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        process_context(environ)
    assert error.value.problems[0].field == field


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


OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
OPEN_MPI |= {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_RANK": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}


@pytest.mark.parametrize("environ", [OPEN_MPI, HYDRA, SRUN | OPEN_MPI, SRUN | HYDRA], ids=str)
def test_mpirun_on_one_machine(environ: dict[str, str]) -> None:
    context = process_context(environ)
    assert context is not None and not context.one_per_node
    assert (context.launcher, context.rank, context.local_rank, context.world_size) == ("mpirun", 1, 1, 2)
    assert (context.master_addr, context.node, context.nodes, context.has_store) == ("127.0.0.1", 0, 1, False)
    assert context.master_port == process_context(environ | {"PMI_RANK": "0"}).master_port
    assert process_context(environ | {"MASTER_PORT": "4000"}).master_port == 4000


def test_one_process_of_mpiruns_may_start_all_ranks() -> None:
    single = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
    assert process_context(OPEN_MPI | single | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"}) is None
    assert process_context(HYDRA | {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"}) is None


def test_mpirun_on_several_machines_needs_an_address() -> None:
    for environ, option in ((OPEN_MPI, "-x MASTER_ADDR=HOST"), (HYDRA, "-genv MASTER_ADDR HOST")):
        several = {name: "8" for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")}
        with pytest.raises(ConfigError, match=rf"mpirun\s+{option}"):
            process_context(environ | several)
        context = process_context(environ | several | {"MASTER_ADDR": "n1"})
        assert (context.master_addr, context.master_port, context.nodes) == ("n1", 29500, 4)
        in_slurm = process_context(SRUN | environ | several)
        assert (in_slurm.master_addr, in_slurm.job) == ("gpu07", "4711")
    one_each = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert process_context(OPEN_MPI | one_each | {"MASTER_ADDR": "n1"}).one_per_node


def test_torchrun_inside_mpirun_counts() -> None:
    assert process_context(OPEN_MPI | TORCHRUN).launcher == "torchrun"


def test_deepspeeds_and_hand_made_variables() -> None:
    few = {name: TORCHRUN[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert process_context(few | {"LOCAL_SIZE": "8"}).nodes == 2, "deepspeed"
    assert process_context(few | {"MASTER_ADDR": "127.0.0.1"}).nodes == 1, "the loopback reaches one machine only"
    with pytest.raises(ConfigError) as error:
        process_context(few)
    assert [problem.field for problem in error.value.problems] == ["LOCAL_WORLD_SIZE"]


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({"PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0", "PMI_RANK": "0", "PMI_SIZE": "4"}, "PALS_RANKID"),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1"}, "FLUX_TASK_RANK"),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2"}, "JSM_NAMESPACE_RANK"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "prte"}, "PMIX_RANK"),
        ({"PBS_NODENUM": "1"}, "PBS_NODENUM"),
    ],
)
def test_several_processes_of_an_unsupported_launcher_are_rejected(environ: dict[str, str], rank: str) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)each\s+of\s+its\s+processes\s+would\s+start\s+the\s+whole\s+run"
    ) as error:
        process_context(environ)
    assert [problem.field for problem in error.value.problems] == [rank]
    assert f"RANK=${rank} WORLD_SIZE=" in error.value.problems[0].instead


@pytest.mark.parametrize(
    "environ",
    [
        {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"},
        {"PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_JOBID": "1.head"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "PMIX_RANK": "0", "PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_single_process_of_an_unsupported_launcher_starts_the_run(environ: dict[str, str]) -> None:
    assert process_context(environ) is None


def test_all_wrong_variables_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        process_context({"WORLD_SIZE": "8"})
    assert [problem.field for problem in error.value.problems] == ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
    assert "unset WORLD_SIZE" in error.value.problems[0].instead
    with pytest.raises(ConfigError) as error:
        process_context({"RANK": "x", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_PORT": "y"})
    fields = [problem.field for problem in error.value.problems]
    assert fields == ["RANK", "MASTER_PORT", "MASTER_ADDR", "LOCAL_WORLD_SIZE"]
    with pytest.raises(ConfigError) as error:
        process_context(TORCHRUN | {"LOCAL_RANK": "8"})
    assert [problem.field for problem in error.value.problems] == ["LOCAL_RANK"]
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_RANK"):
        process_context(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"})


@pytest.mark.parametrize("launcher", [OPEN_MPI, HYDRA, SRUN])
def test_world_size_below_the_launchers_is_rejected(launcher: dict[str, str]) -> None:
    left = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(ConfigError, match=r"is less than \w+=(2|16)") as error:
        process_context(launcher | left)
    assert [problem.field for problem in error.value.problems] == ["WORLD_SIZE"]


def test_one_task_per_node() -> None:
    tasks = SRUN | {"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    context = process_context(tasks | {"SLURM_TASKS_PER_NODE": "1(x4)", "SLURM_NNODES": "4"})
    assert context is not None and context.one_per_node
    assert (context.node, context.nodes, context.rank, context.local_ranks) == (2, 4, 2, 1)
    assert context.ranks_of_nodes(32) == (8, 8, 8, 8)
    per_device = process_context(SRUN)
    assert per_device is not None and not per_device.one_per_node
    assert (per_device.node, per_device.nodes) == (1, 2)


def test_nodes_of_torchrun() -> None:
    context = process_context(TORCHRUN)
    assert context is not None and (context.node, context.nodes) == (1, 2) and not context.one_per_node
    uneven = process_context(TORCHRUN | {"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3"})
    assert uneven is not None and (uneven.node, uneven.nodes) == (2, 3)


def test_a_process_on_a_host() -> None:
    variables = {NODE: "1", NODES: "3", SLOTS: "4,2,2", RUN_ID: "x", "MASTER_ADDR": "a", "MASTER_PORT": "15001"}
    context = process_context(variables | SRUN)
    assert context is not None and context.launcher == "hosts" and context.one_per_node
    assert (context.rank, context.world_size, context.ranks_of_nodes(8)) == (1, 3, (4, 2, 2))
    equal = process_context(variables | {SLOTS: ""})
    assert equal is not None and equal.ranks_of_nodes(12) == (4, 4, 4)
