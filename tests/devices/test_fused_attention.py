"""Transformer Engine's attention, by a stand-in on the CPU; GPUs and versions without it and FlashAttention 3.

tests/cuda has the test that a device takes these paths.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatron_llama.arch.attention_pattern import Pattern
from megatron_llama.devices.attention_inputs import Documents, build_attention_inputs, dense_mask
from megatron_llama.devices.cuda import flash_attention_3, transformer_engine
from megatron_llama.devices.cuda.kernels import CudaKernels
from tests.cuda.fused_attention import BLACKWELL, HEAD_DIM, IDS, LENGTH, STAND_INS
from tests.devices.helpers import attention_inputs, dense_attention

BF16_ERROR = 2**-7


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in is installed, and a FlashAttention 3 without kernels, as after a build for another version of torch,
    on a machine with a Blackwell GPU."""
    (tmp_path / f"{flash_attention_3.MODULE}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(STAND_INS / "te"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: BLACKWELL)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: transformer_engine.LEAST_CUDNN[BLACKWELL[0]])
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == transformer_engine.PACKAGE]:
        del sys.modules[name]
    sys.modules.pop(flash_attention_3.MODULE, None)
    monkeypatch.undo()
    transformer_engine.activate()


CASES = {
    "whole": (Pattern(), None, "sbhd"),
    "documents": (Pattern(), Documents.of(IDS), "thd"),
    "window": (Pattern(window=9), None, "thd"),
    "window in documents": (Pattern(window=5), Documents.of(IDS), "thd"),
}


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("pattern", "documents", "kind"), CASES.values(), ids=CASES)
def test_results(pattern: Pattern, documents: Documents | None, kind: str, compiled: bool) -> None:
    from transformer_engine.pytorch.cpp_extensions import fused_attn  # type: ignore[import-not-found]

    assert transformer_engine.activate()
    q, k, v, grad = attention_inputs(torch.bfloat16, 4, 2, LENGTH, d=HEAD_DIM, seed=1)
    whole = documents or Documents.whole(2, LENGTH, torch.device("cpu"))
    expected = dense_attention(q, k, v, grad, dense_mask(whole.positions(), pattern, whole.ids), torch.float32)
    kernels = CudaKernels(compiled=compiled)
    visible = build_attention_inputs(torch.zeros(2, LENGTH), documents, pattern, "varlen", compiled)
    attend = torch.compile(kernels.attend, backend="aot_eager", fullgraph=True) if compiled else kernels.attend
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, visible)
    actual: list[Tensor] = [out, *torch.autograd.grad(out, leaves, grad)]
    for one, other in zip(actual, expected, strict=True):
        assert ((one.float() - other).norm() / other.norm()).item() < BF16_ERROR
    assert fused_attn.calls == {f"fwd {kind}": 1, f"bwd {kind}": 1}


@pytest.mark.usefixtures("package")
def test_other_formats_and_heads_keep_their_kernels() -> None:
    assert transformer_engine.activate()
    heads = (128, torch.bfloat16, True), (128, torch.float32, False), (256, torch.bfloat16, False)
    for size, dtype, is_taken in heads:
        assert transformer_engine.takes(torch.empty(1, size, dtype=dtype)) == is_taken


OTHER_GPUS = {transformer_engine: [(8, 9), (12, 0)], flash_attention_3: [(8, 9), (10, 0)]}


@pytest.mark.usefixtures("package")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("module", OTHER_GPUS)
def test_other_gpus_keep_their_kernels(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in OTHER_GPUS[module]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert not module.activate()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("module", [transformer_engine, flash_attention_3])
def test_without_the_package_nothing_changes(module: ModuleType) -> None:
    assert not module.activate()


@pytest.mark.usefixtures("package")
def test_a_flash_attention_without_kernels_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.warns(UserWarning, match="FlashAttention 2 instead of flash_attn_3, which does not work here"):
        assert not flash_attention_3.activate()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("major", "version", "message"),
    [(9, 90599, "is older"), (10, 90600, "is older"), (9, 91000, "a known fault"), (10, 91001, "a known fault")],
)
def test_an_unfit_cudnn_is_reported(major: int, version: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine rejects these versions at the first call."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    with pytest.warns(UserWarning, match=f"FlashAttention 2 instead of transformer_engine.*cuDNN {version}.*{message}"):
        assert not transformer_engine.activate()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("major", "version", "is_taken"), [(9, 90600, True), (10, 91800, False), (10, 91801, True)])
def test_deterministic_backward_pass(major: int, version: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert transformer_engine.activate()
    q = torch.empty(1, 128, dtype=torch.bfloat16)
    assert transformer_engine.takes(q)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert transformer_engine.takes(q) == is_taken


@pytest.mark.usefixtures("package")
def test_an_old_version_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.15 the functions had no format of the output."""
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    def fused_attn_fwd(is_training: bool, qkv_layout: str) -> None:
        """Forward function with fewer arguments."""

    monkeypatch.setattr(fused_attn, "fused_attn_fwd", fused_attn_fwd)
    with pytest.warns(UserWarning, match="fused_attn_fwd has no argument .*o_format"):
        assert not transformer_engine.activate()


FAULTS = {"": "No module named", "assert False, 'version mismatch'": "version mismatch"}


@pytest.mark.parametrize(("code", "message"), FAULTS.items())
def test_a_failing_import_is_reported(code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package checks the versions of its parts by assertions (transformer_engine/common/__init__.py)."""
    (tmp_path / transformer_engine.PACKAGE).mkdir()
    (tmp_path / transformer_engine.PACKAGE / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: BLACKWELL)
    with pytest.warns(UserWarning, match=f"which does not work here: {message}"):
        assert not transformer_engine.activate()
    sys.modules.pop(transformer_engine.PACKAGE, None)
