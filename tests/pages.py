"""Commands in pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path


def commands_of(page: Path) -> list[str]:
    """Return the commands in the indented blocks of a page, joined over continued lines, without comments."""
    text = re.sub(r" *\\\n +", " ", page.read_text(encoding="utf-8"))
    lines = re.findall(r"^    (?:\$ )?((?:python|torchrun|srun|sbatch|make|source) .*)$", text, flags=re.MULTILINE)
    return [line.partition("  #")[0].strip() for line in lines]
