"""Uncompiled blocks launch few kernels, because norms, rotations and SwiGLU are fused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.cuda.harness import Runtime
from tests.cuda.log import kernel_class
from tests.cuda.rows import MEASURED_STEP

pytestmark = pytest.mark.slow
OPERATORS = {"norms": 2 * 3, "rotations of q and k": 2 * 2, "SwiGLU": 2}
"""Kernels of a block, forward and backward. A norm's backward pass adds and rounds the weight's gradient."""
PLAIN = 60
"""Kernels of a block that the fused operators replace, at least."""


def _block(runtime: Runtime, folder: Path, **settings: str) -> Counter[str]:
    """Return the kernels of one block of a micro batch by class, from runs with one and two blocks."""
    counted = []
    for layers in (1, 2):
        overrides = (f"model.num_hidden_layers={layers}", "trainer.global_batch_size=2", "trainer.compile=false")
        run = runtime.train(folder / str(layers), *overrides, **settings).check()
        calls = (call for call in run.logs[0].steps[MEASURED_STEP] if call.name == "KERNEL")
        counted.append(Counter(kernel_class(call.fields["name"]) for call in calls))
    return counted[1] - counted[0]


def test_launches_of_a_block(runtime: Runtime, tmp_path: Path) -> None:
    """Without a C compiler Triton cannot launch kernels: the plain operators run."""
    fused = _block(runtime, tmp_path / "fused")
    plain = _block(runtime, tmp_path / "plain", CC="no-such-compiler")
    assert 0 < fused["Triton"] <= sum(OPERATORS.values()) + 2  # and the sums of the norms' weight gradients
    assert plain["Triton"] == 0
    assert plain.total() - fused.total() >= PLAIN, (plain, fused)
