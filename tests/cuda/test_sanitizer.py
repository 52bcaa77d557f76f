"""torch's stream sanitizer (``torch.cuda._sanitizer``) runs on the runtime, and reports nothing in correct steps.

It compares addresses at which tensors begin, in eager operators. It forgets memory that is freed, so it does not report
a use after a free; ``streams.conflicts`` does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.harness import Runtime
from tests.cuda.in_process import FAULT, SANITIZER

pytestmark = pytest.mark.slow
REPORT = "CSAN detected a possible data race on tensor"
ZERO_3 = ("trainer.zero=3",)
ROWS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "offloaded activations": (1, ("trainer.offload=[activations]",)),
    "offloaded optimizer": (1, ("trainer.offload=[optimizer]",)),
    "dp 2, zero 3": (2, ZERO_3),
    "tp 2, pp 2": (4, ("trainer.tp=2", "trainer.pp=2")),
}


@pytest.mark.parametrize(("ranks", "overrides"), ROWS.values(), ids=ROWS)
def test_no_report(runtime: Runtime, tmp_path: Path, ranks: int, overrides: tuple[str, ...]) -> None:
    run = runtime.train(tmp_path, *overrides, devices=ranks, **{SANITIZER: "1"}).check()
    assert [list(log.steps) for log in run.logs] == [[1, 2, 3]] * ranks
    assert "CSAN" not in run.output


def test_a_missing_wait_is_reported(runtime: Runtime, tmp_path: Path) -> None:
    run = runtime.train(tmp_path, *ZERO_3, devices=2, **{SANITIZER: "1", FAULT: "missing event"})
    assert run.status and REPORT in run.output, run.output[-2000:]
    assert "CUDASanitizerErrors: detected" in run.output.splitlines()[-1]
