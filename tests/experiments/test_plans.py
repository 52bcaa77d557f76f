"""The four experiments at their true size, and recipes that pretrain or extend the context, as published."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from docs import generate
from megatron_llama.cli import CONF_DIR, main, usage
from megatron_llama.config import Config, ConfigError, load_config
from megatron_llama.config.settings_table import get, settings_by_name
from megatron_llama.devices import device_named
from megatron_llama.launch.world import find_world
from megatron_llama.plan import Plan, resolve
from megatron_llama.plan.memory import USABLE, rank_memory, stage_footprints
from megatron_llama.system.tables import GIB
from megatron_llama.tools.common import MOCK_RUN
from tests.config.helpers import leaves
from tests.processes import losses, run_train_py

WORLDS = {
    "llama2_70b_fsdp_chat": 16,
    "llama2_70b_lora_gaudi": 8,
    "llama2_7b_qnli_trainium": 128,
    "llama2_7b_lora_zero3": 8,
}
FSDP, GAUDI, TRAINIUM, ZERO = WORLDS


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a folder without datasets and weights."""
    monkeypatch.chdir(tmp_path)


def dry_run(name: str, *overrides: str) -> Plan:
    """Return the plan of ``train.py +experiment=NAME --dry-run``."""
    return find_world(load_config([f"+experiment={name}", "dry_run=true", *overrides], CONF_DIR), None).plan()


def gib(plan: Plan) -> float:
    """Return the largest memory of a rank, without activations."""
    return max(sum(rank_memory(plan, stage)) for stage in plan.stages) / GIB


def test_each_recipe_is_known_here_and_to_those_who_ask_for_help() -> None:
    names = {path.stem for path in (CONF_DIR / "experiment").glob("*.yaml")}
    others = {name for name in names if name.startswith(("pretrain_", "extend_")) or name.endswith("gb")}
    assert names - others == set(WORLDS), "the others: test_recipes.py, test_extensions.py"
    assert {path.stem for path in (CONF_DIR / "experiment").glob("pretrain_*.yaml")} == set(PUBLISHED)
    assert [path.stem for path in (CONF_DIR / "experiment").glob("extend_*.yaml")] == [EXTEND]
    assert {path.stem for path in (CONF_DIR / "experiment").glob("*gb.yaml")} == set(CARDS)
    lines = usage().splitlines()
    for name in PUBLISHED:
        assert any(line.split()[:1] == [name] and "from random weights" in line for line in lines)


