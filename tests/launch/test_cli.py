"""``train.py`` up to the point where ranks train: help, dry runs, refusals, the run's folder, who starts what."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import yaml

from megatron_llama import cli
from megatron_llama.config import ConfigError, load_config
from megatron_llama.launch import run_dir
from megatron_llama.launch.environment import ProcessContext
from megatron_llama.launch.world import find_world
from megatron_llama.plan import Plan
from megatron_llama.system.wrapping import WIDTH
from tests.data.files import numbered, write_indexed
from tests.golden import GoldenFiles
from tests.launch.small_runs import TINY, note_place, script, started
from tests.paths import ROOT
from tests.processes import LAUNCHER_VARIABLES, MakeLauncher, run_command, wait_until
from tests.ranks import check_threads


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the launcher's variables from the environment."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
        monkeypatch.delenv(name)


# Runs train.py and says afterwards which of the heavy packages came along.
PROBE = """
import json, runpy, sys
sys.argv = ["train.py", *json.loads(sys.argv[1])]
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as end:
    status = end.code
print("heavy:", sorted({"torch", "megatron", "matplotlib", "tensorboard"} & set(sys.modules)), "status:", status)
"""


def probe(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs ``train.py`` from the tree and reports what it imported."""
    return run_command(sys.executable, "-c", PROBE, json.dumps(arguments))


@pytest.mark.parametrize(
    ("arguments", "last_ranks"),
    [
        ("--dry-run device=cpu trainer.tp=2", "0-1"),
        ("dry_run=true model=llama70b trainer.tp=8 trainer.pp=16 trainer.dp=4", "504-511"),
        ("--dry-run device=cuda model=llama7b trainer.tp=8", "0-7"),
    ],
)
def test_a_dry_run_is_light_and_leaves_nothing(arguments: str, last_ranks: str) -> None:
    before = set(ROOT.iterdir()) | set((ROOT / "runs").glob("*"))
    done = probe([*arguments.split(), "data=mock"])
    assert done.stdout.endswith("heavy: [] status: 0\n"), done.stderr
    assert last_ranks in done.stdout
    assert set(ROOT.iterdir()) | set((ROOT / "runs").glob("*")) == before


ASYNC_TP = "data=mock trainer.tp=2 trainer.dp=1 trainer.compile=true trainer.async_tp=true"


