"""Each published bug: our test fails under a mutation that has it, and the documentation lists it."""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest

import tests.warm  # noqa: F401  before the fork
from tests.museum.bugs import BUGS, PAGE, Bug, Mutation, table
from tests.paths import ROOT
from tests.processes import run_forked

SECONDS = 240


def run_test(node: str, mutation: Mutation | None, folder: Path) -> tuple[int, str]:
    """Return pytest's exit status (1: the test failed) and the output of the test ``node`` under ``mutation``."""
    output = folder / "output"
    status = run_forked(partial(_run, node, mutation, folder), output, output, SECONDS)
    return status, output.read_text()


def _run(node: str, mutation: Mutation | None, folder: Path) -> None:
    os.chdir(ROOT)
    for variable in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[variable]
    with pytest.MonkeyPatch.context() as patch:
        _clear_caches()
        if mutation is not None:
            mutation(patch)
        options = ["-q", "-m", "slow or not slow", "-p", "no:cacheprovider"]
        raise SystemExit(int(pytest.main([node, *options, f"--basetemp={folder / 'inner'}"])))


def _clear_caches() -> None:
    """Forget what tests of this process have computed without the mutation."""
    for name in [name for name in sys.modules if name.startswith("tests.")]:
        for value in vars(sys.modules[name]).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@pytest.mark.parametrize("bug", BUGS, ids=[f"{number}, {bug.function}" for number, bug in enumerate(BUGS, start=1)])
def test_a_test_fails_under_the_mutation(bug: Bug, tmp_path: Path) -> None:
    status, output = run_test(bug.test, bug.mutation, tmp_path)
    assert status == pytest.ExitCode.TESTS_FAILED, output[-3000:]
    assert re.search(bug.symptom, output), output[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("test", sorted({bug.test for bug in BUGS}))
def test_it_passes_without(test: str, tmp_path: Path) -> None:
    status, output = run_test(test, None, tmp_path)
    assert status == pytest.ExitCode.OK, output[-3000:]


def test_the_page_lists_the_entries() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "run python -m tests.museum"
