"""Settings of the process that runs tests: one thread, limits of time, and which files come first."""

from __future__ import annotations

import os

import pytest

# Commands that tests run get one thread too: pools of threads that spin are in each other's way on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch  # noqa: E402

# Ranks are forked from this process. A pool of threads does not survive a fork, and a child that needs one waits for
# ever.
torch.set_num_threads(1)
SLOW_SECONDS = 900
# Folders whose files take minutes, because their tests start ranks or commands. `make test` hands whole files to two
# workers in this order, so that no worker begins with a long file when the other has nothing left.
LONG_FOLDERS = ("checkpoint", "launch", "layouts", "finetuning", "inference", "data_prep", "devices", "parallel")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives slow tests more time, and puts the files of LONG_FOLDERS first."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
    items.sort(key=_rank_of_folder)  # stable: a file's tests stay together and in their order


def _rank_of_folder(item: pytest.Item) -> int:
    folder = item.path.parent.name
    return LONG_FOLDERS.index(folder) if folder in LONG_FOLDERS else len(LONG_FOLDERS)
