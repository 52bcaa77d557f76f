"""The runner of the tests: forked workers, samples of slow tests, and threads that would disturb a fork."""

from __future__ import annotations

import re
import threading
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests import pytest_workers, ranks
from tests.processes import Launcher, host_store, run_forked
from tests.ranks import run_ranks
from tests.tiers import ROWS, escaped, selected_by_tier

CONFTEST = "from tests.conftest import pytest_addoption, pytest_runtestloop, pytest_runtest_setup\n"

FIRST = """
import os, time
import pytest

def inner(): time.sleep(100)

def test_passes(tmp_path): assert tmp_path.exists()
def test_fails(): print("its output"); assert 1 == 2
@pytest.mark.timeout(1)
def test_hangs(): inner()
def test_dies(): os._exit(3)
def test_after(): pass
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
"""
SECOND = "def test_in_another_worker(): pass\n"


def _pytest(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 60\n")
    arguments = ["-p", "no:cacheprovider", "--basetemp", str(folder / "base"), "-ra", *options, str(folder)]
    output = folder / "output.txt"
    return run_forked(partial(_main, arguments), output, output, 60), output.read_text()


def _main(arguments: list[str]) -> None:
    raise SystemExit(pytest.main(arguments))


def test_each_test_has_one_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest_workers, "MOST_TESTS", 4)
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    status, output = _pytest(tmp_path, "--workers", "2")
    assert status == 1
    assert "3 failed, 3 passed, 1 skipped" in output
    assert re.search(r"test_hangs _+\nno end within 1 s\n(.*\n)+.* in inner\n.* in test_hangs\n", output), output
    assert "ended during this test, with status 3" in output
    assert "its output" in output


def test_a_limit_names_the_running_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = tmp_path / "running"
    test = f"def test_long():\n    open({str(running)!r}, 'w').close()\n    time.sleep(100)\n"
    (tmp_path / "test_first.py").write_text(f"import time\n{test}def test_after(): pass\n")
    monkeypatch.setattr(pytest_workers, "monotonic", lambda: 50.0 * running.exists())
    status, output = _pytest(tmp_path, "--workers", "1", "--limit", "40")
    assert status == 2
    assert "stopped after --limit 40 s: 2 tests have not ended" in output
    assert "1 failed" in output and "in test_long" in output


def test_listed_rows_exist(request: pytest.FixtureRequest) -> None:
    collected: dict[str, set[str]] = {}
    for item in request.session.items:
        function, _, row = item.nodeid.removeprefix("tests/").partition("[")
        collected.setdefault(function, set()).add(row.removesuffix("]"))
    listed = {name: rows for name, rows in ROWS.items() if name in collected and rows}
    missing = [f"{name}[{row}]" for name, rows in listed.items() for row in rows if escaped(row) not in collected[name]]
    assert not missing
    assert all(selected_by_tier(item) or item.get_closest_marker("slow") for item in request.session.items)


FORKS = {
    "ranks": lambda folder: run_ranks(int, 1),
    "launcher": lambda folder: Launcher(lambda: 0, folder),
    "forked": lambda folder: run_forked(lambda: None, folder / "out", folder / "err", 60),
    "store": lambda folder: host_store(),
}


@pytest.mark.parametrize("kind", FORKS)
def test_a_thread_is_named_before_a_fork(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.check_threads()
    monkeypatch.setattr(ranks.check_threads, "__defaults__", (0.0,))
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left by a test", daemon=True)
    thread.start()
    try:
        with pytest.raises(AssertionError, match="left by a test"):
            FORKS[kind](tmp_path)
        thread.name = "pytest_timeout tests/test_x.py"  # of the test runner
        ranks.check_threads()
    finally:
        end.set()
        thread.join()
    ranks.check_threads()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_a_native_thread_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.check_threads, "__defaults__", (0.0,))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(AssertionError, match="pt_tcpstore"):
        Launcher(lambda: 0, tmp_path)
    del store
    ranks.check_threads(10.0)
