"""Overrides become a typed config, and all mistakes in them are reported together, each with a suggestion."""

from __future__ import annotations

import dataclasses
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.config import (
    Config,
    ConfigError,
    Problem,
    RopeScaling,
    TrainerConfig,
    format_problems,
    from_yaml,
    load_config,
    to_yaml,
)
from megatron_llama.config.problems import group_by_suggestion, merge_problems
from megatron_llama.plan import resolve
from tests.paths import CONF, ROOT
from tests.processes import environment


def refused(*overrides: str, conf: Path = CONF) -> list[Problem]:
    """The problems that load_config raises; it must raise."""
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, conf)
    return list(caught.value.problems)


def test_nothing_said_is_the_demo() -> None:
    config = load_config([], CONF)
    assert isinstance(config, Config) and dataclasses.is_dataclass(config.model)
    assert (config.model.name, config.data.name, config.device.name) == ("llama_2m", "python_stdlib", "auto")
    assert config.data.prepare == "make demo-data"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (['data.prefixes=["/data/my book_text_document"]'], "my_book"),
        (["data.prefixes=[0.3,a/one,0.7,b/two/]"], "one+1"),
        (["data.prefixes=[a/one]", "data.name=mine"], "mine"),
        (["data=chat", "data.prefixes=[a/one.jsonl]"], "chat"),
        (["data.prefixes=[]"], "python_stdlib"),
    ],
)
def test_datasets_of_ones_own_are_not_called_by_the_demos_name(overrides: list[str], name: str) -> None:
    assert load_config(overrides, CONF).data.name == name


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
    notes = [note for note in plan.notes if "move its content to corpora/" in note]
    assert len(notes) == (used == "datasets")


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
    (problem,) = refused("model=conf/data/mock.yaml")
    assert (problem.rule, problem.instead) == ("is a file of the group data", "write data=mock")
    (tmp_path / "mine.yaml").write_text("hidden_size: 64\n")
    (problem,) = refused(f"model={tmp_path}/mine")
    for odd in ("", ".", "x" * 5000):
        assert "no model of that name" in refused(f"model='{odd}'")[0].rule
    assert "outside conf/model/" in problem.rule and "copy it to conf/model/ and write model=mine" in problem.instead


def test_the_line_in_the_readme() -> None:
    config = load_config(["model=llama7b", "trainer.tp=8"], CONF)
    assert (config.model.hidden_size, config.trainer.tp, config.model.rope_scaling) == (4096, 8, None)
    assert type(config.trainer.tp) is int


def test_groups_and_values_of_every_kind() -> None:
    config = load_config(
        [
            "model=llama3_405b",
            "data=mock",
            "optim=linear",
            "device=cpu",
            "optim.lr=1e-3",
            "optim.betas=[0.8,0.99]",
            "optim.clip=null",
            "trainer.sp=false",
            "trainer.pipeline_layers=[1,2]",
            "data.prefixes=[0.3,/data/one two,0.7,b]",
            "run.dir='/tmp/a=b'",
            "dry_run=true",
            "logging.sample_prompts=['def f(x):','import']",
        ],
        CONF,
    )
    assert config.model.rope_scaling == RopeScaling(original_max_position_embeddings=8192)
    assert (config.data.mock, config.device.name) == (True, "cpu")
    assert (config.optim.lr, config.optim.betas, config.optim.clip) == (1e-3, [0.8, 0.99], None)
    assert (config.trainer.sp, config.trainer.pipeline_layers) == (False, [1, 2])
    assert config.data.prefixes == [0.3, "/data/one two", 0.7, "b"]
    assert (config.run.dir, config.dry_run) == ("/tmp/a=b", True)
    assert config.logging.sample_prompts == ["def f(x):", "import"]
    assert config.optim.schedule["_target_"].endswith(".LinearDecay")


