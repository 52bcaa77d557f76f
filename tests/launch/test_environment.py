"""Variables of torchrun, srun and mpirun, rejected launchers, and the checks before the ranks start."""

from __future__ import annotations

import resource
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_llama.config import ConfigError
from megatron_llama.devices import get_device
from megatron_llama.launch import host_checks
from megatron_llama.launch.environment import check_interface, first_node, process_context, tasks_on_node
from megatron_llama.launch.start import rank_environment
from tests.golden import GoldenFiles
from tests.paths import ROOT
from tests.processes import plan_of, run_command, run_train_py

TABLE = Path(__file__).with_name("environments.txt")


def environments() -> dict[str, dict[str, str]]:
    """Return the environments of the table by their line."""
    defined: dict[str, dict[str, str]] = {}
    lines: dict[str, dict[str, str]] = {}
    for line in filter(None, TABLE.read_text().splitlines()):
        name, colon, words = ("", "", "") if line.startswith("#") else line.partition(": ")
        environ = defined.setdefault(name, {}) if colon else lines.setdefault(line, {})
        for word in (words or name).split():
            key, is_set, value = word.partition("=")
            environ |= {key: value} if is_set else defined.get(word, {})
            if word.startswith("-"):
                del environ[word[1:]]
    return lines


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


def test_each_environment() -> None:
    """Its position in the job, or the message; none if the process starts the run."""
    page = ""
    for line, environ in environments().items():
        if line.startswith("#"):
            page += f"\n{line}\n"
            continue
        try:
            context = process_context(environ)
        except ConfigError as error:
            page += f"$ {line}\n{error}\n\n"
            continue
        answer = "starts the run" if context is None else str(context)
        ranks = f" ranks of 24: {context.ranks_of_nodes(24)}" if context is not None and context.one_per_node else ""
        page += f"$ {line}\n    {answer}{ranks}\n"
    from_parent = r"(master_addr='127.0.0.1', master_port=)(?!4000|29500)\d+"  # mpirun's processes have one parent
    GoldenFiles.check("launch/environments.txt", page, {from_parent: r"\1PARENT"})


def test_variables_of_a_rank() -> None:
    """The processes of a job use one port."""
    context = process_context(environ := environments()["torchrun"])
    assert context is not None
    variables = context.environment()
    assert variables == {name: value for name, value in environ.items() if not name.startswith("TORCHELASTIC")}
    lines = environments()
    jobs = [lines["srun"] | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 8)} for rank in range(16)]
    contexts = [process_context(environ) for environ in jobs]
    ((address, port),) = {(context.master_addr, context.master_port) for context in contexts}
    assert address == "gpu07" and process_context(lines["srun SLURM_STEP_ID=1"]).master_port != port
    for environ in (lines["openmpi"], lines["hydra"]):
        assert process_context(environ).master_port == process_context(environ | {"PMI_RANK": "0"}).master_port


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
    done = run_command(*command, **{name: "junk"})
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "torch rejects an environment variable" in done.stderr and "unset that variable" in done.stderr


SMALL = ["data=mock", "device=cpu", "data.seq_length=32", "model.num_hidden_layers=1", "device.peak_tflops=0.01"]


@pytest.mark.parametrize(
    ("kind", "limit", "words"),
    [
        (resource.RLIMIT_NOFILE, 20, ["ulimit -n = 20\n", "ulimit -n 65536"]),  # gloo would abort or hang
        (resource.RLIMIT_FSIZE, 100_000, ["ulimit -f = 100000 bytes\n", "ulimit -f unlimited"]),
        ("disk", 4 << 20, ["its disk has 4 MiB free", "1 x 6.33 MiB", "write another run.dir=PATH"]),
    ],
)
def test_a_limit_of_the_host_ends_the_run_before_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: object, limit: int, words: list[str]
) -> None:
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (limit, limit) if asked == kind else real(asked))
    if kind == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=limit))
        plan = plan_of(1)
        plan.config.checkpoint.save_last, plan.config.checkpoint.every_minutes = False, 0.0
        assert "4 MiB free" in host_checks.check_start(plan, tmp_path)
    status, output = run_train_py(tmp_path / "run", *SMALL, "trainer.tp=2", "trainer.steps=1")
    assert status == 2 and all(word in output for word in words) and "Traceback" not in output, output
    assert kind != "disk" or ", 1 MiB for logs" in " ".join(output.split()), output
    assert "step 1/" not in output


@pytest.mark.parametrize(
    ("variables", "netrc", "accepted"),
    [
        ({}, "", False),
        ({"WANDB_API_KEY": "k"}, "", True),
        ({"WANDB_MODE": "offline"}, "", True),
        ({}, "machine api.wandb.ai login user password k", True),
        ({}, "machine example.org login user password k", False),
        ({"WANDB_BASE_URL": "https://w.example.org"}, "machine w.example.org login user password k", True),
        ({}, "machine", False),
    ],
)
def test_wandb_without_a_key(tmp_path: Path, variables: dict[str, str], netrc: str, accepted: bool) -> None:
    plan = plan_of(1)
    assert not [*host_checks.check_wandb(plan, {"HOME": str(tmp_path)})], "wandb is off"
    plan.config.logging.wandb = "online"
    if netrc:
        (tmp_path / ".netrc").write_text(netrc)
    problems = [*host_checks.check_wandb(plan, {"HOME": str(tmp_path), **variables})]
    assert (not problems) == accepted
    for problem in problems:
        assert all(remedy in problem.instead for remedy in ("wandb login", "WANDB_API_KEY", "WANDB_MODE", "wandb=off"))
