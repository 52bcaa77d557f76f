"""Run a benchmark on this machine, together with its baselines.

    python -m benchmarks data --input all.jsonl --tokenizer-model tokenizer.model

Each command is a module of benchmarks/ or a study of studies.toml. A module has `add_arguments(parser)` and
`run(args) -> int`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from pathlib import Path

from benchmarks.help_format import HelpFormatter
from benchmarks.results import read_studies
from megatron_llama.config import ConfigError, format_problems
from megatron_llama.system.errors import run_main
from megatron_llama.system.exit_status import EXIT_USER

COMMANDS = ("train", "data", "plan", "planner.published", "planner.fit_planner", "recovery")
"""The modules; the last part of the name is the command."""


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    titles = {name: f"{study['title']}." for name, study in read_studies().items()}
    modules = {module.rpartition(".")[2]: module for module in COMMANDS} | dict.fromkeys(titles, "studies")
    for name, module in modules.items():
        path = Path(__file__).parent / f"{module.replace('.', '/')}.py"
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        title = titles.get(name, doc.partition("\n")[0])
        command = commands.add_parser(name, help=title, description=doc.replace("%", "%%"))
        command.formatter_class = HelpFormatter
        # Import only the requested module: some import torch, which makes --help slow.
        if name in sys.argv[1:2]:
            loaded = importlib.import_module(f"benchmarks.{module}")
            loaded.add_arguments(command)
            command.set_defaults(run=loaded.run)
    args = parser.parse_args()
    try:
        return int(args.run(args))
    except ConfigError as error:
        sys.stderr.write(format_problems(error, "This benchmark") + "\n")
        return EXIT_USER


if __name__ == "__main__":
    run_main(main, raises_sigterm=True)
