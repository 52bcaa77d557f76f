"""Names of the hub: the local cache; downloads from and uploads to a hub on loopback, with faults."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, snapshot_download

from megatron_llama.checkpoint.hf_folder import open_hf_folder
from megatron_llama.config import ConfigError, ModelConfig, load_config
from megatron_llama.config.hub import (
    cache_folder,
    check_upload,
    download_hint,
    fetch_weights,
    is_hub_name,
    resolve_hub_name,
    short_name,
    upload_folder,
)
from megatron_llama.text.tokenizer import TokenizerError, open_tokenizer
from megatron_llama.tools.inference.saved_model import open_saved_model
from tests.config.helpers import refused
from tests.hub_server import COMMIT as NEWEST
from tests.hub_server import HubServer, hub_server
from tests.paths import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(hub: Path, name: str, kind: str = "model", commit: str = COMMIT, ref: bool = True) -> Path:
    """A repository as huggingface_hub downloads it: a blob, a link to it, a reference."""
    repository = hub / f"{kind}s--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    (repository / "blobs/aa").write_text("{}")
    (snapshot / "config.json").symlink_to(repository / "blobs/aa")
    if ref:
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text(commit)
    return snapshot


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a working folder without anything in it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home/hub"


def test_it_finds_what_huggingface_hub_finds(hub: Path) -> None:
    for kind in ("model", "dataset"):
        cached(hub, "org/name-2", kind)
        cached(hub, "org/name-2", kind, commit="f" * 40, ref=False)
        theirs = snapshot_download("org/name-2", repo_type=kind, cache_dir=hub, local_files_only=True)
        assert resolve_hub_name("org/name-2", kind) == theirs
        assert short_name(theirs) == "name-2"
    assert resolve_hub_name("org/other") == "org/other"
    assert resolve_hub_name(f"org/name-2@{'f' * 40}") == str(hub / "models--org--name-2/snapshots" / ("f" * 40))


def test_a_path_that_exists_goes_before(hub: Path, tmp_path: Path) -> None:
    cached(hub, "org/name")
    (tmp_path / "org/name").mkdir(parents=True)
    assert resolve_hub_name("org/name") == "org/name" and download_hint("org/name") == ""


@pytest.mark.parametrize(
    "name", ["/abs/path", "./org/name", "../name", "a/b/c", "name", "org/", "org/a b", "a--b/c", "models/a"]
)
def test_paths_are_no_names(name: str) -> None:
    assert not is_hub_name(name) and resolve_hub_name(name) == name and download_hint(name) == ""


def test_the_variables_of_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"XDG_CACHE_HOME": "/x/huggingface/hub", "HF_HOME": "/h/hub", "HF_HUB_CACHE": "/c"}
    for name in (*steps, "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder() == Path("~/.cache/huggingface/hub").expanduser()
    for name, expected in steps.items():
        monkeypatch.setenv(name, "/" + name[0].lower() if name != "HF_HUB_CACHE" else "/c")
        assert str(cache_folder()) == expected


def test_settings_take_names(hub: Path, tmp_path: Path) -> None:
    model, data = cached(hub, "org/llama"), cached(hub, "org/talks", "dataset")
    (tmp_path / "org").mkdir()
    (tmp_path / "org/made.idx").touch()
    prefixes = "data.prefixes=[org/talks,org/made,org/none]"
    words = ["data.kind=sft", prefixes, "init_from=org/llama", "data.tokenizer=org/llama"]
    config = load_config(words, ROOT / "conf")
    assert config.init_from == config.data.tokenizer == str(model)
    assert config.data.prefixes == [f"{data}/", "org/made", "org/none"]


def test_a_snapshot_without_weights_names_the_command(hub: Path) -> None:
    """A download of the tokenizer alone creates such a snapshot."""
    snapshot = cached(hub, "org/llama")
    with pytest.raises(ConfigError, match=r"model\.safetensors[\s\S]*hf\s+download\s+org/llama"):
        open_hf_folder(snapshot, ModelConfig())
    assert download_hint(str(cached(hub, "org/talks", "dataset")), "dataset").endswith("org/talks --repo-type dataset")


def test_what_is_missing_is_refused_with_the_command(hub: Path) -> None:
    (problem,) = refused("model=from_hf", "init_from=org/llama")
    assert problem.instead.endswith(f"cache {hub} (tried: HF_HUB_OFFLINE is set): hf download org/llama")
    with pytest.raises(ConfigError, match=r"hf\s+download\s+org/llama"):
        open_saved_model(Path("org/llama"))
    with pytest.raises(TokenizerError, match=r"hf\s+download\s+org/llama"):
        open_tokenizer(Path("org/llama"))
    assert download_hint("org/talks", "dataset").endswith("hf download org/talks --repo-type dataset")


SHAPE = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
MODEL = {
    "config.json": json.dumps({**SHAPE, "num_attention_heads": 4}).encode(),
    "tokenizer.json": b"{}",
    "model-00001-of-00002.safetensors": bytes(100_000),
    "model-00002-of-00002.safetensors": bytes(200_000),
    "model.safetensors.index.json": b'{"weight_map": {"a": "model-00001-of-00002.safetensors", '
    b'"b": "model-00002-of-00002.safetensors"}}',
    "pytorch_model.bin": b"a pickle",
    "original/consolidated.00.pth": b"another",
}
NEEDED = {name for name in MODEL if name.endswith((".json", ".safetensors"))}


@pytest.fixture
def server(hub: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with a model and a dataset, to which names are resolved."""
    with hub_server() as served:
        served.files |= {"models/org/llama": MODEL, "datasets/org/talks": {"train/a.jsonl": b"{}", "README.md": b""}}
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield served