def test_the_last_of_two_wins_whatever_the_order_of_groups_and_values() -> None:
    config = load_config(
        ["trainer.tp=2", "model.hidden_size=64", "model=llama7b", "trainer.tp=4", "model=llama13b"], CONF
    )
    assert (config.trainer.tp, config.model.name, config.model.hidden_size) == (4, "llama13b", 64)


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_plus_before_a_known_setting_does_no_harm(plus: str) -> None:
    assert load_config([f"{plus}trainer.tp=2", f"{plus}optim.schedule.power=3"], CONF).optim.schedule["power"] == 3


LLAMA3: dict[str, Any] = {"original_max_position_embeddings": 8192}


def test_rope_scaling_can_be_changed_switched_on_and_switched_off() -> None:
    assert load_config(["model=llama3_405b", "model.rope_scaling.factor=32"], CONF).model.rope_scaling == RopeScaling(
        factor=32.0, **LLAMA3
    )
    assert load_config(["model.rope_scaling.factor=32"], CONF).model.rope_scaling == RopeScaling(factor=32.0, **LLAMA3)
    assert load_config(["model.rope_scaling={factor: 4}"], CONF).model.rope_scaling == RopeScaling(factor=4.0, **LLAMA3)
    assert load_config(["model=llama3_405b", "model.rope_scaling=null"], CONF).model.rope_scaling is None


def test_the_schedule_is_any_class_with_any_arguments() -> None:
    schedule = load_config(
        ["optim.schedule={_target_: torch.optim.lr_scheduler.StepLR, step_size: 5}"], CONF
    ).optim.schedule
    assert schedule == {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 5}
    nemo = "optim.schedule._target_=nemo.core.optim.lr_scheduler.CosineAnnealing"
    changed = load_config([nemo, "~optim.schedule.constant_steps", "optim.schedule.min_lr=0"], CONF).optim.schedule
    assert changed == {
        "_target_": "nemo.core.optim.lr_scheduler.CosineAnnealing",
        "max_steps": "${trainer.steps}",
        "warmup_steps": "${optim.warmup_steps}",
        "min_lr": 0,
    }


def test_a_setting_can_refer_to_another() -> None:
    config = load_config(["trainer.val_every_steps=${trainer.steps}", "run.dir=runs/${model.name}"], CONF)
    assert (config.trainer.val_every_steps, config.run.dir) == (100, "runs/llama_2m")
    (problem,) = refused("trainer.pp=${trainer.nothing}")
    assert problem.field == "trainer.pp" and "trainer.nothing" in problem.rule


