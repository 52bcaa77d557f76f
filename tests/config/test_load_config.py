"""Overrides and stored configs become a typed config; all mistakes are reported together, with suggestions."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.cli import usage
from megatron_llama.config import ConfigError, Problem, RopeScaling, format_problems, from_yaml, load_config, to_yaml
from megatron_llama.config.problems import group_by_suggestion, merge_problems, write_override
from megatron_llama.config.settings import Config, TrainerConfig
from megatron_llama.config.stored_settings import has_run
from megatron_llama.plan import Plan, resolve
from tests.config.helpers import refused
from tests.data.files import numbered, write_indexed
from tests.golden import GoldenFiles
from tests.paths import CONF, ROOT
from tests.processes import environment


@pytest.mark.parametrize(
    ("prepared", "typed", "used"),
    [
        (["corpora"], "corpora", "corpora"),
        (["datasets"], "corpora", "datasets"),  # of an older version
        (["corpora"], "datasets", "corpora"),  # moved
        (["corpora", "datasets"], "corpora", "corpora"),
        (["corpora", "datasets"], "datasets", "datasets"),
        ([], "corpora", "corpora"),
    ],
)
def test_data_in_the_old_folder_is_found(
    prepared: list[str], typed: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in prepared:
        (tmp_path / folder).mkdir()
        for name in ("tokenizer.model", "a_sft.idx", "b_sft.idx"):
            (tmp_path / folder / name).touch()
    names = [f"data.prefixes=[{typed}/a]", f"data.validation_prefixes=[{typed}/b_sft]", "data.kind=sft"]
    config = load_config([*names, f"data.tokenizer={typed}/tokenizer.model"], CONF)
    paths = [*config.data.prefixes, *config.data.validation_prefixes, config.data.tokenizer]
    assert paths == [f"{used}/{name}" for name in (("a_sft" if prepared else "a"), "b_sft", "tokenizer.model")]
    plan = resolve(config, 1, exists=lambda path: True)
    assert len([note for note in plan.notes if "move its content to corpora/" in note]) == (used == "datasets")


@pytest.mark.parametrize(
    ("path", "option"),
    [
        ("model=conf/model/llama7b.yaml", "model=llama7b"),
        ("model=conf/model/llama7b", "model=llama7b"),
        ("model=llama7b.yaml", "model=llama7b"),
        (f"data={CONF}/data/mock.yaml", "data=mock"),
        ("optim=conf/optim/wsd.yaml", "optim=wsd"),
        ("experiment=conf/experiment/pretrain_llama7b.yaml", "experiment=pretrain_llama7b"),
        ("+experiment=conf/experiment/pretrain_llama7b", "experiment=pretrain_llama7b"),
        ("scaled=conf/scaled/laptop.yaml", "scaled=laptop"),
    ],
)
def test_the_path_of_a_groups_file_is_its_option(path: str, option: str) -> None:
    assert load_config([path], CONF) == load_config([option], CONF)


def test_a_users_recipe_may_have_the_name_of_a_file_in_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pretrain_llama7b.yaml", "their recipe.yml"):
        Path(name).write_text("# @package _global_\ntrainer:\n  steps: 7\n")
        assert load_config([f"experiment='{name}'"], CONF).trainer.steps == 7


def test_the_path_of_another_file_is_refused_with_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("hidden_size: 64\n")
    (problem,) = refused(f"model={tmp_path}/mine")
    assert "no model of that name" in refused(f"model={'x' * 5000}")[0].rule
    assert "outside conf/model/" in problem.rule and "copy it to conf/model/ and write model=mine" in problem.instead


LLAMA3 = RopeScaling(original_max_position_embeddings=8192)
STEP_LR = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 5}
NEMO = "nemo.core.optim.lr_scheduler.CosineAnnealing"
OF_NEMO = {"_target_": NEMO, "max_steps": "${trainer.steps}", "warmup_steps": "${optim.warmup_steps}", "min_lr": 0}
COMPOSED: list[tuple[str, dict[str, Any]]] = [
    ("model=llama7b trainer.tp=8", {"model.hidden_size": 4096, "trainer.tp": 8, "model.rope_scaling": None}),
    ("model=llama3_405b data=mock device=cpu", {"data.mock": True, "device.name": "cpu", "model.rope_scaling": LLAMA3}),
    ("optim.lr=1e-3 optim.betas=[0.8,0.99] optim.clip=null", {"optim.lr": 1e-3, "optim.betas": [0.8, 0.99]}),
    ("optim.clip=null trainer.sp=false dry_run=true", {"optim.clip": None, "trainer.sp": False, "dry_run": True}),
    ("trainer.pipeline_layers=[1,2] run.dir='/tmp/a=b'", {"trainer.pipeline_layers": [1, 2], "run.dir": "/tmp/a=b"}),
    ("data.prefixes=[0.3,/data/one\ttwo,0.7,b]", {"data.prefixes": [0.3, "/data/one two", 0.7, "b"]}),
    ("data.prefixes=[0.5,2026_11_27,1e3,b]", {"data.prefixes": [0.5, "2026_11_27", 1000.0, "b"]}),
    ("data.validation_prefixes=[a,b]", {"data.validation_prefixes": ["a", "b"]}),
    ("data.validation_prefixes=[{wiki:a},{code:b}]", {"data.validation_prefixes": [{"wiki": ["a"]}, {"code": ["b"]}]}),
    (
        "data.validation_prefixes={wiki:a,code:[b,3.10]}",
        {"data.validation_prefixes": [{"wiki": ["a"]}, {"code": ["b", "3.10"]}]},
    ),
    ("logging.sample_prompts=['def\tf(x):','import']", {"logging.sample_prompts": ["def f(x):", "import"]}),
    ("checkpoint={keep:\t3}", {"checkpoint.keep": 3}),
    # The last of two wins; values win over groups.
    ("trainer.tp=2 trainer.tp=4 model.hidden_size=64 model=llama7b", {"trainer.tp": 4, "model.hidden_size": 64}),
    ("model=llama7b model=llama13b", {"model.name": "llama13b"}),
    *((f"{plus}trainer.tp=2 {plus}optim.schedule.power=3", {"trainer.tp": 2}) for plus in ("+", "++")),
    ("model=llama3_405b model.rope_scaling.factor=32", {"model.rope_scaling": replace(LLAMA3, factor=32.0)}),
    ("model.rope_scaling.factor=32", {"model.rope_scaling": replace(LLAMA3, factor=32.0)}),
    ("model.rope_scaling={factor:\t4}", {"model.rope_scaling": replace(LLAMA3, factor=4.0)}),
    ("model=llama3_405b model.rope_scaling=null", {"model.rope_scaling": None}),
    ("optim.schedule={_target_:\ttorch.optim.lr_scheduler.StepLR,step_size:\t5}", {"optim.schedule": STEP_LR}),
    (
        f"optim.schedule._target_={NEMO} ~optim.schedule.constant_steps optim.schedule.min_lr=0",
        {"optim.schedule": OF_NEMO},
    ),
    ("trainer.val_every_steps=${trainer.steps}", {"trainer.val_every_steps": 100}),
    ("run.dir=runs/${model.name}", {"run.dir": "runs/llama_2m"}),
    # The demo's name is not that of other datasets.
    ('data.prefixes=["/data/my\tbook_text_document"]', {"data.name": "my_book"}),
    ("data.prefixes=[0.3,a/one,0.7,b/two/]", {"data.name": "one+1"}),
    ("data.prefixes=[a/one] data.name=mine", {"data.name": "mine"}),
    ("data=chat data.prefixes=[a/one.jsonl]", {"data.name": "chat"}),
    ("data.prefixes=[]", {"data.name": "python_stdlib"}),
    ("", {"model.name": "llama_2m", "data.prepare": "make demo-data", "device.name": "auto"}),
    ("trainer.steps=7 trainer.epochs=null", {"trainer.steps": 7}),
]


@pytest.mark.parametrize(("overrides", "expected"), COMPOSED)
def test_overrides_are_composed(overrides: str, expected: dict[str, Any]) -> None:
    """A tab stands for a space in a value."""
    config = load_config([word.replace("\t", " ") for word in filter(None, overrides.split(" "))], CONF)
    values = {name: reduce(getattr, name.split("."), config) for name in expected}
    assert values == expected and [type(value) for value in values.values()] == [*map(type, expected.values())]
    if "power" in overrides:
        assert config.optim.schedule["power"] == 3


def test_one_mistake_is_one_problem() -> None:
    page = []
    for override in GoldenFiles.commands("config/mistakes.txt"):
        (problem,) = refused(override)
        page += [f"$ {override}", *format_problems([problem]).splitlines()[2:], ""]
    GoldenFiles.check("config/mistakes.txt", "\n".join(page))


@pytest.mark.parametrize("text", ["2026_11_27", "3.10", "1e3", "007", "true", "-1_0", "inf", "a, 1e3"])
def test_text_settings_keep_the_text_as_typed(text: str) -> None:
    quoted = f'"{text}"' if "," in text else text
    config = load_config([f"run.dir={quoted}", f"logging.sample_prompts=[a,{quoted}, {quoted}]"], CONF)
    assert (config.run.dir, config.logging.sample_prompts) == (text, ["a", text, text])
    assert load_config([write_override("run.dir", text)], CONF).run.dir == text


@pytest.mark.parametrize(
    "text", ["a=b", "~x", "it's", 'a"b', "a#b", "a&b;c", "a(b", "a*b c=", "a=\\", "é", "`a`", "x/`'\"\\"]
)
def test_suggestions_are_valid_in_a_shell(text: str) -> None:
    for name, written in (("run.dir", text), ("data.prefixes", f"[{text}]")):
        (problem,) = refused(f"{name}={written}")
        (override,) = shlex.split(problem.instead.partition(": ")[2])
        config = load_config([override], CONF)
        assert text in (config.run.dir, *config.data.prefixes)


def test_paths_of_one_dataset_have_one_name(tmp_path: Path) -> None:
    for name in ("a_text_document", "b_text_document"):
        write_indexed(tmp_path / name, numbered(9))
    (tmp_path / "c_text_document.idx").symlink_to("a_text_document.idx")
    (tmp_path / "c_text_document.bin").symlink_to("a_text_document.bin")
    a, b, c, other = (f"{tmp_path}/{name}" for name in ("a_text_document", "b_text_document", "c", "x/../a"))
    (tmp_path / "x").mkdir()
    later = f"data.schedule=[{{samples: 8, prefixes: [{c}_text_document,{b}]}}]"
    overrides = [f"data.prefixes=[1,{a},1,{c},1,{other}]", later, "data.tokenizer=null", "model.vocab_size=900"]
    config = load_config(overrides, CONF)
    assert config.data.prefixes == [1, a, 1, a, 1, a] and config.data.schedule[0]["prefixes"] == [a, b]
    assert any(f"{a} is in data.prefixes 3 times" in note for note in resolve(config, 1).notes)


def test_a_pattern_stands_for_the_datasets_that_match(tmp_path: Path) -> None:
    for name in ("b_sft", "a_sft", "a_sft_mask", "c"):
        write_indexed(tmp_path / name, numbered(9))
    prefixes = load_config([f"data.prefixes=[{tmp_path}/c,{tmp_path}/*_sft*,{tmp_path}/none*]"], CONF).data.prefixes
    assert prefixes == [f"{tmp_path}/{name}" for name in ("c", "a_sft", "b_sft", "none*")]


@pytest.mark.parametrize(
    "override", ["data.prefixes=[a, b]", "data.prefixes=[0.3, a, 0.7, b]", "checkpoint={keep: 3, every_steps: 10}"]
)
def test_lists_split_by_the_shell_get_quotes(override: str) -> None:
    problems = refused("model=llama_15m", *override.split(), "trainer.tp=x")
    assert [problem.field for problem in problems] == [override.partition("=")[0], "trainer.tp"]
    assert problems[0].instead == f"put it in quotes: '{override}'" and load_config([override], CONF)


def test_groups_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in ``conf/`` of the current folder are options, alone and in recipes."""
    for name, text in {
        "model/mine.yaml": "defaults: [llama_2m]\nnum_hidden_layers: 3\n",
        "experiment/short.yaml": "# @package _global_\ndefaults: [{override /model: mine}]\ntrainer: {steps: 7}\n",
        "optim/wsd.yaml": "lr: 1.0\n",
    }.items():
        (tmp_path / "a project/conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a project/conf" / name).write_text(text)
    monkeypatch.chdir(tmp_path / "a project")
    for model in ("mine", "conf/model/mine.yaml"):
        assert load_config([f"model={model}", "data=mock"], CONF).model.num_hidden_layers == 3
    config = load_config(["experiment=short", "data=mock"], CONF)
    assert (config.model.num_hidden_layers, config.trainer.steps) == (3, 7)
    for word, message in (("optim=wsd", "rename conf/optim/wsd.yaml"), ("model=mime", "mine")):
        with pytest.raises(ConfigError, match=message):
            load_config([word, "data=mock"], CONF)
    assert "| mine" in usage() and "short" in usage()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no model of that name"):
        load_config(["model=mine", "data=mock"], CONF)


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A copy of conf/."""
    return Path(shutil.copytree(CONF, tmp_path / "conf"))


def test_mistakes_in_files_of_conf(conf: Path) -> None:
    page = []
    for text in ("hidden_sizes: 64", "hidden_size: wide", "a: [1"):
        (conf / "model/mine.yaml").write_text(f"{text}\n", encoding="utf-8")
        (problem,) = refused("model=mine", conf=conf)
        page.append(f"{text}\n  {problem.field}: {problem.rule}\n  {problem.instead}\n")
    hidden = {str(conf.parent): "FOLDER", "( is invalid| is not valid YAML): .*": r"\1: ..."}  # text of libraries
    GoldenFiles.check("config/mistakes_in_files.txt", "\n".join(page), hidden)


def test_files_in_conf_are_options(conf: Path) -> None:
    (conf / "model/mine.yaml").write_text("defaults: [llama7b]\nname: mine\nhidden_size: 2048\n", encoding="utf-8")
    model = load_config(["model=mine"], conf).model
    assert (model.name, model.hidden_size, model.num_hidden_layers) == ("mine", 2048, 32)
    (conf / "trainer/long.yaml").write_text("epochs: 3\n")
    (conf / "trainer/short.yaml").write_text("steps: 7\n")
    for words, steps, epochs in (("trainer=long trainer.steps=5", 5, None), ("trainer=short trainer.epochs=2", 100, 2)):
        typed = load_config(words.split(), conf).trainer
        assert (typed.steps, typed.epochs) == (steps, epochs), "typed settings win"
    (conf / "run").mkdir()  # a group without a default
    (conf / "run/scratch.yaml").write_text("dir: /scratch\n", encoding="utf-8")
    assert load_config(["run=scratch"], conf).run.dir == "/scratch" and load_config([], conf).run.dir is None


@pytest.mark.parametrize("overrides", [[], ["model=llama3_405b", "data=mock", "optim=wsd", "optim.clip=null"]])
def test_yaml_and_back(overrides: list[str]) -> None:
    config = load_config(overrides, CONF)
    assert from_yaml(to_yaml(config)) == config
    resolved = resolve(config, 1, exists=lambda path: True).config
    text = to_yaml(resolved)
    assert "${" not in text, "a resolved config stands alone"
    assert from_yaml(text) == resolved
    with pytest.raises(ConfigError, match="trainer.tpp"):
        from_yaml("trainer:\n  tpp: 3\n")


def test_all_mistakes_come_at_once() -> None:
    words = ["model=llama7", "trainer.tp=abc", "trainer.ppp=2", "oops", "data.split=1,2,3", "optim.lr=1e-3"]
    fields = sorted(problem.field for problem in refused(*words))
    assert fields == ["data.split", "model", "override", "trainer.ppp", "trainer.tp"]
    page = []
    for name, problems in MESSAGES.items():
        assert group_by_suggestion(problems).keys() == group_by_suggestion(problems[::-1]).keys()
        page += [f"{name}\n\n{format_problems(problems)}\n", *merge_problems(problems), ""]
    GoldenFiles.check("config/messages.txt", "\n".join(page))


DEVICE = Problem("a.b", True, "is not for this device", "write a.b=false")
RANKS = Problem("a.b", True, "is for two ranks", "write a.b=false, or a.tp=2 or more")
SMALL = Problem("c", 1, "is small", "write c=2")
MESSAGES = {
    "one problem": [SMALL],
    "a suggestion that fixes two problems": [DEVICE, SMALL, RANKS],
    "of another setting": [DEVICE, Problem("a.c", True, RANKS.rule, RANKS.instead)],
    "of another value": [DEVICE, Problem("a.b", False, RANKS.rule, RANKS.instead)],
    "a part in common": [RANKS, Problem("a.b", True, "is compiled", "write a.b=false, or a.compile=true")],
    "a rule of several settings": [*(Problem(field, 1, "is odd", "write c=2") for field in "ab"), SMALL],
    "a long list": [Problem("trainer.batch_schedule", [[1000 * i, 8 * i] for i in range(12)], "is long", "write less")],
}


def test_steps_and_epochs_typed_together_are_refused_whatever_the_steps() -> None:
    for steps in (7, TrainerConfig.steps):  # the default too, which a rule can't tell from nothing
        assert [problem.field for problem in refused(f"trainer.steps={steps}", "trainer.epochs=2")] == [
            "trainer.epochs"
        ]


@pytest.mark.parametrize("words", [["data=mock", "--dry-run"], ["-m", "data=mock", "optim.lr=1e-3,2e-3"]])
def test_a_current_folder_that_was_removed_is_reported(words: list[str], tmp_path: Path) -> None:
    command = f'cd "{tmp_path}" && rmdir "{tmp_path}" && exec "$@"'
    program = ["bash", "-c", command, "bash", sys.executable, str(ROOT / "train.py"), *words]
    done = subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "cd to a folder that exists" in done.stderr and "Traceback" not in done.stderr


FIRST = ("model=llama_2m", "data=mock", "data.seq_length=64", "optim=linear", "optim.lr=0.01", "trainer.tp=2")
SECOND = ("trainer.steps=40", "checkpoint.keep=3", "model.num_hidden_layers=3", "trainer.random_ltd.min_value=32")


def make_run(folder: Path, *words: str, checkpoint: bool = True) -> Plan:
    """Write the files that a run with these settings leaves."""
    plan = resolve(load_config([*words, f"run.dir={folder}"], CONF), 2)
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(plan.config, plan.requested))
    if checkpoint:
        (folder / "checkpoints/step_00000010").mkdir(parents=True)
    return plan


def load(folder: Path, *words: str) -> Config:
    """Return the config of a command with only the folder and ``words``."""
    return load_config([f"run.dir={folder}", *words], CONF, resumes=True)


def test_the_folder_is_enough(tmp_path: Path) -> None:
    plan = make_run(tmp_path / "run", *FIRST, *SECOND)
    assert load(tmp_path / "run") == plan.requested and resolve(load(tmp_path / "run"), 2).config == plan.config
    assert load_config([f"run.dir={tmp_path}/run"], CONF).model.num_hidden_layers == 4, "tools do not resume"


def test_data_of_a_stored_run_may_be_in_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's config.yaml has paths in datasets/; the user may have moved the data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets").mkdir()
    write_indexed(tmp_path / "datasets/a", numbered(150))
    make_run(tmp_path / "run", "data=redpajama", "data.prefixes=[datasets/a]", "model.vocab_size=20000")
    assert load(tmp_path / "run").data.prefixes == ["datasets/a"]
    (tmp_path / "datasets").rename(tmp_path / "corpora")
    assert load(tmp_path / "run").data.prefixes == ["corpora/a"]


def test_the_command_line_wins(tmp_path: Path) -> None:
    """Derived settings follow it; a group or an experiment replaces the settings of its files."""
    make_run(tmp_path / "run", *FIRST, *SECOND)
    longer = resolve(load(tmp_path / "run", "trainer.steps=80", "optim.lr=0.02"), 2).config
    assert longer.trainer.steps == 80 and longer.optim.lr == 0.02 and longer.optim.min_lr == 0.002
    assert longer.optim.schedule["max_steps"] == 80 and longer.optim.warmup_steps == 8
    group = load(tmp_path / "run", "model=llama_15m", "optim=cosine")
    assert group.model == load_config(["model=llama_15m"], CONF).model
    assert group.optim.schedule["_target_"].endswith("CosineAnnealing") and group.optim.lr == 0.01
    assert group.data.seq_length == 64 and group.checkpoint.keep == 3
    recipe = load(tmp_path / "run", "experiment=llama2_7b_lora_zero3")
    assert recipe.trainer.epochs == 4 and recipe.finetune.method == "lora" and recipe.model.name == "llama7b"
    epochs = load(tmp_path / "run", "trainer.epochs=2")
    assert epochs.trainer.epochs == 2 and epochs.trainer.steps == 100


def test_files_in_the_current_folder_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a group's or a recipe's file in ``conf/`` of the current folder replace the stored ones."""
    make_run(tmp_path / "run", *FIRST, *SECOND, "model.sliding_window=8")
    for group in ("experiment", "model"):
        (tmp_path / "conf" / group).mkdir(parents=True)
    (tmp_path / "conf/experiment/longer.yaml").write_text("# @package _global_\ntrainer: {steps: 70}\n")
    (tmp_path / "conf/model/wide.yaml").write_text("name: wide\nsliding_window: 16\n")
    monkeypatch.chdir(tmp_path)
    for recipe in ("longer", "longer.yaml", "conf/experiment/longer.yaml"):
        config = load(tmp_path / "run", f"experiment={recipe}")
        assert config.trainer.steps == 70 and config.model.num_hidden_layers == 3
    assert load(tmp_path / "run", "model=wide").model.sliding_window == 16


