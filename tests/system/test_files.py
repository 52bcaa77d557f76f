"""Files that are read whole, without a wait for pipes; locks; files that are written atomically; private folders."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from data_prep.lib.find_inputs import find_sources
from data_prep.lib.output_files import read_manifest as read_dataset_manifest
from data_prep.lib.tokenizer_backends import load_encoder
from megatron_llama.checkpoint.folder import read_pointer
from megatron_llama.checkpoint.hf_folder import list_tensors
from megatron_llama.checkpoint.manifest import NAME, read_manifest
from megatron_llama.checkpoint.tensor_source import CorruptFile
from megatron_llama.config.hf_config import read_hf_config
from megatron_llama.corpus.indexed_format import IndexedDataset, read_index
from megatron_llama.devices import private_folder
from megatron_llama.devices.private_folder import exposure, make_private
from megatron_llama.launch.run_dir import claim_run_dir
from megatron_llama.system import files
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import (
    FolderTaken,
    atomic_folder,
    check_yaml,
    locked_folder,
    own_folder,
    process_folder,
    read_json,
    read_whole,
    remove_orphans,
    scratch_folder,
    sha256_file,
    try_lock,
    unlock,
    write_atomically,
)
from megatron_llama.text.chat_template import load_own_template
from megatron_llama.text.tokenizer import read_settings, read_tokenizer_json, vocabulary_size
from megatron_llama.tools.compare.logs import read_log
from tests.golden import GoldenFiles
from tests.ranks import check_threads

READERS: dict[str, Callable[[Path], object]] = {
    "recipe.yaml": lambda folder: check_yaml(folder / "recipe.yaml"),
    "config.json": lambda folder: read_hf_config(str(folder)),
    "tokenizer.model": lambda folder: load_encoder("sentencepiece", str(folder / "tokenizer.model"), "sentencepiece"),
    "tiktoken.model": lambda folder: load_encoder("tiktoken", str(folder / "tiktoken.model"), "auto"),
    "tokenizer.json": lambda folder: read_tokenizer_json(folder / "tokenizer.json"),
    "tokenizer_config.json": lambda folder: read_settings(folder / "tokenizer_config.json"),
    "special_tokens_map.json": lambda folder: load_own_template(folder, []),
    "set.idx": lambda folder: read_index(str(folder / "set")),
    "set.bin": lambda folder: IndexedDataset(str(folder / "set")),
    "set.json": lambda folder: read_dataset_manifest(str(folder / "set")),
    NAME: read_manifest,
    "latest": lambda folder: read_pointer(folder, "latest"),
    "metrics.jsonl": lambda folder: claim_run_dir(folder).__enter__(),
    "model.safetensors": lambda folder: list_tensors(folder / "model.safetensors"),
    "trainer_state.json": lambda folder: read_log(folder / "trainer_state.json"),
    "a.sha256": lambda folder: sha256_file(folder / "a.sha256"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", READERS)
def test_nobody_waits_for_a_pipe(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    if name == "special_tokens_map.json":
        (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    with pytest.raises((OSError, ValueError, CorruptFile)) as refused:
        READERS[name](tmp_path)
    assert name in " ".join(map(str, (refused.value, getattr(refused.value, "filename", ""))))


TENFOLD = [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n".join(["a0: &a0 [x]", *TENFOLD]), "values after aliases are expanded"),
        ("a: &a [*a]", "contains itself"),
        ("a: " + "[" * 20_000 + "]" * 20_000, "nested too deeply"),
        ("# " + "x" * 2000, "bytes"),
        ("[" + "1," * 500 + "1]", "values after aliases are expanded"),
        ("base: &base {lr: 1e-3}\noptim: *base\nsteps: [1, 2, *base]\n", None),
        ("", None),
    ],
    ids=["aliases of aliases", "a cycle", "depth", "size", "values", "good", "empty"],
)
def test_small_yaml_that_expands_is_rejected(
    text: str, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if message == "bytes":
        monkeypatch.setattr(files, "MOST_BYTES", 1000)
    elif "1,1,1" in text:
        monkeypatch.setattr(files, "MOST_VALUES", 400)
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_yaml(tmp_path / "recipe.yaml")


def test_pipes_devices_and_giants_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.model")
    assert vocabulary_size(tmp_path / "tokenizer.model") is None
    with pytest.raises(OSError, match="not a regular file"):
        read_whole(Path("/dev/zero"))
    with open(tmp_path / "giant.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match=r"has 1,099,511,627,776 bytes; the limit is 1,073,741,824"):
        read_json(tmp_path / "giant.json")


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "nul", "", "\ufeff", "9" * 5000])
def test_what_is_no_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError):
        read_json(tmp_path / "a.json")


def test_a_link_that_leads_round_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "in/deep/b.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / "in/here").symlink_to(".")
    (tmp_path / "in/deep/up").symlink_to(tmp_path / "in")
    result = find_sources([str(tmp_path / "in")])
    assert [Path(source.path).name for source in result.sources] == ["a.jsonl", "b.jsonl"]
    assert set(result.not_taken.values()) == {"a link to a parent folder"} and len(result.not_taken) == 2
    (tmp_path / "in/again").symlink_to("deep")  # this is no loop, and takes a file twice
    with pytest.raises(UserError, match="occurs twice"):
        find_sources([str(tmp_path / "in")])


@pytest.mark.parametrize("before", [None, "old", "new"])
def test_a_private_file_of_an_older_run_is_closed(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "config.yaml"
    if before is not None:
        path.write_text(before)
        path.chmod(0o644)
    write_atomically(path, "new", private=True)
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o600
    write_atomically(tmp_path / "public", "new")
    umask = os.umask(0o022)
    os.umask(umask)
    assert (tmp_path / "public").stat().st_mode & 0o777 == 0o666 & ~umask


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    """The second gets one error, and the first's files stay. A lock of this process excludes it like another's."""
    out = tmp_path / "out"
    with atomic_folder(out) as first:
        (first / "weights").write_text("first")
        with pytest.raises(FolderTaken), atomic_folder(out):
            pass
        assert (first / "weights").read_text() == "first" and not out.exists()
    assert (out / "weights").read_text() == "first" and [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(FileExistsError), atomic_folder(out):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_shared_and_exclusive_locks_of_a_folder(tmp_path: Path) -> None:
    with locked_folder(tmp_path, shared=True), locked_folder(tmp_path, shared=True):
        with pytest.raises(FolderTaken), locked_folder(tmp_path):
            pass
    with locked_folder(tmp_path), pytest.raises(FolderTaken), locked_folder(tmp_path, shared=True):
        pass


def test_unlock_releases_the_lock_of_forked_processes(tmp_path: Path) -> None:
    check_threads()
    with open(tmp_path / "lock", "w") as file, open(tmp_path / "lock", "w") as other:
        assert try_lock(file)
        if (child := os.fork()) == 0:
            signal.pause()
        assert try_lock(other) is False
        unlock(file)
        assert try_lock(other)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_scratch_folder_that_another_process_created_again_stays(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "work") as folder:
        folder.rename(tmp_path / "result")
        folder.mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result", "work"]


def test_the_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    (partial := tmp_path / ".out.partial").mkdir()
    (partial / "old").write_text("old")
    (partial / "folder").mkdir()
    (partial / "link").symlink_to(tmp_path)
    (tmp_path / "out").mkdir()
    with atomic_folder(tmp_path / "out") as folder:
        assert folder == partial and not list(folder.iterdir())
        (folder / "new").write_text("new")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "new"]


def test_a_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    """A folder that appears meanwhile is not replaced."""
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "out") as folder:
        (folder / "part").write_text("part")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileExistsError), atomic_folder(tmp_path / "out"):
        write_atomically(tmp_path / "out" / "theirs", "theirs")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


def test_a_device_is_written_not_replaced(tmp_path: Path) -> None:
    (device := tmp_path / "device").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{device}'"):
        write_atomically(device, "text")
    assert device.is_char_device() and os.readlink(device) == "/dev/full" and len(list(tmp_path.iterdir())) == 1


STATES = "exists, deleted, locked, on another disk, unmounted, renamed, moved and started".split(", ")


@pytest.mark.parametrize("state", STATES)
def test_orphaned_copies_are_removed(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "copies_folder", lambda: tmp_path / "copies")
    run, folder = tmp_path / "disk" / "run", tmp_path / "copies" / "0123"
    write_atomically(run / "linked [1]" / "memory.json", '{"folder": "0123"}')
    write_atomically(folder / "rank_00000.0.safetensors", bytes(1 << 20))
    lock = own_folder(folder, f"{run}/linked [1]/memory.json")
    if state != "locked":
        lock.close()
    if state != "exists":
        shutil.rmtree(run.parent if state == "unmounted" else run)
    if state == "on another disk":
        (folder / ".owner").write_text(f"1{(folder / '.owner').read_text()}")
    if state == "renamed":
        write_atomically(run.with_name("other") / "linked [1]" / "memory.json", '{"folder": "0123"}')
    assert (remove_orphans("0123" if "started" in state else "") >= 1 << 20) == (state == "deleted") != folder.exists()


def test_temporary_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files, "copies_folder", lambda: tmp_path / "none")
    used = process_folder()
    check_threads()
    if (pid := os.fork()) == 0:
        process_folder("compile-")
        os._exit(0)
    os.waitpid(pid, 0)
    (tmp_path / "megatron_llama-other").mkdir()
    assert len([*tmp_path.glob("*")]) == 3 and remove_orphans() == 0
    assert {*tmp_path.glob("*")} == {used, tmp_path / "megatron_llama-other"}


def test_exposures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others cannot reach files in a closed folder or rename files of a sticky parent. Another user owns "planted".

    A line has commands next to the private folder a/cache, and the path that is checked (/*: with all files below it).
    """
    lstat, page = os.lstat, ""

    def planted_lstat(path: Path) -> os.stat_result:
        status = list(lstat(path))
        status[stat.ST_UID] = 12345 if Path(path).name == "planted" else status[stat.ST_UID]
        return os.stat_result(status)

    monkeypatch.setattr(private_folder, "_is_own_group", lambda gid: False)
    monkeypatch.setattr(private_folder.os, "lstat", planted_lstat)
    for number, line in enumerate(GoldenFiles.commands("system/exposures.txt")):
        root = tmp_path / str(number)
        make_private(root / "a/cache")
        commands, _, path = line.rpartition("; ")
        printed = subprocess.check_output(["sh", "-ec", commands], cwd=root, text=True)
        problem = exposure(root / path.removesuffix("/*"), contents=path.endswith("*")) or ("private",)
        page += f"$ {line}\n{printed}" + "\n".join(problem).replace(f"{root}/", "") + "\n\n"
    other = r"chown -R 0 (.*)|use a copy: cp -rL (.*) COPY"  # as root, and as another user
    GoldenFiles.check("system/exposures.txt", page, {other: r"OWN \1\2"})
    monkeypatch.setattr(private_folder, "_is_own_group", lambda gid: True)
    (tmp_path / "0/a/cache").chmod(0o770)
    assert exposure(tmp_path / "0/a/cache") is None