def test_refusals(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All mistakes are reported at once, before anything is started, imported or written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    prefix = write_indexed(tmp_path / "set", numbered(50, first_id=700))
    write_indexed(tmp_path / "set_mask", numbered(50))  # of another type than masks are
    before, page = sorted(tmp_path.iterdir()), ""
    for line in GoldenFiles.commands("launch/refused.txt"):
        assert cli.main(line.split(), note_place) == 2, line
        printed = capfd.readouterr()
        page += f"$ {line}\n{printed.out}{printed.err}\n"
    GoldenFiles.check("launch/refused.txt", page)
    assert sorted(tmp_path.iterdir()) == before
    words = f"data.prefixes=[{prefix}] data.tokenizer=null device=cpu model.vocab_size=600"
    assert probe(words.split()).stdout == "heavy: [] status: 2\n"
    assert cli.main(["--dry-run", *ASYNC_TP.split(), "device=cuda", "trainer.seed=7", "+trainer.seed=8"]) == 0
    printed = capfd.readouterr()
    assert "tp 2 with sp · compile with async_tp" in printed.out
    assert "train.py: trainer.seed is given more than once; the last value is used\n" in printed.err


def test_a_missing_device_among_mistakes(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:

    def missing(name: str) -> None:
        raise ValueError(f"device={name} is unavailable on this host: no driver")

    monkeypatch.setattr("megatron_llama.devices.get_device", missing)
    assert cli.main(["data=mock", "device=cuda", "optim.lr=-1"]) == 2
    text = capfd.readouterr().err
    assert "is unavailable on this host" in text and "optim.lr" in text


class Accelerator:
    """Four devices that don't exist."""

    name = "cuda"
    is_accelerator = True
    forkable = False

    def count(self) -> int:
        return 4

    def memory_bytes(self) -> int:
        return 80 * 2**30

    def has_fast_bf16(self) -> bool:
        return True


def with_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the devices other than the CPU."""
    from megatron_llama.devices.cpu import DEVICE

    there = {"cpu": DEVICE}
    monkeypatch.setattr("megatron_llama.launch.world.get_device", lambda name: there.get(name, Accelerator()))


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        (["device=cpu"], 1),
        (["device=cpu", "trainer.tp=2", "trainer.pp=2"], 4),
        (["device=cpu", "trainer.tp=2", "trainer.dp=3"], 6),
        (["device=cuda", "trainer.tp=2"], 4),
        (["device=cuda", "trainer.tp=2", "dry_run=true"], 2),
        (["device=cuda", "trainer.tp=2", "trainer.dp=16", "dry_run=true"], 32),
        (["device=auto", "trainer.tp=2", "dry_run=true"], 4),
        (["device=cuda", "trainer.dp=1"], 1),  # a part of the devices
        (["device=cuda", "trainer.tp=2", "trainer.dp=1"], 2),
        (["device=cuda", "trainer.tp=2", "trainer.dp=3"], 4),  # which the plan rejects
        (["device=auto", "trainer.tp=8", "dry_run=true"], 8),
    ],
)
def test_the_world_when_started_by_hand(overrides: list[str], world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with_accelerator(monkeypatch)
    assert find_world(load_config(overrides, cli.CONF_DIR), None).size == world


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(
    ("file", "start", "end", "world"),
    [("Makefile", "DEMO_ARGS := ", "\n\n", 2), ("README.md", "    python train.py ", "\n    python", None)],
)
def test_documented_commands_run_on_a_machine_with_gpus(
    file: str, start: str, end: str, world: int | None, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / file).read_text().partition(start)[2].partition(end)[0]
    settings = shlex.split(text.replace("$(DEMO_RUN)", "runs/demo").replace("\\\n", " "))
    assert any(each.startswith("trainer.steps=") for each in settings)
    settings = [each for each in settings if not each.startswith("data.")]  # without the demo's files
    monkeypatch.setattr(Accelerator, "count", lambda self: devices)
    with_accelerator(monkeypatch)
    config = load_config([*settings, "data=mock", "logging.sample_prompts=[]"], cli.CONF_DIR)
    assert find_world(config, None).plan().world_size == (world or devices)


def test_an_unusable_gpu_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("megatron_llama.launch.world.ignored_devices", lambda: ["the GPU is not used. " * 8])
    find_world(load_config([], cli.CONF_DIR), None)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("the GPU is not used") and max(map(len, lines)) <= WIDTH
    find_world(load_config(["device=cpu"], cli.CONF_DIR), None)
    find_world(load_config([], cli.CONF_DIR), ProcessContext("srun", 1, 0, 4, 8, "node1", 15000, "7", False))
    assert capsys.readouterr().err == "", "the device is named, or another rank reports"


def test_the_world_of_a_starter_wins() -> None:
    """The default folder of a run is in runs/."""
    context = ProcessContext("srun", 0, 0, 4, 8, "node1", 15000, "7", False)
    assert find_world(load_config(["device=cpu", "trainer.tp=2"], cli.CONF_DIR), context).size == 8
    config = load_config([*TINY, "model.name=../../a b", "data.name=/etc"], cli.CONF_DIR)
    assert run_dir.run_dir_name(config, "x") == "runs/.._.._a_b-_etc-x"


def test_a_run_writes_config_and_plan(launcher: MakeLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launcher(partial(cli.main, [*TINY, "trainer.tp=2", "trainer.global_batch_size=4"], note_place), status=0)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("llama_2m-mock-")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["run"]["dir"] == f"runs/{folder.name}" and config["device"]["name"] == "cpu"
    assert config["trainer"]["dp"] == 1 and config["model"]["num_key_value_heads"], "derived values are filled in"
    assert "llama_2m" in (folder / "plan.txt").read_text()
    assert {(folder / name).stat().st_mode & 0o777 for name in ("config.yaml", "plan.txt")} == {0o600}
    places = [json.loads((folder / f"place{rank}.json").read_text()) for rank in range(2)]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    assert [[place[name] for name in names] for place in places] == [["0", "0", "2"], ["1", "1", "2"]]
    assert {place["dir"] for place in places} == {f"runs/{folder.name}"}


def hold(plan: Plan) -> None:
    """A rank that writes for a long time."""
    (Path(str(plan.config.run.dir)) / "held").touch()
    time.sleep(600)


def test_one_folder_has_one_run(launcher: MakeLauncher, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [*TINY, f"run.dir={tmp_path}/run"]
    job = launcher(partial(cli.main, arguments, hold))
    wait_until((tmp_path / "run/held").exists, lambda: job.errors)
    assert cli.main(arguments, note_place) == 2
    text = capfd.readouterr().err
    assert "is locked by another run" in text and f"process {job.pid} " in text
    os.kill(job.pid, signal.SIGKILL)
    job.wait()

    def is_released() -> bool:  # when the last rank ends
        with suppress(ConfigError), run_dir.claim_run_dir(tmp_path / "run"):
            return True
        return False

    wait_until(is_released)


def test_no_file_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    lock, host = tmp_path / run_dir.LOCK_NAME, socket.gethostname()
    lock.write_text(f"process {os.getppid()} on {host}")
    with pytest.raises(ConfigError, match="is locked by another run"), run_dir.claim_run_dir(tmp_path):
        pass
    lock.write_text(f"process {os.getppid()} on another-{host}")
    with run_dir.claim_run_dir(tmp_path):
        assert lock.read_text() == f"process {os.getpid()} on {host}"
    warning = " ".join(capsys.readouterr().err.split())
    assert "has no locks" in warning and f"another-{host}" in warning
    assert not lock.read_text(), "a later start does not take a run that has ended for a running one"


def test_a_full_disk_is_one_message(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    check_threads()
    pid = os.fork()
    if pid == 0:  # no file of this process can grow, as on a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stderr = os.fdopen(writer, "w", buffering=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        os._exit(cli.main([*TINY, f"run.dir={tmp_path}/run"], note_place))
    os.close(writer)
    with os.fdopen(reader) as pipe:
        stderr = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert "run.dir" in stderr and "cannot write" in stderr and "Traceback" not in stderr


def test_ctrl_c_before_the_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "parse_overrides", interrupted)
    assert cli.main([*TINY]) == 130
    assert capsys.readouterr().err == "Stopped by Ctrl-C before the start.\n"


def test_a_job_that_is_started_again_finds_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(TINY, cli.CONF_DIR)
    first = run_dir.default_run_dir(config, "4711")
    assert re.fullmatch(r"runs/llama_2m-mock-4711-\d{8}-\d{6}", first)
    for name in (first, "runs/llama_2m-mock-4711-20200101-000000", "runs/llama_2m-mock-47112-20990101-000000"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(run_dir.time, "time", lambda: time.mktime((2033, 1, 1, 0, 0, 0, 0, 1, -1)))
    # Slurm may reuse job ids: a later job with this id must not resume in that folder.
    assert run_dir.default_run_dir(config, "4711") == "runs/llama_2m-mock-4711-20330101-000000"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run_dir.default_run_dir(config, "4711") == first
    assert run_dir.default_run_dir(config, "4712") == "runs/llama_2m-mock-4712-20330101-000000"


def test_a_clock_that_is_set_back_gives_a_new_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the folder of an earlier run, this run would resume it."""
    monkeypatch.chdir(tmp_path)
    config = load_config(TINY, cli.CONF_DIR)
    monkeypatch.setattr(run_dir.time, "time", lambda: time.mktime((1969, 7, 20, 20, 17, 39, 0, 1, -1)))
    names = []
    for job in (None, None, "7", "7"):
        names.append(run_dir.default_run_dir(config, job))
        (tmp_path / names[-1]).mkdir(parents=True)
    start = "runs/llama_2m-mock-"
    assert names[:2] == [f"{start}19690720-201739", f"{start}19690720-201740"]
    assert names[2:] == [f"{start}7-19690720-201739", f"{start}7-19690720-201740"]


def test_torchrun_shows_the_first_failure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += [str(script(tmp_path, "fail_on_the_last", patience=20)), *TINY, "trainer.tp=2"]
    done = run_command(*command, cwd=tmp_path, timeout=240, GLOO_SOCKET_IFNAME="lo", PIDS=str(tmp_path))
    assert done.returncode == 1
    assert "ZeroDivisionError: the weights of the last rank" in done.stderr
    assert "Connection closed" not in done.stderr, "rank 0's error is a consequence"


def srun(path: Path, arguments: list[str], folder: Path, tasks: int = 2) -> list[subprocess.Popen[str]]:
    """Ranks with srun's variables."""
    common = {"SLURM_NTASKS": str(tasks), "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid())}
    common["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, str(path), *arguments]
    numbers = map(str, range(tasks))
    return [started(command, folder, SLURM_PROCID=task, SLURM_LOCALID=task, **common) for task in numbers]


@pytest.mark.slow
def test_srun_ranks_meet(tmp_path: Path) -> None:
    tasks = srun(script(tmp_path, "meet"), [*TINY, "trainer.tp=2"], tmp_path)
    ends = [task.communicate(timeout=130) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], ends
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith(f"llama_2m-mock-{os.getpid()}-")
    assert [(folder / f"sum{rank}").read_text() for rank in range(2)] == ["1.0", "1.0"]
    places = [json.loads((folder / f"place{rank}.json").read_text()) for rank in range(2)]
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1"]


def test_under_srun_a_mistake_is_said_once(tmp_path: Path) -> None:
    tasks = srun(script(tmp_path, "meet"), [*TINY, "trainer.tp=3"], tmp_path)
    ends = [task.communicate(timeout=130)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [2, 2]
    assert "trainer.tp" in ends[0] and "Traceback" not in ends[0] and ends[1] == ""


@pytest.mark.timeout(60)  # a pipe would block
def test_run_folders_in_which_a_run_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported together, before the run writes through links to files elsewhere. A command is next to mine.txt."""
    monkeypatch.setattr(os, "access", lambda path, mode: bool(os.stat(path).st_mode & mode << 6))  # also for root
    page = ""
    for number, line in enumerate(GoldenFiles.commands("launch/run_folders.txt")):
        (tmp_path / str(number) / "run").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / str(number))
        Path("mine.txt").write_text("mine")
        subprocess.run(["sh", "-ec", line], cwd="run", check=True)
        with pytest.raises(ConfigError) as rejected, run_dir.claim_run_dir(Path("run")):
            pass
        page += f"$ {line}\n{rejected.value}\n\n"
        assert Path("mine.txt").read_text() == "mine"
    GoldenFiles.check("launch/run_folders.txt", page)
