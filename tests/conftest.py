"""Settings of the process that runs tests: one thread, limits of time, and which files come first."""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from omegaconf import DictConfig

# Commands that tests run get one thread too: pools of threads that spin are in each other's way on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # names of the hub are not looked up
# No pool of Inductor workers per forked rank. Inductor reads this at import.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
import torch  # noqa: E402
import tqdm  # noqa: E402

# Ranks are forked from this process. A pool of threads does not survive a fork, and a child that needs one waits for
# ever.
torch.set_num_threads(1)
# Progress bars of transformers would start a thread that stays.
tqdm.tqdm.monitor_interval = 0
if TYPE_CHECKING:
    from tests.object_store import Store

SLOW_SECONDS = 900
BUCKETS = itertools.count()
"""Numbers of the buckets of tests."""
# Folders with long files, because their tests start ranks or commands. `make test` gives files to three workers
# in this order, so that no worker begins a long file when the others are idle.
LONG_FOLDERS = "checkpoint launch layouts finetuning tools data_prep optim model devices parallel".split()


@pytest.fixture(autouse=True, scope="session")
def signals_have_defaults() -> Iterator[None]:
    """Undo ``nohup`` and ``&``: both ignore signals, and commands and forked ranks would inherit that."""
    from tests.processes import default_signals

    with default_signals():
        yield


@pytest.fixture(autouse=True)
def torchs_own_products() -> Iterator[None]:
    """Reset the CPU device's choice of matmul, which a test may have set."""
    from megatron_llama.devices.cpu import device as cpu
    from megatron_llama.devices.cpu import matmul

    yield
    if matmul.multiply_in_fp32.cache_info().currsize:
        matmul.multiply_in_fp32()._destroy()
        matmul.multiply_in_fp32.cache_clear()
    cpu.prefer_onednn.cache_clear()
    torch.backends.mkldnn.matmul.fp32_precision = "none"  # type: ignore[attr-defined]


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the folder of this run of the tests that all workers share."""
    base = factory.getbasetemp()
    return base.parent if base.name.startswith("worker") else base


@pytest.fixture(autouse=True, scope="session")
def shared_oracles(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compute each result of one process once for all test files and workers."""
    if "tests.oracle" in sys.modules:  # imported by the tests that use it
        sys.modules["tests.oracle"].SharedResults.folder = shared_folder(tmp_path_factory)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a file's tests compile: a folder for the graphs of all."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def compiled_here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Share one compile cache between all test files and workers, which have many equal graphs."""
    folder = shared_folder(tmp_path_factory) / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


@pytest.fixture(scope="session")
def object_server() -> Iterator[int]:
    """Run an S3 store on loopback, in a process (tests/object_store.py)."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    from tests.object_store import object_server

    with object_server() as port:
        yield port


@pytest.fixture
def store(object_server: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    """A new bucket of the store, its environment, and an empty cache folder."""
    from megatron_llama.system.object_store import end_threads
    from tests.object_store import new_bucket

    store = new_bucket(object_server, f"bucket{next(BUCKETS)}")
    for name, value in {**store.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    end_threads()
    return store


def pytest_configure(config: pytest.Config) -> None:
    """Composes each choice of groups of the project's conf/ once a worker: it takes a tenth of a second of processor
    time, and most tests choose the same groups."""
    from tests.golden import GoldenFiles
    from tests.paths import CONF

    GoldenFiles.write = config.getoption("write_golden")
    module = importlib.import_module("megatron_llama.config.load_config")  # the package's name is the function's
    compose = module._compose_groups
    composed: dict[tuple, bytes] = {}

    def compose_once(choices: dict[str, str], conf_dir: Path) -> DictConfig:
        if conf_dir != CONF or any("." in choice for choice in choices.values()):  # files of the test's own
            return compose(choices, conf_dir)
        key = tuple(choices.items())  # in the order that was written
        if key not in composed:
            composed[key] = pickle.dumps(compose(choices, conf_dir))
        return pickle.loads(composed[key])

    module._compose_groups = compose_once  # type: ignore[attr-defined]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of ``make test`` and ``.ci/run``."""
    text = "run files of tests in N processes, which are forked after the collection"
    parser.addoption("--workers", type=int, default=0, metavar="N", help=text)
    text = "stop a run of --workers after SECONDS and name the tests that were running"
    parser.addoption("--limit", type=float, default=float("inf"), metavar="SECONDS", help=text)
    text = "run the files in an order that depends on KEY, for parts of a suite that change with the commit"
    parser.addoption("--rotate", metavar="KEY", help=text)
    text = "write the pages of the selected tests to tests/golden instead of comparing them"
    parser.addoption("--write-golden", action="store_true", help=text)
    text = "run at most ROWS rows of each slow test, evenly spread, and no long test; for machines with little time"
    parser.addoption("--sample", type=int, metavar="ROWS", help=text)
    text = "skip tests that have not begun after SECONDS"
    parser.addoption("--budget", type=float, default=float("inf"), metavar="SECONDS", help=text)


STARTED = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test when the time of ``--budget`` is used up."""
    if time.monotonic() - STARTED > (budget := item.config.getoption("budget")):
        pytest.skip(f"not begun within --budget {budget:.0f} s")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the rows that tests/tiers.py omits as slow, takes the sample, and orders the files."""
    from tests.tiers import (
        sample,  # not before torch's threads are set
        selected_by_tier,
    )

    for item in items:
        if not selected_by_tier(item):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
    if (rows := config.getoption("sample")) is not None:
        selected = sample(items, rows)
        config.hook.pytest_deselected(items=[item for item in items if item not in selected])
        items[:] = [item for item in items if item in selected]
    # Stable: a file's tests stay together and in their order.
    if key := config.getoption("rotate"):
        items.sort(key=lambda item: sha256(f"{key} {item.path.name}".encode()).digest())
    else:
        items.sort(key=_rank_of_folder)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs the tests in forked workers if ``--workers`` is given."""
    count = session.config.getoption("workers")
    if not count or session.config.option.collectonly or session.testsfailed:
        return None
    from tests.pytest_workers import Run  # imports what the tests need, before the first fork

    Run(session, count, session.config.getoption("limit")).loop()
    return True


def _rank_of_folder(item: pytest.Item) -> int:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return LONG_FOLDERS.index(folder) if folder in LONG_FOLDERS else len(LONG_FOLDERS)
