"""Objects of a store: reads and writes through a proxy with faults."""

from __future__ import annotations

import weakref

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.registry import _registry

from megatron_llama.system import object_store
from megatron_llama.system.object_store import RemotePath
from tests.object_store import Store

CONTENT = bytes(range(256)) * 4096
"""1 MiB."""


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_DELAYS", (0.01, 0.02, 0.03))


@pytest.mark.parametrize("kind", ["slow down", "error", "reset", "truncated", "latency"])
def test_a_fault_is_retried(kind: str, store: Store) -> None:
    path = RemotePath(store.url("folder/x.bin"))
    more = {"seconds": 0.02} if kind == "latency" else {}
    store.fault(kind, "x.bin", "PUT", **more)
    path.write_bytes(CONTENT)
    assert store.names() == ["folder/x.bin"] and store.get("folder/x.bin") == CONTENT
    store.fault(kind, "x.bin", "GET", count=2, **more)
    store.fault(kind, "x.bin", "HEAD", **more)
    assert path.read_bytes() == CONTENT and path.read_bytes(100, 300_000) == CONTENT[100:300_000]
    assert path.facts().size == len(CONTENT) and len(store.requests()) > 4


def test_a_lasting_fault_is_named(store: Store) -> None:
    path = RemotePath(store.url("x.bin"))
    with pytest.raises(FileNotFoundError, match="there is no such bucket or object.*x.bin"):
        path.read_bytes()
    store.put("x.bin", CONTENT)
    store.fault("denied", "x.bin", count=100)
    with pytest.raises(PermissionError, match="the store denies the access.*x.bin"):
        path.read_bytes()


def test_a_file_system_is_closed_before_its_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finalizers like adlfs's would fail at Python's exit and print a traceback."""
    closed: list[object] = []

    class Azure(AsyncFileSystem):  # type: ignore[misc]
        def __init__(self, **options: object) -> None:
            super().__init__(**options)
            weakref.finalize(self, closed.append, self)

    monkeypatch.setitem(_registry, "azure-like", Azure)
    system = fsspec.filesystem("azure-like")
    object_store.end_threads()
    assert closed == [system]
