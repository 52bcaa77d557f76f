"""The commands of docs/guides/training/parallelism.md work and produce its diagrams and tables."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_llama import cli as train_cli
from megatron_llama.launch.world import find_world
from megatron_llama.plan import Plan
from megatron_llama.tools.common import MOCK_RUN
from megatron_llama.tools.pipeline import cli
from tests.pages import commands_of
from tests.paths import ROOT
from tests.ranks import run_ranks

PAGE_FILE = ROOT / "docs/guides/training/parallelism.md"
PAGE = PAGE_FILE.read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in commands_of(PAGE_FILE) if line.startswith("python ")]
PICTURES = [command[2:] for command in COMMANDS if command[1] == "scripts/pipeline.py" and "--out" in command]


def make_plan(arguments: list[str]) -> Plan:
    """Resolve the plan of a command without its files: its checkpoint comes from an earlier command."""
    overrides = [
        argument
        for argument in arguments
        if "=" in argument and not argument.startswith(("checkpoint.resume=", "cluster."))
    ]
    return find_world(train_cli.parse_overrides([*overrides, *MOCK_RUN, "dry_run=true"]), None).plan()


def test_each_command_plans_the_ranks_shown() -> None:
    runs = [command[2:] for command in COMMANDS if command[1] in ("train.py", "scripts/pipeline.py")]
    assert len(runs) == len(
        [line for line in PAGE.splitlines() if re.match(r"    (\$ )?python (train|scripts/pip)", line)]
    )
    worlds = {plan.config.run.dir: plan.world_size for plan in map(make_plan, runs)}
    assert worlds["runs/3d"] == 8 and worlds["runs/tp2"] == worlds["runs/pp2_vpp2"] == 2 and worlds["runs/one"] == 1


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(PICTURES)))])
def test_diagrams_and_tables_match_the_commands(number: int, tmp_path: Path) -> None:
    shown = Path(PICTURES[number][-1])
    text, picture = run_ranks(_draw, 1, PICTURES[number], tmp_path / shown.name)[0]
    link = Path(os.path.relpath(ROOT / shown, PAGE_FILE.parent)).as_posix()
    assert _content(picture) == _content((ROOT / shown).read_text(encoding="utf-8")) and f"({link})" in PAGE
    table = [line for line in text.splitlines()[5:-1] if line]  # below the layout and megatron-core's version
    assert len(table) == 9 and all(f"    {line}" in PAGE.splitlines() for line in table)


def _draw(_: int, arguments: list[str], out: Path) -> tuple[str, str]:
    dist.destroy_process_group()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert cli.main([*arguments[:-1], str(out)]) == 0
    return output.getvalue(), out.read_text(encoding="utf-8")


def _content(svg: str) -> list[str]:
    """Return the texts and tooltips of a picture with the rounded places of its boxes, which each matplotlib draws."""
    boxes = re.findall(r"<title>(.*?)</title>\s*<path d=\"M (\S+) (\S+) L (\S+)", svg)
    places = [f"{about} {float(x):.0f} {float(y):.0f} {float(right):.0f}" for about, x, y, right in boxes]
    return [*re.findall("<text[^>]*>(.*?)</text>", svg), *places]
