"""Datasets in an object store: samples, losses, order and resume equal a local dataset's, through faults."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_llama.config import ConfigError, load_config
from megatron_llama.config.hf_config import missing_folder
from megatron_llama.corpus.splits import open_splits
from megatron_llama.data.finetuning_set import Examples
from megatron_llama.data.resume_record import make_record, moved_datasets
from megatron_llama.system import object_store
from tests.checkpoint.runner import run
from tests.data.files import data_plan, numbered, stream_of, write_indexed
from tests.golden import GoldenFiles
from tests.messages import unwrap
from tests.object_store import Store
from tests.paths import CONF

FAULTS = [("slow down", ".bin"), ("truncated", ".bin"), ("reset", ".idx"), ("error", ".bin"), ("truncated", ".idx")]


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_DELAYS", (0.0, 0.01, 0.02))


def upload(store: Store, prefix: str) -> str:
    """Upload all files whose names begin with a prefix; return its URL."""
    path = Path(prefix)
    for file in path.parent.glob(f"{path.name}*.*"):
        store.put(f"data/{file.name}", file.read_bytes())
    return store.url(f"data/{path.name}")


def inject(store: Store) -> None:
    for kind, match in FAULTS:
        store.fault(kind, match, "GET")


def test_samples_and_records(store: Store, tmp_path: Path) -> None:
    local = [write_indexed(tmp_path / "one", numbered(60)), write_indexed(tmp_path / "two", numbered(90, 5000))]
    remote = [upload(store, prefix) for prefix in local]
    inject(store)
    plans = [data_plan([0.3, one, 0.7, two]) for one, two in (local, remote)]
    assert all(".bin" not in each for each in store.requests() if each.startswith("GET")), "a plan reads indices only"
    assert plans[1].config.data.cache_dir == str(tmp_path / "cache/megatron_llama/index_cache")
    streams = [stream_of(plan) for plan in plans]
    for number in range(2 * len(streams[0])):
        one, other = (stream[number] for stream in streams)
        assert one["tokens"].tolist() == other["tokens"].tolist() and one["labels"].tolist() == other["labels"].tolist()
    records = [make_record(plan) for plan in plans]
    assert moved_datasets(*records) == dict(zip(local, remote, strict=True)), "a copied dataset is the same dataset"
    store.put("data/one.bin", store.get("data/one.bin")[::-1])
    assert make_record(plans[1])["datasets"][remote[0]] != records[1]["datasets"][remote[0]]


def test_fine_tuning_sets(store: Store, tmp_path: Path) -> None:
    local = write_indexed(tmp_path / "set", numbered(50))
    write_indexed(tmp_path / "set_mask", [[token % 2 for token in document] for document in numbered(50)], "B")
    plans = [data_plan([path], **{"data.kind": "sft"}) for path in (local, upload(store, local))]
    one, other = (Examples(open_splits(plan.config.data, 0), plan.model.vocab_size) for plan in plans)
    assert len(one) == len(other) == 40
    for number in range(len(one)):
        assert all(map(np.array_equal, one[number], other[number]))


@pytest.mark.slow
def test_losses_and_resume(store: Store, tmp_path: Path) -> None:
    chooser = random.Random(0)
    documents = [[chooser.randrange(1, 64) for _ in range(chooser.randrange(2, 40))] for _ in range(60)]
    local = write_indexed(tmp_path / "x_text_document", documents)
    upload(store, local)
    settings = ["data=redpajama", "data.seq_length=16", "optim=constant"]
    whole = run(1, tmp_path / "local", *settings, f"data.prefixes=[{local}]", until=4)
    inject(store)
    remote = [*settings, f"data.prefixes=[{store.url('data')}/*_text_document]"]
    assert run(2, tmp_path / "remote", *remote, "trainer.dp=1", "trainer.tp=2", until=0).started_at == 0
    losses = {}
    for until in (2, 4):
        losses |= run(1, tmp_path / "run", *remote, until=until).losses
    assert losses == whole.losses  # floats, all bits


def test_refused(store: Store) -> None:
    store.fault("denied", "denied", count=1000)
    page = ""
    for url in GoldenFiles.commands("data/urls.txt"):
        changes: dict[str, Any] = {"data.kind": "sft"} if url.endswith(".jsonl") else {}
        with pytest.raises(ConfigError) as raised:
            data_plan([url.replace("BUCKET", store.bucket)], **changes)
        assert "secret" not in str(raised.value)
        page += f"$ {url}\n{raised.value}\n"
    GoldenFiles.check("data/urls.txt", page, {store.bucket: "BUCKET"})


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_package(url: str) -> None:
        raise ImportError("gcsfs")

    monkeypatch.setattr(object_store, "_file_system", no_package)
    with pytest.raises(ConfigError) as raised:
        data_plan(["gs://bucket/x"])
    text = unwrap(str(raised.value))
    assert "gs://bucket/x rule needs a package that is not installed instead" in text and "gcs]" in text
    advice = missing_folder("gs://bucket/model").instead
    assert "needs a package that is not installed" in advice and "hf download" not in advice


def test_a_tokenizer_by_url(store: Store, tmp_path: Path) -> None:
    store.put("tokenizer/tokenizer.json", b"{}")
    store.put("tokenizer/model.safetensors", b"large")
    folder = Path(str(load_config(["data=mock", f"data.tokenizer={store.url('tokenizer')}"], CONF).data.tokenizer))
    assert [path.name for path in folder.glob("[!.]*")] == ["tokenizer.json"]