@pytest.mark.parametrize("words", [("checkpoint.resume=never",), ()], ids=["never", "no checkpoint"])
def test_a_new_start_takes_none(tmp_path: Path, words: tuple[str, ...]) -> None:
    make_run(tmp_path / "run", *FIRST, checkpoint=bool(words))
    assert load(tmp_path / "run", *words).optim.lr != 0.01


def test_settings_of_one_start_are_not_taken(tmp_path: Path) -> None:
    words = ["checkpoint.allow=[data]", "allow_targets=[some.Class]", "dry_run=true", "hook.on_event=./notify.sh"]
    make_run(tmp_path / "run", *FIRST, *words)
    config = load(tmp_path / "run")
    assert (config.checkpoint.allow, config.allow_targets, config.dry_run) == ([], [], False)
    assert config.hook.on_event is None


def test_the_file_of_an_older_version(tmp_path: Path) -> None:
    """Older files lack the list of derived settings and some names, and have others."""
    plan = make_run(tmp_path / "run", *FIRST, *SECOND)
    text = to_yaml(plan.config).replace("  every_minutes: 15.0\n", "").replace("  sp: true\n", "  old_name: 3\n")
    (tmp_path / "run/config.yaml").write_text(text + "removed: {a: 1}\n")
    longer = resolve(load(tmp_path / "run", "trainer.steps=80"), 4).config
    assert longer.optim.lr == 0.01 and longer.optim.schedule["max_steps"] == 80
    assert longer.trainer.dp == 2 and longer.trainer.sp and longer.checkpoint.every_minutes == 15


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trainer: {tp: many}", "trainer.tp = many\n    rule     its config.yaml has this value, which is invalid"),
        ("trainer: {tp: [}", "config.yaml, line 1, cannot be read"),
        ("- 1", "contains a sequence where a mapping is expected"),
        ("data: {name: '${data.name}'}", "refers to itself"),
        ("# requested: " + "[" * 100_000, "cannot be read: maximum recursion depth"),
    ],
)
def test_an_invalid_file(tmp_path: Path, line: str, message: str) -> None:
    make_run(tmp_path / "run", *FIRST)
    (tmp_path / "run/config.yaml").write_text(line)
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "run")
    assert message in str(error.value).replace("\n             ", " ")


def test_a_folder_name_or_number_that_is_too_long() -> None:
    assert not has_run(Path("a" * 256))
    with pytest.raises(ConfigError, match="longer than a path can be"):
        load_config([f"run.dir={'a' * 256}"], CONF, resumes=True)
    with pytest.raises(ConfigError, match="has a number of too many digits"):
        load_config([f"trainer.steps={'9' * 5000}"], CONF)
