"""Change one operator, constant or call of the core at a time, and report the test that fails.

Each mutant runs in a copy of the checkout: first the test files with its module's name, then the tests of its package,
then the others that run it. A mutant survives if no test fails.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

from tests.paths import ROOT

PACKAGES = ("parallel", "optim", "data", "checkpoint", "model", "plan/rules")
TIERS = {"test": "not slow and not slurm", "slow": "slow and not slurm"}
# Tests that run the core as a whole, after the tests of the mutant's package.
WHOLE = ("layouts", "checkpoint", "optim", "model", "finetuning", "train", "parallel", "data", "plan")
SECONDS = 900
_PAIRS = """Add Sub, Sub Add, Mult Add, Div Mult, FloorDiv Mult, Mod FloorDiv, Lt LtE, LtE Lt, Gt GtE, GtE Gt, Eq NotEq,
NotEq Eq, In NotIn, NotIn In, And Or, Or And"""
SWAPS: dict[type, type] = {getattr(ast, a): getattr(ast, b) for a, b in map(str.split, _PAIRS.split(","))}


@dataclass(frozen=True)
class Mutant:
    """One change of a file."""

    file: str
    line: int
    change: str
    source: str  # the whole file after the change


def places_of(path: Path) -> Iterator[tuple[Path, int]]:
    """Yield the file and the number in ``ast.walk`` of all nodes in the bodies of functions that have a mutant."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(node) for function in functions for part in function.body for node in ast.walk(part)}
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in inside and _has_mutant(node):
            yield path, number


def _has_mutant(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and any(isinstance(side, ast.JoinedStr) for side in (node.left, node.right)):
        return False
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        return type(node.op) in SWAPS
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in SWAPS
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, bool)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def mutant_at(path: Path, number: int) -> Mutant:
    """Return the mutant of a node."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    node = list(ast.walk(tree))[number]
    before = ast.unparse(node)
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        node.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
    elif isinstance(node, ast.Expr):
        node.value = ast.Constant(None)
    line: int = node.lineno  # type: ignore[attr-defined]
    change = f"{before[:60]} -> {ast.unparse(node)[:60]}".replace("\n", " ")
    return Mutant(str(path.relative_to(ROOT)), line, change, ast.unparse(tree))


def draw(count: int, seed: int) -> list[Mutant]:
    """Return ``count`` mutants, equally many of each package."""
    generator = random.Random(seed)
    chosen: list[Mutant] = []
    for number, package in enumerate(PACKAGES, start=1):
        paths = sorted((ROOT / "megatron_llama" / package).rglob("*.py"))
        places = [place for path in paths for place in places_of(path)]
        share = count * number // len(PACKAGES) - len(chosen)
        chosen += starmap(mutant_at, generator.sample(places, min(share, len(places))))
    return chosen


def failing_test(mutant: Mutant, tree: Path, tier: str) -> str | None:
    """Return the first test of the tier that fails with the mutant in ``tree``, None if it survives."""
    target = tree / mutant.file
    original = target.read_bytes()
    target.write_text(mutant.source, encoding="utf-8")
    package, name = Path(mutant.file).parts[1], Path(mutant.file).stem
    named = (str(path.relative_to(tree / "tests")) for path in (tree / "tests" / package).rglob(f"test_*{name}*.py"))
    try:
        for paths in filter(None, ([*named], [package], [each for each in WHOLE if each != package])):
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", TIERS[tier]]
            command += ["--workers", "2", "--limit", str(SECONDS), *(f"tests/{path}" for path in paths)]
            run = subprocess.run(command, cwd=tree, capture_output=True, text=True)
            if run.returncode not in (0, 5):  # 5: no test of this tier
                lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return lines[0].split(" - ")[0] if lines else f"status {run.returncode}"
    finally:
        target.write_bytes(original)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=120, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1, help="choice of mutants")
    parser.add_argument(
        "--tier", choices=TIERS, default="test", help="tests that run: of make test, or of make test-slow"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON lines; mutants that it has are not repeated")
    options = parser.parse_args()
    results = options.output.read_text().splitlines() if options.output.exists() else []
    done = {(r["file"], r["line"], r["change"], r["tier"]) for r in map(json.loads, results)}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "corpora", "datasets", "build", "__pycache__")
        shutil.copytree(ROOT, tree, ignore=ignored)
        for mutant in draw(options.count, options.seed):
            key = (mutant.file, mutant.line, mutant.change, options.tier)
            if key in done:
                continue
            answer = (*key, failing_test(mutant, tree, options.tier))
            record = dict(zip(("file", "line", "change", "tier", "test"), answer, strict=True))
            with options.output.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(f"{mutant.file}:{mutant.line}  {mutant.change}\n    {record['test'] or 'survives'}", flush=True)


if __name__ == "__main__":
    main()
