"""Values of a config.json: other JSON types, RoPE scaling, and models of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.checkpoint.hf_folder import open_hf_folder
from megatron_llama.config import Config, ConfigError, ModelConfig, RopeScaling, load_config
from megatron_llama.config.hf_config import (
    ARCHITECTURES,
    cache_folder,
    compare_shapes,
    download_hint,
    hf_config,
    is_hub_name,
    read_hf_config,
    resolve_hub_name,
    shape_from_hf,
    short_name,
    unsupported_architecture,
)
from megatron_llama.config.problems import MOST_CHARACTERS, Problem, format_problems, merge_problems
from megatron_llama.config.rope import longest_sequence, unsupported_rope
from megatron_llama.plan import resolve
from megatron_llama.text.tokenizer import TokenizerError, open_tokenizer
from megatron_llama.tools.inference.saved_model import open_saved_model
from tests.paths import CONF, ROOT

VALUES: list[Any] = [None, True, -1, 3, 0.5, 10**30, "", "text", [], ["full_attention", 1, {}], {}, {"a": []}]
KEYS = sorted({*hf_config(ModelConfig(), "float32", {}), "layer_types", "max_window_layers", "use_sliding_window"})


def read(folder: Path, content: dict[str, Any]) -> None:
    """Read a config.json as ``model=from_hf`` and a model with its own shape do."""
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    read_content = read_hf_config(str(folder))
    unsupported_architecture(read_content)
    shape = shape_from_hf(read_content)
    compare_shapes({**shape, "name": "x"}, read_content)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_each_value_of_another_type_is_read_or_reported(kind: str, tmp_path: Path) -> None:
    good = {**hf_config(ModelConfig(), "float32", {}), "model_type": kind, "use_sliding_window": True}
    cases = [(key, value, {**good, key: value}) for key in KEYS for value in VALUES]
    cases += [
        (key, value, {**good, "rope_parameters": {"rope_theta": 1e4, key: value}})
        for key in ("rope_type", "type", "factor", "original_max_position_embeddings", "long_factor")
        for value in VALUES
    ]
    wrong = 0
    for key, value, content in cases:
        try:
            read(tmp_path, content)
        except ValueError as error:
            wrong += 1
            assert str(error).startswith(f"{tmp_path}/config.json: "), (key, value)
        except Exception as error:
            pytest.fail(f"{key}: {value!r} gives {error!r}")
    assert wrong > 100


LONG: dict[str, Any] = {
    "model_type": "z" * 10**6,
    "hidden_act": "z" * 10**6,
    "quantization_config": {"a": ["b"] * 10**5},
    "rms_norm_eps": ["a"] * 10**5,
    "rope_parameters": {"rope_type": "z" * 10**6},
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 10**5, "long_factor": [1.0] * 10**5},
}


@pytest.mark.parametrize("key", LONG)
def test_a_long_value_gives_a_short_message(key: str, tmp_path: Path) -> None:
    content = {**hf_config(ModelConfig(), "float32", {}), key: LONG[key]}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        resolve(load_config(["model=from_hf", f"init_from={tmp_path}", "data=mock", "device=cpu"], CONF), 1)
    assert "more characters)" in str(error.value)
    assert len(str(error.value)) < 5000, "the values themselves are cut, so that all reasons are shown"


def test_the_parts_of_a_message_are_cut() -> None:
    """Names of tensors, for example, come from files of other people."""
    problem = Problem("init_from", "v" * 10**6, "r" * 10**6, "i" * 10**6)
    for text in (format_problems([problem]), "\n".join(merge_problems([problem]))):
        assert len(text) < 4 * MOST_CHARACTERS and all(letter * MOST_CHARACTERS in text for letter in "vr")


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


LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
IN_CONFIG_JSON: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 8.0},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "truncate": False, "mscale": 0.7},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "beta_slow": 0},
    {"rope_type": "longrope", "original_max_position_embeddings": 1024, **FACTORS},
    {"rope_type": "longrope", "factor": 2.0, "attention_factor": 1.2, **FACTORS},
]


def folder_with(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}), encoding="utf-8")
    return folder


def load(folder: Path, *overrides: str) -> Config:
    return load_config(["model=from_hf", f"init_from={folder}", "data=mock", "device=cpu", *overrides], CONF)


@pytest.mark.parametrize("scaling", IN_CONFIG_JSON, ids=lambda scaling: ", ".join(map(str, scaling.values()))[:40])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_a_folders_scaling_is_loaded_and_exported_as_transformers_reads_it(
    scaling: dict[str, Any], spelling: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_with(tmp_path, **{spelling: {**scaling, "rope_theta": 20000.0}})
    model = load(folder).model
    assert model.rope_scaling is not None and model.rope_theta == 20000.0
    exported = hf_config(model, "float32", {})
    theirs = transformers.LlamaConfig(**json.loads((folder / "config.json").read_text()))
    ours = transformers.LlamaConfig(**exported)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    function = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]]
    for length in (16, 4096):
        (one, one_factor), (other, other_factor) = (function(config, seq_len=length) for config in (theirs, ours))
        assert one.equal(other) and one_factor == other_factor
    (tmp_path / "exported").mkdir()
    second = tmp_path / "exported"
    (second / "config.json").write_text(json.dumps(exported))
    assert load(second).model.rope_scaling == model.rope_scaling, "a second export has the same values"


def test_the_context_of_phi_3_is_beside_the_scaling() -> None:
    scaling = {"rope_type": "longrope", **FACTORS}
    content = {**LLAMA, "rope_scaling": scaling, "original_max_position_embeddings": 1024}
    read = shape_from_hf(content)["rope_scaling"]
    assert (read["original_max_position_embeddings"], read["factor"]) == (1024, 4.0)
    del content["max_position_embeddings"]
    assert shape_from_hf(content)["rope_scaling"]["factor"] == 2.0, "transformers' default is 2048"


@pytest.mark.parametrize(
    ("rope", "clause"),
    [
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "its llama3 scaling has no high_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "its longrope scaling has no long_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, and only 1.0 is supported"),
    ],
)
def test_unsupported_scalings(rope: dict[str, Any], clause: str) -> None:
    assert unsupported_rope({**LLAMA, "rope_parameters": rope}) == [clause]


EXTENDED = "model.rope_scaling={rope_type: yarn, factor: 8}"


@pytest.mark.parametrize(
    ("overrides", "contexts"),
    [
        ([EXTENDED], (4096, 32768)),
        ([EXTENDED, "model.max_position_embeddings=16384"], (2048, 16384)),
        ([EXTENDED, "model.rope_scaling.original_max_position_embeddings=1024"], (1024, 4096)),
        (["model.rope_scaling={rope_type: linear, factor: 8}"], (None, 4096)),
        (["model.rope_scaling={rope_type: dynamic, factor: 8}"], (None, 4096)),
        (["model.rope_scaling={rope_type: llama3}"], (8192, 4096)),
    ],
)
def test_a_scaling_on_the_command_line_extends_the_context(
    overrides: list[str], contexts: tuple[int | None, int], tmp_path: Path
) -> None:
    model = load(folder_with(tmp_path), *overrides).model
    assert model.rope_scaling is not None
    assert (model.rope_scaling.original_max_position_embeddings, model.max_position_embeddings) == contexts


def test_one_value_on_the_command_line_changes_the_folders_scaling(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, rope_scaling=IN_CONFIG_JSON[3])
    changed = load(folder, "model.rope_scaling.beta_fast=16").model.rope_scaling
    assert changed == RopeScaling("yarn", 8.0, original_max_position_embeddings=512, beta_fast=16.0)
    assert load(folder, "model.rope_scaling=null").model.rope_scaling is None


def test_the_longest_sequence_counts_the_scaling() -> None:
    for kind, longest in {"linear": 16384, "dynamic": 16384, "yarn": 4096, "llama3": 4096}.items():
        assert longest_sequence(ModelConfig(rope_scaling=RopeScaling(kind, 4.0))) == longest
