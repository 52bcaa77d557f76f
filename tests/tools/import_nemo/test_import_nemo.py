"""Converted configs of NeMo, neuronx-nemo-megatron and NxDT: all keys are listed and plans are equivalent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.config import ConfigError, load_config
from megatron_llama.config.precision import PRECISIONS
from megatron_llama.plan import resolve
from megatron_llama.tools.import_nemo.cli import as_yaml, command_line, format_listing
from megatron_llama.tools.import_nemo.nemo_keys import PRESETS
from megatron_llama.tools.import_nemo.read_yaml import MEANINGLESS, RENAMED, TAKEN, UNSUPPORTED
from tests.paths import CONF
from tests.tools.import_nemo.nemo_files import (
    LAUNCHER,
    NEMO,
    NXDT,
    import_dict,
    kinds,
    load_converted,
    with_changes,
)


def test_seven_billion_of_nemo(tmp_path: Path) -> None:
    result = import_dict(tmp_path, NEMO)
    plan = resolve(load_converted(tmp_path, result), result.world_size or 0, exists=lambda _: True)
    model, trainer, optim, data = plan.model, plan.config.trainer, plan.config.optim, plan.config.data
    assert plan.world_size == 32 and plan.dp == 4 and plan.num_microbatches == 64
    assert (trainer.tp, trainer.pp, trainer.vpp, trainer.sp, trainer.zero) == (8, 1, 1, True, 1)
    assert (trainer.micro_batch_size, trainer.global_batch_size, trainer.steps, trainer.seed) == (1, 256, 10000, 7)
    assert (trainer.recompute, trainer.precision) == ("full", "fp32")
    assert (trainer.val_every_steps, trainer.val_steps) == (500, 2)
    assert (model.num_hidden_layers, model.hidden_size, model.intermediate_size) == (32, 4096, 11008)
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (32, 32, 128)
    assert (model.vocab_size, model.max_position_embeddings, model.tie_word_embeddings) == (32000, 4096, False)
    assert (model.rope_theta, model.rms_norm_eps, model.initializer_range) == (10000.0, 1e-5, 0.021)
    assert (optim.name, optim.lr, optim.min_lr, optim.betas) == ("adamw", 3e-4, 3e-5, [0.9, 0.95])
    assert (optim.weight_decay, optim.clip, optim.warmup_steps, optim.constant_steps) == (0.1, 1.0, 2000, 100)
    assert optim.schedule["_target_"].endswith(".CosineAnnealing") and optim.schedule["constant_steps"] == 100
    assert (data.prefixes, data.seq_length) == ([1.0, "/data/book_text_document"], 4096)
    assert (data.split, data.tokenizer) == ("980,10,10", "/elsewhere/tokenizer.model")
    assert (plan.config.checkpoint.keep, plan.config.checkpoint.every_steps) == (3, 200)
    assert plan.config.logging.every_steps == 5


def test_seventy_billion_of_nxdt(tmp_path: Path) -> None:
    result = import_dict(tmp_path, NXDT)
    plan = resolve(load_converted(tmp_path, result), result.world_size or 0, exists=lambda _: True)
    model, trainer, optim = plan.model, plan.config.trainer, plan.config.optim
    assert plan.world_size == 256 and plan.dp == 2 and plan.num_microbatches == 256
    assert (trainer.tp, trainer.pp, trainer.sp, trainer.zero, trainer.precision) == (8, 16, True, 1, "bf16")
    assert (trainer.global_batch_size, trainer.recompute, trainer.val_every_steps) == (512, "selective", None)
    assert (model.num_key_value_heads, model.num_attention_heads, model.rope_theta) == (8, 64, 500000.0)
    assert len(plan.stage_layers) == 16 and plan.stage_layers[0] == (0, 1, 2, 3, 4)
    assert optim.schedule["_target_"].endswith(".LinearDecay")
    assert (optim.warmup_steps, optim.min_lr, optim.constant_steps) == (100, 0.0, 0), "the schedule there ends at zero"
    assert plan.config.data.prefixes == ["/data/all_text_document"]


@pytest.mark.parametrize("content", [NEMO, NXDT], ids=["nemo", "nxdt"])
def test_every_key_is_accounted_for_once(tmp_path: Path, content: dict[str, Any]) -> None:
    def leaves(section: dict[str, Any], prefix: str = "") -> list[str]:
        return [
            key
            for name, value in section.items()
            for key in (leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"])
        ]

    result = import_dict(tmp_path, content)
    assert sorted(item.key for item in result.conversions) == sorted(leaves(content))
    assert not result.unsupported
    text = format_listing(result, "theirs.yaml")
    assert all(f"  {key}=" in text for key in leaves(content))


def test_kinds_of_keys(tmp_path: Path) -> None:
    kind_of_key = kinds(import_dict(tmp_path, NEMO))
    assert (
        kind_of_key["model.hidden_size"]
        == kind_of_key["model.optim.lr"]
        == kind_of_key["model.micro_batch_size"]
        == TAKEN
    )
    assert kind_of_key["model.num_layers"] == kind_of_key["model.tensor_model_parallel_size"] == RENAMED
    assert kind_of_key["model.data.splits_string"] == kind_of_key["trainer.max_steps"] == RENAMED
    assert (
        kind_of_key["model.masked_softmax_fusion"]
        == kind_of_key["trainer.devices"]
        == kind_of_key["model.activation"]
        == MEANINGLESS
    )
    assert kind_of_key["model.data.train_ds.shuffle"] == MEANINGLESS


@pytest.mark.parametrize("content", [NEMO, NXDT], ids=["nemo", "nxdt"])
def test_the_command_line_equals_the_file(tmp_path: Path, content: dict[str, Any]) -> None:
    result = import_dict(
        tmp_path, content, 'model.tokenizer.model="/a b/t,k.model"', "model.tokenizer.library=sentencepiece"
    )
    line = command_line(result, CONF)
    assert line[:2] == ["python", "train.py"]
    by_line, by_file = load_config(line[2:], CONF), load_converted(tmp_path, result)
    assert by_file.data.tokenizer == "/a b/t,k.model"
    by_line.model.name, by_line.data.name = by_file.model.name, by_file.data.name  # labels
    assert by_line == by_file


def test_the_nearest_preset_shortens_the_command(tmp_path: Path) -> None:
    assert "model=llama7b" in command_line(import_dict(tmp_path, NEMO), CONF)
    assert "num_attention_heads" not in command_line(import_dict(tmp_path, NEMO), CONF)
    assert "model=llama70b" in command_line(import_dict(tmp_path, NXDT), CONF)


def test_dependent_keys(tmp_path: Path) -> None:
    def settings(content: dict[str, Any], *overrides: str) -> dict[str, Any]:
        return import_dict(tmp_path, content, *overrides).settings

    assert settings(with_changes(NXDT, distributed_strategy__zero1=...))["trainer.zero"] == 1, "NxDT's default"
    assert settings(NXDT, "distributed_strategy.zero1=False", "precision.type=fp32")["trainer.zero"] == 0
    assert settings(NEMO, "model.data.seq_length=1024")["data.seq_length"] == 1024, "the length of samples"
    for override in (
        "trainer.limit_val_batches=0",
        "trainer.limit_val_batches=0.0",
        "trainer.val_check_interval=1.0",
        "trainer.val_check_interval=0.5",
        "trainer.val_check_interval=10001",
        "trainer.max_steps=''",
    ):
        assert settings(NEMO, override)["trainer.val_every_steps"] is None
    assert settings(NEMO, "exp_manager.checkpoint_callback_params.save_top_k=-1")["checkpoint.keep"] is None
    none = settings(NEMO, "exp_manager.checkpoint_callback_params.save_top_k=0")
    assert none["checkpoint.every_minutes"] == 0 and "checkpoint.every_steps" not in none, "only the last one"
    assert settings(NEMO, "trainer.gradient_clip_val=0")["optim.clip"] is None
    assert settings(NEMO, "model.optim.name=fused_adam")["optim.name"] == "adamw"
    scheduled = settings(NEMO, "+model.optim.sched.max_steps=5000")
    assert scheduled["optim.schedule.max_steps"] == 5000 and scheduled["trainer.steps"] == 10000
    ratio = settings(with_changes(NEMO, model__optim__sched__warmup_steps=...), "+model.optim.sched.warmup_ratio=0.01")
    assert ratio["optim.warmup_steps"] == 100


@pytest.mark.parametrize(
    ("interval", "limit", "expected"),
    [
        (100, 2, (100, 2)),
        (100, 1, (100, 1)),  # one batch
        (100, 1.0, (100, None)),  # the whole set
        (100, 0.5, (100, None)),
        (1, 1, (1, 1)),  # after every step
        (1.0, 1, (None, None)),  # once in an epoch
        (0.25, 2, (None, None)),
        (100, 0, (None, None)),
        (100, None, (100, None)),
    ],
)
def test_integers_are_steps_and_floats_are_shares(
    tmp_path: Path, interval: Any, limit: Any, expected: tuple[int | None, int | None]
) -> None:
    result = import_dict(
        tmp_path, with_changes(NEMO, trainer__val_check_interval=interval, trainer__limit_val_batches=limit)
    )
    settings = result.settings
    assert (settings.get("trainer.val_every_steps"), settings.get("trainer.val_steps")) == expected
    assert ("share of" in "\n".join(result.assumed)) == (
        isinstance(interval, float) or (limit != 0 and expected[1] is None)
    )


@pytest.mark.parametrize(
    ("devices", "world_size"), [(8, 8), ("8", 8), ([0, 2, 5], 3), ("0,2", 2), (-1, None), ("auto", None), (True, None)]
)
def test_devices_of_all_kinds(tmp_path: Path, devices: Any, world_size: int | None) -> None:
    content = with_changes(NEMO, trainer__devices=devices, trainer__num_nodes=1)
    assert import_dict(tmp_path, content).world_size == world_size


def test_keys_of_lightning_that_change_the_training(tmp_path: Path) -> None:
    for key, same, other in (
        ("gradient_clip_algorithm", "norm", "value"),
        ("limit_train_batches", 1.0, 1),
        ("overfit_batches", 0.0, 10),
        ("fast_dev_run", False, 5),
        ("accumulate_grad_batches", 1, 4),
    ):
        assert kinds(import_dict(tmp_path, NEMO, f"+trainer.{key}={same}"))[f"trainer.{key}"] == MEANINGLESS
        assert kinds(import_dict(tmp_path, NEMO, f"+trainer.{key}={other}"))[f"trainer.{key}"] == UNSUPPORTED
    with pytest.raises(ConfigError, match="is unlimited in Lightning"):
        import_dict(tmp_path, NEMO, "trainer.max_steps=-1")
    assert "logging.every_steps" not in import_dict(tmp_path, NEMO, "++trainer.log_every_n_steps=0").settings
    assert import_dict(tmp_path, LAUNCHER, "++trainer.precision=null").settings["trainer.precision"] == "fp32"


def test_a_schedule_of_another_length(tmp_path: Path) -> None:
    config = load_converted(tmp_path, import_dict(tmp_path, NEMO, "+model.optim.sched.max_steps=5000"))
    plan = resolve(config, 8, exists=lambda _: True)
    assert plan.config.optim.schedule["max_steps"] == 5000 and plan.config.optim.schedule["warmup_steps"] == 2000


def test_the_default_preset_is_not_used(tmp_path: Path) -> None:
    """llama_2m has two kv heads and an initializer range of 0.05, which must not be used."""
    silent = with_changes(NEMO, model__init_method_std=..., model__layernorm_epsilon=...)
    model = load_converted(tmp_path, import_dict(tmp_path, silent)).model
    assert (model.num_key_value_heads, model.initializer_range, model.rms_norm_eps) == (None, 0.02, 1e-5)


def test_overrides_have_precedence_over_the_file(tmp_path: Path) -> None:
    config = load_converted(tmp_path, import_dict(tmp_path, NEMO), "trainer.steps=3", "optim=linear", "data=mock")
    assert config.trainer.steps == 3 and config.optim.schedule["_target_"].endswith(".LinearDecay")
    assert config.data.mock and config.trainer.global_batch_size == 256


def test_overrides_of_the_source_are_applied(tmp_path: Path) -> None:
    overrides = ["model.num_layers=40", "+model.use_flash_attention=False", "model.data.data_prefix=[0.5,/a,0.5,/b]"]
    result = import_dict(tmp_path, NEMO, *overrides, "model.vocab_size=50000", "model.encoder_seq_length=2048")
    config = load_converted(tmp_path, result)
    assert (config.model.num_hidden_layers, config.model.vocab_size, config.data.seq_length) == (40, 50000, 2048)
    assert config.model.max_position_embeddings == 2048, "${.encoder_seq_length} follows"
    assert config.data.prefixes == [0.5, "/a", 0.5, "/b"] and not any("vocab" in text for text in result.assumed)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model__activation", "gelu"),
        ("model__normalization", "layernorm"),
        ("model__position_embedding_type", "learned_absolute"),
        ("model__rotary_percentage", 0.5),
        ("model__has_bias", True),
        ("model__hidden_dropout", 0.1),
        ("model__use_scaled_init_method", False),
        ("model__do_layer_norm_weight_decay", True),
        ("model__fp8", True),
        ("model__data__reset_attention_mask", True),
        ("model__data__dataloader_type", "cyclic"),
        ("model__data__fine_tuning", True),
        ("model__optim__name", "lion"),
        ("model__optim__sched__name", "SquareAnnealing"),
        ("model__resume_from_checkpoint", "/x.ckpt"),
        ("model__something_new", 3),
        ("trainer__precision", "16-mixed"),
        ("model__data__data_prefix", {"train": ["/a"], "validation": ["/b"]}),
        ("model__rampup_batch_size", [32, 32, 1000]),
        ("model__name", "megatron_gemma2"),
        ("model__restore_from_path", "/x.nemo"),
        ("model__peft", {"peft_scheme": "lora", "lora_tuning": {"adapter_dim": 32}}),
        ("model__kd_teacher_restore_from_path", None),
        ("model__data__mock_dataset", True),
        ("exp_manager__create_early_stopping_callback", True),
    ],
)
def test_unsupported_values_are_reported(tmp_path: Path, key: str, value: Any) -> None:
    content = with_changes(NEMO, **{key: value, "trainer__accelerator": "gpu"}, model__wrap_with_zero=...)
    result = import_dict(tmp_path, content)
    name = key.replace("__", ".") + (".peft_scheme" if key.endswith("peft") else "")
    others = [item.key for item in result.unsupported if item.key not in (name, "model.data.train_ds.file_names")]
    assert name in [item.key for item in result.unsupported] and not others, "no other unsupported keys"
    assert f"NOT SUPPORTED {name}=" in as_yaml(result, "theirs.yaml")
    assert load_converted(tmp_path, result).model.hidden_size == 4096, "the rest is written"


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({}, "fp32"),
        ({"model__zero_use_master_weight": True}, "fp32_ZeroOptMaster"),
        ({"model__zero_use_master_weight": True, "model__zero_use_fp32_grad_accum": True}, "fp32_ZeroOptMasterGradAcc"),
        ({"model__megatron_amp_O2": True, "model__wrap_with_zero": False}, "megatron_amp_O2"),
        ({"model__optim__name": "adamw_fp32OptState", "model__wrap_with_zero": False}, "fp32_OptStates"),
        ({"trainer__precision": "bf16SR"}, "bf16SR"),
        ({"trainer__accelerator": "gpu", "model__wrap_with_zero": None}, "fp32"),
        ({"trainer__accelerator": "gpu", "model__wrap_with_zero": None, "trainer__precision": "bf16-mixed"}, "bf16"),
        (
            {
                "trainer__accelerator": "gpu",
                "model__wrap_with_zero": None,
                "trainer__precision": "bf16",
                "model__megatron_amp_O2": True,
            },
            "megatron_amp_O2",
        ),
    ],
)
def test_precisions_of_nemo_and_neuron(tmp_path: Path, changes: dict[str, Any], precision: str) -> None:
    result = import_dict(tmp_path, with_changes(NEMO, **changes))
    assert result.settings["trainer.precision"] == precision and not result.unsupported


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({"type": "bf16SR"}, "bf16SR"),
        ({"type": "fp32"}, "fp32"),
        ({"type": "autocast"}, "bf16"),
        ({"type": "mixed_precision"}, "fp32_ZeroOptMasterGradAcc"),
        ({"type": "mixed_precisionSR"}, "fp32_ZeroOptMasterGradAcc"),
        ({"type": "manual", "xla_use_bf16": "1", "neuron_rt_stochastic_rounding_en": "1"}, "bf16SR"),
        ({"type": "manual", "xla_downcast_bf16": "1", "master_weights": True}, "fp32_ZeroOptMaster"),
        ({"type": "manual"}, "fp32"),
    ],
)
def test_precisions_of_nxdt(tmp_path: Path, changes: dict[str, Any], precision: str) -> None:
    content = with_changes(NXDT, **{f"precision__{key}": value for key, value in changes.items()})
    result = import_dict(tmp_path, content)
    assert result.settings["trainer.precision"] == precision and not result.unsupported
    lost = import_dict(
        tmp_path, with_changes(content, precision__type="mixed_precision", distributed_strategy__zero1=False)
    )
    assert [item.key for item in lost.unsupported] == ["precision.type"] and lost.settings["trainer.zero"] == 0


def test_all_presets_exist() -> None:
    assert set(PRESETS) <= set(PRECISIONS)


def test_launcher_configs_with_open_references(tmp_path: Path) -> None:
    result = import_dict(tmp_path, LAUNCHER)
    assert not result.unsupported
    assert result.settings["model.intermediate_size"] == 16384, "NeMo's multiply"
    assert result.settings["data.prefixes"] == [] and "run.dir" not in result.settings
    omitted = [text for text in result.assumed if "is omitted" in text]
    assert len(omitted) == 2 and "${data_dir}/my-llama_00_text_document" in omitted[1], omitted
    assert "data_dir=PATH" in omitted[1] and "exp_manager.explicit_log_dir" in omitted[0]
    assert "${data_dir}" in format_listing(result, "theirs.yaml"), "the listing has the original text"
    complete = import_dict(tmp_path, LAUNCHER, "data_dir=/data")
    assert complete.settings["data.prefixes"][1] == "/data/my-llama_00_text_document" and not complete.unsupported
    assert complete.settings["data.document_mask"] is True and complete.settings["data.eod_mask_loss"] is False
    plan = resolve(load_converted(tmp_path, complete), 8, exists=lambda _: True)
    assert plan.config.data.prefixes[3] == "/data/my-llama_01_text_document"


def test_secrets_stay_unresolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    monkeypatch.setenv("SCRATCH", "/scratch")
    for name, shown in (("WANDB_API_KEY", "${oc.env:WANDB_API_KEY}"), ("SCRATCH", "/scratch/runs")):
        folder = f"${{oc.env:{name}}}/runs"
        result = import_dict(tmp_path, with_changes(NEMO, exp_manager__explicit_log_dir=folder))
        written = format_listing(result, "theirs.yaml") + as_yaml(result, "theirs.yaml") + str(result)
        assert shown in written and "hunter2" not in written


def test_missing_keys_are_assumed_and_reported(tmp_path: Path) -> None:
    def assumed(content: dict[str, Any], *overrides: str) -> tuple[dict[str, Any], str]:
        result = import_dict(tmp_path, content, *overrides)
        return result.settings, "\n".join(result.assumed)

    settings, text = assumed(LAUNCHER)
    assert "model.position_embedding_type as in Llama" in text and "NeMo's default is learned_absolute" in text
    assert "model.bias as" in text and "model.activation as" not in text
    assert settings["model.tie_word_embeddings"] is True and "tie_word_embeddings=true, NeMo's default" in text
    assert settings["model.vocab_size"] == 128256 and "llama3" in text
    assert settings["checkpoint.every_steps"] == 2000 and "saves at each validation" in text
    untied, text = assumed(LAUNCHER, "+model.share_embeddings_and_output_weights=false")
    assert untied["model.tie_word_embeddings"] is False and "tie_word" not in text
    for override in ("trainer.limit_val_batches=0", "trainer.accelerator=tpu"):
        assert "checkpoint.every_steps" not in assumed(LAUNCHER, override)[0], "no checkpoints there"
    stepped, text = assumed(LAUNCHER, "+exp_manager.checkpoint_callback_params.every_n_train_steps=50")
    assert stepped["checkpoint.every_steps"] == 50 and "each validation" not in text
    timed = import_dict(tmp_path, LAUNCHER, "+exp_manager.checkpoint_callback_params.train_time_interval=600")
    assert kinds(timed)["exp_manager.checkpoint_callback_params.train_time_interval"] == RENAMED
    assert timed.settings["checkpoint.every_minutes"] == 10 and "checkpoint.every_steps" not in timed.settings


def test_initial_weights_of_nxdts_hugging_face_models_differ(tmp_path: Path) -> None:
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 32, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    content = with_changes(NXDT, model_source="hf", model__model_config=str(tmp_path / "config.json"))
    (differs,) = import_dict(tmp_path, content).unsupported
    assert differs.key == "model_source" and "o_proj and down_proj" in differs.why
    assert kinds(import_dict(tmp_path, NXDT))["model_source"] == MEANINGLESS


def test_document_mask_needs_both_keys(tmp_path: Path) -> None:
    half = kinds(import_dict(tmp_path, LAUNCHER, "model.data.reset_position_ids=false"))
    assert half["model.data.reset_attention_mask"] == UNSUPPORTED


def test_newer_keys_without_effect(tmp_path: Path) -> None:
    newer = with_changes(
        LAUNCHER,
        model__name="te_gpt",
        model__drop_layers=[],
        model__optim__sched__monitor="val_loss",
        model__reset_lr=False,
        model__cpu_offloading_num_layers="${sum:${.num_layers},-1}",
        model__sharp=True,
        model__enable_megatron_timers=True,
        model__nccl_communicator_config_path="/x.yaml",
        model__data__num_dataset_builder_threads=4,
        exp_manager__checkpoint_callback_params__save_last=False,
        exp_manager__checkpoint_callback_params__async_save=False,
        exp_manager__early_stopping_callback_params={"patience": 10},
    )
    result = import_dict(tmp_path, newer, "data_dir=/data")
    assert not result.unsupported
    assert result.settings["checkpoint.asynchronous"] is False and "checkpoint.save_last" not in result.settings


@pytest.mark.parametrize(
    ("key", "value", "setting", "converted"),
    [
        ("model.context_parallel_size", "2", "trainer.cp", 2),
        ("distributed_strategy.context_parallel_size", "2", "trainer.cp", 2),
        ("exp_manager.create_wandb_logger", "true", "logging.wandb", "online"),
        ("exp_manager.wandb_logger_kwargs.project", "ours", "logging.wandb_project", "ours"),
    ],
)
def test_keys_of_features_that_exist(key: str, value: str, setting: str, converted: Any, tmp_path: Path) -> None:
    result = import_dict(tmp_path, NXDT if key.startswith("distributed") else NEMO, f"++{key}={value}")
    assert result.settings[setting] == converted and not result.unsupported


def test_sliding_window_keys(tmp_path: Path) -> None:
    for key in ("sliding_window", "sliding_window_size"):
        result = import_dict(tmp_path, NEMO, f"+model.{key}=1024")
        assert load_converted(tmp_path, result).model.sliding_window == 1024 and not result.unsupported
    assert kinds(import_dict(tmp_path, NEMO, "+model.window_size=[1024,0]"))["model.window_size"] == UNSUPPORTED


def test_missing_dropout_is_reported(tmp_path: Path) -> None:
    text = "\n".join(import_dict(tmp_path, with_changes(NEMO, model__hidden_dropout=...)).assumed)
    assert "model.hidden_dropout as in Llama" in text and "NeMo's default is 0.1" in text
    assert "model.attention_dropout" in text
    assert "dropout" not in "\n".join(import_dict(tmp_path, NEMO, "+model.attention_dropout=0").assumed)


def test_fine_tuning_datasets_are_reported(tmp_path: Path) -> None:
    """NeMo configs have fine-tuning datasets without a switch; neuronx-nemo-megatron configs have both."""
    without_switch = with_changes(NEMO, model__data__fine_tuning=...)
    for content in (without_switch, with_changes(NEMO, model__data__fine_tuning=True)):
        kind_of_key = kinds(import_dict(tmp_path, content))
        assert kind_of_key["model.data.train_ds.file_names"] == UNSUPPORTED
        assert kind_of_key["model.data.train_ds.shuffle"] == MEANINGLESS
    assert not import_dict(tmp_path, with_changes(without_switch, model__data__train_ds=...)).unsupported
    sizes = {"num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"}
    shapeless = with_changes(
        without_switch, **{f"model__{size}": ... for size in sizes}, model__restore_from_path="???"
    )
    with pytest.raises(ConfigError, match=r"init_from=FOLDER") as error:
        import_dict(tmp_path, shapeless)
    assert [problem.field for problem in error.value.problems] == ["model"]
    (started,) = import_dict(tmp_path, NEMO, "+model.restore_from_path=/x.nemo").unsupported
    assert "init_from=FOLDER" in started.why
    scheme = import_dict(
        tmp_path, with_changes(NEMO, model__peft={"peft_scheme": None, "lora_tuning": {"adapter_dim": 32}})
    )
    assert not scheme.unsupported, "full fine-tuning"


def test_interpolated_positions_are_linear_scaling(tmp_path: Path) -> None:
    plain = import_dict(tmp_path, with_changes(NEMO, model__seq_len_interpolation_factor=1))
    assert load_converted(tmp_path, plain).model.rope_scaling is None
    interpolated = import_dict(tmp_path, with_changes(NEMO, model__seq_len_interpolation_factor=4))
    scaling = load_converted(tmp_path, interpolated).model.rope_scaling
    assert scaling is not None and (scaling.rope_type, scaling.factor) == ("linear", 4.0)
