"""Lines of Python by room, and whether README.md states them: python scripts/count_lines.py [--check | --write]

In README.md a number stands between <!-- lines: NAME --> and <!-- /lines -->, where NAME is core, package or all.
Numbers are rounded to hundreds, so that not every change has to touch the text. Status 1 where --check finds others.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
# What runs between a rank's start and its last optimizer step: the part that docs/tour.md leads through.
CORE = ("model", "parallel", "optim", "data", "train", "devices", "topology.py")
STATED = re.compile(r"<!-- lines: (\w+) -->(.*?)<!-- /lines -->")


def lines_of(path: Path) -> int:
    """Lines of a Python file, or of all in a folder."""
    files = [path] if path.is_file() else path.rglob("*.py")
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def counted() -> tuple[dict[str, int], dict[str, int]]:
    """Lines by room, and the sums that README.md states."""
    package = ROOT / "megatron_llama"
    rooms = {path.name: lines_of(path) for path in sorted(package.iterdir()) if path.suffix in ("", ".py")}
    rooms = {name: count for name, count in rooms.items() if count}
    rooms |= {name: lines_of(ROOT / name) for name in ("data_prep", "scripts")}
    outside = rooms["data_prep"] + rooms["scripts"]
    everything = sum(rooms.values())
    return rooms, {"core": sum(rooms[name] for name in CORE), "package": everything - outside, "all": everything}


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with README.md, print nothing else")
    parser.add_argument("--write", action="store_true", help="put the numbers into README.md")
    arguments = parser.parse_args()
    rooms, sums = counted()
    text = README.read_text(encoding="utf-8")
    wanted = STATED.sub(lambda found: f"<!-- lines: {found[1]} -->{round(sums[found[1]], -2):,}<!-- /lines -->", text)
    if arguments.write:
        README.write_text(wanted, encoding="utf-8")
    if arguments.check:
        if text != wanted:
            sys.stderr.write("README.md states other numbers of lines: run python scripts/count_lines.py --write\n")
        return int(text != wanted)
    for name, count in [*rooms.items(), *sums.items()]:
        sys.stdout.write(f"{count:>8,}  {name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
