"""A recipe is data: it comes from a stranger, and reading it runs nothing and ends soon."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_llama.config import ConfigError, load_config
from megatron_llama.config.problems import CONTROL
from megatron_llama.plan import resolve
from tests.paths import CONF

RUNS_A_PROGRAM = """\
data: {{mock: true}}
optim:
  schedule:
    _target_: torch.optim.lr_scheduler.LambdaLR
    lr_lambda:
      _target_: {target}
      _args_: [touch {file}]
"""


def refusal(*overrides: str) -> str:
    """The message of a config that must be refused when it is read or planned."""
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(overrides, CONF), 1)
    return str(caught.value)


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "setuptools._distutils.spawn.spawn",
        "torch.hub.load",
        "pathlib.Path.write_text",
        "torch.optim.lr_scheduler.warnings.sys.exit",
        "${oc.decode:os.system}",
    ],
)
def test_a_recipe_can_not_name_a_program(target: str, tmp_path: Path) -> None:
    recipe, file = tmp_path / "recipe.yaml", tmp_path / "ran"
    recipe.write_text(RUNS_A_PROGRAM.format(target=f"'{target}'", file=file), encoding="utf-8")
    for dry in ([], ["dry_run=true"]):
        message = refusal("device=cpu", f"experiment={recipe}", *dry)
        assert "optim.schedule" in message and "_target_" in message
        assert "allow_targets" in message or "is not a supported reference" in message
    assert not file.exists()


def test_a_recipe_can_not_allow_itself(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    text = RUNS_A_PROGRAM.format(target="os.system", file=tmp_path / "ran")
    recipe.write_text(text + "allow_targets: [os.system]\n", encoding="utf-8")
    assert "set in a file" in refusal("device=cpu", f"experiment={recipe}")


@pytest.mark.parametrize(
    ("text", "field", "rule"),
    [
        (r'model: {name: "a\e[2Jb"}', "model.name", r"control character '\\x1b'"),
        (r'run: {dir: "a\0b"}', "run.dir", r"control character '\\x00'"),
        (r'data: {mock: false, prefixes: [1, "a\rb"]}', "data.prefixes", r"control character '\\r'"),
        (r'optim: {schedule: {_target_: "a\x9bb"}}', "optim.schedule._target_", r"control character '\\x9b'"),
        (f"run: {{dir: /tmp/{'é' * 128}}}", "run.dir", "at most 255 bytes"),
        (f"data: {{tokenizer: /tmp/{'a/' * 2048}}}", "data.tokenizer", "a path 4,095"),
    ],
    ids=["escape", "null", "return", "c1", "name", "path"],
)
def test_texts_that_no_terminal_and_no_path_takes(text: str, field: str, rule: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{text}\n", encoding="utf-8")
    for base in ([], ["data=mock"]):
        with pytest.raises(ConfigError, match=rule) as error:
            load_config([f"experiment={recipe}", "device=cpu", *base], CONF)
        assert field in [problem.field for problem in error.value.problems]
        assert not CONTROL.search(str(error.value)) and error.value.config is not None


def test_other_texts_keep_their_lines_and_length(tmp_path: Path) -> None:
    recipe, prompt = tmp_path / "recipe.yaml", "one\n\ttwo" + "x" * 5000
    recipe.write_text(f"data: {{mock: true}}\nlogging: {{sample_prompts: ['{prompt}']}}\n", encoding="utf-8")
    load_config([f"experiment={recipe}", "device=cpu", f"run.dir='{tmp_path}/two words\nand a line'"], CONF)


def test_the_command_line_allows_a_class_and_the_plan_shows_it(tmp_path: Path) -> None:
    from megatron_llama.plan import format_plan

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data: {mock: true}\noptim: {schedule: {_target_: mine.Schedule}}\n", encoding="utf-8")
    message = refusal(f"experiment={recipe}", "device=cpu")
    assert "allow_targets=[mine.Schedule]" in message
    config = load_config([f"experiment={recipe}", "device=cpu", "allow_targets=[mine.Schedule]", "dry_run=true"], CONF)
    with pytest.raises(ConfigError, match="the package mine is not installed"):
        resolve(config, 1)
    config.optim.schedule["_target_"] = "tests.config.test_recipes.Schedule"
    config.allow_targets = [config.optim.schedule["_target_"]]
    assert "may also run tests.config.test_recipes.Schedule" in format_plan(resolve(config, 1))


def test_a_bomb_is_a_mistake_in_the_file(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    lines = ["a0: &a0 [x,x]", *(f"a{i}: &a{i} [*a{i - 1},*a{i - 1}]" for i in range(1, 60))]
    recipe.write_text("\n".join(lines), encoding="utf-8")
    message = refusal(f"experiment={recipe}")
    assert "recipe.yaml" in message and "values after aliases are expanded" in " ".join(message.split())


FILES_IN_CONF = {
    "aliases": ("a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)), "aliases"),
    "deep": (f"a: {'[' * 2000}{']' * 2000}\n", "nested too deeply"),
    "itself": ("optim:\n  schedule: &a\n    b: *a\n", "contains itself"),
    "number": ("5\n", "where a mapping is expected"),
    "null": ("null: 2\n", "is invalid: "),
    "defaults": ("defaults: [hostile]\n", "the defaults of"),
}


@pytest.mark.parametrize("case", FILES_IN_CONF)
def test_files_in_the_current_folder_have_the_limits_of_recipes(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, message = FILES_IN_CONF[case]
    for group in ("experiment", "model"):
        (tmp_path / "conf" / group).mkdir(parents=True)
    (tmp_path / "conf/experiment/hostile.yaml").write_text(f"# @package _global_\n{text}", encoding="utf-8")
    (tmp_path / "conf/model/hostile.yaml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for choice in ("experiment=hostile", "model=hostile"):
        assert message in " ".join(refusal(choice, "data=mock", "device=cpu").split())


def test_the_defaults_of_a_recipe_do_not_lead_back_to_it(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("defaults: [file_of_the_user]\n", encoding="utf-8")
    assert f"the defaults of {recipe} lead back" in " ".join(refusal("data=mock", f"experiment={recipe}").split())
