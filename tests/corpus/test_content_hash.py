"""A dataset's hash is of all bytes; the hashes of files are cached."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_llama.corpus import content_hash as module
from megatron_llama.corpus.content_hash import content_hash, file_hash
from megatron_llama.corpus.indexed_format import dataset_facts
from tests.data.files import numbered, write_indexed

OLD = 1_000_000_000


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def age(path: Path, seconds: int = OLD) -> None:
    os.utime(path, (seconds, seconds))


def change_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (old,) = file.read(1)
        file.seek(offset)
        file.write(bytes([old ^ 1]))


def caches() -> list[Path]:
    return sorted((Path(os.environ["XDG_CACHE_HOME"]) / "megatron_llama" / "hashes").glob("*"))


@pytest.mark.parametrize("suffix", [".bin", ".idx", "_mask.bin", "_mask.idx"])
def test_every_byte_counts(tmp_path: Path, suffix: str) -> None:
    """In the middle too, with equal size and modification time, which a sample of the ends misses."""
    prefix = write_indexed(tmp_path / "a", [[1] * 5000 for _ in range(600)])
    write_indexed(tmp_path / "a_mask", [[1]], "B")
    path = Path(prefix + suffix)
    age(path)
    facts, hashes = dataset_facts(prefix), {content_hash(prefix)}
    for offset in {0, path.stat().st_size // 2, path.stat().st_size - 1}:
        change_byte(path, offset)
        age(path)
        hashes.add(content_hash(prefix))
        change_byte(path, offset)
    assert len(hashes) == (4 if path.stat().st_size > 1 else 2)
    if suffix == ".bin":
        change_byte(path, path.stat().st_size // 2)
        assert dataset_facts(prefix) == facts, "the sampled fingerprint misses this change"


def test_a_moved_copy_has_the_same_hash(tmp_path: Path) -> None:
    one = write_indexed(tmp_path / "one", numbered(30))
    other = write_indexed(tmp_path / "other", numbered(30))
    assert content_hash(one) == content_hash(other) != content_hash(write_indexed(tmp_path / "c", numbered(31)))


def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(write_indexed(tmp_path / "a", numbered(30)) + ".bin")
    young = file_hash(path)
    assert not caches(), "a young file may change within the resolution of its time"
    age(path)
    assert file_hash(path) == young and len(caches()) == 1
    (cache,) = caches()
    assert json.loads(cache.read_text())["path"] == str(path)
    with monkeypatch.context() as patched:
        patched.setattr(module, "_hash_blocks", lambda *_: pytest.fail("the file is read again"))
        assert file_hash(path) == young
    change_byte(path, 7)
    age(path)  # size, inode and modification time are equal
    assert file_hash(path) != young


@pytest.mark.parametrize("harm", ["writable", "folder", "link", "bad digest", "not JSON", "a list"])
def test_a_cache_that_is_not_safe_is_not_used(tmp_path: Path, harm: str) -> None:
    path = Path(write_indexed(tmp_path / "a", numbered(30)) + ".bin")
    age(path)
    digest = file_hash(path)
    (cache,) = caches()
    forged = {**json.loads(cache.read_text()), "digest": "0" * 32}
    cache.write_text(json.dumps(forged))
    assert file_hash(path) == "0" * 32, "so a forged cache is noticed below"
    if harm == "writable":
        cache.chmod(0o666)
    elif harm == "folder":
        cache.parent.chmod(0o777)
    elif harm == "link":
        cache.rename(tmp_path / "elsewhere")
        cache.symlink_to(tmp_path / "elsewhere")
    else:
        cache.write_text({"bad digest": json.dumps({**forged, "digest": 5}), "not JSON": "{", "a list": "[]"}[harm])
    assert file_hash(path) == digest


def test_without_a_writable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(write_indexed(tmp_path / "a", numbered(30)) + ".bin")
    age(path)
    digest = file_hash(path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert file_hash(path) == digest


def test_blocks_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 8)
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    whole = file_hash(path)
    monkeypatch.setattr(module, "THREADS", 1)
    assert file_hash(path) == whole
    assert module._blocks(100, 40) == [(0, 8), (23, 8), (46, 8), (69, 8), (92, 8)]
    assert [size for _, size in module._blocks(100, 100)] == [8] * 12 + [4]


def test_the_files_of_a_run_share_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small dataset has the same hash in each run. A part of a large one is compared with the same part only."""
    small, *large = (write_indexed(tmp_path / str(size), [[1] * 4000] * size) for size in (2, 50, 60))
    monkeypatch.setattr(module, "BLOCK", 1 << 12)
    monkeypatch.setattr(module, "WHOLE_BYTES", 1 << 19)
    read: list[list[tuple[int, int]]] = []
    monkeypatch.setattr(
        module, "_hash_blocks", lambda _, path, *sizes: read.append(module._blocks(*sizes)) or path.name
    )
    facts = module.content_facts([small, *large])
    assert 1 << 18 < sum(size for blocks in read for _, size in blocks) <= 1 << 19
    assert [*facts[small]] == ["content"] and [*facts[large[0]]] == [*facts[large[1]]] == ["content_0"]
    assert module.content_facts([small]) == {small: facts[small]}
    assert [*module.content_facts(large[:1])[large[0]]] == ["content"]
