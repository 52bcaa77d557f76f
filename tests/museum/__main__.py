"""Write the table of docs/design/silent_bugs.md.

python -m tests.museum
"""

from __future__ import annotations

from tests.museum.bugs import PAGE, table

if __name__ == "__main__":
    head, _, tail = PAGE.read_text(encoding="utf-8").partition("| bug |")
    PAGE.write_text(f"{head}{table()}\n\n{tail.partition(chr(10) * 2)[2]}", encoding="utf-8")
