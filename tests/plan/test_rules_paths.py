"""Files that a config names: missing files, other formats, and models with another shape."""

from __future__ import annotations

import errno
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.arch.recognize_format import is_foreign, recognize
from megatron_llama.config import Config, ConfigError, ModelConfig, RopeScaling, load_config
from megatron_llama.config.problems import Problem
from megatron_llama.config.rope import rope_to_hf
from megatron_llama.plan import resolve
from tests.config.helpers import make, problems_of
from tests.golden import GoldenFiles
from tests.paths import CONF

SHAPE = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads tie_word_embeddings".split()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, so that messages have short paths."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_data(prefix: str, **changes: object) -> Config:
    return make(**{"data.mock": False, "data.prefixes": [prefix], **changes})


def touch(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


def problem_of(config: Config, **options: Any) -> Problem:
    (problem,) = problems_of(config, **options)
    return problem


def check_page(name: str, problems: dict[str, list[Problem]], folder: Path) -> None:
    """Compare the problems of each row; lines are not wrapped, because the folder's name has any length."""
    lines = [
        line
        for row, each in problems.items()
        for line in (row, *(f"  {p.field} = {p.value}\n    {p.rule}\n    {p.instead}" for p in each), "")
    ]
    GoldenFiles.check(f"plan/{name}.txt", "\n".join(lines), {str(folder): "FOLDER"})


def test_datasets(folder: Path) -> None:
    """A dataset needs both of its files, and each missing one of a blend is named."""
    config = with_data("text_document")
    rows = {"both files are missing": problems_of(config)}
    touch("text_document.bin")
    rows["one file is missing"] = problems_of(config)
    touch("text_document.idx", "book_code_document.idx", "book_title_document.idx")
    assert problems_of(config) == []
    rows["with its suffix"] = problems_of(with_data("text_document.bin"))
    rows["raw data that is missing"] = problems_of(with_data("none.jsonl", **{"data.kind": "sft"}))
    rows["a blend"] = problems_of(make(**{"data.mock": False, "data.prefixes": [0.3, "one", 0.7, "two"]}))
    rows["datasets of other keys"] = problems_of(with_data("book"))
    with pytest.raises(ConfigError, match=r"write\s+data.prefixes=\["):
        load_config(["data=book"], CONF)
    made = {"data.prepare": "make demo-data", "data.tokenizer": "t.model", "data.validation_prefixes": ["y"]}
    rows["a group with a command"] = problems_of(prepared := with_data("x", **made))
    prepared.dry_run = True
    note = "".join(resolve(prepared, 1).notes)
    assert note.count("make demo-data") == 1 and "data.prefixes" in note and "data.tokenizer" in note
    typed = {"data.tokenizer": "t.model", "data.prepare": "make demo-data"}
    rows["a tokenizer"] = problems_of(with_data("text_document", **typed))
    touch("t.model")
    assert problems_of(with_data("text_document", **{"data.tokenizer": "t.model"})) == []
    assert problems_of(make(**{"data.prefixes": ["nowhere"], "data.tokenizer": "nowhere"})) == [], "mock data"
    check_page("datasets", rows, folder)


def test_one_command_for_several_files_is_named_once() -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(load_config(["data=redpajama", "trainer.tp=0"], CONF), 1)
    message = str(refused.value)
    names = [name for name in load_config(["data=redpajama"], CONF).data.prefixes if isinstance(name, str)]
    assert len(names) == 7 and all(f"data.prefixes = {name}\n" in message for name in names)
    assert "trainer.tp = 0\n" in message and message.count("redpajama.py prepare") == 1
    assert message.count("    instead") == message.count("    rule") == 2


def test_a_dataset_on_the_command_line_stops_a_dry_run_too() -> None:
    """The group's command makes the group's files only."""
    words = ["data.prefixes=[no/such/dataset]", "data.tokenizer=null", "dry_run=true"]
    assert problem_of(load_config(words, CONF)).field == "data.prefixes"
    assert problems_of(load_config([*words, "data.prepare=make it"], CONF)) == []


@pytest.mark.parametrize("name", ["corpus.txt", "corpus.jsonl", "corpus.jsonl.zst", "corpus.parquet", "corpus/a.txt"])
def test_raw_text_names_the_command_that_prepares_it(name: str) -> None:
    touch(name)
    path = name.partition("/")[0]
    problem = problem_of(with_data(path))
    assert "raw data" in problem.rule
    with pytest.raises(ConfigError) as caught:
        load_config([f"data={path}"], CONF)
    for instead in (problem.instead, caught.value.problems[0].instead):
        assert f"python data_prep/preprocess.py --input {path} --tokenizer-model TOKENIZER" in instead
        assert "data.prefixes=[corpora/corpus_text_document]" in instead


def test_a_folder_of_datasets_names_its_pattern() -> None:
    touch("sets/a.bin", "sets/a.idx")
    assert problem_of(with_data("sets")).instead == "write data.prefixes='[\"sets/*\"]' for all datasets in the folder"


@pytest.mark.parametrize(("kind", "suffix"), [("pretrain", "_text_document"), ("sft", "_sft")])
def test_the_output_prefix_of_data_prep_is_completed(kind: str, suffix: str, folder: Path) -> None:
    touch(*(f"book{suffix}{ending}" for ending in (".bin", ".idx", "_mask.bin", "_mask.idx")))
    overrides = [f"data.prefixes=[{folder}/book]", f"data.kind={kind}"]
    overrides += [f"data.validation_prefixes=[{folder}/book]"] if kind == "sft" else []
    data = load_config(overrides, CONF).data
    assert data.prefixes == [f"{folder}/book{suffix}"] and data.name == "book"
    assert data.validation_prefixes in ([], data.prefixes)


CHECKPOINTS: dict[str, list[str]] = {
    "empty": [],
    "unknown": ["a.pt", "b", "c", "d", "e"],
    "hugging_face": ["model.safetensors", "config.json"],
    "litgpt": ["lit_model.pth"],
    "folder_of_checkpoints": ["step_00000002/checkpoint.json", "step_00000001/checkpoint.json"],
    "run": ["checkpoints/step_00000002/checkpoint.json", "config.yaml"],
    "run_without_checkpoints": ["checkpoints/x", "config.yaml"],
}


def test_checkpoints_that_cannot_be_resumed(folder: Path) -> None:
    touch("torch_dist/common.pt", "torch_dist/.metadata", "ours/checkpoint.json", "ours/best")
    names = ("atuo", "runs/x", "s3://a:b@c/d", "ours/step_00000009", "ours/checkpoint.json")
    rows = {name: problems_of(make(**{"checkpoint.resume": name})) for name in names}
    for name, files in CHECKPOINTS.items():
        Path(name).mkdir()
        touch(*(f"{name}/{file}" for file in files))
        rows[name] = problems_of(make(**{"checkpoint.resume": name}))
    check_page("resume", rows, folder)
    assert not any(problems_of(make(**{"checkpoint.resume": name})) for name in ("torch_dist", "ours", "ours/best"))


def test_a_folder_without_permission(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's checkpoint is private."""
    private = folder / "theirs"
    private.mkdir()
    real = {"stat": os.stat, "listdir": os.listdir}

    def denied(name: str, path: Any, **options: Any) -> Any:
        if private in Path(path).parents or (name == "listdir" and Path(path) == private):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real[name](path, **options)

    for name in real:
        monkeypatch.setattr(os, name, partial(denied, name))
    problem = problem_of(make(**{"checkpoint.resume": str(private)}))
    assert (problem.field, problem.rule) == ("checkpoint.resume", "cannot be read: Permission denied")
    assert recognize(private) is None and not is_foreign(private)


def hf_folder(**changes: object) -> str:
    """Write a config.json of our default shape, changed, and return its folder."""
    content = {name: getattr(make().model, name) for name in SHAPE}
    Path("theirs").mkdir(exist_ok=True)
    Path("theirs/config.json").write_text(json.dumps({**content, **changes}), encoding="utf-8")
    return "theirs"


def load_hf(name: str, *overrides: str, preset: str = "from_hf") -> list[Problem]:
    """Return the problems of a run from a folder, when it is read or planned."""
    with pytest.raises(ConfigError) as caught:
        resolve(load_config([f"model={preset}", f"init_from={name}", "data=mock", "device=cpu", *overrides], CONF), 1)
    return list(caught.value.problems)


LLAMA3 = RopeScaling(original_max_position_embeddings=8192)


def test_models_of_hugging_face(folder: Path) -> None:
    """A value that no model has is one problem, and so is another shape."""
    Path("empty").mkdir()
    rows = {"no config.json": problems_of(make(**{"init_from": "empty"}))}
    Path("empty/adapter_config.json").touch()
    rows["an adapter"] = problems_of(make(**{"init_from": "empty"}))
    for line in GoldenFiles.commands("plan/init_from.txt"):
        kind, _, changes = line.partition(" ")
        rows[f"$ {line}"] = problems_of(make(**{"init_from": hf_folder(**json.loads(changes))}))
        for preset in ("from_hf", "llama_2m") if kind == "value" else ():
            (problem,) = load_hf("theirs", preset=preset)
            assert problem.field == "init_from" and problem.rule in rows[f"$ {line}"][0].rule
    name = hf_folder()
    rows["settings over the shape"] = load_hf(name, "model.hidden_size=384", "model.num_hidden_layers=8")
    rows["tied"] = problems_of(make(**{"init_from": name, "model.tie_word_embeddings": True}))
    rows["rope_scaling"] = problems_of(make(**{"init_from": name, "model.rope_scaling": LLAMA3}))
    assert {row: [p.field for p in each] for row, each in rows.items()} == dict.fromkeys(rows, ["init_from"])
    check_page("init_from", rows, folder)
    assert problems_of(make(**{"init_from": name})) == []
    assert problems_of(make(**{"init_from": hf_folder(tie_word_embeddings=True)})) == [], "its tensors decide"
    # GGUF holds 1e-05 as fp32, so transformers writes it as 9.99999974e-06.
    assert problems_of(make(**{"init_from": hf_folder(rms_norm_eps=9.999999747378752e-06)})) == []


def test_llama_3_scaling_is_read_in_both_spellings() -> None:
    """The reading of transformers decides."""
    scaling = rope_to_hf(ModelConfig(rope_scaling=LLAMA3)) or {}
    contents = {"rope_scaling": scaling, "rope_theta": 10000.0}, {"rope_parameters": {**scaling, "rope_theta": 10000.0}}
    for content in contents:
        name = hf_folder(**content)
        assert problems_of(make(**{"init_from": name, "model.rope_scaling": LLAMA3})) == []
        assert "rope_scaling" in problem_of(make(**{"init_from": name})).rule
    llama_config = pytest.importorskip("transformers").LlamaConfig
    default, linear = {"rope_type": "default", "rope_theta": 10000.0}, {"type": "linear", "factor": 4.0}
    theirs = llama_config(rope_scaling=dict(linear), rope_parameters=dict(default)).rope_parameters
    assert theirs["rope_type"] == "linear" and theirs["factor"] == 4.0
    name = hf_folder(rope_scaling=linear, rope_parameters=default)
    assert "{rope_type: linear, factor: 4}" in problem_of(make(**{"init_from": name})).rule


def test_a_missing_folder_is_named_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["model=from_hf", "init_from=a/b/none", "data=mock", "device=cpu"], CONF)
    assert caught.value.config is not None
    with pytest.raises(ConfigError) as resolved:
        resolve(caught.value.config, 1, known=caught.value.problems)
    (problem,) = [problem for problem in resolved.value.problems if problem.field == "init_from"]
    assert "no such folder" in problem.rule and "hf download" in problem.instead


def test_a_schedule_of_a_package_that_is_not_installed() -> None:
    target = "no_such_package.schedules.Cosine"
    problem = problem_of(make(**{"optim.schedule": {"_target_": target}, "allow_targets": [target]}))
    assert problem.field == "optim.schedule._target_" and "no_such_package is not installed" in problem.rule
    assert problems_of(make(**{"optim.schedule": {"_target_": "torch.optim.lr_scheduler.LinearLR"}})) == []