@pytest.mark.parametrize(
    ("override", "field", "advice"),
    [
        ("trainer.tpp=8", "trainer.tpp", "write trainer.tp=8"),
        ("tp=8", "tp", "write trainer.tp=8"),
        ("trainer.lr=1e-3", "trainer.lr", "write optim.lr=0.001"),
        ("trainer.tensor_model_parallel_size=8", "trainer.tensor_model_parallel_size", "write trainer.tp=8"),
        ("model.num_hidden_layer=8", "model.num_hidden_layer", "write model.num_hidden_layers=8"),
        ("model.rope_scaling.fac=8", "model.rope_scaling.fac", "write model.rope_scaling.factor=8"),
        ("+new.key=1", "new.key", "trainer.*"),
        ("dryrun=true", "dryrun", "write dry_run=true"),
        ("trainer.xyzzy=1", "trainer.xyzzy", "trainer.pp"),
        ("model=llama7", "model", "model=llama7b"),
        ("model=gpt2", "model", "llama_2m"),
        ("data=stdlib", "data", "python_stdlib"),
        ("device=tpu", "device", "write device=auto,"),
        ("device=gpu", "device", "write device=cuda,"),
        ("device=GPU", "device", "write device=cuda,"),
        ("device=nvidia", "device", "write device=cuda,"),
        ("device=cuda:0", "device", "write device=cuda,"),
        ("device=h100", "device", "write device=cuda,"),
        ("device=gaudi2", "device", "write device=hpu,"),
        ("device=hpu:1", "device", "write device=hpu,"),
        ("device=trainium", "device", "write device=neuron,"),
        ("device=trn1", "device", "write device=neuron,"),
        ("device=cdua", "device", "write device=cuda,"),
        ("finetune=qlora", "finetune", "write finetune=lora finetune.frozen_dtype=nf4,"),
        ("optim=adamw", "optim", "write optim.name=adamw; optim= chooses the schedule: constant, cosine"),
        ("model=llama3", "model", "write model= one of llama3.1/70b, llama3.1/8b, llama3.2/1b, llama3.2/3b, "),
        ("model=Qwen3-8B", "model", "write model=qwen3/8b"),
        ("model=qwen2_5_7b", "model", "write model=qwen2.5/7b"),
        ("model=qwen2", "model", "write model= one of qwen2.5/0.5b, qwen2.5/1.5b"),
        ("trainer=fdsp", "trainer", "fsdp"),
        ("~model", "model", "llama_2m"),
        ("model=null", "model", "llama_2m"),
        ("trainer.tp=abc", "trainer.tp", "a whole number, such as trainer.tp=1"),
        ("trainer.tp=2.5", "trainer.tp", "a whole number"),
        ("trainer.tp=null", "trainer.tp", "a whole number"),
        ("trainer.tp=true", "trainer.tp", "a whole number"),
        ("trainer.steps=1e3", "trainer.steps", "write trainer.steps=1000"),
        ("trainer.sp=maybe", "trainer.sp", "true or false (or null)"),
        ("optim.lr=fast", "optim.lr", "such as optim.lr=3e-4"),
        ("optim.betas=0.9", "optim.betas", "write optim.betas=[0.9]"),
        ("optim.betas=[a,b]", "optim.betas", "a list of numbers, such as optim.betas=[0.9,0.95]"),
        ("data.prefixes=one", "data.prefixes", "write data.prefixes=[one]"),
        ("trainer.pipeline_layers=[1,x]", "trainer.pipeline_layers", "whole numbers"),
        ("trainer.tp={a: 1}", "trainer.tp", "a whole number"),
        ("run=here", "run", "run.dir=..."),
        ("run=null", "run", "run.dir=..."),
        ("model.rope_scaling=3", "model.rope_scaling", "model.rope_scaling.rope_type=..."),
        ("~trainer.tp", "~trainer.tp", "omit ~"),
        ("~optim.schedule.nothing", "~optim.schedule.nothing", "omit ~"),
        ("~trainer.dp", "~trainer.dp", "trainer.dp=null"),
        ("optim.schedule.min_lr=${nope}", "optim.schedule.min_lr", "name of a setting"),
        ("optim.schedule.warmup_steps=${trainer.nope}", "optim.schedule.warmup_steps", "name of a setting"),
        ("trainer.seed=1e400", "trainer.seed", "whole number"),
        ("trainer.compile=7", "trainer.compile", "true or false"),
        ("trainer.TP=2", "trainer.TP", "trainer.tp=2"),
        ("trainer.context_parallel_size=2", "trainer.context_parallel_size", "trainer.cp=2"),
        ("trainer.bf16=true", "trainer.bf16", "trainer.precision=bf16"),
        ("trainer.tensor_parallel=4", "trainer.tensor_parallel", "trainer.tp=4"),
        ("trainer.tp==2", "override", "write trainer.tp=2"),
        ("trainer.tp=2,4", "trainer.tp", "trainer.tp=2, or add -m, which starts a run for each value"),
        ("trainer.tp=range(1,4)", "trainer.tp", "which starts a run for each"),
        ("model=llama7b,llama13b", "model", "model=llama7b, or add -m, which starts a run for each value"),
        ("data.prefixes=a,b", "data.prefixes", "write data.prefixes=[a,b]"),
        ("data.split=9,1,0", "data.split", "data.split='\"9,1,0\"'"),
        ("trainer.tp", "override", "write name=value"),
        ("--tp", "override", "omit the dashes"),
        ("run.dir=/a=b", "override", "run.dir='\"/a=b\"'"),
        ("trainer.tp=[1", "override", "close it; a list with spaces needs quotes: 'trainer.tp=[1, 2]'"),
        ("=3", "override", "write name=value"),
        ("hydra.run.dir=x", "hydra.run.dir", "run.dir=x"),
    ],
)
def test_one_mistake_is_one_problem(override: str, field: str, advice: str) -> None:
    (problem,) = refused(override)
    assert problem.field == field
    assert advice in problem.instead


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [("device.name", "gpu", "cuda"), ("trainer.recompute", "true", "full"), ("trainer.recompute", "false", "none")],
)
def test_values_of_other_programs_get_the_value_here(name: str, value: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(load_config([f"{name}={value}", "data=mock"], CONF), 1)
    assert [problem.instead for problem in caught.value.problems] == [f"write {name}={advice}"]


@pytest.mark.parametrize(
    "override", ["data.prefixes=[a, b]", "data.prefixes=[0.3, a, 0.7, b]", "checkpoint={keep: 3, every_steps: 10}"]
)
def test_lists_split_by_the_shell_get_quotes(override: str) -> None:
    problems = refused("model=llama_15m", *override.split(), "trainer.tp=x")
    assert [problem.field for problem in problems] == [override.partition("=")[0], "trainer.tp"]
    assert problems[0].instead == f"put it in quotes: '{override}'"
    assert load_config([override], CONF)


def test_all_mistakes_come_at_once() -> None:
    fields = [
        problem.field
        for problem in refused(
            "model=llama7", "trainer.tp=abc", "trainer.ppp=2", "oops", "data.split=1,2,3", "optim.lr=1e-3"
        )
    ]
    assert sorted(fields) == ["data.split", "model", "override", "trainer.ppp", "trainer.tp"]


def test_a_section_given_as_a_mapping_sets_its_values() -> None:
    assert load_config(["checkpoint={keep: 3, every_steps: 10}"], CONF).checkpoint.keep == 3
    (problem,) = refused("checkpoint={keep: 3, evry_steps: 10}")
    assert "checkpoint.every_steps=10" in problem.instead


def test_a_mistake_in_a_file_of_conf_is_told_like_one_on_the_command_line(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    (conf / "model" / "mine.yaml").write_text("hidden_sizes: 64\n", encoding="utf-8")
    (problem,) = refused("model=mine", conf=conf)
    assert problem.field == "model.hidden_sizes" and "model.hidden_size" in problem.instead
    (conf / "model" / "mine.yaml").write_text("hidden_size: wide\n", encoding="utf-8")
    (problem,) = refused("model=mine", conf=conf)
    assert problem.field == "model.hidden_size" and "conf/model/mine.yaml" in problem.rule and "wide" in problem.rule
    assert problem.instead == "write a whole number"
    (conf / "model" / "mine.yaml").write_text("a: [1\n", encoding="utf-8")
    (problem,) = refused("model=mine", conf=conf)
    assert "mine.yaml, line" in problem.rule and "not valid YAML" in problem.rule


def test_a_preset_of_ones_own_is_a_file(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    (conf / "model" / "mine.yaml").write_text("defaults: [llama7b]\nname: mine\nhidden_size: 2048\n", encoding="utf-8")
    config = load_config(["model=mine"], conf)
    assert (config.model.name, config.model.hidden_size, config.model.num_hidden_layers) == ("mine", 2048, 32)


def test_a_group_without_a_default_needs_no_plus(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    (conf / "run").mkdir()
    (conf / "run" / "scratch.yaml").write_text("dir: /scratch\n", encoding="utf-8")
    assert load_config(["run=scratch"], conf).run.dir == "/scratch"
    assert load_config([], conf).run.dir is None


@pytest.mark.parametrize("overrides", [[], ["model=llama3_405b", "data=mock", "optim=wsd", "optim.clip=null"]])
def test_yaml_and_back(overrides: list[str]) -> None:
    config = load_config(overrides, CONF)
    assert from_yaml(to_yaml(config)) == config
    resolved = resolve(config, 1, exists=lambda path: True).config
    text = to_yaml(resolved)
    assert "${" not in text, "a resolved config stands alone"
    assert from_yaml(text) == resolved


def test_yaml_of_another_version_is_refused_with_the_setting() -> None:
    with pytest.raises(ConfigError) as caught:
        from_yaml("trainer:\n  tpp: 3\n")
    assert caught.value.problems[0].field == "trainer.tpp"


def test_the_message_shows_field_value_rule_and_advice() -> None:
    problems = refused("trainer.tpp=8", "model=llama7")
    text = format_problems(problems)
    assert text.startswith("This config can't work, for 2 reasons:")
    for problem in problems:
        assert f"{problem.field} = {problem.value}" in text
        assert problem.rule in text and problem.instead.split(",")[0] in text
    assert max(map(len, text.splitlines())) <= 100
    assert "for one reason" in format_problems(problems[:1])


def test_a_setting_with_several_problems_gets_advice_that_mends_all_of_them() -> None:
    off, other = (
        Problem("a.b", True, "is not for this device", "write a.b=false"),
        Problem("c", 1, "is small", "write c=2"),
    )
    needs_tp = Problem("a.b", True, "is for two ranks", "write a.b=false, or a.tp=2 or more")
    for listed in ([off, other, needs_tp], [needs_tp, other, off]):
        text = format_problems(listed)
        assert "for 3 reasons" in text
        assert text.count("a.b = true") == text.count("instead  write a.b=false\n") == 1 and "tp=2" not in text
        assert "is not for this device" in text and "is for two ranks" in text and "write c=2" in text
        assert "a.b=true: is not for this device; is for two ranks; write a.b=false" in merge_problems([off, needs_tp])
    # Of another setting or value it says nothing, nor do two that have only a part in common.
    for listed in (
        [off, Problem("a.c", True, needs_tp.rule, needs_tp.instead)],
        [off, Problem("a.b", False, needs_tp.rule, needs_tp.instead)],
        [needs_tp, Problem("a.b", True, "is compiled", "write a.b=false, or a.compile=true")],
    ):
        assert {problem.instead for problem in listed} == set(group_by_suggestion(listed))


def test_long_lists_are_wrapped() -> None:
    problem = Problem("trainer.batch_schedule", [[1000 * i, 8 * i] for i in range(12)], "must be shorter", "write less")
    assert max(map(len, format_problems([problem]).splitlines())) <= 79


def test_rules_stand_below_the_settings_that_break_them() -> None:
    one, two = (Problem(field, 1, "is odd", "write 2") for field in "ab")
    text = format_problems([one, two, Problem("a", 1, "is small", "write 2")])
    expected = ["a = 1", "b = 1", "is odd; likewise the others", "a = 1", "is small"]
    assert re.findall(r"[ab] = 1|\bis .*", text) == expected


def test_composing_is_quick() -> None:
    """A dry run answers in well under 1.5 s of processor time, interpreter and Hydra's import included."""
    program = (
        "from pathlib import Path; from megatron_llama.config import load_config; from megatron_llama.plan import *\n"
        f"print(format_plan(resolve(load_config(['data=mock'], Path({str(CONF)!r})), 1)))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], cwd=CONF.parent, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


def test_steps_and_epochs_typed_together_are_refused_whatever_the_steps() -> None:
    for steps in (7, TrainerConfig.steps):  # the default too, which a rule can't tell from nothing
        assert [problem.field for problem in refused(f"trainer.steps={steps}", "trainer.epochs=2")] == [
            "trainer.epochs"
        ]
    assert load_config(["trainer.steps=7", "trainer.epochs=null"], CONF).trainer.steps == 7


@pytest.mark.parametrize("words", [["data=mock", "--dry-run"], ["-m", "data=mock", "optim.lr=1e-3,2e-3"]])
def test_a_current_folder_that_was_removed_is_reported(words: list[str], tmp_path: Path) -> None:
    command = f'cd "{tmp_path}" && rmdir "{tmp_path}" && exec "$@"'
    program = ["bash", "-c", command, "bash", sys.executable, str(ROOT / "train.py"), *words]
    done = subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "cd to a folder that exists" in done.stderr and "Traceback" not in done.stderr
