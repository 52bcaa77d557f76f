"""Pages that programs print, compared with files under tests/golden/.

``pytest --write-golden`` writes the files of the selected tests. Read ``git diff tests/golden`` before you commit it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "golden"


class GoldenFiles:
    """The golden files, and whether this run of the tests writes them."""

    write = False

    @staticmethod
    def commands(name: str) -> list[str]:
        """Return the inputs of a page: its lines after ``$``. To add one, write its line, and then the file."""
        lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
        return [line[2:] for line in lines if line == "$" or line.startswith("$ ")]

    @staticmethod
    def names(pattern: str, first_line: str) -> list[str]:
        """Return the golden files whose path matches the pattern, and whose first line the regular expression."""
        pages = sorted(path for path in FOLDER.glob(pattern) if re.match(first_line, path.read_text(encoding="utf-8")))
        return [path.relative_to(FOLDER).as_posix() for path in pages]

    @classmethod
    def check(cls, name: str, text: str, hidden: Mapping[str, str] | None = None) -> None:
        """Compare a page with ``tests/golden/NAME``, or write the file under ``--write-golden``.

        Args:
            name: Path of the file below tests/golden.
            text: The page.
            hidden: Regular expressions and their replacements, for text that differs between runs and machines,
                such as the temporary folder, times and sizes of this machine's memory.

        Raises:
            AssertionError: The page differs. The message is the difference.
        """
        for pattern, replacement in (hidden or {}).items():
            text = re.sub(pattern, replacement, text)
        text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
        path = FOLDER / name
        if cls.write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = "\n".join(unified_diff(expected.splitlines(), text.splitlines(), str(path), "printed", lineterm=""))
        assert not lines, f"{lines}\n\nIf the change is right: pytest --write-golden, and read git diff {FOLDER.name}"
