"""Settings that a command with the folder of a run takes from its config.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_llama.config import Config, ConfigError, load_config, to_yaml
from megatron_llama.config.stored import has_run
from megatron_llama.plan import Plan, resolve
from tests.paths import CONF

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
    assert load(tmp_path / "run") == plan.requested
    assert resolve(load(tmp_path / "run"), 2).config == plan.config
    assert load_config([f"run.dir={tmp_path}/run"], CONF).model.num_hidden_layers == 4, "tools do not resume"


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
    make_run(tmp_path / "run", *FIRST, "checkpoint.allow=[data]", "allow_targets=[some.Class]", "dry_run=true")
    config = load(tmp_path / "run")
    assert (config.checkpoint.allow, config.allow_targets, config.dry_run) == ([], [], False)


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


def test_a_folder_name_longer_than_the_file_system_takes_has_no_run() -> None:
    assert not has_run(Path("a" * 256))
    with pytest.raises(ConfigError, match="longer than a path can be"):
        load_config([f"run.dir={'a' * 256}"], CONF, resumes=True)


def test_a_number_of_more_digits_than_python_reads() -> None:
    with pytest.raises(ConfigError, match="has a number of too many digits"):
        load_config([f"trainer.steps={'9' * 5000}"], CONF)
