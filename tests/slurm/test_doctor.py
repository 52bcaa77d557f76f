"""The doctor on four nodes with injected faults: each fault is reported with a fix."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_llama.tools import common
from megatron_llama.tools.sweep import cli
from megatron_llama.tools.sweep.cli import main
from tests.paths import ROOT
from tests.processes import losses
from tests.slurm.cluster import TINY, Lab, plain

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
FAULTS = ROOT / "tests" / "slurm" / "faulty_nodes"
SETTINGS = ["model=llama_2m", "trainer.tp=2", "trainer.dp=2", "device=cpu"]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def doctor(lab: Lab) -> Run:
    """``scripts/doctor.py --json`` on the four nodes."""

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        variables = lab.client | {"PYTHONPATH": f"{FAULTS}:{ROOT}", **more}
        command = ["srun", "--nodes=4", "--ntasks-per-node=1", str(lab.python), "scripts/doctor.py", *SETTINGS, *words]
        return subprocess.run(
            [*command, "--json"], env=variables, cwd=lab.checkout, capture_output=True, text=True, timeout=280
        )

    return run


@contextmanager
def on_node(lab: Lab, node: str, put_in: str, take_out: str) -> Iterator[None]:
    """A command inside a node's network while the block runs, and another one after it."""
    prefix = ["ip", "netns", "exec", f"{lab.variables['SLURM_LAB_NS']}-{node}"]
    subprocess.run([*prefix, *put_in.split()], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run([*prefix, *take_out.split()], check=True, capture_output=True)


@contextmanager
def blocked(lab: Lab, node: str, address: str) -> Iterator[None]:
    """A firewall on ``node`` that drops what comes from ``address`` to the ports of programs."""
    if shutil.which("nft") is None:
        subprocess.run(["apt-get", "install", "-y", "-qq", "nftables"], capture_output=True, check=False)
    if shutil.which("nft") is None:
        pytest.skip("there is no nft to block a port with, and it can't be installed")
    with ExitStack() as stack:
        stack.enter_context(on_node(lab, node, "nft add table inet faults", "nft delete table inet faults"))
        chain = "nft add chain inet faults input { type filter hook input priority 0 ; }"
        stack.enter_context(on_node(lab, node, chain, "true"))
        rule = f"nft add rule inet faults input ip saddr {address} tcp dport 1024-65535 ct state new drop"
        stack.enter_context(on_node(lab, node, rule, "true"))
        yield


@contextmanager
def small_disk(lab: Lab, node: str, folder: Path) -> Iterator[None]:
    """``folder`` is a disk of 1 MiB on ``node``, and there alone: that is what node-local caches are."""
    inside = ["nsenter", "-t", _node_pid(lab, node), "-m"]
    subprocess.run([*inside, "mount", "-t", "tmpfs", "-o", "size=1m", "full", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run([*inside, "umount", str(folder)], check=True)


def _node_pid(lab: Lab, node: str) -> str:
    """A process inside the node's own mounts: its slurmd."""
    command = ["pgrep", "-f", f"slurmd -D -N {node} -f {lab.home}/etc/slurm.conf"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


def slow(lab: Lab) -> AbstractContextManager[None]:
    qdisc = "tc qdisc add dev eth0 root tbf rate 40mbit burst 64kb latency 400ms"
    return on_node(lab, "n3", qdisc, "tc qdisc del dev eth0 root")


def full(lab: Lab) -> AbstractContextManager[None]:
    (cache := lab.checkout / "cache").mkdir()
    return small_disk(lab, "n3", cache)


class Fault(NamedTuple):
    """An injected fault, and the finding that reports it."""

    check: str
    severity: str
    where: str
    texts: tuple[str, ...]
    """Parts of the finding."""
    remedy: str
    words: tuple[str, ...] = ("--quick",)
    inject: Callable[[Lab], AbstractContextManager[Any]] = lambda lab: nullcontext()
    variables: dict[str, str] = {}


COMPILED = ("trainer.compile=true", "trainer.compile_cache=cache", "--quick")
NO_ROOM = ("trainer.steps=10000000", "checkpoint.every_steps=1", "--quick")
INJECTED = {
    "blocked port": Fault(
        *("pairs", "breaks", "n2 → n3", ("10.77.0.2 cannot connect to 10.77.0.3", "no answer within"), "firewall"),
        inject=lambda lab: blocked(lab, "n3", "10.77.0.2"),
    ),
    "slow link": Fault("links", "warns", "n3", ("all links are slow",), "--exclude=n3", (), slow),
    "full disk": Fault(
        *("disks", "breaks", "n3", ("compile_cache", "No space left on device"), "trainer.compile_cache=PATH"),
        *(COMPILED, full),
    ),
    "many checkpoints": Fault("disks", "warns", "", ("a checkpoint takes",), "checkpoint.keep=", NO_ROOM),
    "wrong clock": Fault(
        *("clocks", "warns", "n4", ("37.5 s ahead of n1",), "chrony"),
        variables={"FAULTY_NODE": "n4", "FAULTY_CLOCK": "37.5"},
    ),
    "other torch": Fault(
        *("versions", "breaks", "n2", ("torch 2.11.0; n1 has ",), "pip install torch=="),
        variables={"FAULTY_NODE": "n2", "FAULTY_TORCH": "2.11.0"},
    ),
}


@pytest.mark.parametrize("fault", INJECTED.values(), ids=INJECTED)
def test_a_fault_is_reported_with_its_remedy(fault: Fault, doctor: Run, lab: Lab) -> None:
    """The status is 2 if no run would get further."""
    with fault.inject(lab):
        done = doctor(*fault.words, **fault.variables)
    findings = json.loads(done.stdout)["findings"]
    (finding,) = [
        each
        for each in findings
        if each["check"] == fault.check and fault.where in each["where"] and fault.texts[0] in each["what"]
    ]
    assert finding["severity"] == fault.severity and fault.remedy in finding["remedy"], finding
    assert all(text in finding["what"] for text in fault.texts), finding
    assert done.returncode == (2 if fault.severity == "breaks" else 0), "slow is not broken"


def test_healthy_nodes_and_a_blocked_rendezvous(doctor: Run, lab: Lab) -> None:
    """The first node also reports a node that cannot connect."""
    done = doctor("--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [finding for finding in json.loads(done.stdout)["findings"] if finding["severity"] == "breaks"]
    with blocked(lab, "n1", "10.77.0.4"):
        done = doctor("--quick")
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout.count("n4 → n1") == 2 and "firewall" in done.stdout, "reported by n4 and by n1"


def test_a_fatal_problem_ends_a_batch_job(lab: Lab) -> None:
    faults = {"PYTHONPATH": f"{FAULTS}:{ROOT}", "FAULTY_NODE": "n2", "FAULTY_TORCH": "2.11.0"}
    job = lab.submit(["--nodes=4"], [*SETTINGS, "data=mock", "trainer.steps=2"], **faults)
    assert job.wait_for_end() == "FAILED" and job.facts["ExitCode"] == "2:0", job.log
    assert "torch 2.11.0; n1 has" in job.log and "step 1" not in job.log


def test_each_run_of_a_sweep_is_a_job(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in lab.client.items():
        monkeypatch.setenv(name, value)
    for module in (common, cli):
        monkeypatch.setattr(module, "BATCH_FOLDER", lab.checkout)
    folder = tmp_path / "s"
    options = f"--nodes=2 --output={lab.checkout}/slurm-%j.out"
    line = ["-m", f"--slurm={options}", *TINY, "trainer.steps=3", "optim.lr=1e-3,1e-4", f"run.dir={folder}"]
    assert main(line) == 0, capsys.readouterr().out
    ends = [losses(folder / f"optim.lr_{lr}") for lr in ("0.001", "0.0001")]
    assert [len(end) for end in ends] == [3, 3] and ends[0] != ends[1]
    assert ends[1] == plain(tmp_path / "plain", *TINY, "trainer.steps=3", "optim.lr=1e-4"), "to the bit"
    rows = [row.split(" | ")[1:4] for row in (folder / "sweep.md").read_text().splitlines()[2:]]
    assert rows == [["done", "3", f"{end[-1]:.4f}"] for end in ends]

    def jobs() -> list[str]:
        return [run["job"] for run in json.loads((folder / "sweep.json").read_text())["runs"].values()]

    first = jobs()
    assert len(set(first)) == 2 and all((lab.checkout / "logs" / job).is_dir() for job in first)
    assert main(line) == 0 and jobs() == first, "finished runs are not submitted again"


SEARCHED = "trainer.global_batch_size=4 trainer.micro_batch_size=1 trainer.recompute=none trainer.zero=1 trainer.vpp=1"


def test_trials_are_jobs(lab: Lab, tmp_path: Path) -> None:
    name, machine = "slurm_test", "cluster.device=cpu cluster.nodes=4 cluster.devices_per_node=1 device.memory_gib=16"
    written = ROOT / "conf" / "experiment" / f"{name}.yaml"
    words = [f"tune.name={name}", f"tune.dir={tmp_path}", "tune.jobs=true", "tune.trials=2", "tune.steps=2"]
    command = [sys.executable, str(ROOT / "scripts/tune.py"), *TINY[:9], *SEARCHED.split(), *machine.split(), *words]
    try:
        done = subprocess.run(command, env=lab.client, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Measured: a step of" in written.read_text()
    finally:
        written.unlink(missing_ok=True)
    trials = json.loads((tmp_path / "trials.json").read_text())["trials"]
    assert [each["outcome"]["status"] for each in trials] == ["done", "done"], trials
    assert len({each["settings"] for each in trials}) == 2
    assert all("trainer.tp=2" in each["settings"] for each in trials)
