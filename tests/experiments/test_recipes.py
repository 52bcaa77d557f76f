"""Recipes that pretrain or extend the context: published numbers, data, memory, and short training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from docs import generate
from megatron_llama.cli import CONF_DIR, main, usage
from megatron_llama.config import Config, load_config
from megatron_llama.config.fields import get, settings_by_name
from megatron_llama.devices import device_named
from megatron_llama.launch.world import find_world
from megatron_llama.plan import Plan, resolve
from megatron_llama.plan.memory import USABLE, stage_footprints
from megatron_llama.system.tables import GIB
from tests.processes import losses, run_train_py


class Published(NamedTuple):
    """Published numbers of a model."""

    tokens: float
    seq_length: int
    batch_tokens: float
    lr: float
    min_lr: float
    warmup: int
    parameters: float
    source: str


LLAMA_2 = "arXiv:2307.09288, section 2.2 and table 1"
LLAMA_3 = "arXiv:2407.21783, sections 3.2.1 and 3.4.1, table 3; 8 M tokens are the second stage of the 405B"
PUBLISHED = {
    "pretrain_llama7b": Published(2e12, 4096, 4e6, 3e-4, 3e-5, 2000, 6.7e9, LLAMA_2),
    "pretrain_llama13b": Published(2e12, 4096, 4e6, 3e-4, 3e-5, 2000, 13e9, LLAMA_2),
    "pretrain_llama70b": Published(2e12, 4096, 4e6, 1.5e-4, 1.5e-5, 2000, 69e9, LLAMA_2),
    "pretrain_llama3_8b": Published(15e12, 8192, 8e6, 3e-4, 3e-5, 2000, 8e9, LLAMA_3),
    "pretrain_llama3_70b": Published(15e12, 8192, 8e6, 1.5e-4, 1.5e-5, 2000, 70.6e9, LLAMA_3),
    "pretrain_llama3_405b": Published(15.6e12, 8192, 16e6, 8e-5, 8e-7, 8000, 405e9, LLAMA_3),
}
EXTEND = "extend_llama3_8b_128k"
SCALED = CONF_DIR / "scaled" / "laptop.yaml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a folder without datasets and weights."""
    monkeypatch.chdir(tmp_path)


def plan_of(name: str, *overrides: str) -> Plan:
    return find_world(load_config([f"+experiment={name}", "dry_run=true", *overrides], CONF_DIR), None).plan()


