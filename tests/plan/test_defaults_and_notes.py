"""Defaults by model and device: the plan names each, and settings from the user take precedence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from megatron_llama.config import Config, load_config, to_yaml
from megatron_llama.config.problems import format_value
from megatron_llama.config.settings_table import get
from megatron_llama.plan import Machine, Plan, format_plan, resolve
from megatron_llama.plan.defaults_and_notes import CHOSEN, choose_defaults
from tests.config.helpers import everything_exists
from tests.golden import GoldenFiles
from tests.paths import CONF, ROOT

OLD = {"data.seq_length": 256, "trainer.precision": "fp32", "trainer.compile": False}


def plan_of(*overrides: str, machine: Machine | None = None) -> Plan:
    config = load_config(["data=mock", *overrides], CONF)
    return resolve(config, config.trainer.tp, machine, exists=everything_exists)


def values(config: Config) -> dict[str, object]:
    return {name: get(config, name) for name in CHOSEN}


def test_defaults_by_model_and_device() -> None:
    page = []
    for row in GoldenFiles.commands("plan/defaults.txt"):
        config = load_config(["data=mock", *row.split()], CONF)
        chosen, lines = choose_defaults(config)
        assert values(config) == dict.fromkeys(CHOSEN), "the config is not modified"
        line = ", ".join(f"{name}={format_value(value)}" for name, value in values(chosen).items())
        page += [f"$ {row}", f"  {line}", *(f"    {line}" for line in lines)]
    GoldenFiles.check("plan/defaults.txt", "\n".join(page))


@pytest.mark.parametrize("device", ["cpu", "cuda", "neuron", "hpu", "auto"])
def test_what_is_written_wins_and_is_not_called_chosen(device: str) -> None:
    written = ("data.seq_length=512", "trainer.precision=bf16_sr", "trainer.compile=true")
    plan = plan_of("model=llama7b", f"device={device}", *written)
    assert values(plan.config) == dict(zip(CHOSEN, (512, "bf16_sr", True), strict=True))
    assert plan.chosen == () and "chosen" not in format_plan(plan)
    one = plan_of("model=llama7b", f"device={device}", "trainer.precision=bf16_sr")
    assert "trainer.precision" not in " ".join(one.chosen) and "data.seq_length=" in " ".join(one.chosen)


def test_a_group_or_an_experiment_wins_too(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("trainer: {precision: fp32, compile: false}\ndata: {mock: true, seq_length: 128}\n")
    plan = plan_of("model=llama7b", "device=cuda", "trainer.steps=5000", f"experiment={recipe}")
    assert values(plan.config) == {**OLD, "data.seq_length": 128} and plan.chosen == ()


def test_notes() -> None:
    """Learning rate, choices and notes of each command line."""
    old_gpu, page = Machine(16 << 30, accelerator=True, fast_bf16=False), ""
    for row in GoldenFiles.commands("plan/notes.txt"):
        settings, _, about = row.partition("  # ")
        plan = plan_of(*settings.split(), machine=old_gpu if about == "an old GPU" else None)
        (rate,) = re.findall(r"· (lr .*?) · ", format_plan(plan))
        page += "\n".join([f"$ {row}", rate, *plan.chosen, *plan.notes, "\n"])
    GoldenFiles.check("plan/notes.txt", page)


def test_the_demo_sets_none_of_them() -> None:
    arguments = (ROOT / "Makefile").read_text(encoding="utf-8").partition("DEMO_ARGS :=")[2].partition("\n\n")[0]
    assert not any(name in arguments for name in CHOSEN)
    assert values(plan_of("model=llama_2m", "trainer.tp=2", "device=cpu").config) == OLD


def begun(folder: Path, settings: Config, step: bool = True) -> Path:
    """The folder of a run that has begun, and saved a step."""
    (folder / "checkpoints" / ("step_00000010" if step else "")).mkdir(parents=True)
    if step:
        (folder / "checkpoints/step_00000010/checkpoint.json").touch()
    (folder / "config.yaml").write_text(to_yaml(settings), encoding="utf-8")
    return folder


def test_a_resumed_run_keeps_its_settings(tmp_path: Path) -> None:
    """Resuming keeps the stored settings on any device, even if this version would choose others."""
    old = begun(tmp_path / "old", plan_of("model=llama7b", "device=cpu").config)
    resumed = ("model=llama7b", "device=cuda", "trainer.steps=5000")
    plan = plan_of(*resumed, f"run.dir={old}")
    assert values(plan.config) == OLD
    assert plan.chosen == (f"data.seq_length=256, trainer.precision=fp32, trainer.compile=false: kept from {old}",)
    assert values(plan_of(*resumed, f"checkpoint.resume={old}/checkpoints/step_00000010").config) == OLD
    written = plan_of(*resumed, f"run.dir={old}", "trainer.precision=bf16")
    assert values(written.config) == {**OLD, "trainer.precision": "bf16"}, "also here"


def test_a_resumed_run_keeps_the_default_learning_rate_of_its_version(tmp_path: Path) -> None:
    full = ("finetune=full", "init_from=FOLDER")

    def resumed(name: str, saved: str) -> Plan:
        old = begun(tmp_path / name, plan_of("finetune=none", saved).config)
        return resolve(load_config(["data=mock", *full, f"run.dir={old}"], CONF), 1, exists=lambda path: True)

    old = resumed("old", "optim.lr=3e-4")  # the default of older versions
    assert (old.config.optim.lr, old.config.optim.min_lr) == (3e-4, 3e-4 / 10)
    assert f"optim.lr=0.0003: kept from {tmp_path / 'old'}" in " ".join(old.chosen)
    assert resumed("new", "optim.lr=2e-5").config.optim.lr == 2e-5
    assert resumed("set", "optim.lr=1e-3").config.optim.lr == 2e-5, "the checkpoint reports this difference"


def test_a_start_from_step_0_chooses_anew(tmp_path: Path) -> None:
    old = begun(tmp_path / "old", plan_of("model=llama7b", "device=cpu").config)
    nothing_saved = begun(tmp_path / "empty", plan_of("model=llama7b", "device=cpu").config, step=False)
    for place in (f"run.dir={nothing_saved}", f"run.dir={tmp_path / 'none'}", f"run.dir={old} checkpoint.resume=never"):
        plan = plan_of("model=llama7b", "device=cuda", *place.split())
        assert (plan.config.data.seq_length, plan.config.trainer.precision) == (4096, "bf16")


@pytest.mark.parametrize(
    "text", ["", "[", "data: 5", yaml.safe_dump({"data": {"seq_length": -3}, "trainer": {"precision": 7}})]
)
def test_a_damaged_config_of_the_run_is_passed_over(text: str, tmp_path: Path) -> None:
    old = begun(tmp_path / "old", Config())
    (old / "config.yaml").write_text(text, encoding="utf-8")
    assert plan_of("model=llama7b", "device=cuda", f"run.dir={old}").config.data.seq_length == 4096
