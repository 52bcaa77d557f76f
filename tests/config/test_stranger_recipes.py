"""``${...}`` in recipes and on the command line: counted before it is written out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from megatron_llama.config import ConfigError, load_config
from megatron_llama.config.fields import settings_by_name
from megatron_llama.config.text_checks import MOST_CHARACTERS, MOST_STEPS, check_interpolations, names_secret
from megatron_llama.plan import resolve
from tests.messages import raises_with_message
from tests.paths import CONF

DOUBLING = {"a0": "xxxxxxxxxx", **{f"a{n}": f"${{.a{n - 1}}}" * 30 for n in range(1, MOST_STEPS)}}


def rules(values: object, **options: bool) -> list[str]:
    config = OmegaConf.create(values)
    assert isinstance(config, DictConfig)
    return [f"{problem.field}: {problem.rule}" for problem in check_interpolations(config, **options)]


@pytest.mark.parametrize(
    ("values", "words"),
    [
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
    ],
)
def test_what_is_refused(values: object, words: str) -> None:
    assert words in rules(values)[0]


def test_the_count_is_what_is_written_out() -> None:
    values = {"a": "12345", "b": "${a}${.a}-", "c": {"d": ["${..b}", "${b}${oc.env:HOME}", 7]}, "e": "${c.d[0]}"}
    assert rules(values) == []
    written = "x" * (MOST_CHARACTERS // 16)
    assert rules({"a": written, "b": ["${a}"] * 15}) == [], "each 10 characters and 2^18 more"
    assert rules({"a": written, "b": ["${a}"] * 16}) != []


def test_functions_of_other_programs_pass_where_they_are_not_called() -> None:
    values = {"hidden": 64, "ffn": "${multiply:4, ${.hidden}}", "kv": "${divide:${hidden},${oc.env:HEADS}}"}
    assert rules(values, functions=True) == [] and len(rules(values)) == 2
    assert rules({"a": "${oc.decode:${b}}", "b": "1"}, functions=True), "omegaconf's own are"


def test_a_recipe_of_a_stranger(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    for values, words in [
        ({"optim": {"schedule": DOUBLING}}, "characters; the limit is"),
        ({"run": {"dir": "${run.dir}"}}, "run.dir rule refers to itself"),
        ({"model": {"name": "${oc.decode:x}"}}, "is not a supported reference"),
        ({"allow_targets": "${trainer.tp}"}, "allow_targets = .* must be a list, and refers to a value that is not"),
        ({"optim": {"schedule": "${trainer.tp}"}}, "optim.schedule = .* must be a section or mapping"),
        ({"data": {"prefixes": "${model.name}"}}, "data.prefixes = .* must be a list"),
    ]:
        recipe.write_text(yaml.safe_dump(values))
        with raises_with_message(ConfigError, words):
            load_config([f"experiment={recipe}", "dry_run=true"], CONF)


@pytest.mark.parametrize("defaults", [[{"override /model": False}], {"a": 1}, 7, [[1]], [{"a": 1, "b": 2}], "x"])
def test_defaults_that_are_no_list_of_names(defaults: object, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"defaults": defaults}))
    with raises_with_message(ConfigError, "recipe.*is invalid"):
        load_config([f"experiment={recipe}"], CONF)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.dir=${run.dir}", "run.dir rule refers to itself"),
        ("model.name=${oc.decode:x}", "is not a supported reference"),
        ("data.prefixes=${model.name}", "data.prefixes = .* must be a list"),
        (f"data.prefixes={'[' * 3000}{']' * 3000}", "nested brackets"),
        (f"run.dir={'${a:' * 3000}{'}' * 3000}", "nested brackets"),
    ],
)
def test_a_command_line(override: str, words: str) -> None:
    with raises_with_message(ConfigError, words):
        load_config([override, "data=mock"], CONF)


def test_missing_values_of_omegaconf_are_named_all_at_once() -> None:
    names = list(settings_by_name())
    with pytest.raises(ConfigError) as error:
        load_config([f"{name}='???'" for name in names], CONF)
    assert {problem.field for problem in error.value.problems} == set(names)


def test_unusable_references_come_with_the_problems_of_other_settings() -> None:
    words = ["trainer.steps='???'", "data.prefixes=${trainer.tp}", "optim.lr=much", "trainer.tpp=2"]
    with pytest.raises(ConfigError) as error:
        load_config(words, CONF)
    fields = {problem.field for problem in error.value.problems}
    assert fields == {"trainer.steps", "data.prefixes", "optim.lr", "trainer.tpp"}


def test_what_people_write_is_accepted() -> None:
    config = load_config(["data=mock", "run.dir=runs/${model.name}-${oc.env:HOME}", "optim=wsd"], CONF)
    assert config.run.dir and config.run.dir.startswith("runs/llama_2m-/")
    config = load_config(["data=mock", "data.prefixes=${finetune.lora_target_modules}"], CONF)
    assert config.data.prefixes == config.finetune.lora_target_modules


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
        with pytest.raises(ConfigError) as caught:
            load_config([argument, "data=mock"], CONF)
        (problem,) = caught.value.problems
        assert problem.field == "logging.wandb_project" and "is the name of a secret" in problem.rule
        assert "hunter2" not in str(caught.value)


def test_names_of_variables_without_a_secret() -> None:
    for name in ("HOME", "SCRATCH", "TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY", "SLURM_JOB_ID", "PWD"):
        assert not names_secret(name), name


@pytest.mark.parametrize("setting", ["model.num_attention_heads", "model.num_key_value_heads", "trainer.dp"])
def test_advice_does_not_look_through_everything(setting: str) -> None:
    """Rules name the nearest value that divides, and try one after the other."""
    begin = time.thread_time()
    with raises_with_message(ConfigError, f"{setting} = 100000000000000000 rule must be between 1 and"):
        settings = [f"{setting}=100000000000000000", "trainer.tp=3", "trainer.shard_group=7", "data=mock"]
        resolve(load_config(settings, CONF), 10**17)
    assert time.thread_time() - begin < 5
