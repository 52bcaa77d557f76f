"""The doctor on four nodes with injected faults: each fault is reported with a fix.

$DOCTOR_REPORT names a file for the printed pages of docs/results/doctor.md, e.g. for ``pytest -m slurm``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.tools import slurm
from megatron_llama.tools.doctor.examination import DoctorReport
from megatron_llama.tools.doctor.finding import Finding, NodeState
from megatron_llama.tools.doctor.network import ClockReading
from megatron_llama.tools.sweep import cli
from megatron_llama.tools.sweep.cli import main
from tests.paths import ROOT
from tests.processes import losses
from tests.slurm.cluster import TINY, Lab, Report, plain

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
FAULTS = ROOT / "tests" / "slurm" / "faulty_nodes"
SETTINGS = ["model=llama_2m", "trainer.tp=2", "trainer.dp=2", "device=cpu"]


class Doctor:
    """``scripts/doctor.py`` on the lab, and its pages for the report."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.pages: list[str] = []

    def __call__(self, title: str, *words: str, **variables: str) -> tuple[int, list[dict[str, Any]]]:
        """The exit status and the findings of one examination."""
        done = self.run([*words, "--json"], variables)
        assert done.stdout, done.stderr
        report_json = json.loads(done.stdout)
        report = DoctorReport(
            nodes=[NodeState(**node) for node in report_json["nodes"]],
            readings=[reading and ClockReading(**reading) for reading in report_json["readings"]],
            findings=[Finding(**finding) for finding in report_json["findings"]],
            measured=report_json["measured"],
            seconds=report_json["seconds"],
        )
        command = " ".join(["srun --nodes 4 --ntasks-per-node 1 python scripts/doctor.py", *words])
        text = f"## {title}\n\n    {command}\n\n```\n{report.page(colour=False)}```\n"
        self.pages.append(text.replace(str(self.lab.checkout), "/shared"))
        return done.returncode, report_json["findings"]

    def run(self, words: Any, more: dict[str, str]) -> subprocess.CompletedProcess[str]:
        variables = self.lab.variables | {
            "SLURM_CONF": f"{self.lab.home}/etc/slurm.conf",
            "PATH": f"{self.lab.home}/bin:{self.lab.variables['PATH']}",
            "PYTHONPATH": f"{FAULTS}:{ROOT}",
            **more,
        }
        command = ["srun", "--nodes=4", "--ntasks-per-node=1", str(self.lab.python), "scripts/doctor.py", *words]
        return subprocess.run(
            command, env=variables, cwd=self.lab.checkout, capture_output=True, text=True, timeout=280
        )


@pytest.fixture(scope="module")
def doctor(lab: Lab) -> Iterator[Doctor]:
    made = Doctor(lab)
    yield made
    if path := os.environ.get("DOCTOR_REPORT"):
        Path(path).write_text("\n".join(made.pages))


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


Check = Callable[[dict[str, Any]], bool]


def only(findings: list[dict[str, Any]], check: str, severity: str, where: str) -> dict[str, Any]:
    """The one finding of a check."""
    (finding,) = [finding for finding in findings if finding["check"] == check]
    assert (finding["severity"], finding["where"]) == (severity, where), finding
    assert finding["remedy"]
    return finding


def test_healthy_nodes(doctor: Doctor) -> None:
    status, findings = doctor("Nothing put in", *SETTINGS, "--quick")
    assert status == 0
    assert not [finding for finding in findings if finding["severity"] == "breaks"]


def test_a_blocked_port(doctor: Doctor, lab: Lab) -> None:
    with blocked(lab, "n3", "10.77.0.2"):
        status, findings = doctor("A port that is blocked, from n2 to n3", *SETTINGS, "--quick")
    assert status == 2, "no run would get further"
    finding = only(findings, "pairs", "breaks", "n2 → n3")
    assert "10.77.0.2 cannot connect to 10.77.0.3" in finding["what"] and "no answer within" in finding["what"]
    assert "firewall" in finding["remedy"]


def test_a_blocked_rendezvous(doctor: Doctor, lab: Lab) -> None:
    """The first node also reports a node that cannot connect."""
    with blocked(lab, "n1", "10.77.0.4"):
        shown = doctor.run([*SETTINGS, "--quick", "--json"], {})
    assert shown.returncode == 2, shown.stdout + shown.stderr
    assert shown.stdout.count("n4 → n1") == 2, "reported by n4 and by n1"
    assert "firewall" in shown.stdout


