"""Names of the Hugging Face hub: what huggingface_hub finds in its cache is found here, and nothing is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_llama.checkpoint.hf_folder import open_hf_folder
from megatron_llama.config import ConfigError, ModelConfig, load_config
from megatron_llama.config.hf_config import cache_folder, download_hint, is_hub_name, resolve_hub_name, short_name
from megatron_llama.text.tokenizer import TokenizerError, open_tokenizer
from megatron_llama.tools.inference.saved_model import open_saved_model
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
    library = pytest.importorskip("huggingface_hub", reason="comes with tokenizers")
    for kind in ("model", "dataset"):
        cached(hub, "org/name-2", kind)
        cached(hub, "org/name-2", kind, commit="f" * 40, ref=False)
        theirs = library.snapshot_download("org/name-2", repo_type=kind, cache_dir=hub, local_files_only=True)
        assert resolve_hub_name("org/name-2", kind) == theirs
        assert short_name(theirs) == "name-2"
    assert resolve_hub_name("org/other") == "org/other"
    only = cached(hub, "org/by-commit", ref=False)
    assert resolve_hub_name("org/by-commit") == str(only)
    cached(hub, "org/by-commit", commit="e" * 40, ref=False)
    assert resolve_hub_name("org/by-commit") == "org/by-commit", "ambiguous: two commits"


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
    with pytest.raises(ConfigError) as refused:
        load_config(["model=from_hf", "init_from=org/llama"], ROOT / "conf")
    (problem,) = refused.value.problems
    assert problem.instead.endswith(f"not in the Hugging Face cache {hub}: hf download org/llama")
    with pytest.raises(ConfigError, match=r"hf\s+download\s+org/llama"):
        open_saved_model(Path("org/llama"))
    with pytest.raises(TokenizerError, match=r"hf\s+download\s+org/llama"):
        open_tokenizer(Path("org/llama"))
    assert download_hint("org/talks", "dataset").endswith("hf download org/talks --repo-type dataset")
