"""One thread for torch in the process that ranks are forked from: a pool of threads does not survive a fork, and who
needs one there waits for ever. And what is slow may take longer before it counts as hanging."""

import pytest
import torch

torch.set_num_threads(1)
SLOW_SECONDS = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
