"""README.md and the pages in docs/ against the tree that they describe."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from docs import generate
from megatron_llama.cli import CONF_DIR, main
from megatron_llama.config import ConfigError, load_config
from megatron_llama.config.settings_table import settings_by_name
from tests.pages import commands_of
from tests.paths import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "AGENTS.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Other programs' files.
FOREIGN = {"preprocess_data.py", "test_llama.sh", "llama_7b.sh", "train_setup.sh"}
FOREIGN |= {"gaudi_spawn.py", "convert_nemo_checkpoint_to_hf_llama.py", "checkpoint_converter.py"}
FOLDERS = ("megatron_llama", "data_prep", "scripts", "benchmarks", "tests", "conf", "docs")
THERE = {f"/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("*.*")}
THERE |= {f"/{path.relative_to(ROOT).as_posix()}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}
FILE = re.compile(r"[`*]((?:[\w.]+/)*\w+\.(?:py|slurm|sh))[`*]")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = set(FILE.findall(page.read_text(encoding="utf-8")))
    missing = sorted(name for name in named - FOREIGN if not any(path.endswith(f"/{name}") for path in THERE))
    assert not missing, f"{page.name} names files that do not exist"


LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SITE = sorted((ROOT / "docs").rglob("*.md"))
# Sphinx checks the links of the site.
OUTSIDE = sorted({*PAGES} - {*SITE} | {ROOT / "CHANGELOG.md"})


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return {f"{slug}-{number}" if (number := slugs[:i].count(slug)) else slug for i, slug in enumerate(slugs)}


def broken_links(page: Path) -> list[str]:
    """Return the links of a page without a file, or without a heading for their anchor."""
    links = {link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link}
    targets = {link: (page.parent / link.partition("#")[0] if link[0] != "#" else page) for link in links}
    return sorted(
        link
        for link, target in targets.items()
        if not target.exists() or ("#" in link and link.partition("#")[2] not in anchors(target))
    )


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert not broken_links(page), f"{page.name} links to files or headings that do not exist"


def test_each_page_is_in_the_index() -> None:
    """docs/conf.py makes the toctrees of the site from the links of docs/index.md."""
    index = ROOT / "docs/index.md"
    linked = [(index.parent / link).resolve() for link in LINK.findall(index.read_text(encoding="utf-8"))]
    missing = sorted(page.relative_to(ROOT).as_posix() for page in {*SITE} - {index, *linked})
    assert not missing, "link these pages from docs/index.md"
    assert len(linked) == len(set(linked)), "docs/index.md links to a page twice"


def test_each_file_of_results_is_used() -> None:
    """A page of results is linked from a page other than the index; a picture or a record from its page or a test."""
    users = {*PAGES, *(ROOT / "tests").rglob("*.py")}
    texts = {path: path.read_text(encoding="utf-8") for path in users - {Path(__file__), ROOT / "docs/index.md"}}
    for file in (ROOT / "docs/results").iterdir():
        used = [path for path, text in texts.items() if f"/{file.name}" in text or f"({file.name}" in text]
        assert set(used) - {file}, f"no page links to {file.name}"


def train(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the status and the output of a ``python train.py`` command."""
    status = main(shlex.split(command)[2:])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_readme_shows_a_real_error_and_plan(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [line for line in commands_of(ROOT / "README.md") if "optim.lrr=1" in line]
    status, output = train(command, capsys)
    shown = "".join(f"    {line}".rstrip() + "\n" for line in output.strip().splitlines())
    assert status == 2 and f"    $ {command}\n{shown}" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(PLANS) == 1 and RUNS
    status, output = train(PLANS[0], capsys)
    assert status == 0 and "64 ranks" in output
    for command in RUNS:
        settings = [word for word in command.replace("DATA", "data=mock").split() if "=" in word]
        status, output = train(" ".join(["python train.py --dry-run device=cuda", *settings]), capsys)
        assert status == 0, output


PLANS = [line for line in commands_of(ROOT / "README.md") if "--dry-run" in line]
RUNS = [line for line in commands_of(ROOT / "README.md") if "trainer.tp=8 DATA" in line]


# Generated pages


def test_generated_pages_are_current() -> None:
    assert generate.main(["--check", "config", "lines", "recipes", "tour"]) == 0


def test_a_stale_page_is_reported_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs/reference/config.md"
    (tmp_path / "conf").symlink_to(generate.ROOT / "conf")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.main(["--check", "config"]) == 1
    assert generate.main(["config"]) == 0 and generate.main(["--check", "config"]) == 0
    page.write_text(page.read_text(encoding="utf-8").replace("Tensor-parallel size", "Size"), encoding="utf-8")
    assert generate.main(["--check", "config"]) == 1


def test_every_setting_is_explained() -> None:
    """A description is split after its first sentence."""
    page = generate.config_page()
    for name in settings_by_name():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert len(row.split("|")[-2].strip()) > 10, f"{name} has no description"
    start, values = "Format of " + "messages " * 10 + "between ranks.", "null: fp32; int8: blocks (ZeRO++). For zero 3."
    assert generate._split_description(f"{start} {values}") == (start, values)
    with pytest.raises(AssertionError, match="begin with a sentence of at most 140 characters"):
        generate._split_description("Format: " + "text " * 40)


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
    settings = [
        one
        for one in settings
        if not one.startswith(("init_from=", "model=from_hf", "data.chat_template=", "data.add_"))
    ]
    if "-m" in words or "data_prep" in words[1]:
        return
    try:
        load_config(settings, CONF_DIR)
    except ConfigError as error:
        pytest.fail(f"{page.name}: {shlex.join(words)}\n{error}")