@pytest.mark.parametrize("name", WORLDS)
def test_a_dry_run_needs_neither_devices_nor_files(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Unlike a run."""
    assert main([f"+experiment={name}", "--dry-run"]) == 0
    page = capsys.readouterr().out
    assert f" · {WORLDS[name]} ranks " in page and "data_prep/sft.py" in page and "init_from=models/Llama-2-" in page
    assert main([f"experiment={name}", "--dry-run"]) == 0
    assert capsys.readouterr().out == page, "with and without the plus is one"
    with pytest.raises(ConfigError) as caught:
        resolve(load_config([f"+experiment={name}"], CONF_DIR), WORLDS[name])
    fields = {problem.field for problem in caught.value.problems}
    assert fields - {"data.validation_prefixes"} == {"data.prefixes", "init_from"}


@pytest.mark.parametrize(
    "overrides",
    [["data=mock", "trainer.steps=4"], [*MOCK_RUN, "trainer.compile=true"], [*MOCK_RUN, "checkpoint.every_steps=null"]],
    ids=["user", "compile", "traffic"],
)
@pytest.mark.parametrize("name", WORLDS)
def test_mock_data_keeps_the_settings_of_graphs_and_work(name: str, overrides: list[str]) -> None:
    """A user's choice of mock data, and the choices of tools that run on it."""
    plan, run = dry_run(name, *overrides), dry_run(name)
    assert plan.config.data.mock and plan.tokens_per_step == run.tokens_per_step
    assert plan.config.trainer.steps == (4 if "trainer.steps=4" in overrides else run.config.trainer.steps)
    assert "data=mock" in overrides or plan.config.data.pack == run.config.data.pack


def test_starting_weights_of_another_shape_stop_a_dry_run_too(tmp_path: Path) -> None:
    (tmp_path / "models" / "Llama-2-7b-hf").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no\s+config.json"):
        dry_run(ZERO)
    (tmp_path / "models" / "Llama-2-7b-hf" / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    with pytest.raises(ConfigError, match=r"hidden_size\s+is\s+64,\s+not\s+4096"):
        dry_run(ZERO)


def test_fsdp_chat_is_the_published_run() -> None:
    """No other stage fits its GPUs. 13.5 hours on 16 A100 are 2.8 % MFU; 45.5 % was of the peak of one GPU."""
    plan = dry_run(FSDP)
    trainer, optim = plan.config.trainer, plan.config.optim
    assert (trainer.zero, plan.shard_size, plan.num_microbatches, trainer.recompute) == (3, 16, 1, "full")
    assert (optim.lr, optim.min_lr, optim.weight_decay, optim.warmup_steps) == (5e-5, 0, 0.01, 15)
    assert plan.config.data.pack and plan.precision.compute_dtype == "bfloat16" and plan.precision.master == "float32"
    assert gib(plan) == pytest.approx(16 * 68_976_648_192 / 16 / GIB, rel=1e-3), "16 bytes a weight over 16 ranks"
    dry_run(FSDP, "device.memory_gib=79")
    for zero in (0, 1, 2):
        with pytest.raises(ConfigError, match=r"trainer.zero=3\s+\(64.2\s+GiB"):
            dry_run(FSDP, "device.memory_gib=79", f"trainer.zero={zero}")
    assert plan.tokens_per_step * plan.config.trainer.steps == 16_384_000


def test_lora_gaudi_is_the_published_run() -> None:
    plan = dry_run(GAUDI)
    finetune, optim = plan.config.finetune, plan.config.optim
    assert (finetune.lora_rank, finetune.lora_alpha, finetune.lora_dropout) == (4, 16, 0.05)
    assert (plan.config.trainer.zero, plan.config.trainer.micro_batch_size, plan.num_microbatches) == (3, 5, 2)
    assert (optim.lr, str(optim.schedule["_target_"]).rpartition(".")[2]) == (4e-4, "Constant")
    # A rank of q, k, v, o: in + out of each, k and v going to 8 heads of 128.
    per_layer = 4 * ((8192 + 8192) * 2 + (8192 + 1024) * 2)
    assert 80 * per_layer == 16_384_000
    assert gib(plan) == pytest.approx((2 * 68_976_648_192 + 16 * 80 * per_layer) / 8 / GIB, rel=1e-3)
    assert optim.warmup_steps == 3, "3 % of 100 steps, until the dataset is there and 2 epochs are a number of steps"


def test_qnli_trainium_is_the_published_run() -> None:
    """Their larger models are overrides."""
    plan = dry_run(TRAINIUM)
    trainer, optim = plan.config.trainer, plan.config.optim
    assert (trainer.tp, trainer.pp, plan.dp, plan.sp, trainer.zero) == (8, 1, 16, True, 1)
    assert (plan.precision.name, plan.precision.stochastic, plan.num_microbatches) == ("bf16_sr", True, 16)
    assert (optim.lr, optim.min_lr, optim.warmup_steps, trainer.steps) == (3e-4, 3e-5, 10, 500)
    assert plan.tokens_per_step == 256 * 4096
    sizes = {"llama13b": (4, 1024, 10), "llama70b": (16, 512, 5)}
    for model, (pp, batch, layers) in sizes.items():
        name = f"init_from=models/{model}"
        plan = dry_run(TRAINIUM, f"model={model}", f"trainer.pp={pp}", f"trainer.global_batch_size={batch}", name)
        assert [len(chunk) for chunk in plan.stage_layers] == [layers] * pp and plan.world_size == 8 * pp * 16


def test_lora_zero3_is_the_published_run_in_every_stage() -> None:
    needed = []
    for zero in (0, 1, 2, 3):
        plan = dry_run(ZERO, f"trainer.zero={zero}")
        finetune, optim = plan.config.finetune, plan.config.optim
        assert (finetune.lora_rank, finetune.lora_alpha, optim.lr, optim.warmup_steps) == (128, 1, 5e-4, 0)
        assert len(finetune.lora_target_modules) == 7 and plan.num_microbatches == 1 and not plan.config.data.pack
        needed.append(round(gib(plan), 1))
    assert needed == [29.3, 15.2, 15.2, 2.2], "docs/guides/training/experiments.md has these numbers"
    assert dry_run(ZERO, "trainer.dp=4", "trainer.global_batch_size=16").world_size == 4


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


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_numbers_are_the_published_ones(name: str) -> None:
    there, plan = PUBLISHED[name], dry_run(name)
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
    plan = dry_run(EXTEND)
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
    plan = dry_run(name, "device.memory_gib=79.1")
    assert max(stage.total for stage in stage_footprints(plan)) <= USABLE * 79.1 * GIB
    assert f" on {plan.world_size // 8} machines with 8 H100" in generate.experiment_summary(name)


CARDS = {"llama3_1b_24gb": 23.5, "llama3_8b_qlora_24gb": 23.5, "llama3_8b_80gb": 79.1}
"""Memory that the driver reports, GiB."""


@pytest.mark.parametrize("name", CARDS)
def test_it_fits_its_card(name: str) -> None:
    (stage,) = stage_footprints(dry_run(name, f"device.memory_gib={CARDS[name]}"))
    assert stage.total + device_named("cuda").memory_reserve(stage.total) <= CARDS[name] * GIB


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
    """Mock data and one rank, for speed."""
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
