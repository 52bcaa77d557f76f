"""``--help`` of each program: golden pages, exit status 0, at most 79 columns, and no import of large packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_llama.system.programs import program_files
from tests.golden import GoldenFiles
from tests.processes import environment

PROGRAMS = program_files()
# Runs each program with --help in one new interpreter, without large packages.
RUN_ALL = """
import os, runpy, sys
folder, *programs = sys.argv[1:]
for path in programs:
    sys.argv = [path, "--help"]
    name = os.path.join(folder, os.path.basename(path))
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), 1)
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        sys.stdout.flush()
        with open(name + ".end", "w") as file:
            heavy = {"torch", "megatron", "matplotlib", "tensorboard"} & set(sys.modules)
            file.write(f"{end.code or 0} {sorted(heavy)}")
"""
# argparse formats options and wraps usages differently in other versions.
HELP_PYTHON = (3, 11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the page of each program, its exit status, and the large packages that were imported."""
    pages = tmp_path_factory.mktemp("help")
    command = [sys.executable, "-c", RUN_ALL, str(pages), *map(str, PROGRAMS.values())]
    done = subprocess.run(command, env=environment(COLUMNS="80"), capture_output=True, text=True, timeout=100)
    assert done.stderr == ""
    return pages


@pytest.mark.parametrize("program", PROGRAMS)
def test_help(program: str, folder: Path) -> None:
    path = folder / PROGRAMS[program].name
    assert path.with_suffix(".py.end").read_text() == "0 []"
    page = path.read_text()
    long = [line for line in page.splitlines() if len(line) > 79]
    assert not long or program == "sft" and len(long[0].split()) == 2, "a list of choices is one word"
    if sys.version_info[:2] == HELP_PYTHON:
        GoldenFiles.check(f"tools/help/{program}.txt", page)
