"""Parts run one after the other within the time; tables, pages and exit statuses show their results."""

from __future__ import annotations

import fcntl
import gzip
import sys
import tarfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_llama.devices import get_device
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import read_json
from megatron_llama.tools.prove_gpu import cli, training
from megatron_llama.tools.prove_gpu.environment import settings_of_environment
from megatron_llama.tools.prove_gpu.run_checks import Outcome, Part, PartResult, Result, Row, Status, run_parts
from megatron_llama.tools.prove_gpu.session import CheckFailed, Clock, NotRun, Process, Redactor, Session
from tests.golden import GoldenFiles

FACTS = {
    "device": "cpu", "is_accelerator": False, "count": 1, "libraries": {"CUDA": "13.0"},
    "hardware": {"driver": "580.1"},
    "cards": [{"name": "Card | 80", "memory_bytes": 80 << 30, "capability": "capability 9.0"}],
    "packages": {"torch": "2.13.0"}, "python": "3.12.1", "platform": "Linux", "processor": "CPU", "cores": 2,
    "memory_bytes": 1 << 34, "compiler": "gcc 12", "compiler_missing": None, "variables": {}, "matmul_error": 1e-7,
    "commit": "0123abcd", "small": False,
}  # fmt: skip


Run = Callable[[Session], Outcome]


class FakeTime:
    """A clock whose time passes only in checks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def takes(self, seconds: float, outcome: Outcome | Exception | None = None) -> tuple[str, Run]:
        """Return a check that lasts ``seconds``."""

        def run(_: Session) -> Outcome:
            self.seconds += seconds
            if isinstance(outcome, Exception):
                raise outcome
            return outcome or Outcome("well")

        return f"{seconds:g} s", run

    def session(self, seconds: float = 100, jobs: int = 1) -> Session:
        return Session(Path("/none"), Path("/none"), Clock(seconds, self), "cpu", FACTS, jobs=jobs)


def part(name: str, *checks: tuple[str, Run], share: float = 1, alone: bool = True) -> Part:
    rows = [Row(title, (str(number),)) for number, (title, _) in enumerate(checks)]
    return Part(name, f"the part {name}", share, rows, lambda s, row: checks[int(row.settings[0])][1](s), alone)


def test_failures_do_not_stop_the_rest() -> None:
    time = FakeTime()
    faults = [CheckFailed("wrong number", {"error": 1.0}), NotRun("no such card"), ZeroDivisionError("division")]
    parts = [
        part("first", *(time.takes(1, fault) for fault in faults), time.takes(1)),
        part("absent", time.takes(1, NotRun("no such card"))),
        part("last", time.takes(1)),
    ]
    results = list(run_parts(parts, time.session()))
    assert [result.status for result in results] == [Status.FAILED, Status.NOT_RUN, Status.PASSED]
    assert [result.status for result in results[0].results] == ["FAILED", "not run", "FAILED", "passed"]
    assert "wrong number" in results[0].detail and "ZeroDivisionError: division" in results[0].detail
    assert "test_checks.py" in results[0].results[2].values["traceback"]
    assert cli.last_line(results) == "1 of 3 parts passed. Failed: first. Not run: absent. Run in part: first."


def test_checks_that_do_not_fit_are_not_run() -> None:
    """Each part has its share of the time; later parts get unused time, and no check starts at the end."""
    time = FakeTime()
    long = time.takes(30)
    parts = [part("long", *[long] * 4), part("next", long, long), part("last", long)]
    results = list(run_parts(parts, time.session(150)))
    ran = [[result.status == Status.PASSED for result in part.results] for part in results]
    assert ran == [[True, False, False, False], [True, True], [True]] and time.seconds <= 150
    assert results[0].detail == "1 of 4 checks passed; 3 not run"
    results = list(run_parts([part("a", time.takes(100)), part("b", time.takes(1))], time.session()))
    assert results[1].status == Status.NOT_RUN and "--minutes" in results[1].detail
    checks = {number: Result(f"zero {number}", Status.PASSED if number else Status.NOT_RUN, "") for number in range(3)}
    assert PartResult("parity", "", checks).detail == "2 of 3 checks passed; not run: zero 0"


def test_a_stopped_command_continues(tmp_path: Path) -> None:
    """Each verdict is on the disk and in the archive before the next check starts; a second command runs the rest."""
    time, archive = FakeTime(), tmp_path / "results.tar.gz"

    def stopped(_: Session) -> Outcome:
        raise SystemExit  # as by a signal that nothing catches

    parts = [part("a", time.takes(1), time.takes(2, CheckFailed("wrong"))), part("b", time.takes(3), ("x", stopped))]
    folder = tmp_path / "results"

    def save(results: Sequence[PartResult]) -> None:
        cli.write_files(folder, FACTS | {"small": True}, results, "command", str)
        cli.pack(folder, archive)

    with pytest.raises(SystemExit):
        list(run_parts(parts, time.session(), save=save))
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "sent", filter="data")
    for each in (folder, tmp_path / "sent/results"):
        earlier = cli.read_results(each, small=True)
        assert [*earlier] == [("a", "1 s"), ("a", "2 s"), ("b", "3 s")]
    with pytest.raises(UserError, match="small shapes"):
        cli.read_results(folder, small=False)
    parts[1] = part("b", time.takes(3), ("x", lambda _: Outcome("well")))
    before = time.seconds
    results = [*run_parts(parts, time.session(), earlier=earlier)]
    assert time.seconds == before and [result.status for result in results] == ["FAILED", "passed"]


def test_an_interrupt_keeps_the_results() -> None:
    def interrupt(_: Session) -> Outcome:
        raise KeyboardInterrupt

    results, one = [], FakeTime().session()
    with pytest.raises(KeyboardInterrupt):
        for result in run_parts([part("a", ("x", interrupt)), part("b")], one):
            results.append(result)
    assert [result.status for result in results] == [Status.NOT_RUN] and not one.stopping.is_set()


def test_parts_run_side_by_side(tmp_path: Path) -> None:
    """Rows of consecutive parts that are not alone run round-robin; a part that is alone waits for them."""
    barrier, order = threading.Barrier(2, timeout=60), list[str]()

    def meets(_: Session) -> Outcome:
        barrier.wait()
        return Outcome("together")

    def notes(name: str) -> tuple[str, Run]:
        return name, lambda _: order.append(name) or Outcome("well")  # type: ignore[func-returns-value]

    parts = [part("a", ("x", meets), alone=False), part("b", ("x", meets), notes("1"), alone=False)]
    parts.append(part("c", notes("2")))
    results = list(run_parts(parts, FakeTime().session(jobs=2)))
    assert [result.status for result in results] == [Status.PASSED] * 3 and order == ["1", "2"]


def test_a_failed_check_is_repeated_with_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failed check of a part runs again without each feature; its verdict names the variants that pass."""
    calls: list[tuple[str, dict[str, str]]] = []

    def run(session: Session) -> Outcome:
        calls.append((session.prefix, dict(session.variables)))
        if session.variables != {"DYNAMO": "0"}:
            raise CheckFailed("wrong")
        return Outcome("well")

    one = FakeTime().session(jobs=2)
    one.environment = FACTS | {"is_accelerator": True}
    variants = {"without Dynamo": {"DYNAMO": "0"}, "without cuDNN": {"CUDNN": "0"}}
    monkeypatch.setattr(get_device("cpu").__class__, "variants", variants)
    parts = [part("a", ("x", run), ("y", run)), part("b", ("x", run))._replace(repeats=False)]
    first, second = run_parts(parts, one)
    assert [result.detail for result in first.results] == ["wrong; passes without Dynamo", "wrong"]
    assert second.detail == "wrong" and len(calls) == 5
    assert [prefix for prefix, _ in calls].count("variants/without_Dynamo/") == 1
    failed_before = Result("x", Status.FAILED, "wrong", seconds=1000)  # longer than this command
    (first,) = run_parts(parts[:1], one, earlier={("a", "x"): failed_before})
    assert first.results[1].detail == "wrong; passes without Dynamo", "as the first failure of this command"


