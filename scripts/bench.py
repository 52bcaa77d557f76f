"""Benchmarks, each against its peers on this machine in the same run.

    python scripts/bench.py data --input all.jsonl --tokenizer-model tokenizer.model

Each sub-command lives in scripts/bench_<name>.py, with `describe(parser)` and `run(args) -> int`.
"""

from __future__ import annotations

import os
import sys

if __package__ in (None, ""):  # run as a script
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import ast
import importlib
from pathlib import Path

from megatron_llama.config import ConfigError, format_problems
from megatron_llama.system.errors import run_main
from megatron_llama.system.exit_status import EXIT_USER


def main() -> int:
    """The command line: finds the sub-commands by their files' names."""
    parser = argparse.ArgumentParser(prog="bench.py", description=(__doc__ or "").partition("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        name = path.stem.removeprefix("bench_")
        summary = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        command = commands.add_parser(name, help=summary.partition("\n")[0])
        # only the requested one is imported: some need torch, and --help must be fast
        if name in sys.argv[1:2]:
            module = importlib.import_module(f"scripts.{path.stem}")
            module.describe(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args()
    try:
        return int(args.run(args))
    except ConfigError as error:
        sys.stderr.write(format_problems(error, "This benchmark") + "\n")
        return EXIT_USER


if __name__ == "__main__":
    run_main(main)
