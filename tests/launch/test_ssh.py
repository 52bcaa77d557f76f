"""launch.hosts: the same start on several machines over ssh; here ssh is a script that stays on this one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_llama import cli
from megatron_llama.config import Config, ConfigError, load_config
from megatron_llama.config.hostfile import Host, parse_hostfile
from megatron_llama.launch import ssh as module
from megatron_llama.launch.ssh import control_line_closed
from megatron_llama.launch.start_log import read_starts
from megatron_llama.launch.world import find_world
from megatron_llama.plan import Plan
from tests.launch.small_runs import TINY, script, started
from tests.processes import PATIENCE_SECONDS, gone, pids, plan_of

# Like sshd: a shell in the user's home, in a session that outlives the local command. "down" is an unreachable host.
SSH = """#!/bin/sh
test "$1" = down && { echo "ssh: connect to host down: No route to host" >&2; exit 255; }
echo "$2" >>"${0%/*}/command_lines"
exec 3<&0
cd / && setsid sh -c "$2" <&3 3<&- &
exec 3<&-
wait $!
"""
# The machines are this one: its address must not look like a loopback, which the start refuses for several nodes.
ADDRESS = "megatron_llama.launch.rendezvous.check_first_address = lambda context: None"
# Their machine may be slow: a host whose ranks only lost another one speaks when the cause surely has.
PATIENCE = "megatron_llama.launch.start.CONSEQUENCE_DELAY_SECONDS = 100.0"

# Each host leaves the secret that it got, and the threads of its process at each fork.
NOTES_SECRET = """
import os, pathlib
from megatron_llama.launch import other_launchers
from tests.ranks import foreign_threads
read = other_launchers.secret_of_job
def noted(context):
    secret = read(context)
    pathlib.Path({folder!r}, f"secret{{os.getpid()}}").write_text(secret)
    return secret