def test_a_failure_is_stored_after_its_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the variants are interrupted, a resumed command runs the check and them again."""

    def run(session: Session) -> Outcome:
        if session.variables:
            raise KeyboardInterrupt
        raise CheckFailed("wrong")

    one, results = FakeTime().session(), list[PartResult]()
    monkeypatch.setattr(get_device("cpu").__class__, "variants", {"without cuDNN": {"CUDNN": "0"}})
    one.environment = FACTS | {"is_accelerator": True}
    with pytest.raises(KeyboardInterrupt):
        results.extend(run_parts([part("a", ("x", run))], one, save=results.extend))
    assert not any(result.named(Status.FAILED) for result in results)


def test_table_and_page_show_all_results(tmp_path: Path) -> None:
    time = FakeTime()
    long = "a sentence with | a bar " * 8
    parts = [part("attention", time.takes(61, CheckFailed(long))), part("smoke", time.takes(1))]
    parts.append(part("parity", time.takes(1)))
    results = list(run_parts(parts, time.session()))
    table = [line for result in [None, *results] for line in cli.table_lines(result)]
    assert max(map(len, table)) <= 79
    path = cli.write_files(tmp_path, FACTS, results, "python scripts/prove_gpu.py", lambda text: text)
    assert path.name.startswith("gpu-20") and path.suffix == ".md"
    text = "\n".join([*table, "", path.read_text(encoding="utf-8")])
    GoldenFiles.check("tools/prove_gpu/page.txt", text, {r"\d{4}-\d\d-\d\d": "TODAY"})
    assert {file.name for file in tmp_path.iterdir()} == {path.name, "results.json", "environment.json"}


def test_private_names_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/erika")
    monkeypatch.setattr("getpass.getuser", lambda: "erika")
    monkeypatch.setattr("socket.gethostname", lambda: "gpu7.lab.org")
    work = tmp_path / "work"
    redact = Redactor(work)
    text = f"{work}/run /home/erika/x by erika on gpu7.lab.org (gpu7), erikas"
    assert redact(text) == "WORK/run HOME/x by USER on HOST (HOST), erikas"
    source, target = work / "trace.json.gz", tmp_path / "folder" / "trace.json.gz"
    work.mkdir()
    with gzip.open(source, "wt") as file:
        file.write(text)
    redact.copy(source, target)
    with gzip.open(target, "rt") as file:
        assert "erika " not in file.read()


def test_variables_with_secrets_are_omitted() -> None:
    environ = {"NCCL_DEBUG": "INFO", "TORCH_API_KEY": "1", "NCCL_AUTH": "1", "HF_TOKEN": "1", "OMP_NUM_THREADS": "4"}
    assert settings_of_environment(environ) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}


def session(tmp_path: Path, start: object) -> Session:
    return Session(tmp_path / "folder", tmp_path / "work", Clock(600), "cpu", FACTS, start=start)  # type: ignore[arg-type]


def test_a_process_that_hangs_is_a_failure(tmp_path: Path) -> None:
    def hang(words: object, limit: float) -> Process:
        raise TimeoutError("step 1")

    with pytest.raises(CheckFailed, match="timed out after 150 s, see smoke/log.txt"):
        session(tmp_path, hang).train("smoke")
    with pytest.raises(CheckFailed, match="timed out after 300 s"):  # a cold compilation takes longer
        training.attention(session(tmp_path, hang), Row("compiled"))
    assert "step 1" in (tmp_path / "folder/smoke/log.txt").read_text()


CHILD = """
import fcntl, os, signal, sys
reader, writer = os.pipe()
if os.fork() == 0:  # as a compile process: it keeps stdout open
    os.close(reader)
    file = open(sys.argv[1], "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    os.close(writer)
    signal.pause()
os.close(writer)
os.read(reader, 1)
print('{"a": 1}', "the end", sep="\\n", flush=True)
"""


def test_a_process_ends_with_its_children(tmp_path: Path) -> None:
    """A result is taken when the process ends, though a child holds its output open, and the child ends too."""
    held, one = tmp_path / "held", session(tmp_path, None)
    process = one._start([sys.executable, "-c", CHILD, str(held)], 60)
    assert process.status == 0 and process.output.splitlines() == ['{"a": 1}', "the end"]
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # once the child has ended
    assert session(tmp_path, lambda *_: process).module("smoke", "attention") == {"a": 1}, "the last line that parses"
    threading.Timer(0.2, one.stopping.set).start()
    with pytest.raises(NotRun, match="stopped by a signal"):  # and so does a process that still runs
        one.run("smoke", ["-c", "import signal; signal.pause()"])


def test_a_refused_run_states_the_rule(tmp_path: Path) -> None:
    message = (
        "This config can't work\n\n  trainer.async_tp = true\n    rule     needs peer access,\n"
        "             on one node\n    rule     needs tp\n    instead  x\n"
    )
    with pytest.raises(NotRun, match="refused: needs peer access, on one node; needs tp$"):
        session(tmp_path, lambda *_: Process(2, message)).train("parity/async")
    with pytest.raises(CheckFailed, match="exit status 1: a / b / OutOfMemoryError"):
        session(tmp_path, lambda *_: Process(1, "x\na\nb\n\nOutOfMemoryError")).train("smoke")


def test_ranks_of_a_run(tmp_path: Path) -> None:
    """trainer.dp fills the devices of a check, after tp and pp."""
    started: list[list[str]] = []

    def note(words: list[str], limit: float) -> Process:
        started.append(words)
        return Process(1, "")

    for overrides in (["trainer.tp=2", "trainer.pp=2"], []):
        with pytest.raises(CheckFailed):
            session(tmp_path, note).train("x", *overrides, ranks=8)
    assert "trainer.dp=2" in started[0] and "trainer.dp=8" in started[1]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints a row per part and writes the folder; a resumed command runs only checks without a result."""
    calls: list[str] = []

    def fail(_: Session) -> Outcome:
        calls.append("x")
        raise CheckFailed("wrong")

    parts = [part("environment", ("x", fail)), part("smoke", ("x", lambda _: Outcome("well")))]
    monkeypatch.setattr(cli, "parts", lambda small=False: parts)
    monkeypatch.setattr(Session, "module", lambda *_: FACTS | {"cards": []})
    folder = tmp_path / "results"
    words = ["--output", str(folder), "--archive", str(tmp_path / "a.tar.gz"), "--device", "cpu"]
    for more in ([], ["--resume"]):
        assert cli.main([*words, *more]) == 1 and calls == ["x"]
        printed = capsys.readouterr().out
        assert "environment   FAILED    0:00    wrong\n" in printed and "1 of 2 parts passed." in printed
    record = read_json(folder / "results.json")
    assert record["small"] and [each["status"] for each in record["parts"]] == ["FAILED", "passed"]
    assert tarfile.is_tarfile(tmp_path / "a.tar.gz")


def test_mistakes_are_reported_together() -> None:
    with pytest.raises(UserError) as error:
        cli.main(["--minutes", "0", "--device", "tpu", "--parts", "smoke,taste", "--fast", "--resume", "--jobs", "0"])
    GoldenFiles.check("tools/prove_gpu/refused.txt", str(error.value))