def test_each_recipe_is_known_here_and_to_those_who_ask_for_help() -> None:
    assert {path.stem for path in (CONF_DIR / "experiment").glob("pretrain_*.yaml")} == set(PUBLISHED)
    assert [path.stem for path in (CONF_DIR / "experiment").glob("extend_*.yaml")] == [EXTEND]
    assert {path.stem for path in (CONF_DIR / "experiment").glob("*gb.yaml")} == set(CARDS)
    lines = usage().splitlines()
    for name in PUBLISHED:
        assert any(line.split()[:1] == [name] and "from random weights" in line for line in lines)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_numbers_are_the_published_ones(name: str) -> None:
    there, plan = PUBLISHED[name], plan_of(name)
    trainer, optim = plan.config.trainer, plan.config.optim
    assert there.source.partition(",")[0] in (CONF_DIR / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
    assert plan.parameters == pytest.approx(there.parameters, rel=0.01)
    assert plan.config.data.seq_length == there.seq_length == plan.model.max_position_embeddings
    assert plan.tokens_per_step == pytest.approx(there.batch_tokens, rel=0.05)  # M is 2^20 there
    assert abs(trainer.steps * plan.tokens_per_step - there.tokens) < plan.tokens_per_step
    assert (optim.name, optim.lr, optim.min_lr, optim.warmup_steps) == ("adamw", there.lr, there.min_lr, there.warmup)
    assert (optim.betas, optim.weight_decay, optim.clip) == ([0.9, 0.95], 0.1, 1.0)
    assert optim.eps == (1e-5 if there.source == LLAMA_2 else 1e-8)
    assert str(optim.schedule["_target_"]).endswith("CosineAnnealing") and optim.constant_steps == 0
    assert plan.precision.name == "bf16" and plan.chosen == (), "a recipe leaves nothing open"
    assert plan.config.data.document_mask == (there.source == LLAMA_3)
    weights = [float(share) for share in plan.config.data.prefixes[::2]]
    shares = [0.67, 0.15, 0.045, 0.045, 0.045, 0.025, 0.02] if there.source == LLAMA_2 else [0.5, 0.25, 0.17, 0.08]
    assert weights == shares and sum(weights) == pytest.approx(1)


def test_the_numbers_of_the_extension_are_the_published_ones() -> None:
    """Fu et al. 2024, sections 3 and 4; YaRN, section 4.1; the context of Llama 3."""
    text = (CONF_DIR / "experiment" / f"{EXTEND}.yaml").read_text(encoding="utf-8")
    assert all(source in text for source in ("arXiv:2402.10171", "arXiv:2309.00071", "arXiv:2407.21783"))
    plan = plan_of(EXTEND)
    trainer, optim, scaling = plan.config.trainer, plan.config.optim, plan.model.rope_scaling
    assert plan.config.data.seq_length == plan.model.max_position_embeddings == 131_072
    assert scaling is not None and (scaling.rope_type, scaling.factor) == ("yarn", 131_072 / 8_192)
    assert plan.tokens_per_step == pytest.approx(4e6, rel=0.05)
    assert abs(trainer.steps * plan.tokens_per_step - 5e9) < plan.tokens_per_step
    assert (optim.lr, optim.min_lr, optim.warmup_steps) == (2e-5, 2e-5, 20)
    assert (optim.betas, optim.weight_decay, optim.clip) == ([0.9, 0.95], 0.0, 1.0)
    assert str(optim.schedule["_target_"]).endswith("Constant")
    assert not plan.config.data.document_mask and plan.precision.name == "bf16"
    assert plan.chosen == (), "a recipe leaves nothing open"


def test_long_documents_are_upsampled_in_each_source() -> None:
    """A source keeps its share of the pretraining; documents of 4,096 tokens or more are 70 % of it."""

    def shares(name: str) -> dict[str, float]:
        prefixes: list[Any] = yaml.safe_load((CONF_DIR / "data" / f"{name}.yaml").read_text())["prefixes"]
        names = [str(path).removeprefix("corpora/redpajama/") for path in prefixes[1::2]]
        return dict(zip(names, map(float, prefixes[::2]), strict=True))

    whole, parts = shares("redpajama"), shares("redpajama_long")
    assert sum(whole.values()) == pytest.approx(1.0, abs=1e-5)
    for name, share in whole.items():
        source = name.removesuffix("_text_document")
        short, long = (parts.pop(f"{source}_{part}_4096_text_document") for part in ("below", "from"))
        assert short + long == pytest.approx(share, abs=2e-4) and long / share == pytest.approx(0.7, abs=5e-3)
    assert not parts


def test_a_dry_run_without_the_data_has_each_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(["+experiment=pretrain_llama7b", "dry_run=true"], CONF_DIR)
    plan = resolve(config, 128, exists=lambda _: False)
    (note,) = [note for note in plan.notes if "on this host would be rejected" in note]
    assert note.count("redpajama.py prepare") == 1 and all(str(path) in note for path in config.data.prefixes[1::2])
    config = load_config(["+experiment=llama2_70b_lora_gaudi", "dry_run=true"], CONF_DIR)
    weights = next(note for note in resolve(config, 8, exists=lambda _: False).notes if "init_from" in note)
    assert "hf download OWNER/NAME --local-dir models/Llama-2-70b-hf" in weights
    assert "hf download models/" not in weights, "models/ is a folder, not an owner on the Hub"
    assert main([f"+experiment={EXTEND}", "--dry-run"]) == 0
    page = capsys.readouterr().out
    assert " 32 ranks " in page and "data_prep/split_by_length.py" in page and "redpajama.py prepare" in page
    assert "init_from=models/Meta-Llama-3-8B" in page and "yarn x 16" in page


@pytest.mark.parametrize("name", [*PUBLISHED, EXTEND])
def test_it_fits_its_cluster(name: str) -> None:
    """Memory fits an H100 (79.1 GiB, of which tensors can use a share); the summary names the number of machines."""
    plan = plan_of(name, "device.memory_gib=79.1")
    assert max(stage.total for stage in stage_footprints(plan)) <= USABLE * 79.1 * GIB
    assert f" on {plan.world_size // 8} machines with 8 H100" in generate.experiment_summary(name)


CARDS = {"llama3_1b_24gb": 23.5, "llama3_8b_qlora_24gb": 23.5, "llama3_8b_80gb": 79.1}
"""Memory that the driver reports, GiB."""


@pytest.mark.parametrize("name", CARDS)
def test_it_fits_its_card(name: str) -> None:
    (stage,) = stage_footprints(plan_of(name, f"device.memory_gib={CARDS[name]}"))
    assert stage.total + device_named("cuda").memory_reserve(stage.total) <= CARDS[name] * GIB


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings of a YAML file by full name."""
    leaves_by_name: dict[str, Any] = {}
    for name, value in tree.items():
        leaves_by_name |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return leaves_by_name


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("name", PUBLISHED)
def test_scaled_down_all_but_size_is_the_recipes(name: str, order: int) -> None:
    """Both orders on the command line are equal."""
    recipe = load_config([f"experiment={name}"], CONF_DIR)
    small = load_config([f"experiment={name}", "scaled=laptop"][::order], CONF_DIR)
    rule = leaves(yaml.safe_load(SCALED.read_text(encoding="utf-8")))
    named = {*rule, *(setting for setting in settings_by_name() if any(setting.startswith(f"{one}.") for one in rule))}
    assert {setting for setting in settings_by_name() if get(recipe, setting) != get(small, setting)} <= named
    assert all(get(small, setting) == value for setting, value in rule.items())


CHEAP = (
    *("trainer.val_every_steps=null", "logging.tensorboard=false", "checkpoint=none", "checkpoint.every_steps=null"),
    *("optim.warmup_steps=1", "trainer.dp=1"),
)


def test_one_trains(tmp_path: Path) -> None:
    """Mock data and one rank, for speed; `python -m benchmarks.verify.recipes` trains all recipes on text."""
    words = ("+experiment=pretrain_llama3_8b", "+scaled=laptop", "data.mock=true", "data.tokenizer=null")
    status, output = run_train_py(tmp_path / "run", *words, *CHEAP, "trainer.tp=1", "trainer.steps=6")
    assert status == 0, output
    trained = losses(tmp_path / "run")
    assert len(trained) == 6 and trained[-1] < trained[0] - 0.1


def test_the_extension_trains_scaled_down(tmp_path: Path) -> None:
    """Two context-parallel ranks, mock data and random weights of a small model."""
    model = "model=llama_2m model.max_position_embeddings=512 init_from=null finetune=none data=mock"
    trainer = "device=cpu trainer.cp=2 trainer.global_batch_size=2 trainer.steps=2 trainer.compile=false"
    more = "data.seq_length=512 trainer.precision=fp32 checkpoint.export_hf=false"
    words = f"{model} {trainer} {more}".split()
    status, output = run_train_py(tmp_path / "run", f"+experiment={EXTEND}", *words, *CHEAP)
    assert status == 0, output
    assert "yarn x 16" in output


def test_a_misspelt_recipe_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+experiment=pretrain_lama7b", "--dry-run"]) == 2
    assert "write experiment=pretrain_llama7b" in capsys.readouterr().err
    assert main(["+scaled=labtop", "--dry-run"]) == 2
    assert "write scaled=laptop" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("choice", "settings"),
    [
        ("trainer=fsdp", {"trainer.zero": 3, "trainer.recompute": "full"}),
        ("trainer=reproducible", {"trainer.deterministic": True, "trainer.precision": "fp32"}),
        ("trainer=measure", {"trainer.steps": 20, "trainer.profile": [16, 18]}),
        ("logging=csv", {"logging.csv": True, "logging.tensorboard": False}),
        ("logging=wandb", {"logging.wandb": "online", "logging.tensorboard": True}),
        ("logging=quiet", {"logging.tensorboard": False, "logging.every_steps": 100}),
        ("checkpoint=none", {"checkpoint.save_last": False}),
        ("checkpoint=rolling", {"checkpoint.every_steps": 1000, "checkpoint.keep": 3}),
        ("checkpoint=best trainer.val_every_steps=50", {"checkpoint.every_steps": 50, "checkpoint.keep_best": True}),
    ],
)
def test_each_choice_of_a_group_makes_a_plan(choice: str, settings: dict[str, Any]) -> None:
    config = find_world(load_config(["data=mock", "device=cpu", *choice.split()], CONF_DIR), None).plan().config
    assert {name: get(config, name) for name in settings} == settings


def test_without_a_choice_the_groups_change_nothing() -> None:
    """Defaults are only in settings.py."""
    composed, plain = load_config([], CONF_DIR), Config()
    for section in ("trainer", "logging", "checkpoint"):
        assert getattr(composed, section) == getattr(plain, section)


def test_the_table_of_the_docs_is_fresh() -> None:
    assert generate.main(["--check", "recipes"]) == 0, "run python docs/generate.py recipes"
