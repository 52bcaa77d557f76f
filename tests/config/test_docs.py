"""docs/config.md agrees with the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_llama.config.fields import settings_by_name
from scripts import config_docs


def test_the_page_is_not_stale() -> None:
    assert config_docs.main(["--check"]) == 0


def test_a_stale_page_is_noticed_and_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs" / "config.md"
    monkeypatch.setattr(config_docs, "ROOT", tmp_path)
    monkeypatch.setattr(config_docs, "DOCS", page)
    assert config_docs.main(["--check"]) == 1
    assert config_docs.main([]) == 0 and config_docs.main(["--check"]) == 0
    page.write_text(page.read_text(encoding="utf-8").replace("Tensor-parallel size", "Size"), encoding="utf-8")
    assert config_docs.main(["--check"]) == 1


def test_every_setting_is_explained() -> None:
    page = config_docs.page()
    for name in settings_by_name():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert len(row.split("|")[-2].strip()) > 10, f"{name} has no description"
