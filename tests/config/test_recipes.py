"""A recipe is data of another user: reading it runs nothing, ends soon, and each problem has a message."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from megatron_llama.config import ConfigError, load_config
from megatron_llama.config.settings_table import settings_by_name
from megatron_llama.config.text_checks import MOST_CHARACTERS, MOST_STEPS, check_interpolations, names_secret
from megatron_llama.plan import format_plan, resolve
from megatron_llama.system.wrapping import CONTROL
from tests.config.helpers import refused
from tests.golden import GoldenFiles
from tests.messages import raises_with_message, unwrap
from tests.paths import CONF

TARGETS = ("os.system", "setuptools._distutils.spawn.spawn", "torch.hub.load", "pathlib.Path.write_text")
TARGETS += ("torch.optim.lr_scheduler.warnings.sys.exit", "${oc.decode:os.system}")
LAMBDA = "_target_: torch.optim.lr_scheduler.LambdaLR, lr_lambda: {_target_: '%s', _args_: [touch ran]}"
PROGRAM = f"optim: {{schedule: {{{LAMBDA}}}}}"
ALIASES = ["a0: &a0 [x,x]", *(f"a{i}: &a{i} [*a{i - 1},*a{i - 1}]" for i in range(1, 60))]
DOUBLING = {"a0": "xxxxxxxxxx", **{f"a{n}": f"${{.a{n - 1}}}" * 30 for n in range(1, MOST_STEPS)}}
REFUSED = {
    **{f"program {target}": PROGRAM % target for target in TARGETS},
    "a recipe that allows itself": PROGRAM % "os.system" + "\nallow_targets: [os.system]",
    "a command": "hook: {on_event: touch ran}",
    "a section by reference": "hook: '${run}'",
    "another class": "optim: {schedule: {_target_: mine.Schedule}}",
    "control character": r'model: {name: "a\e[2Jb"}',
    "not UTF-8": r'run: {dir: "a\udce4b"}',
    "reversal": r'run: {dir: "a\u202eb"}',
    "zero byte": r'run: {dir: "a\0b"}',
    "carriage return": r'data: {mock: false, prefixes: [1, "a\rb"]}',
    "C1 character": r'optim: {schedule: {_target_: "a\x9bb"}}',
    "tilde": "{run: {dir: ~/runs/a}, data: {mock: false, cache_dir: ~/c, prefixes: [1, ~/b]}}",
    "long name": f"run: {{dir: /tmp/{'é' * 128}}}",
    "long path": f"data: {{tokenizer: /tmp/{'a/' * 2048}}}",
    "aliases": "\n".join(ALIASES),
    "doubling": yaml.safe_dump({"optim": {"schedule": DOUBLING}}),
    "itself": "run: {dir: '${run.dir}'}",
    "decode": "model: {name: '${oc.decode:x}'}",
    "allowed by reference": "allow_targets: '${trainer.tp}'",
    "schedule by reference": "optim: {schedule: '${trainer.tp}'}",
    "prefixes by reference": "data: {prefixes: '${model.name}'}",
    "its own defaults": "defaults: [file_of_the_user]",
    **{
        f"defaults {values}": yaml.safe_dump({"defaults": values})
        for values in ([{"override /model": False}], {"a": 1}, 7, [[1]], [{"a": 1, "b": 2}], "x")
    },
}


def refusal(*overrides: str) -> str:
    """Return the message of a config that must be refused when it is read or planned, also for a dry run."""
    with pytest.raises(ConfigError) as caught:
        config = load_config(overrides, CONF)
        with pytest.raises(ConfigError):
            resolve(replace(config, dry_run=True), 1)
        resolve(config, 1)
    assert not CONTROL.search(str(caught.value).replace("\n", ""))
    return unwrap(str(caught.value))


def test_refused_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    page = []
    for name, text in REFUSED.items():
        Path("recipe.yaml").write_text(text, encoding="utf-8")
        page.append(f"{name}: {refusal('data=mock', 'device=cpu', 'experiment=recipe.yaml')[:1000]}")
    assert not Path("ran").exists()
    hidden = {str(tmp_path): "FOLDER", "(defaults .* is invalid: ).*( instead)": r"\1...\2"}  # text of Hydra
    GoldenFiles.check("config/recipes.txt", "\n".join(page), hidden)


FILES_IN_CONF = {
    "aliases": "\n".join(ALIASES),
    "deep": f"a: {'[' * 2000}{']' * 2000}\n",
    "itself": "optim:\n  schedule: &a\n    b: *a\n",
    "number": "5\n",
    "null": "null: 2\n",
    "defaults": "defaults: [hostile]\n",
}


def test_files_in_the_current_folder_have_the_limits_of_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for group in ("experiment", "model"):
        (tmp_path / "conf" / group).mkdir(parents=True)
    page = []
    for name, text in FILES_IN_CONF.items():
        Path("conf/experiment/hostile.yaml").write_text(f"# @package _global_\n{text}", encoding="utf-8")
        Path("conf/model/hostile.yaml").write_text(text, encoding="utf-8")
        for choice in ("experiment", "model"):
            page.append(f"{name}, {choice}: {refusal(f'{choice}=hostile', 'data=mock', 'device=cpu')}")
    GoldenFiles.check("config/files_in_conf.txt", "\n".join(page), {str(tmp_path): "FOLDER"})


def test_other_texts_keep_their_lines_and_length(tmp_path: Path) -> None:
    recipe, prompt = tmp_path / "recipe.yaml", "one\n\ttwo" + "x" * 5000
    recipe.write_text(f"data: {{mock: true}}\nlogging: {{sample_prompts: ['{prompt}']}}\n", encoding="utf-8")
    load_config([f"experiment={recipe}", "device=cpu", f"run.dir='{tmp_path}/two words\nand a line'"], CONF)


def test_the_command_line_allows_a_class_and_the_plan_shows_it() -> None:
    target = "tests.config.test_recipes.Schedule"
    words = ["data=mock", "device=cpu", f"optim.schedule={{_target_: {target}}}", f"allow_targets=[{target}]"]
    assert f"may also run {target}" in format_plan(resolve(load_config(words, CONF), 1))
    words = [word.replace(target, "mine.Schedule") for word in words]
    with pytest.raises(ConfigError, match="the package mine is not installed"):
        resolve(load_config(words, CONF), 1)


# References ${...}


def rules(values: object, **options: bool) -> list[str]:
    config = OmegaConf.create(values)
    assert isinstance(config, DictConfig)
    return [f"{problem.field}: {problem.rule}" for problem in check_interpolations(config, **options)]


REFERENCES: list[tuple[object, str]] = [
    (DOUBLING, "characters; the limit is"),
    ({"a": "${b}", "b": "${a}"}, "refers to itself"),
    ({"a": "${a}"}, "refers to itself"),
    ({"a": {"b": "${a}"}}, "refers to itself"),
    ({"a": ["${..a}"]}, "refers to itself"),
    ({"a0": "x", **{f"a{n}": f"${{a{n - 1}}}" for n in range(1, MOST_STEPS + 3)}}, "more than 8 others"),
    ({"big": ["x" * 1000] * 50, "all": ["${big}"] * 100}, "characters; the limit is"),
    ({"a": "${b.${c}}", "b": {"x": "1"}, "c": "x"}, "is not a supported reference"),
    ({"a": "${oc.decode:'[1]'}"}, "is not a supported reference"),
    ({"a": "${oc.create:'{b: 1}'}"}, "is not a supported reference"),
    ({"a": "${oc.env:${b}}", "b": "HOME"}, "is not a supported reference"),
    ({"a": "${now:%Y}"}, "is not a supported reference"),
]


@pytest.mark.parametrize(("values", "words"), REFERENCES)
def test_refused_references(values: object, words: str) -> None:
    assert words in rules(values)[0]


def test_references_are_counted_as_they_are_written_out() -> None:
    """Common references are accepted, and functions of other programs where they are not called."""
    values = {"a": "12345", "b": "${a}${.a}-", "c": {"d": ["${..b}", "${b}${oc.env:HOME}", 7]}, "e": "${c.d[0]}"}
    assert rules(values) == []
    written = "x" * (MOST_CHARACTERS // 16)
    assert rules({"a": written, "b": ["${a}"] * 15}) == [], "each 10 characters and 2^18 more"
    assert rules({"a": written, "b": ["${a}"] * 16}) != []
    config = load_config(["data=mock", "run.dir=runs/${model.name}-${oc.env:HOME}", "optim=wsd"], CONF)
    assert config.run.dir and config.run.dir.startswith("runs/llama_2m-/")
    config = load_config(["data=mock", "data.prefixes=${finetune.lora_target_modules}"], CONF)
    assert config.data.prefixes == config.finetune.lora_target_modules
    values = {"hidden": 64, "ffn": "${multiply:4, ${.hidden}}", "kv": "${divide:${hidden},${oc.env:HEADS}}"}
    assert rules(values, functions=True) == [] and len(rules(values)) == 2
    assert rules({"a": "${oc.decode:${b}}", "b": "1"}, functions=True), "omegaconf's own are refused"


def test_many_nested_brackets_on_the_command_line() -> None:
    for override in (f"data.prefixes={'[' * 3000}{']' * 3000}", f"run.dir={'${a:' * 3000}{'}' * 3000}"):
        with raises_with_message(ConfigError, "nested brackets"):
            load_config([override], CONF)


def test_references_to_no_value_are_reported_with_other_problems() -> None:
    names = list(settings_by_name())
    words = ["trainer.steps='???'", "data.prefixes=${trainer.tp}", "optim.lr=much", "trainer.tpp=2"]
    for overrides, fields in (
        ([f"{name}='???'" for name in names], names),
        (words, ["trainer.steps", "data.prefixes", "optim.lr", "trainer.tpp"]),
    ):
        assert {problem.field for problem in refused(*overrides)} == set(fields)


@pytest.mark.parametrize(
    "text", ["${oc.env:WANDB_API_KEY}", "runs/${oc.env: HF_TOKEN , x}", "${oc.env:aws_secret_access_key}"]
)
def test_secrets_do_not_get_into_files(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are written to config.yaml and checkpoints, and sent to Weights & Biases."""
    for name in ("WANDB_API_KEY", "HF_TOKEN", "aws_secret_access_key"):
        monkeypatch.setenv(name, "hunter2")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"logging": {"wandb_project": text}}))
    for argument in (f"experiment={recipe}", f"logging.wandb_project='{text}'"):
        (problem,) = refused(argument, "data=mock")
        assert problem.field == "logging.wandb_project" and "is the name of a secret" in problem.rule
        assert "hunter2" not in str(problem)
    assert not any(map(names_secret, "HOME SCRATCH TOKENIZERS_PARALLELISM KEYBOARD MONKEY SLURM_JOB_ID PWD".split()))


@pytest.mark.parametrize("setting", ["model.num_attention_heads", "model.num_key_value_heads", "trainer.dp"])
def test_advice_does_not_try_all_values(setting: str) -> None:
    """Rules name the nearest value that divides, and try one after the other."""
    begin = time.thread_time()
    with raises_with_message(ConfigError, f"{setting} = 100000000000000000 rule must be between 1 and"):
        settings = [f"{setting}=100000000000000000", "trainer.tp=3", "trainer.shard_group=7", "data=mock"]
        resolve(load_config(settings, CONF), 10**17)
    assert time.thread_time() - begin < 5
