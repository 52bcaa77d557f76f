"""docs/getting-started/quickstart.md: its ten commands, as typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

PAGE = (ROOT / "docs/getting-started/quickstart.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
# Files of the repository that the commands use.
NEEDED = ("megatron_llama", "data_prep", "scripts", "conf", "docs", "train.py")


def commands() -> list[str]:
    """Return the page's commands without the installation; a quoted text may have several lines."""
    text = "\n".join(BLOCKS[1:])
    return [command for command in re.split(r"\n+(?=mkdir|python|echo)", text.strip()) if command]


def test_installation_and_ten_commands() -> None:
    assert BLOCKS[0].splitlines() == ["make venv", "source .venv/bin/activate"]
    assert len(commands()) == 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_commands_lead_to_a_model_that_answers(tmp_path: Path) -> None:
    for name in NEEDED:
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    for command in commands():
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "A small Llama." in done.stdout
    assert (tmp_path / "runs/chat_hf/model.safetensors").is_file()
