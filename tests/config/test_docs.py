"""docs/reference/config.md agrees with the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import generate
from megatron_llama.config.fields import settings_by_name


def test_the_page_is_not_stale() -> None:
    assert generate.main(["--check", "config"]) == 0


def test_a_stale_page_is_noticed_and_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs/reference/config.md"
    (tmp_path / "conf").symlink_to(generate.ROOT / "conf")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.main(["--check", "config"]) == 1
    assert generate.main(["config"]) == 0 and generate.main(["--check", "config"]) == 0
    page.write_text(page.read_text(encoding="utf-8").replace("Tensor-parallel size", "Size"), encoding="utf-8")
    assert generate.main(["--check", "config"]) == 1


def test_every_setting_is_explained() -> None:
    page = generate.config_page()
    for name in settings_by_name():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert len(row.split("|")[-2].strip()) > 10, f"{name} has no description"


def test_a_description_is_split_after_its_first_sentence() -> None:
    start, values = "Format of " + "messages " * 10 + "between ranks.", "null: fp32; int8: blocks (ZeRO++). For zero 3."
    assert generate._split_description(f"{start} {values}") == (start, values)
    with pytest.raises(AssertionError, match="begin with a sentence of at most 140 characters"):
        generate._split_description("Format: " + "text " * 40)
