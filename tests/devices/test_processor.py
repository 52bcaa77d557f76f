"""The processor: its units and instruction sets, and the library and cache that follow from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_llama.devices import processor
from megatron_llama.devices.cpu import device as cpu

AVX2, AVX512 = {"flags": "fpu avx2 fma"}, {"flags": "fpu avx2 fma avx512f"}
ZEN_5 = {"vendor_id": "AuthenticAMD", "cpu family": "26", "flags": "fpu avx2 avx512f avx512_bf16"}


def test_graphs_of_each_instruction_set_have_a_separate_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The name of the cache depends on the extensions alone."""
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)

    def folder(actual: dict[str, str]) -> str:
        monkeypatch.setattr(processor, "processor", lambda: actual)
        return cpu.DEVICE.compile_environment(tmp_path)["TORCHINDUCTOR_CACHE_DIR"]

    assert folder(AVX2) == folder({**AVX2, "model name": "another"}) == folder({"flags": "fma avx2 fpu"})
    folders = {folder(actual) for actual in (AVX2, AVX512, {"Features": "fp asimd"}, {})}
    assert len(folders) == 4
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert folder({}) not in folders


class Products(TorchDispatchMode):
    """Record the operands of matmuls."""

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


def library() -> str:
    """Return the setting of the library that multiplies fp32 matrices."""
    return str(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("other", "has_units", "may_choose"),
    [
        pytest.param({}, True, True, id="Zen 5"),
        pytest.param({"cpu family": "27"}, True, True, id="newer"),
        pytest.param({"cpu family": "25"}, False, True, id="Zen 4"),
        pytest.param({"cpu family": "unknown"}, False, True, id="no number"),
        pytest.param({"vendor_id": "GenuineIntel"}, False, False, id="Intel"),
        pytest.param({"flags": "fpu avx2"}, False, False, id="AVX-512 switched off"),
        pytest.param({"flags": "avx512f amx_bf16"}, True, False, id="AMX, which rounds"),
    ],
)
def test_units_of_512_bits_and_processors_that_keep_torchs_library(
    other: dict[str, str], has_units: bool, may_choose: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = library()
    for module in (processor, cpu):
        monkeypatch.setattr(module, "processor", lambda: ZEN_5 | other)
    assert processor.has_512_bit_units() == has_units
    if not may_choose:
        assert not cpu.prefer_onednn() and library() == before


def test_a_system_without_a_description_keeps_torchs_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processor, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert processor.processor() == {} and not cpu.prefer_onednn()


def test_matmuls_stay_in_fp32_with_any_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """On hardware that would round, a processor with AMX that calls itself Zen 5, the choice is reverted."""
    before = library()
    monkeypatch.setattr(cpu, "processor", lambda: ZEN_5)
    is_chosen = cpu.prefer_onednn()
    assert library() == ("bf16" if is_chosen else before)
    torch.manual_seed(0)
    for rows, inner, columns in ((2048, 512, 512), (64, 4096, 256), (7, 33, 129)):
        a, b = torch.randn(rows, inner), torch.randn(inner, columns)
        error = ((a @ b).double() - a.double() @ b.double()).abs().max()
        assert error < 2e-6 * inner**0.5 * 8, "bf16 would be off by 4e-3 of sqrt(inner)"


def test_a_choice_that_rounds_is_reverted(monkeypatch: pytest.MonkeyPatch) -> None:
    before, eye = library(), torch.eye
    monkeypatch.setattr(cpu, "processor", lambda: ZEN_5)
    monkeypatch.setattr(torch, "eye", lambda size: eye(size) * (1 - 2**-9))
    assert not cpu.prefer_onednn() and library() == before
