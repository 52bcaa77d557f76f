"""trainer.compile=true gives the numbers of the eager model, and says so when there is no compiler."""

from __future__ import annotations

import pytest

from megatron_llama.devices import get_device
from tests.layouts.runner import run_layout
from tests.layouts.test_layouts import worst
from tests.ranks import RankFailed

REASON = get_device("cpu").compiler_missing()
ONE_BLOCK = ("trainer.tp=2", "model.num_hidden_layers=1")


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_compiled_equals_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of workers beside forked ranks
    compiled = run_layout(2, *ONE_BLOCK, "trainer.compile=true", steps=2)
    differences = worst(compiled, run_layout(2, *ONE_BLOCK, steps=2))
    assert all(difference <= 1e-5 for difference in differences.values()), differences
    assert any(difference > 0 for difference in differences.values()), (
        "fused kernels round differently: did it compile?"
    )


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(RankFailed, match="needs a C.. compiler, and no-such-compiler is not there"):
        run_layout(2, *ONE_BLOCK, "trainer.compile=true", steps=1)
