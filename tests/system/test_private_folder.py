"""Folders of code that other users can change are found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_llama.system import private_folder
from megatron_llama.system.private_folder import exposure, make_private


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_private(tmp_path / "a" / "cache")
    return tmp_path / "a" / "cache"


def message(path: Path, contents: bool = False) -> str:
    """Return the problem of a folder and its remedy, in two lines; empty if there is none."""
    return "\n".join(exposure(path, contents=contents) or ())


def test_a_new_folder_and_its_new_parents_are_closed_to_others(folder: Path) -> None:
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]
    assert exposure(folder, contents=True) is None
    assert exposure(folder / "missing" / "too") is None


@pytest.mark.parametrize("mode", [0o777, 0o702, 0o1777])
def test_a_folder_that_all_can_write(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert exposure(folder) == (
        f"{folder} is writable by all users (mode {mode:04o})",
        f"delete it, or if you trust its content: chmod -R go-w {folder}",
    )


def test_parents_count_unless_sticky(folder: Path) -> None:
    folder.parent.chmod(0o777)
    assert message(folder).startswith(f"{folder.parent} is writable by all users")
    remedy = f"chmod go-w {folder.parent}, or chmod +t {folder.parent} if others need to write there"
    assert message(folder).endswith(f"\n{remedy}")
    folder.parent.chmod(0o1777)
    assert exposure(folder) is None


def test_a_group_counts_unless_it_is_the_own_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o770)
    monkeypatch.setattr(private_folder, "_is_own_group", lambda gid: False)
    assert "writable by its group" in message(folder)
    monkeypatch.setattr(private_folder, "_is_own_group", lambda gid: True)
    assert exposure(folder) is None


def test_a_link_leads_to_its_target(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert exposure(link / "below") is None
    folder.chmod(0o777)
    assert message(link / "below").startswith(f"{folder} is writable")
    folder.chmod(0o1777)  # sticky, but others could add files
    assert message(link).startswith(f"{folder} is writable")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "loop of links" in message(tmp_path / "loop")


def test_a_links_target_is_relative_to_its_real_folder(tmp_path: Path) -> None:
    for name in ("a/b", "a/c", "c"):
        make_private(tmp_path / name)
    (tmp_path / "link").symlink_to("a/b")
    (tmp_path / "a/b/up").symlink_to("../c")
    (tmp_path / "c").chmod(0o777)
    assert exposure(tmp_path / "link" / "up") is None
    (tmp_path / "a/c").chmod(0o777)
    assert message(tmp_path / "link" / "up").startswith(f"{tmp_path}/a/c is writable")


def test_files_in_an_open_folder(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "code.so").touch()
    (folder / "sub" / "code.so").chmod(0o666)
    assert exposure(folder, contents=True) is None  # other users cannot reach it
    folder.chmod(0o755)
    assert message(folder, contents=True).startswith(f"{folder}/sub/code.so is writable by all users")
    assert message(folder, contents=True).endswith(f"\ndelete it, or if you trust its content: chmod 700 {folder}")


def test_another_users_folder_link_or_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {str(folder)}
    lstat = os.lstat

    def planted_lstat(path: Path) -> os.stat_result:
        status = list(lstat(path))
        status[4] = 12345 if str(path) in planted else status[4]
        return os.stat_result(status)

    monkeypatch.setattr(private_folder.os, "lstat", planted_lstat)
    assert exposure(folder) == (f"{folder} belongs to another user (uid 12345)", _remedy(folder))
    (folder / "below").mkdir()
    assert exposure(folder / "below") == (f"{folder} belongs to another user (uid 12345)", "")
    (folder / "below").rmdir()
    planted.clear()
    file, link = folder / "code.so", folder / "link"
    file.touch()
    link.symlink_to(file)
    for path in (file, link):
        planted.add(str(path))
        assert exposure(folder, contents=True) == (f"{path} belongs to another user (uid 12345)", _remedy(path))
        planted.clear()
    planted.add(str(link))
    assert exposure(link) is not None


@pytest.mark.parametrize("target", ["../code.so", "{}/code.so", "inside", "sub/../../code.so"])
def test_links_out_of_the_folder(folder: Path, target: str) -> None:
    for path in (folder.parent / "code.so", folder / "code.so"):
        path.touch()
    (folder / "inside").symlink_to(folder / "code.so")
    (folder / "sub").symlink_to(".")
    assert exposure(folder, contents=True) is None
    (folder / "link").symlink_to(target.format(folder.parent))
    problem = exposure(folder, contents=True)
    assert (problem is None) == (target == "inside")
    assert problem is None or problem[0] == f"{folder}/link is a link to a file outside of the folder"


def _remedy(path: Path) -> str:
    command = f"chown -R 0 {path}" if os.geteuid() == 0 else f"use a copy: cp -rL {path} COPY"
    return f"delete it, or if you trust its content: {command}"
