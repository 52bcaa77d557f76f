"""The library that multiplies fp32 matrices on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_llama.devices import processor
from megatron_llama.devices.cpu import device as cpu

ZEN_5 = {"vendor_id": "AuthenticAMD", "cpu family": "26", "flags": "fpu avx2 avx512f avx512_bf16"}


def setting() -> str:
    return str(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "other",
    [
        {"vendor_id": "GenuineIntel"},
        {"flags": "fpu avx2"},
        {"flags": "avx512f amx_bf16"},
    ],
    ids=["Intel", "AVX-512 switched off", "AMX, which rounds"],
)
def test_other_processors_keep_torchs_choice(other: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = setting()
    monkeypatch.setattr(cpu, "processor", lambda: ZEN_5 | other)
    assert not cpu.prefer_onednn() and setting() == before


@pytest.mark.parametrize(
    ("other", "fp32"),
    [({}, True), ({"cpu family": "27"}, True), ({"cpu family": "25"}, False), ({"cpu family": "unknown"}, False)]
    + [({"vendor_id": "GenuineIntel"}, False), ({"flags": "avx2"}, False)],
    ids=["Zen 5", "newer", "Zen 4", "no number", "Intel", "AVX2"],
)
def test_zen_5_and_newer_have_units_of_512_bits(
    other: dict[str, str], fp32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "processor", lambda: ZEN_5 | other)
    assert processor.has_512_bit_units() == fp32


def test_a_system_that_says_nothing_keeps_torchs_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processor, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert processor.processor() == {} and not cpu.prefer_onednn()


def test_products_stay_in_fp32_whatever_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On hardware that would round, a processor with AMX that calls itself Zen 5, the choice is taken back."""
    before = setting()
    monkeypatch.setattr(cpu, "processor", lambda: ZEN_5)
    chosen = cpu.prefer_onednn()
    assert setting() == ("bf16" if chosen else before)
    torch.manual_seed(0)
    for rows, inner, columns in ((2048, 512, 512), (64, 4096, 256), (7, 33, 129)):
        a, b = torch.randn(rows, inner), torch.randn(inner, columns)
        error = ((a @ b).double() - a.double() @ b.double()).abs().max()
        assert error < 2e-6 * inner**0.5 * 8, "bf16 would be off by 4e-3 of sqrt(inner)"


def test_a_choice_that_rounds_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before, eye = setting(), torch.eye
    monkeypatch.setattr(cpu, "processor", lambda: ZEN_5)
    monkeypatch.setattr(torch, "eye", lambda size: eye(size) * (1 - 2**-9))
    assert not cpu.prefer_onednn() and setting() == before
