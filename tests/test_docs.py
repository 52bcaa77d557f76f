"""README.md and the pages in docs/ against the tree that they describe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.paths import ROOT

# docs/design/log and the results tell of files as they were.
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "AGENTS.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if not {"log", "results"} & set(path.parts)),
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


LINK = re.compile(r"\]\(([^)\s#]+)")


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs/results").glob("*.md"))],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_links_lead_to_files(page: Path) -> None:
    links = {link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link}
    missing = sorted(link for link in links if not (page.parent / link).exists())
    assert not missing, f"{page.name} links to files that do not exist"


def test_each_file_of_results_is_used() -> None:
    """A page of results is linked from the documentation; a picture or a record from its page or a test."""
    users = [*PAGES, *(ROOT / "docs/results").glob("*.md"), *(ROOT / "tests").rglob("*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in users if path != Path(__file__)}
    for file in (ROOT / "docs/results").iterdir():
        used = [path for path, text in texts.items() if f"/{file.name}" in text or f"({file.name}" in text]
        assert set(used) - {file}, f"no page links to {file.name}"