def test_a_slow_link(doctor: Doctor, lab: Lab) -> None:
    slow = "tc qdisc add dev eth0 root tbf rate 40mbit burst 64kb latency 400ms"
    with on_node(lab, "n3", slow, "tc qdisc del dev eth0 root"):
        status, findings = doctor("n3 sends no more than 40 Mbit/s", *SETTINGS)
    assert status == 0, "slow is not broken"
    (finding,) = [finding for finding in findings if finding["check"] == "links" and finding["where"] == "n3"]
    assert "all links are slow" in finding["what"] and "--exclude=n3" in finding["remedy"]


def test_a_full_disk(doctor: Doctor, lab: Lab) -> None:
    cache = lab.checkout / "cache"
    cache.mkdir()
    words = ["trainer.compile=true", f"trainer.compile_cache={cache}"]
    with small_disk(lab, "n3", cache):
        status, findings = doctor("The disk of n3's compile cache is full", *SETTINGS, *words, "--quick")
    assert status == 2
    finding = only([each for each in findings if "compile_cache" in each["what"]], "disks", "breaks", "n3")
    assert "No space left on device" in finding["what"] and "trainer.compile_cache=PATH" in finding["remedy"]


def test_a_disk_too_small_for_the_checkpoints(doctor: Doctor) -> None:
    words = ["trainer.steps=10000000", "checkpoint.every_steps=1"]
    status, findings = doctor("More checkpoints than the disk takes", *SETTINGS, *words, "--quick")
    assert status == 0, "they may be removed meanwhile"
    (finding,) = [each for each in findings if each["check"] == "disks" and "a checkpoint takes" in each["what"]]
    assert finding["severity"] == "warns" and "checkpoint.keep=" in finding["remedy"]


def test_a_wrong_clock(doctor: Doctor) -> None:
    faults = {"FAULTY_NODE": "n4", "FAULTY_CLOCK": "37.5"}
    status, findings = doctor("n4's clock is 37.5 s ahead", *SETTINGS, "--quick", **faults)
    assert status == 0
    finding = only(findings, "clocks", "warns", "n4")
    assert "37.5 s ahead of n1" in finding["what"] and "chrony" in finding["remedy"]


def test_two_versions_of_torch(doctor: Doctor) -> None:
    faults = {"FAULTY_NODE": "n2", "FAULTY_TORCH": "2.11.0"}
    status, findings = doctor("n2 has another torch", *SETTINGS, "--quick", **faults)
    assert status == 2
    finding = only(findings, "versions", "breaks", "n2")
    assert finding["what"].startswith("torch 2.11.0; n1 has ") and "pip install torch==" in finding["remedy"]


def test_a_fatal_problem_ends_a_batch_job(lab: Lab) -> None:
    faults = {"PYTHONPATH": f"{FAULTS}:{ROOT}", "FAULTY_NODE": "n2", "FAULTY_TORCH": "2.11.0"}
    job = lab.submit(["--nodes=4"], [*SETTINGS, "data=mock", "trainer.steps=2"], **faults)
    assert job.wait_for_end() == "FAILED" and job.facts["ExitCode"] == "2:0", job.log
    assert "torch 2.11.0; n1 has" in job.log and "step 1" not in job.log


def test_each_run_of_a_sweep_is_a_job(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in lab.client.items():
        monkeypatch.setenv(name, value)
    for module in (slurm, cli):
        monkeypatch.setattr(module, "BATCH_FOLDER", lab.checkout)
    folder = tmp_path / "s"
    options = f"--nodes=2 --output={lab.checkout}/slurm-%j.out"
    line = ["-m", f"--slurm={options}", *TINY, "trainer.steps=3", "optim.lr=1e-3,1e-4", f"run.dir={folder}"]
    begin = time.monotonic()
    assert main(line) == 0, capsys.readouterr().out
    seconds = time.monotonic() - begin
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
    report(
        "`python train.py -m '--slurm=--nodes 2' optim.lr=1e-3,1e-4`: a job each, then the table", f"{seconds:.0f} s"
    )


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
