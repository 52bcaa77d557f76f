"""README.md and the pages in docs/ against the tree that they describe."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from docs import generate
from megatron_llama.cli import main
from megatron_llama.config.fields import settings_by_name
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


def test_readme_shows_a_real_error(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [line for line in commands_of(ROOT / "README.md") if "optim.lrr=1" in line]
    status, output = train(command, capsys)
    shown = "".join(f"    {line}".rstrip() + "\n" for line in output.strip().splitlines())
    assert status == 2 and f"    $ {command}\n{shown}" in (ROOT / "README.md").read_text(encoding="utf-8")


PLANS = [line for line in commands_of(ROOT / "README.md") if "--dry-run" in line]
RUNS = [line for line in commands_of(ROOT / "README.md") if "trainer.tp=8 DATA" in line]


def test_readme_commands_make_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(PLANS) == 1 and RUNS
    status, output = train(PLANS[0], capsys)
    assert status == 0 and "64 ranks" in output
    for command in RUNS:
        settings = [word for word in command.replace("DATA", "data=mock").split() if "=" in word]
        status, output = train(" ".join(["python train.py --dry-run device=cuda", *settings]), capsys)
        assert status == 0, output


# Generated pages


def test_generated_pages_are_current() -> None:
    assert generate.main(["--check", "config", "lines", "tour"]) == 0


def test_a_stale_page_is_reported_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs/reference/config.md"
    (tmp_path / "conf").symlink_to(generate.ROOT / "conf")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.main(["--check", "config"]) == 1
    assert generate.main(["config"]) == 0 and generate.main(["--check", "config"]) == 0
    page.write_text(page.read_text(encoding="utf-8").replace("Tensor-parallel size", "Size"), encoding="utf-8")
    assert generate.main(["--check", "config"]) == 1


def test_every_setting_is_explained() -> None:
    page = generate.config_page()
    for name in settings_by_name():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert len(row.split("|")[-2].strip()) > 10, f"{name} has no description"


def test_a_description_is_split_after_its_first_sentence() -> None:
    start, values = "Format of " + "messages " * 10 + "between ranks.", "null: fp32; int8: blocks (ZeRO++). For zero 3."
    assert generate._split_description(f"{start} {values}") == (start, values)
    with pytest.raises(AssertionError, match="begin with a sentence of at most 140 characters"):
        generate._split_description("Format: " + "text " * 40)
