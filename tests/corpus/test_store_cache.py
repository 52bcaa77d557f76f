"""Blocks of objects in a store: equal to the object through faults, bounded on disk, shared by processes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from megatron_llama.corpus import store_cache
from megatron_llama.corpus.store_cache import CachedObject, set_limit
from megatron_llama.system import object_store
from megatron_llama.system.object_store import RemotePath
from tests.object_store import Store

BLOCK = 4096
CONTENT = np.random.default_rng(0).integers(0, 256, 50 * BLOCK + 123, np.uint8).tobytes()
PARTS = [(0, 1), (4095, 4097), (0, len(CONTENT)), (len(CONTENT) - 1, len(CONTENT)), (70_000, 150_000), (5, 5)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_DELAYS", (0.0, 0.01, 0.02))
    monkeypatch.setattr(store_cache, "BLOCK", BLOCK)
    monkeypatch.setattr(store_cache, "_REQUEST", 8 * BLOCK)
    monkeypatch.setattr(store_cache._Limit, "size", 1 << 30)


@pytest.fixture
def remote(store: Store) -> RemotePath:
    store.put("x.bin", CONTENT)
    return RemotePath(store.url("x.bin"))


def read(content: CachedObject, start: int, end: int) -> bytes:
    return content.read(start, end).tobytes()


def fetched(store: Store) -> list[str]:
    return [each.rpartition(" ")[2] for each in store.requests() if each.startswith("GET") and "x.bin" in each]


@pytest.mark.parametrize("kind", ["slow down", "error", "reset", "truncated", "latency"])
def test_reads_equal_the_object(kind: str, store: Store, remote: RemotePath) -> None:
    store.fault(kind, "x.bin", "GET", count=2, skip=1, **({"seconds": 0.01} if kind == "latency" else {}))
    for start, end in PARTS:
        assert read(CachedObject(remote), start, end) == CONTENT[start:end]
    before = len(fetched(store))
    for start, end in PARTS:
        assert read(CachedObject(remote), start, end) == CONTENT[start:end]
    assert len(fetched(store)) == before, "cached"


def test_damaged_blocks_are_replaced(store: Store, remote: RemotePath, tmp_path: Path) -> None:
    content = CachedObject(remote)
    read(content, 0, len(CONTENT))
    (data,) = tmp_path.glob("cache/megatron_llama/blocks/*/data")
    with data.open("r+b") as file:
        file.seek(3 * BLOCK + 7)
        file.write(b"torn")
    before = len(fetched(store))
    assert read(content, 0, len(CONTENT)) == CONTENT
    assert fetched(store)[before:] == [f"bytes={3 * BLOCK}-{4 * BLOCK - 1}"]


@pytest.mark.parametrize("sparse", [True, False])
def test_the_cache_is_bounded(sparse: bool, store: Store, remote: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(20 * BLOCK / 2**30)
    if not sparse:
        monkeypatch.setattr(store_cache, "_punch", lambda *_: False)
    content = CachedObject(remote)
    for start in (*range(0, len(CONTENT), BLOCK), *range(0, len(CONTENT), 3 * BLOCK)):
        assert read(content, start, start + BLOCK) == CONTENT[start : start + BLOCK]
        assert 0 < store_cache._used_bytes() <= 20 * BLOCK
    before = len(fetched(store))
    assert read(content, start, start + BLOCK) == CONTENT[start : start + BLOCK] and len(fetched(store)) == before
    set_limit(0)
    assert read(content, 0, len(CONTENT)) == CONTENT, "also if nothing fits"


def test_a_changed_object_is_named(store: Store, remote: RemotePath) -> None:
    content = CachedObject(remote)
    read(content, 0, BLOCK)
    store.put("x.bin", CONTENT[::-1])
    with pytest.raises(OSError, match="has changed since the run opened it.*x.bin"):
        read(content, BLOCK, 2 * BLOCK)
    assert read(CachedObject(remote), 0, BLOCK) == CONTENT[::-1][:BLOCK]


def _read_all(remote: RemotePath) -> bool:
    content = CachedObject(remote)
    return all(read(content, at, at + BLOCK) == CONTENT[at : at + BLOCK] for at in range(0, len(CONTENT), BLOCK))


def test_processes_share_the_cache(store: Store, remote: RemotePath) -> None:
    store.fault("latency", "x.bin", "GET", count=1000, seconds=0.01)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert all(pool.map(_read_all, [remote] * 3))
    assert len(fetched(store)) == len(set(fetched(store))) == 51
