"""The processor that graphs are compiled for; graphs of another processor are not loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_llama.devices import processor
from megatron_llama.devices.cpu import DEVICE
from megatron_llama.devices.processor import instruction_set
from tests.compiled import SECONDS, needs_compiler

AVX2, AVX512 = {"flags": "fpu avx2 fma"}, {"flags": "fpu avx2 fma avx512f"}


def test_it_changes_with_the_extensions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    names = []
    for actual in (
        AVX2,
        AVX512,
        {**AVX2, "model name": "another"},
        {"flags": "fma avx2 fpu"},
        {"Features": "fp asimd"},
        {},
    ):
        monkeypatch.setattr(processor, "processor", lambda actual=actual: actual)
        names.append(instruction_set())
    assert names[0] == names[2] == names[3]
    assert len(set(names)) == 4
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert instruction_set() not in names


def test_each_kind_of_processor_has_a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = []
    for actual in (AVX2, AVX512):
        monkeypatch.setattr(processor, "processor", lambda actual=actual: actual)
        folders.append(DEVICE.compile_environment(tmp_path)["TORCHINDUCTOR_CACHE_DIR"])
    assert len(set(folders)) == 2


RUN = """
import os, sys
from pathlib import Path
from megatron_llama.devices import get_device
os.environ.update(get_device("cpu").compile_environment(Path(sys.argv[1])))
import torch
x = torch.linspace(-1, 1, 4096).view(4, 1024)
own = torch.compile(lambda x: torch.softmax(x * x.sigmoid(), 1).square().sum(1))(x)
torch.testing.assert_close(own, torch.softmax(x * x.sigmoid(), 1).square().sum(1))
"""


@pytest.mark.long
@pytest.mark.slow
@needs_compiler
def test_a_cache_serves_machines_with_other_vectors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In one folder, first with all that this processor has, then as one with AVX2 alone."""
    for capability in (None, "avx2"):
        if capability is not None:
            monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        command = [sys.executable, "-c", RUN, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS / 3)
        assert done.returncode == 0, done.stderr


class Products(TorchDispatchMode):
    """Keeps the operands of matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.operands += args
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measured_matmuls_have_random_numbers(dtype: torch.dtype) -> None:
    """A GPU is faster with constants. The generator of a run keeps its state."""
    state = torch.get_rng_state()
    with Products() as products:
        assert processor.matmul_rate(64, dtype, 0.001) > 0
    assert products.operands[0].dtype == dtype
    assert all(len(operand.unique()) > 100 for operand in products.operands)
    assert not torch.equal(*products.operands[:2])
    assert torch.equal(torch.get_rng_state(), state)
