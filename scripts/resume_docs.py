"""Writes the table in docs/resume.md: what a run does that goes on from a checkpoint with a setting changed. Each line
is tried out: tests/checkpoint/changes.py has a run and a change for every setting.

python scripts/resume_docs.py            writes it
python scripts/resume_docs.py --check    writes nothing; status 1 where it is stale
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_llama.config.problems import shown  # noqa: E402 (the tree need not be installed)
from scripts.results import markdown_table  # noqa: E402
from tests.checkpoint.changes import CHANGES, found_by, outcome, write_datasets  # noqa: E402

DOCS = ROOT / "docs" / "resume.md"
TABLE = "## Every setting\n\n"
OUTCOMES = {
    "free": "goes on without a word",
    "told": "goes on, and says so",
    "fixed": "refused: another run, which can start from the weights",
    "allow=[data]": "refused, unless `checkpoint.allow=[data]`",
    "allow=[batch]": "refused, unless `checkpoint.allow=[batch]`",
    "allow=[optim]": "refused, unless `checkpoint.allow=[optim]`",
}


def table(folder: Path) -> str:
    """The table, tried out on the datasets in ``folder``."""
    tried = ((name, change.now, outcome(found_by(name, folder))) for name, change in CHANGES.items())
    rows = ((f"`{name}`", f"`{shown(value)}`", OUTCOMES[what]) for name, value, what in tried)
    return "\n".join(markdown_table(("setting", "changed to", "what the run does"), rows)) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where docs/resume.md is stale")
    check = parser.parse_args(arguments).check
    text, _, written = DOCS.read_text(encoding="utf-8").partition(TABLE)
    with tempfile.TemporaryDirectory() as folder:
        write_datasets(Path(folder))
        fresh = table(Path(folder))
    if not check:
        DOCS.write_text(text + TABLE + fresh, encoding="utf-8")
        return 0
    if written == fresh:
        return 0
    sys.stderr.write(f"{DOCS.relative_to(ROOT)} is stale; run: python scripts/resume_docs.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
