"""Files that a config names and that are not there."""

from __future__ import annotations

import errno
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.arch.checkpoint_formats import is_foreign, recognize
from megatron_llama.config import Config, ConfigError, ModelConfig, RopeScaling, load_config
from megatron_llama.config.rope import rope_to_hf
from megatron_llama.plan import resolve
from tests.config.helpers import make, problems_of
from tests.paths import CONF

HUGGING_FACE_NAMES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads tie_word_embeddings"
)


def with_data(prefix: Path | str, **changes: object) -> Config:
    return make(**{"data.mock": False, "data.prefixes": [str(prefix)], **changes})


def test_a_dataset_needs_both_of_its_files(tmp_path: Path) -> None:
    prefix = tmp_path / "text_document"
    config = with_data(prefix)
    (problem,) = problems_of(config)
    assert problem.field == "data.prefixes" and ".bin" in problem.rule and ".idx" in problem.rule
    (tmp_path / "text_document.bin").touch()
    (problem,) = problems_of(config)
    assert ".bin" not in problem.rule and ".idx" in problem.rule
    (tmp_path / "text_document.idx").touch()
    assert problems_of(config) == []


def test_a_path_with_its_suffix_is_corrected(tmp_path: Path) -> None:
    (problem,) = problems_of(with_data(tmp_path / "text_document.bin"))
    assert f"data.prefixes=[{tmp_path}/text_document]" in problem.instead


def test_every_missing_dataset_of_a_blend_is_named() -> None:
    problems = problems_of(make(**{"data.mock": False, "data.prefixes": [0.3, "one", 0.7, "two"]}))
    assert [problem.value for problem in problems] == ["one", "two"]


def test_the_command_that_makes_the_data_is_in_the_message_and_a_dry_run_goes_on(tmp_path: Path) -> None:
    config = with_data(
        tmp_path / "x", **{"data.prepare": "make demo-data", "data.tokenizer": str(tmp_path / "t.model")}
    )
    problems = problems_of(config)
    assert [problem.field for problem in problems] == ["data.prefixes", "data.tokenizer"]
    assert all(problem.instead == "make it with: make demo-data" for problem in problems)
    config.dry_run = True
    plan = resolve(config, 1)
    (note,) = plan.notes
    assert note.count("make demo-data") == 1 and all(problem.field in note for problem in problems)


