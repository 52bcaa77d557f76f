"""The runtime, built once per session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda.build import missing
from tests.cuda.harness import Runtime, open_runtime


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """The built runtime. Skips the test, with the reason, where it cannot be used."""
    if reason := missing():
        pytest.skip(reason)
    with open_runtime(tmp_path_factory.mktemp("host_cuda")) as built:
        yield built
