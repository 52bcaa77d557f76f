"""The four experiments at their true size: what they mean on as many devices as the works had, planned here."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_llama.arch.flops import mfu
from megatron_llama.cli import CONF_DIR, main
from megatron_llama.config import ConfigError, load_config
from megatron_llama.launch.world import find_world
from megatron_llama.plan import Plan, resolve, stage_memory
from megatron_llama.system.tables import GIB
from megatron_llama.tools.common import MOCK_RUN

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
    return max(memory.total for memory in stage_memory(plan)) / GIB


def test_each_experiment_is_known_here() -> None:
    names = {path.stem for path in (CONF_DIR / "experiment").glob("*.yaml")}
    others = {name for name in names if name.startswith(("pretrain_", "extend_")) or name.endswith("gb")}
    assert names - others == set(WORLDS), "the others: test_recipes.py, test_extensions.py"


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


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    for written in ("experiment", "+experiment"):
        with pytest.raises(ConfigError, match=r"write\s+experiment=llama2_70b_fsdp_chat,\s+or\s+one\s+of"):
            load_config([f"{written}=llama2_70b_fsdp_chta"], CONF_DIR)


def test_fsdp_chat_is_the_published_run() -> None:
    plan = dry_run(FSDP)
    trainer, optim = plan.config.trainer, plan.config.optim
    assert (trainer.zero, plan.shard_size, plan.num_microbatches, trainer.recompute) == (3, 16, 1, "full")
    assert (optim.lr, optim.min_lr, optim.weight_decay, optim.warmup_steps) == (5e-5, 0, 0.01, 15)
    assert plan.config.data.pack and plan.precision.compute_dtype == "bfloat16" and plan.precision.master == "float32"
    assert gib(plan) == pytest.approx(16 * 68_976_648_192 / 16 / GIB, rel=1e-3), "16 bytes a weight over 16 ranks"


def test_fsdp_chat_fits_its_gpus_in_no_other_stage() -> None:
    dry_run(FSDP, "device.memory_gib=79")
    for zero in (0, 1, 2):
        with pytest.raises(ConfigError, match=r"trainer.zero=3\s+\(64.2\s+GiB"):
            dry_run(FSDP, "device.memory_gib=79", f"trainer.zero={zero}")


def test_fsdp_chat_made_a_sixteenth_of_the_published_mfu() -> None:
    """13.5 hours on 16 A100; 45.5 % was of one GPU's peak."""
    plan = dry_run(FSDP)
    tokens = plan.tokens_per_step * plan.config.trainer.steps
    assert tokens == 16_384_000
    assert mfu(6 * 70e9, tokens / (13.5 * 3600), 312e12, plan.world_size) == pytest.approx(0.0284, abs=1e-4)


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
    plan = dry_run(TRAINIUM)
    trainer, optim = plan.config.trainer, plan.config.optim
    assert (trainer.tp, trainer.pp, plan.dp, plan.sp, trainer.zero) == (8, 1, 16, True, 1)
    assert (plan.precision.name, plan.precision.stochastic, plan.num_microbatches) == ("bf16_sr", True, 16)
    assert (optim.lr, optim.min_lr, optim.warmup_steps, trainer.steps) == (3e-4, 3e-5, 10, 500)
    assert plan.tokens_per_step == 256 * 4096


@pytest.mark.parametrize(("machines", "dp"), [(1, 4), (2, 8), (4, 16)])
def test_dp_is_computed_where_their_table_says_4(machines: int, dp: int) -> None:
    """A dp that is stated must be right."""
    for stated in ("null", "4"):
        config = load_config(
            [f"experiment={TRAINIUM}", "data=mock", "init_from=null", f"trainer.dp={stated}"], CONF_DIR
        )
        if stated == "null" or dp == 4:
            assert resolve(config, 32 * machines).dp == dp
        else:
            with pytest.raises(ConfigError, match=f"write trainer.dp={dp}, or omit it"):
                resolve(config, 32 * machines)


def test_their_larger_models_are_overrides() -> None:
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