other_launchers.secret_of_job = noted
threads = pathlib.Path({folder!r}, f"threads{{os.getpid()}}")
os.register_at_fork(before=lambda: print(foreign_threads(), file=threads.open("a")))
"""


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    path = tmp_path / "ssh"
    path.write_text(SSH)
    path.chmod(0o755)
    return f"launch.ssh={path}"


def start(folder: Path, work: str, *overrides: str, before: str = "") -> subprocess.Popen[str]:
    """The command on the first machine, in the background; its ranks run a function of small_runs.py."""
    modules = "import megatron_llama.launch.rendezvous, megatron_llama.launch.start"
    path = script(folder, work, before=f"{modules}\n{ADDRESS}\n{PATIENCE}\n{before}")
    command = [sys.executable, str(path), *TINY, "trainer.global_batch_size=4", *overrides]
    return started(command, folder, MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", PIDS=str(folder))


def test_ranks_on_two_hosts_meet(tmp_path: Path, ssh: str) -> None:
    overrides = ["trainer.tp=2", "trainer.dp=2", "launch.hosts=[a,u@b]", "run.dir='a run'"]
    run = start(tmp_path, "meet", *overrides, ssh, before=NOTES_SECRET.format(folder=str(tmp_path)))
    out, errors = run.communicate(timeout=150)
    assert run.returncode == 0, errors
    folder = tmp_path / "a run"
    assert [(folder / f"sum{rank}").read_text() for rank in range(4)] == ["6.0"] * 4
    places = [json.loads((folder / f"place{rank}.json").read_text()) for rank in range(4)]
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1", "0", "1"]
    assert "Rendezvous at 127.0.0.1" in out and "2-3" in out
    assert "Messages carry an HMAC with MEGATRON_LLAMA_SECRET." in out
    secret = next(tmp_path.glob("secret*")).read_text()
    assert len(secret) == 64 and {path.read_text() for path in tmp_path.glob("secret*")} == {secret}
    forks = [path.read_text().splitlines() for path in tmp_path.glob("threads*")]
    assert sorted(forks) == [["[]"] * 2, ["[]"] * 3], "the first host forks its store too"
    (first,), _ = read_starts(folder)
    assert "launch.hosts=[a,u@b]" in first.command and "run.dir='a run'" in first.command.replace("'\"'\"'", "'")
    assert "checkpoint.resume" not in first.command, "the user's command, not the hosts'"
    assert secret not in (tmp_path / "command_lines").read_text(), "other users can read command lines"


@pytest.mark.slow
def test_signals_are_forwarded_and_75_returned(tmp_path: Path, ssh: str) -> None:
    run = start(tmp_path, "announce_and_wait", "trainer.tp=2", "launch.hosts=[a,b]", ssh)
    pids(tmp_path, 2)
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 75, errors
    assert {path.read_text() for path in tmp_path.glob("told*")} == {"SIGTERM"}
    assert "Traceback" not in errors


def test_a_signal_between_two_hosts_reaches_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "ssh"  # writes the secret and the first signal that it gets
    script.write_text('#!/bin/sh\ntimeout 20 head -n 2 >"${0%/*}/words_$1"\n')
    script.chmod(0o755)
    start_host = module._start

    def start_after_signal(plan: Plan, host: str, line: str) -> subprocess.Popen[bytes]:
        if host == "b":
            os.kill(os.getpid(), signal.SIGUSR1)
        return start_host(plan, host, line)

    monkeypatch.setattr(module, "_start", start_after_signal)
    plan = plan_of(2)
    plan.config.launch.ssh, plan.config.run.dir = str(script), str(tmp_path / "run")
    module.run_on_hosts(plan, [Host("a"), Host("b")], [])
    assert all((tmp_path / f"words_{host}").read_text().splitlines()[1:] == ["SIGUSR1"] for host in "ab")
    plan.config.launch.ssh = "ssh -i 'key"
    with pytest.raises(ConfigError, match="cannot start the command: No closing quotation"):
        module.run_on_hosts(plan, [Host("a")], [])


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_ranks_end_with_the_command(tmp_path: Path, ssh: str, number: signal.Signals) -> None:
    run = start(tmp_path, "announce_and_wait", "trainer.tp=2", "launch.hosts=[a,b]", ssh)
    ranks = pids(tmp_path, 2)
    run.send_signal(number)
    _, errors = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == (130 if number == signal.SIGINT else -number), errors
    assert all(gone(pid) for pid in ranks)


def test_failing_rank_ends_all_hosts_and_is_printed_last(tmp_path: Path, ssh: str) -> None:
    run = start(tmp_path, "fail_on_the_last", "trainer.tp=4", "launch.hosts=[a:2,b:2]", ssh)
    ranks = pids(tmp_path, 4)
    _, errors = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 1
    assert errors.rstrip().splitlines()[-1] == "ZeroDivisionError: the weights of the last rank"
    assert "Rank 3 of 4 failed" in errors and "Host b failed first, with exit status 1" in errors
    assert all(gone(pid) for pid in ranks)


@pytest.mark.slow
@pytest.mark.long
def test_stopped_rank_on_another_host_is_the_culprit(tmp_path: Path, ssh: str) -> None:
    limit = "trainer.hang_timeout_seconds=20"  # eight times that to start
    run = start(tmp_path, "stop_on_three", "trainer.tp=4", "launch.hosts=[a:2,b:2]", ssh, limit)
    ranks = pids(tmp_path, 4)
    _, errors = run.communicate(timeout=3 * PATIENCE_SECONDS)
    assert run.returncode == 1
    last = errors.rstrip().splitlines()[-1]
    assert last.startswith("Rank 3 of 4 failed: no progress for ") and "in step 1; it is stopped" in last
    assert all(gone(pid) for pid in ranks)


@pytest.mark.slow
def test_unreachable_host_ends_all(tmp_path: Path, ssh: str) -> None:
    run = start(tmp_path, "announce_and_wait", "trainer.tp=2", "launch.hosts=[a,down]", ssh)
    _, errors = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 1, "without a wait for host a, whose rank never ends"
    assert "status 255, ssh's own: correct the name, or let `ssh down true` succeed" in errors
    assert errors.rstrip().splitlines()[-1] == "ssh: connect to host down: No route to host"


def test_a_host_notices_that_its_control_line_was_closed_while_it_started() -> None:
    near, far = socket.socketpair()
    read, write = os.pipe()
    with near, open(read), far:
        assert not control_line_closed(near.fileno()) and not control_line_closed(read)
        far.sendall(b"SIGTERM\n")
        os.write(write, b"SIGTERM\n")
        assert not control_line_closed(near.fileno()) and not control_line_closed(read)
        far.close()
        os.close(write)
        assert control_line_closed(near.fileno()) and control_line_closed(read), "also with unread words"


def test_hostfile(tmp_path: Path) -> None:
    text = "# ours\nn1 slots=8\n\nu@n2.cluster slots = 8 max_slots=16  # the second\n"
    assert parse_hostfile(text) == [Host("n1", 8), Host("u@n2.cluster", 8)]
    assert parse_hostfile("a\nb\n") == [Host("a"), Host("b")]
    for bad, message in [("", "no host"), ("a slots=0", "line 1"), ("a\nb slot=2", "line 2"), ("a\na", "twice")]:
        with pytest.raises(ValueError, match=message):
            parse_hostfile(bad)
    with pytest.raises(ConfigError, match=r"cannot\s+be\s+read"):
        find_world(of(f"launch.hostfile={tmp_path}/none"), None)
    (tmp_path / "file").write_text("a slots=two\n")
    with pytest.raises(ConfigError, match=r"line\s+1"):
        find_world(of(f"launch.hostfile={tmp_path}/file"), None)


@pytest.mark.timeout(30)  # comparing each pair takes many minutes
def test_a_long_hostfile_ends_soon() -> None:
    many = "".join(f"n{number} slots=8\n" for number in range(100_000))
    assert len(parse_hostfile(many)) == 100_000
    with pytest.raises(ValueError, match="n7 is listed twice"):
        parse_hostfile(many + "n7 slots=8\n")


def of(*overrides: str) -> Config:
    return load_config([*TINY, *overrides], cli.CONF_DIR)


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        (["launch.hosts=[a,b]", "trainer.tp=2", "trainer.dp=2"], 4),
        (["launch.hosts=[a,b,c]", "trainer.tp=2"], 3),
        (["launch.hosts=[a:4,b:2]", "trainer.tp=2"], 6),
    ],
)
def test_the_world_of_hosts(overrides: list[str], world: int) -> None:
    assert find_world(of(*overrides), None).size == world