def test_a_real_run_is_told_once_what_mends_several(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        resolve(load_config(["data=redpajama", "trainer.tp=0"], CONF), 1)
    message = str(refused.value)
    names = [name for name in load_config(["data=redpajama"], CONF).data.prefixes if isinstance(name, str)]
    assert len(names) == 7 and "for 8 reasons" in message
    assert all(f"data.prefixes = {name}\n" in message for name in names) and "trainer.tp = 0\n" in message
    assert message.count("redpajama.py prepare") == 1 and message.count("there is no") == 1
    assert message.count("    instead") == message.count("    rule") == 2


def test_a_dataset_named_by_hand_stops_a_dry_run_too() -> None:
    """The group's command makes the group's files only."""
    config = load_config(["data.prefixes=[no/such/dataset]", "data.tokenizer=null", "dry_run=true"], CONF)
    assert [problem.field for problem in problems_of(config)] == ["data.prefixes"]
    by_hand = load_config(
        ["data.prefixes=[no/such/dataset]", "data.prepare=make it", "data.tokenizer=null", "dry_run=true"], CONF
    )
    assert problems_of(by_hand) == []


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    for suffix in ("bin", "idx"):
        (tmp_path / f"x.{suffix}").touch()
    config = with_data(tmp_path / "x", **{"data.tokenizer": str(tmp_path / "t.model")})
    (problem,) = problems_of(config)
    assert problem.field == "data.tokenizer"
    (tmp_path / "t.model").touch()
    assert problems_of(config) == []


def test_made_up_data_needs_no_file() -> None:
    assert problems_of(make(**{"data.prefixes": ["nowhere"], "data.tokenizer": "nowhere"})) == []


@pytest.mark.parametrize(
    ("resume", "advice"), [("atuo", "checkpoint.resume=auto"), ("runs/x", "the path of a checkpoint")]
)
def test_a_checkpoint_that_is_not_there(resume: str, advice: str, tmp_path: Path) -> None:
    (problem,) = problems_of(make(**{"checkpoint.resume": resume}))
    assert problem.field == "checkpoint.resume" and advice in problem.instead
    (tmp_path / "checkpoint.json").touch()
    assert problems_of(make(**{"checkpoint.resume": str(tmp_path)})) == []


@pytest.mark.parametrize(
    ("files", "rule", "advice"),
    [
        ([], "contains nothing", "Megatron's torch_dist checkpoint"),
        (["a.pt", "b", "c", "d", "e"], "known format: the folder contains a.pt, b, c, d and 1 more", "torchtitan"),
        (["model.safetensors", "config.json"], "weights only", "init_from="),
        (["step_00000002/checkpoint.json", "step_00000001/checkpoint.json"], "of checkpoints", "/step_00000002"),
        (["checkpoints/step_00000002/checkpoint.json", "config.yaml"], "of checkpoints", "/checkpoints/step_00000002"),
        (["checkpoints/x", "config.yaml"], "contains checkpoints, config.yaml", "one of"),
        (["common.pt", ".metadata"], None, ""),
    ],
    ids=["empty", "unknown", "hugging face", "folder of checkpoints", "run", "run without checkpoints", "torch_dist"],
)
def test_a_folder_that_cannot_be_resumed(files: list[str], rule: str | None, advice: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    problems = problems_of(make(**{"checkpoint.resume": str(tmp_path)}))
    assert [problem.field for problem in problems] == ["checkpoint.resume"] * (rule is not None)
    assert all(str(rule) in problem.rule and advice in problem.instead for problem in problems)


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's checkpoint is private."""
    folder = tmp_path / "theirs"
    folder.mkdir()

    real = {"stat": os.stat, "listdir": os.listdir}

    def denied(name: str, path: Any, **options: Any) -> Any:
        if folder in Path(path).parents or (name == "listdir" and Path(path) == folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real[name](path, **options)

    for name in real:
        monkeypatch.setattr(os, name, partial(denied, name))
    (problem,) = problems_of(make(**{"checkpoint.resume": str(folder)}))
    assert (problem.field, problem.rule) == ("checkpoint.resume", "cannot be read: Permission denied")
    assert recognize(folder) is None and not is_foreign(folder)


def hugging_face_folder(folder: Path, **changes: object) -> Path:
    """A config.json of our default shape, changed."""
    model = make().model
    content = {name: getattr(model, name) for name in HUGGING_FACE_NAMES.split()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**content, **changes}), encoding="utf-8")
    return folder


def test_starting_weights_need_a_folder_of_hugging_face(tmp_path: Path) -> None:
    (problem,) = problems_of(make(**{"init_from": str(tmp_path)}))
    assert problem.field == "init_from" and "config.json" in problem.rule
    assert problems_of(make(**{"init_from": str(hugging_face_folder(tmp_path))})) == []


LLAMA3 = RopeScaling(original_max_position_embeddings=8192)


def test_llama_3_scaling_is_read_in_both_spellings(tmp_path: Path) -> None:
    scaling = rope_to_hf(ModelConfig(rope_scaling=LLAMA3)) or {}
    for content in (
        {"rope_scaling": scaling, "rope_theta": 10000.0},
        {"rope_parameters": {**scaling, "rope_theta": 10000.0}},
    ):
        folder = str(hugging_face_folder(tmp_path, **content))
        assert problems_of(make(**{"init_from": folder, "model.rope_scaling": LLAMA3})) == []
        (problem,) = problems_of(make(**{"init_from": folder}))
        assert "rope_scaling" in problem.rule
    (problem,) = problems_of(
        make(**{"init_from": str(hugging_face_folder(tmp_path)), "model.rope_scaling": LLAMA3})
    )
    assert "model.rope_scaling=null" in problem.instead


def test_where_both_spellings_are_given_transformers_reading_counts(tmp_path: Path) -> None:
    llama_config = pytest.importorskip("transformers").LlamaConfig
    default, linear = {"rope_type": "default", "rope_theta": 10000.0}, {"type": "linear", "factor": 4.0}
    theirs = llama_config(rope_scaling=dict(linear), rope_parameters=dict(default)).rope_parameters
    assert theirs["rope_type"] == "linear" and theirs["factor"] == 4.0
    folder = hugging_face_folder(tmp_path, rope_scaling=linear, rope_parameters=default)
    (problem,) = problems_of(make(**{"init_from": str(folder)}))
    assert "{rope_type: linear, factor: 4}" in problem.rule


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("hidden_size", "192", "hidden_size is '192', not a whole number"),
        ("num_hidden_layers", -4, "num_hidden_layers is -4, which must be between 1 and"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000, which must be between 1 and"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan, which must be above 0"),
        ("num_attention_heads", True, "not a whole number"),
        ("rope_scaling", 5, "rope_scaling is 5, not a mapping"),
        ("rope_parameters", {"rope_theta": "x"}, "rope_theta is 'x', not a number"),
    ],
)
def test_a_value_that_is_no_models_is_named_once(name: str, value: object, words: str, tmp_path: Path) -> None:
    folder = hugging_face_folder(tmp_path, **{name: value})
    (problem,) = problems_of(make(**{"init_from": str(folder)}))
    assert problem.field == "init_from" and words in problem.rule
    with pytest.raises(ConfigError) as caught:
        config = load_config(["model=from_hf", f"init_from={folder}", "data=mock", "device=cpu"], CONF)
        resolve(config, 1)
    assert [(p.field, words in p.rule) for p in caught.value.problems] == [("init_from", True)]


