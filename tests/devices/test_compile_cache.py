"""The compile cache is private, and is replaced on a full or read-only disk."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.config import ConfigError
from megatron_llama.devices import compile_cache, device_named, get_device
from megatron_llama.devices.compile_cache import FOLDER, confine_inductor, open_compile_cache
from megatron_llama.launch.start import rank_environment
from megatron_llama.parallel.compiling import Compiler
from tests.messages import raises_with_message
from tests.oracle import make_plan, on_ranks
from tests.ranks import RankFailed

CPU = get_device("cpu")


def plan_with(cache: Path) -> Any:
    return make_plan(1, "trainer.compile=true", f"trainer.compile_cache={cache}")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (FOLDER, "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A folder that all users can write."""
    (folder := tmp_path / "cache").mkdir()
    folder.chmod(0o777)
    return folder


def test_the_launcher_and_the_ranks_reject_a_cache_that_others_can_write(open_folder: Path) -> None:
    plan = plan_with(open_folder)
    for check in (lambda: rank_environment(CPU, plan), lambda: Compiler(plan, CPU)):
        text = f"trainer.compile_cache = .* is writable by all users .* chmod -R go-w {open_folder}"
        with raises_with_message(ConfigError, text):
            check()


def test_a_variable_of_the_user_is_checked_too(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(open_folder))
    with raises_with_message(ConfigError, "TORCHINDUCTOR_CACHE_DIR.*unset TORCHINDUCTOR_CACHE_DIR"):
        rank_environment(CPU, plan_with(open_folder.with_name("other")))


@pytest.mark.parametrize(
    ("device", "exact", "compiles"), [("cuda", False, True), ("cpu", False, False), ("cpu", True, True)]
)
def test_uncompiled_runs_compile_loops_into_the_cache(device: str, exact: bool, compiles: bool, tmp_path: Path) -> None:
    """In Inductor's default folder, below /tmp, another user could have put code."""
    plan = make_plan(1, "trainer.compile=false", f"trainer.compile_cache={tmp_path}", f"trainer.exact={exact}")
    variables = rank_environment(device_named(device), plan)
    assert variables.get("TORCHINDUCTOR_CACHE_DIR", "").startswith(str(tmp_path)) == compiles


def test_a_rank_of_exact_mode_checks_the_cache(open_folder: Path) -> None:
    plan = make_plan(1, "trainer.exact=true", f"trainer.compile_cache={open_folder}")
    with raises_with_message(RankFailed, "writable by all users"):
        on_ranks(lambda plan, model: None, plan)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_an_unusable_disk_means_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    real = tempfile.TemporaryFile

    def full(*arguments: Any, dir: Path | None = None, **options: Any) -> Any:
        if dir == tmp_path / "cache":
            raise OSError(number, os.strerror(number), str(dir))
        return real(*arguments, dir=dir, **options)

    monkeypatch.setattr(compile_cache.tempfile, "TemporaryFile", full)
    monkeypatch.setattr(compile_cache.tempfile, "tempdir", str(tmp_path))
    compile_cache._temporary_folder.cache_clear()
    config = plan_with(tmp_path / "cache").config
    variables = open_compile_cache(CPU, config)
    assert variables == open_compile_cache(CPU, config)  # one folder for all ranks, one report
    folder = Path(variables[FOLDER])
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    assert variables["TORCHINDUCTOR_CACHE_DIR"].startswith(str(folder))
    errors = capsys.readouterr().err
    assert errors.count(os.strerror(number)) == 1 and str(folder) in errors
    monkeypatch.setenv(FOLDER, str(folder))
    assert compile_cache.compile_folder(config) == folder


@pytest.mark.parametrize("named", [False, True])
def test_only_a_named_cache_in_the_home_of_another_user_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: bool
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr(compile_cache.tempfile, "tempdir", str(tmp_path))
    compile_cache._temporary_folder.cache_clear()
    real = os.lstat

    def of_another_user(path: Any, **options: Any) -> os.stat_result:
        status = real(path, **options)
        return os.stat_result((*status[:4], 12345, *status[5:])) if Path(path) == home else status

    monkeypatch.setattr("megatron_llama.devices.private_folder.os.lstat", of_another_user)
    plan = plan_with(home / "cache") if named else make_plan(1, "trainer.compile=true")
    if named:
        with raises_with_message(ConfigError, "belongs to another user"):
            rank_environment(CPU, plan)
        return
    variables = rank_environment(CPU, plan)
    assert variables == rank_environment(CPU, plan)
    assert Path(variables[FOLDER]).parent == tmp_path
    assert variables["TORCHINDUCTOR_CACHE_DIR"].startswith(variables[FOLDER])
    assert list(home.iterdir()) == []
    assert capsys.readouterr().err.count("belongs to another user (uid 12345)") == 1
    monkeypatch.setenv("TRITON_CACHE_DIR", str(home))
    with raises_with_message(ConfigError, "unset TRITON_CACHE_DIR"):
        rank_environment(CPU, plan)


def test_little_free_space_counts_as_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "FREE_BYTES", 1 << 62)
    reason = compile_cache._unusable(tmp_path)
    assert reason is not None and reason.endswith("MiB are free")


def test_inductor_puts_no_folder_under_a_guessable_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache
    from torch._inductor.runtime import cache_dir_utils, runtime_utils

    for module in (cache_dir_utils, runtime_utils, codecache):
        monkeypatch.setattr(module, "default_cache_dir", module.default_cache_dir)
    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        monkeypatch.setattr(codecache, name, getattr(codecache, name))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for home in ("home", "inductor"):
        confine_inductor()
        folders = {codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR, codecache.default_cache_dir()}
        folders |= {runtime_utils.default_cache_dir(), cache_dir_utils.default_cache_dir()}
        assert all(folder.startswith(str(tmp_path / home)) for folder in folders), folders
        (tmp_path / "home").chmod(0o777)  # others could plant headers there