def names_in(folder: str) -> set[str]:
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if not path.is_dir()}


def test_names_are_downloaded_as_far_as_they_are_needed(server: HubServer, hub: Path) -> None:
    words = ["model=from_hf", "init_from=org/llama@v1", "data.kind=sft", "data.prefixes=[org/talks]"]
    config = load_config(words, ROOT / "conf")
    folder = str(hub / "models--org--llama/snapshots" / NEWEST)
    assert config.init_from == folder and config.model.vocab_size == 64
    assert names_in(folder) == {name for name in NEEDED if not name.endswith(".safetensors")}
    assert names_in(config.data.prefixes[0]) == {"train/a.jsonl", "README.md"}  # type: ignore[arg-type]
    assert not fetch_weights(folder) and names_in(folder) == NEEDED
    server.requests.clear()
    assert not fetch_weights(folder) and resolve_hub_name(f"org/llama@{NEWEST}", weights=True) == folder
    assert not server.requests


def test_an_interrupted_download_continues(server: HubServer, hub: Path) -> None:
    name = "model-00002-of-00002.safetensors"
    server.cuts.add(name)
    folder = resolve_hub_name("org/llama", weights=True)
    assert (Path(folder) / name).read_bytes() == MODEL[name]
    assert server.requests.count(f"GET org/llama/resolve/{NEWEST}/{name}") == 2
    (Path(folder) / name).unlink()  # a link to a blob: the download of this file had not begun
    assert not fetch_weights(folder) and names_in(folder) == NEEDED


def test_a_damaged_download_is_deleted(server: HubServer, hub: Path) -> None:
    name = "model-00001-of-00002.safetensors"
    folder = resolve_hub_name("org/llama")
    server.damaged.add(name)
    (problem,) = fetch_weights(folder)
    assert f"{name} has another sha256" in problem.rule and name not in names_in(folder)
    assert not fetch_weights(folder) and (Path(folder) / name).read_bytes() == MODEL[name]


Setup = Callable[[HubServer, pytest.MonkeyPatch], object]
REFUSED: dict[str, tuple[Setup, str]] = {
    "gated": (lambda server, patch: vars(server).update(token="t", gated=True), "accept the terms"),
    "no answer": (lambda server, patch: patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9"), "no answer"),
    "offline": (lambda server, patch: patch.setattr(constants, "HF_HUB_OFFLINE", True), "HF_HUB_OFFLINE"),
    "ranks": (lambda server, patch: patch.setenv("RANK", "3"), "each rank of a launcher"),
    "full disk": (lambda server, patch: patch.setattr(shutil, "disk_usage", lambda _: FULL), "has 9.44e-05 MiB free"),
    "not installed": (lambda server, patch: patch.setitem(sys.modules, "huggingface_hub", None), r"-e .*\[hub\]"),
    "org/none": (lambda server, patch: None, "the hub has no such name, or it is private"),
    "org/llama@v2": (lambda server, patch: None, "it has no such revision"),
}
FULL = SimpleNamespace(free=99)


@pytest.mark.parametrize("case", REFUSED)
def test_a_name_that_cannot_be_downloaded_says_why(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    prepare, reason = REFUSED[case]
    prepare(server, monkeypatch)
    name = case if case.startswith("org/") else "org/llama"
    (problem,) = refused("model=from_hf", f"init_from={name}")
    assert re.search(reason, problem.instead) and "hf download org/" in problem.instead


def test_a_cache_without_a_list_of_files_gets_the_weights(server: HubServer, hub: Path) -> None:
    """Older versions of huggingface_hub store no list, so the library does not know that files are missing."""
    folder = str(cached(hub, "org/llama", commit=NEWEST))
    assert not fetch_weights(folder) and names_in(folder) == NEEDED


def test_weights_that_cannot_be_downloaded_are_one_problem(server: HubServer) -> None:
    folder = resolve_hub_name("org/llama")
    server.token, server.gated = "t", True
    (problem,) = fetch_weights(folder)
    assert "could not be downloaded: its owner grants access" in problem.rule


def test_a_folder_is_uploaded_as_one_private_commit(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="there is no token"):
        check_upload("org/new")
    monkeypatch.setenv("HF_TOKEN", "t")
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="is set(.|\n)*unset HF_HUB_OFFLINE"):
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        check_upload("org/new")
    server.token = "t"
    with pytest.raises(ConfigError, match="must be a hub name"):
        check_upload("new")
    for name, content in (("README.md", b"card"), ("model.safetensors", bytes(1000))):
        (tmp_path / name).write_bytes(content)
    check_upload("org/new")
    assert upload_folder(tmp_path, "org/new").startswith(f"{server.url}/org/new/commit/")
    assert server.private and len(server.commits) == 1
    assert server.files["models/org/new"] == {"README.md": b"card", "model.safetensors": bytes(1000)}
    server.token = "other"
    with pytest.raises(ConfigError, match="--push-to-hub"):
        upload_folder(tmp_path, "org/new")
