"""Each published bug: our test fails under a mutation that has it, and the documentation lists it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.museum.bugs import BUGS, PAGE, Bug, table
from tests.museum.run import run_test

NAMED = {f"{number}, {bug.function}": bug for number, bug in enumerate(BUGS, start=1)}


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, id=name, marks=[] if bug.quick else [pytest.mark.slow]) for name, bug in NAMED.items()],
)
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
