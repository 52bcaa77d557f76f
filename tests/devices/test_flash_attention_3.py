"""FlashAttention 3 is omitted, with a warning, where it cannot work. tests/cuda has the test of its results."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_llama.devices.cuda import flash_attention_3


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package without kernels, as after a build for another version of torch."""
    (tmp_path / f"{flash_attention_3.MODULE}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop(flash_attention_3.MODULE, None)


@pytest.mark.usefixtures("package")
def test_a_package_without_kernels_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.warns(UserWarning, match="FlashAttention 2 instead of flash_attn_3, which does not work here"):
        assert not flash_attention_3.activate()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("capability", [(8, 9), (10, 0)])
def test_other_gpus_keep_their_kernels(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not flash_attention_3.activate()


def test_without_the_package_nothing_changes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not flash_attention_3.activate()
