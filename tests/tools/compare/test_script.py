"""Exit status, table, picture and page of scripts/compare.py."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu import children_cpu_seconds
from tests.paths import SCRIPTS
from tests.tools.compare.helpers import falling, noisy, write_metrics

SCRIPT = SCRIPTS / "compare.py"


def run(*arguments: str, where: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], cwd=where, capture_output=True, text=True, timeout=120
    )


def test_help_is_quick_and_imports_no_libraries(tmp_path: Path) -> None:
    with children_cpu_seconds(2.0):
        done = run("--help", where=tmp_path)
    assert done.returncode == 0 and "--tolerance" in done.stdout and "Exit status" in done.stdout
    code = f"import runpy, sys; sys.argv = ['x', '--help']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    loaded = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True).stderr
    assert not re.search(r"\b(numpy|matplotlib|torch|tensorboard)\b", loaded)


@pytest.mark.parametrize(("gap", "status"), [(1.0, 0), (1.3, 1)])
def test_report_files(tmp_path: Path, gap: float, status: int) -> None:
    write_metrics(tmp_path / "gpu", falling(200))
    write_metrics(tmp_path / "<cpu> & co", noisy(falling(200), 1, size=0.001) * gap, seconds=1.0)
    done = run("gpu", "<cpu> & co", "--tolerance", "0.01", "--out", "new/report", where=tmp_path)
    assert done.returncode == status, done.stderr
    for words in ("final loss", "area between the curves", "largest smoothed gap", "first divergence", "(0.50 times)"):
        assert words in done.stdout
    assert ("does not agree" in done.stdout) is bool(status)
    picture = (tmp_path / "new" / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and struct.unpack(">II", picture[16:24]) > (1000, 800)
    page = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    outside = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", page)
    assert not re.search(r"https?:|<script|<link|url\(|@import|file:", outside), "the page is self-contained"
    assert "&lt;cpu&gt; &amp; co" in outside and "<cpu>" not in outside
    assert 'name="viewport"' in outside and "prefers-color-scheme: dark" in outside
    assert page.count("data:image/png;base64,") == 4, "large and small, light and dark"


def test_without_out_no_file_is_written_and_short_runs_exit_with_2(tmp_path: Path) -> None:
    write_metrics(tmp_path / "a", falling(4))
    write_metrics(tmp_path / "b", falling(4))
    done = run("a", "b", where=tmp_path)
    assert done.returncode == 2 and "too short to tell" in done.stdout.lower(), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"], "only --out writes files"
    assert "--out PREFIX" in done.stdout


def test_errors_exit_with_2_and_one_message(tmp_path: Path) -> None:
    done = run("gone", "away", where=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert "This comparison can't work, for 2 reasons" in done.stderr
    assert run("one", where=tmp_path).returncode == 2
    assert not list(tmp_path.iterdir())
