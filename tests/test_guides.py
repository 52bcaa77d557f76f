"""Guides in docs/guides: each begins with its task and a command, and its commands have valid settings and flags."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from megatron_llama.cli import CONF_DIR
from megatron_llama.config import ConfigError, load_config
from tests.pages import commands_of
from tests.paths import ROOT

GUIDES = sorted((ROOT / "docs/guides").rglob("*.md"))
# Arguments that stand for a user's own file or value.
PLACEHOLDER = re.compile(r"[A-Z]{3,}|\.\.\.|\$|experiment=(their(_imported)?|ours|megatron_llama_config)\b|path/to")
# Programs that take settings as train.py does, with the settings of tools, and Hydra's sweeps.
TAKE_SETTINGS = {"compile", "doctor", "pipeline", "plan", "profile", "rehearse", "traffic", "tune"}
TOOL_GROUPS = ("cluster.", "tune.", "objective=", "trainer.dp=$")


@cache
def source(program: str) -> str:
    """Return the source of a program: its file and, for a thin file in scripts/, the package that it calls."""
    text = (ROOT / program).read_text(encoding="utf-8")
    for package in re.findall(r"from megatron_llama\.([\w.]+) import main", text):
        folder = ROOT / "megatron_llama" / package.replace(".", "/")
        text += "".join(file.read_text(encoding="utf-8") for file in folder.parent.glob("*.py"))
    for package in re.findall(r"from (data_prep\.lib[\w.]*)", text):
        path = ROOT / package.replace(".", "/")
        files = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else list(path.glob("*.py"))
        text += "".join(file.read_text(encoding="utf-8") for file in files)
    return text


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_begins_with_its_task_and_a_command(page: Path) -> None:
    title, _, task = page.read_text(encoding="utf-8").split("\n")[:3]
    assert title.startswith("# ") and task.startswith("This guide shows ")
    first = re.search(r"^    (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert first and re.match(r"(python|make|sbatch|mkdir|printf|#) ?", first[1]), "no command at the start"
    assert page.read_text(encoding="utf-8").index(f"    {first[1]}") < 900


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_commands_have_valid_settings_and_flags(page: Path) -> None:
    for words in map(shlex.split, commands_of(page)):
        programs = [word for word in words if re.fullmatch(r"[\w/]+\.(py|slurm)", word)]
        if not programs:  # python -m benchmarks, lm_eval
            continue
        name = programs[-1] if programs[0] == "prepare.slurm" else programs[0]
        program = {"run.slurm": "train.py", "compile.slurm": "scripts/compile.py"}.get(name, name)
        if programs[0] == "prepare.slurm":
            program = f"data_prep/{name}"
        assert (ROOT / program).exists(), f"{page.name}: no {program}"
        arguments = words[words.index(name) + 1 :]
        for flag in [word.split("=")[0] for word in arguments if word.startswith("--")]:
            known = flag == "--slurm" or flag in ("--dry-run", "--help") or f'"{flag}"' in source(program)
            assert known, f"{page.name}: {program} has no {flag}"
        if Path(program).stem in TAKE_SETTINGS or program == "train.py":
            check_settings(page, [word for word in arguments if "=" in word and not word.startswith("-")], words)


def check_settings(page: Path, settings: list[str], words: list[str]) -> None:
    """Compose the settings of a command with conf/ if they are complete."""
    settings = [one for one in settings if not one.startswith(TOOL_GROUPS) and not PLACEHOLDER.search(one)]
    settings = [one for one in settings if not one.startswith(("init_from=", "model=from_hf", "data.chat_template="))]
    if "-m" in words or "data_prep" in words[1]:
        return
    try:
        load_config(settings, CONF_DIR)
    except ConfigError as error:
        pytest.fail(f"{page.name}: {shlex.join(words)}\n{error}")
