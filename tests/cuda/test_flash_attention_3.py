"""FlashAttention 3 is used where its package is installed, with the same results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda import flash_attention_3
from tests.cuda.harness import Runtime

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("without", [[], [flash_attention_3.WITHOUT]], ids=["installed", "not installed"])
def test_results(runtime: Runtime, tmp_path: Path, without: list[str]) -> None:
    run = runtime.start([["-m", flash_attention_3.__name__, *without]], tmp_path, 1, {}).check()
    assert run.output.endswith("done\n")
