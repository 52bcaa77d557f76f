"""benchmarks/verify/memory.py on a small model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiled import needs_compiler
from tests.paths import ROOT

SETTINGS = "model=llama_2m data=mock device=cpu data.seq_length=64 trainer.steps=3 trainer.precision=fp32".split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "bits"),
    [(False, None), (False, 8), pytest.param(True, None, marks=needs_compiler)],
    ids=["eager", "8-bit states", "compiled"],
)
def test_components_of_a_small_step(compiled: bool, bits: int | None, tmp_path: Path) -> None:
    """compile_strict also shows that the hooks cause no graph break."""
    compile_settings = [
        "trainer.compile=true",
        "trainer.compile_strict=true",
        f"trainer.compile_cache={tmp_path / 'compiled'}",
    ]
    command = [sys.executable, str(ROOT / "benchmarks/verify/memory.py"), str(ROOT / "train.py"), *SETTINGS]
    command += [
        f"optim.state_bits={bits or 'null'}",
        f"run.dir={tmp_path / 'run'}",
        *(compile_settings if compiled else ()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    mib = {name: int(size) for name, size in re.findall(r"live at the peak: (.+?) +([\d,]+) MiB", done.stdout)}
    assert mib["weights"] == round(4 * 1_771_200 / 2**20)
    assert mib["optimizer states"] == round((2.25 if bits else 8) * 1_771_200 / 2**20)  # ignores the norms' 32 bits
    assert mib["weights"] + mib["optimizer states"] < mib["total"]
    assert mib["total"] == pytest.approx(sum(mib.values()) - mib["total"], abs=2)
