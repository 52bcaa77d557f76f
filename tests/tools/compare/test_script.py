"""Exit status, table, picture and page of scripts/compare.py."""

from __future__ import annotations

import base64
import re
import struct
from pathlib import Path

import pytest

from megatron_llama.tools.compare.cli import main
from tests.golden import GoldenFiles
from tests.tools.compare.helpers import falling, noisy, write_metrics


@pytest.mark.parametrize(("gap", "status"), [(1.0, 0), (1.3, 1)])
def test_report_files(
    tmp_path: Path, gap: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "gpu", falling(200))
    write_metrics(tmp_path / r"<cpu> & $\frac$", noisy(falling(200), 1, size=0.001) * gap, seconds=1.0)
    assert main(["gpu", r"<cpu> & $\frac$", "--tolerance", "0.01", "--out", "new/report"]) == status
    GoldenFiles.check(f"tools/compare/status_{status}.txt", capsys.readouterr().out)
    picture = Path("new/report.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and struct.unpack(">II", picture[16:24]) > (1000, 800)
    page = Path("new/report.html").read_text(encoding="utf-8")
    pictures = re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", page)
    assert len(pictures) == 2, "large and small"
    assert all(b"prefers-color-scheme:dark" in base64.b64decode(picture) for picture in pictures), "light and dark"
    outside = re.sub(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+", "", page)
    assert not re.search(r"https?:|<script|<link|url\(|@import|file:", outside), "the page is self-contained"
    assert r"&lt;cpu&gt; &amp; $\frac$" in outside and "<cpu>" not in outside
    assert 'name="viewport"' in outside


def test_short_runs_and_errors_exit_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["gone", "away"]) == 2
    GoldenFiles.check("tools/compare/refused.txt", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())
    for name in ("a", "b"):
        write_metrics(tmp_path / name, falling(4))
    assert main(["a", "b"]) == 2
    GoldenFiles.check("tools/compare/too_short.txt", capsys.readouterr().out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"], "only --out writes files"
    with pytest.raises(SystemExit, match="2"):
        main(["one"])