def test_a_missing_folder_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["model=from_hf", f"init_from={tmp_path / 'none'}", "data=mock", "device=cpu"], CONF)
    assert caught.value.config is not None
    with pytest.raises(ConfigError) as resolved:
        resolve(caught.value.config, 1, known=caught.value.problems)
    (problem,) = [problem for problem in resolved.value.problems if problem.field == "init_from"]
    assert "no such folder" in problem.rule and "hf download" in problem.instead


@pytest.mark.parametrize(
    ("theirs", "advice"),
    [
        ({"hidden_size": 576, "num_hidden_layers": 30}, "write model=from_hf, which takes the shape from this folder"),
        ({"rope_theta": 500000.0}, "model.rope_theta=500000"),
        ({"rope_parameters": {"rope_theta": 500000.0}}, "model.rope_theta=500000"),
        ({"num_key_value_heads": 1}, "model.num_key_value_heads=1"),
        ({"tie_word_embeddings": True}, "model.tie_word_embeddings=true"),
        ({"head_dim": 64}, "model.head_dim=64"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 32.0}},
            "'model.rope_scaling={rope_type: llama3, factor: 32}'",
        ),
    ],
)
def test_starting_weights_of_another_shape(theirs: dict[str, object], advice: str, tmp_path: Path) -> None:
    (problem,) = problems_of(make(**{"init_from": str(hugging_face_folder(tmp_path, **theirs))}))
    assert problem.field == "init_from" and advice in problem.instead


def test_settings_over_the_folders_shape_are_named(tmp_path: Path) -> None:
    folder = hugging_face_folder(tmp_path)
    start = ["model=from_hf", f"init_from={folder}", "data=mock", "device=cpu"]
    with pytest.raises(ConfigError) as caught:
        resolve(load_config([*start, "model.hidden_size=384", "model.num_hidden_layers=8"], CONF), 1)
    (problem,) = caught.value.problems
    assert "hidden_size is 192, not 384" in problem.rule and "model.num_hidden_layers=4" in problem.instead


