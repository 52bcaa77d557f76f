"""A test that forks while another thread is alive fails, and names the thread."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests import threads
from tests.processes import Launcher, host_store, run_forked
from tests.ranks import run_ranks

FORKS = {
    "ranks": lambda folder: run_ranks(int, 1),
    "launcher": lambda folder: Launcher(lambda: 0, folder),
    "forked": lambda folder: run_forked(lambda: None, folder / "out", folder / "err", 60),
    "store": lambda folder: host_store(),
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for no thread to end."""
    threads.check_threads()
    monkeypatch.setattr(threads.check_threads, "__defaults__", (0.0,))


@pytest.mark.parametrize("kind", FORKS)
def test_a_thread_of_python_is_named(kind: str, tmp_path: Path) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left by a test", daemon=True)
    thread.start()
    try:
        with pytest.raises(AssertionError, match="left by a test"):
            FORKS[kind](tmp_path)
    finally:
        end.set()
        thread.join()
    threads.check_threads()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_a_native_thread_is_named(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(AssertionError, match="pt_tcpstore"):
        Launcher(lambda: 0, tmp_path)
    del store
    threads.check_threads()


def test_threads_of_the_test_runner_are_allowed() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="pytest_timeout tests/test_x.py", daemon=True)
    thread.start()
    try:
        threads.check_threads()
    finally:
        end.set()
        thread.join()
