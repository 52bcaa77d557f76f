"""Container recipes against pyproject.toml, the Makefile and their page; no container engine is needed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "containers" / "Dockerfile").read_text()
APPTAINER = (ROOT / "containers" / "Apptainer.def").read_text()
PAGE = (ROOT / "docs/getting-started/containers.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_python_is_one_that_the_project_supports() -> None:
    versions = {*re.findall(r"ARG PYTHON=(\S+)", DOCKERFILE), *re.findall(r"From: python:([\d.]+)-slim", APPTAINER)}
    least, below = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()  # type: ignore[union-attr]
    assert len(versions) == 1, "both recipes have the same Python"
    assert int(least) <= int(versions.pop().removeprefix("3.")) < int(below)


def test_torch_is_in_the_tested_range() -> None:
    (requirement,) = re.findall(r'"(torch[^"]+)"', DOCKERFILE)
    assert requirement in PROJECT["dependencies"]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_targets(target: str) -> None:
    assert f"FROM base AS {target}\n" in DOCKERFILE
    assert f"--target {target} -t megatron_llama:{target} ." in PAGE


def test_both_install_the_same_packages_of_the_system() -> None:
    matches = [re.search(r"--no-install-recommends ([^\\\n]+)", text) for text in (DOCKERFILE, APPTAINER)]
    docker, apptainer = (sorted(match[1].split()) for match in matches if match)
    assert docker == apptainer
    assert {"g++", "make"} <= set(docker)


def test_runs_are_not_started_by_root() -> None:
    last = re.findall(r"^USER (\S+)", DOCKERFILE, flags=re.MULTILINE)[-1]
    assert last not in ("0", "root") and f"--uid {last} " in DOCKERFILE


def test_every_command_of_the_page_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for text in (DOCKERFILE, APPTAINER, PAGE):
        assert set(re.findall(r"(?<!g\+\+ )\bmake ([a-z-]+)", text)) <= targets
    for path in re.findall(r"(?:-f |build \S+ )(containers/\S+)", PAGE + DOCKERFILE + APPTAINER):
        assert (ROOT / path).is_file(), path


def test_images_hold_what_git_holds() -> None:
    """Ignored files would make images large, and a .venv of the host would not run in them."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in (ROOT / ".gitignore").read_text().split():
        name = line.strip("/")
        if "*" not in name:
            assert name in ignored or f"**/{name}" in ignored, name
    assert ".git" in ignored