@pytest.mark.parametrize("kind", ["proportional", "axial"])
@pytest.mark.parametrize("preset", ["from_hf", "llama_2m"])
def test_an_unsupported_rotary_scaling_is_one_problem(kind: str, preset: str, tmp_path: Path) -> None:
    scaling = {"rope_type": kind, "factor": 4.0}
    for changes in ({"rope_scaling": scaling}, {"rope_parameters": {**scaling, "rope_theta": 10000.0}}):
        folder = hugging_face_folder(tmp_path, hidden_size=576, num_hidden_layers=30, **changes)
        with pytest.raises(ConfigError) as caught:
            resolve(load_config([f"model={preset}", f"init_from={folder}", "data=mock", "device=cpu"], CONF), 1)
        (problem,) = caught.value.problems
        assert problem.field == "init_from" and f"rope_type is '{kind}'" in problem.rule
        assert "rope_scaling" not in problem.instead


@pytest.mark.parametrize(("kind", "suffix"), [("pretrain", "_text_document"), ("sft", "_sft")])
def test_the_output_prefix_of_data_prep_is_completed(kind: str, suffix: str, tmp_path: Path) -> None:
    for ending in (".bin", ".idx", "_mask.bin", "_mask.idx"):
        (tmp_path / f"book{suffix}{ending}").touch()
    overrides = [f"data.prefixes=[{tmp_path}/book]", f"data.kind={kind}"]
    overrides += [f"data.validation_prefixes=[{tmp_path}/book]"] if kind == "sft" else []
    data = load_config(overrides, CONF).data
    assert data.prefixes == [f"{tmp_path}/book{suffix}"] and data.name == "book"
    assert data.validation_prefixes in ([], data.prefixes)


def test_datasets_of_other_keys_are_named(tmp_path: Path) -> None:
    for key in ("code", "title"):
        (tmp_path / f"book_{key}_document.idx").touch()
    (problem,) = problems_of(with_data(tmp_path / "book"))
    both = f"[{tmp_path}/book_code_document] or [{tmp_path}/book_title_document]"
    assert problem.instead == f"write data.prefixes={both}"
    with pytest.raises(ConfigError, match=r"write\s+data.prefixes=\["):
        load_config([f"data={tmp_path}/book"], CONF)


@pytest.mark.parametrize("name", ["corpus.txt", "corpus.jsonl", "corpus.jsonl.zst", "corpus.parquet", "corpus/a.txt"])
def test_raw_text_names_the_command_that_prepares_it(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    path = tmp_path / name.partition("/")[0]
    (problem,) = problems_of(with_data(path))
    assert "raw data" in problem.rule
    with pytest.raises(ConfigError) as caught:
        load_config([f"data={path}"], CONF)
    for instead in (problem.instead, caught.value.problems[0].instead):
        assert f"python data_prep/preprocess.py --input {path} --tokenizer-model TOKENIZER" in instead
        assert "data.prefixes=[corpora/corpus_text_document]" in instead


def test_a_schedule_of_a_package_that_is_not_installed() -> None:
    target = "no_such_package.schedules.Cosine"
    (problem,) = problems_of(make(**{"optim.schedule": {"_target_": target}, "allow_targets": [target]}))
    assert problem.field == "optim.schedule._target_" and "no_such_package is not installed" in problem.rule
    assert problems_of(make(**{"optim.schedule": {"_target_": "torch.optim.lr_scheduler.LinearLR"}})) == []


def test_a_number_that_went_through_fp32_is_the_same(tmp_path: Path) -> None:
    """GGUF holds 1e-05 as fp32, so what transformers writes of it is 9.99999974e-06."""
    folder = str(hugging_face_folder(tmp_path, rms_norm_eps=9.999999747378752e-06))
    assert problems_of(make(**{"init_from": folder})) == []
    other = hugging_face_folder(tmp_path / "other", rms_norm_eps=1.000001e-05)
    (problem,) = problems_of(make(**{"init_from": str(other)}))
    assert "rms_norm_eps is 1.000001e-05, not 1e-05" in problem.rule
    assert problem.instead.startswith("write model.rms_norm_eps=1.000001e-05,")
