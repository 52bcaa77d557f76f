"""Files of NeMo, neuronx-nemo-megatron and NxDT become ours: every key accounted for, the plan the one they meant."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_llama.config import Config, ConfigError, compose, resolve
from megatron_llama.config.nemo import as_yaml, check, command_line, convert, listing
from megatron_llama.config.nemo.convert import MEANINGLESS, RENAMED, TAKEN, Converted
from megatron_llama.config.nemo.precision import PRESETS
from megatron_llama.config.precision import PRECISIONS

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"

# Seven billion parameters as NeMo and neuronx-nemo-megatron write them: the data inside the model, some ${...}.
NEMO: dict[str, Any] = {
    "name": "seven",
    "trainer": {
        "devices": 32,
        "num_nodes": 1,
        "accelerator": "tpu",
        "precision": 32,
        "max_steps": 10000,
        "val_check_interval": 500,
        "limit_val_batches": 2,
        "log_every_n_steps": 5,
        "gradient_clip_val": 1.0,
    },
    "exp_manager": {
        "resume_if_exists": True,
        "checkpoint_callback_params": {
            "save_top_k": 3,
            "every_n_train_steps": 200,
            "model_parallel_size": "${multiply:${model.tensor_model_parallel_size}, 4}",
        },
    },
    "model": {
        "micro_batch_size": 1,
        "global_batch_size": 256,
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "encoder_seq_length": 4096,
        "max_position_embeddings": "${.encoder_seq_length}",
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 11008,
        "num_attention_heads": 32,
        "init_method_std": 0.021,
        "layernorm_epsilon": "1e-5",
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "position_embedding_type": "rope",
        "has_bias": False,
        "hidden_dropout": 0,
        "share_embeddings_and_output_weights": False,
        "tokenizer": {"library": "sentencepiece", "model": "/elsewhere/tokenizer.model"},
        "seed": 7,
        "activations_checkpoint_granularity": "full",
        "activations_checkpoint_method": "uniform",
        "sequence_parallel": True,
        "masked_softmax_fusion": True,
        "megatron_amp_O2": False,
        "wrap_with_zero": True,
        "zero_use_master_weight": False,
        "data": {
            "data_prefix": [1.0, "/data/book_text_document"],
            "splits_string": "980,10,10",
            "seq_length": "${model.encoder_seq_length}",
            "dataloader_type": "single",
            "fine_tuning": False,
            "train_ds": {"file_names": ["x.jsonl"], "shuffle": True},
        },
        "optim": {
            "name": "adamw",
            "lr": 3.0e-4,
            "betas": [0.9, 0.95],
            "weight_decay": 0.1,
            "sched": {"name": "CosineAnnealing", "warmup_steps": 2000, "constant_steps": 100, "min_lr": 3.0e-5},
        },
    },
}
# Seventy billion as NxDT writes them: layout, data and precision in sections of their own.
NXDT: dict[str, Any] = {
    "name": "seventy",
    "model_source": "megatron",
    "seed": 1234,
    "trainer": {"devices": 32, "num_nodes": 8, "max_steps": 20000, "gradient_clip_val": 1.0, "limit_val_batches": 0.0},
    "distributed_strategy": {
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel_size": 16,
        "virtual_pipeline_model_parallel_size": 1,
        "zero1": True,
        "sequence_parallel": True,
        "kv_replicator": 1,
    },
    "data": {"micro_batch_size": 1, "global_batch_size": 512, "data_prefix": "/data/all_text_document"},
    "model": {
        "encoder_seq_length": 4096,
        "num_layers": 80,
        "hidden_size": 8192,
        "ffn_hidden_size": 28672,
        "num_attention_heads": 64,
        "num_kv_heads": 8,
        "rope_theta": 500000.0,
        "activations_checkpoint_granularity": "selective",
        "activations_checkpoint_recompute": ["CoreAttention"],
        "fusions": {"softmax": True},
        "optim": {
            "name": "adamw",
            "lr": 1.5e-4,
            "betas": [0.9, 0.95],
            "weight_decay": 0.1,
            "sched": {"name": "LinearAnnealingWithWarmUp", "warmup_steps": 100, "max_steps": "${trainer.max_steps}"},
        },
    },
    "precision": {"type": "autocast", "xla_use_bf16": "0"},
    "compiler_flags": "--model-type transformer",
}


def written(where: Path, content: dict[str, Any]) -> Path:
    path = where / "theirs.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def changed(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with keys set; ``model__num_layers`` is model.num_layers, and ... takes a key out."""
    copy: dict[str, Any] = yaml.safe_load(yaml.safe_dump(content))
    for name, value in changes.items():
        *sections, key = name.split("__")
        place = copy
        for section in sections:
            place = place.setdefault(section, {})
        if value is ...:
            del place[key]
        else:
            place[key] = value
    return copy


def converted(where: Path, content: dict[str, Any], *overrides: str) -> Converted:
    return convert(written(where, content), overrides)


def experiment(where: Path, result: Converted, *overrides: str) -> Config:
    """What train.py makes of the written file."""
    path = where / "ours.yaml"
    path.write_text(as_yaml(result, "theirs.yaml"))
    return compose([f"experiment={path}", *overrides], CONF)


def kinds(result: Converted) -> dict[str, str]:
    return {one.key: one.kind for one in result.found}


def test_seven_billion_of_nemo(tmp_path):
    result = converted(tmp_path, NEMO)
    plan = resolve(experiment(tmp_path, result), result.world_size or 0, exists=lambda _: True)
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


def test_seventy_billion_of_nxdt(tmp_path):
    result = converted(tmp_path, NXDT)
    plan = resolve(experiment(tmp_path, result), result.world_size or 0, exists=lambda _: True)
    model, trainer, optim = plan.model, plan.config.trainer, plan.config.optim
    assert plan.world_size == 256 and plan.dp == 2 and plan.num_microbatches == 256
    assert (trainer.tp, trainer.pp, trainer.sp, trainer.zero, trainer.precision) == (8, 16, True, 1, "bf16")
    assert (trainer.global_batch_size, trainer.recompute, trainer.val_every_steps) == (512, "selective", None)
    assert (model.num_key_value_heads, model.num_attention_heads, model.rope_theta) == (8, 64, 500000.0)
    assert len(plan.stage_layers) == 16 and plan.stage_layers[0] == (0, 1, 2, 3, 4)
    assert optim.schedule["_target_"].endswith(".LinearDecay")
    assert (optim.warmup_steps, optim.min_lr, optim.constant_steps) == (100, 0.0, 0), "theirs ends at zero"
    assert plan.config.data.prefixes == ["/data/all_text_document"]


@pytest.mark.parametrize("content", [NEMO, NXDT], ids=["nemo", "nxdt"])
def test_every_key_is_accounted_for_once(tmp_path, content):
    def leaves(place: dict[str, Any], prefix: str = "") -> list[str]:
        return [
            key
            for name, value in place.items()
            for key in (leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"])
        ]

    result = converted(tmp_path, content)
    assert sorted(one.key for one in result.found) == sorted(leaves(content))
    assert not result.unsupported
    text = listing(result, "theirs.yaml")
    assert all(f"  {key}=" in text for key in leaves(content))


def test_what_a_key_becomes(tmp_path):
    found = kinds(converted(tmp_path, NEMO))
    assert found["model.hidden_size"] == found["model.optim.lr"] == found["model.micro_batch_size"] == TAKEN
    assert found["model.num_layers"] == found["model.tensor_model_parallel_size"] == RENAMED
    assert found["model.data.splits_string"] == found["trainer.max_steps"] == RENAMED
    assert found["model.masked_softmax_fusion"] == found["trainer.devices"] == found["model.activation"] == MEANINGLESS
    assert found["model.data.train_ds.shuffle"] == MEANINGLESS


@pytest.mark.parametrize("content", [NEMO, NXDT], ids=["nemo", "nxdt"])
def test_the_command_line_says_the_same_as_the_file(tmp_path, content):
    result = converted(
        tmp_path, content, 'model.tokenizer.model="/a b/t,k.model"', "model.tokenizer.library=sentencepiece"
    )
    line = shlex.split(command_line(result, CONF))
    assert line[:2] == ["python", "train.py"]
    by_line, by_file = compose(line[2:], CONF), experiment(tmp_path, result)
    assert by_file.data.tokenizer == "/a b/t,k.model"
    by_line.model.name, by_line.data.name = by_file.model.name, by_file.data.name  # labels
    assert by_line == by_file


def test_the_nearest_preset_shortens_the_line(tmp_path):
    assert "model=llama7b" in command_line(converted(tmp_path, NEMO), CONF)
    assert "num_attention_heads" not in command_line(converted(tmp_path, NEMO), CONF)
    assert "model=llama70b" in command_line(converted(tmp_path, NXDT), CONF)


def test_keys_that_are_read_together(tmp_path):
    def settings(content: dict[str, Any], *overrides: str) -> dict[str, Any]:
        return converted(tmp_path, content, *overrides).settings

    assert settings(changed(NXDT, distributed_strategy__zero1=...))["trainer.zero"] == 1, "NxDT's default"
    assert settings(NXDT, "distributed_strategy.zero1=False", "precision.type=fp32")["trainer.zero"] == 0
    assert settings(NEMO, "model.data.seq_length=1024")["data.seq_length"] == 1024, "what is trained"
    for override in (
        "trainer.limit_val_batches=1.0",
        "trainer.limit_val_batches=0",
        "trainer.val_check_interval=10001",
    ):
        assert settings(NEMO, override)["trainer.val_every_steps"] is None
    assert settings(NEMO, "exp_manager.checkpoint_callback_params.save_top_k=-1")["checkpoint.keep"] is None
    assert settings(NEMO, "trainer.gradient_clip_val=0")["optim.clip"] is None
    assert settings(NEMO, "model.optim.name=fused_adam")["optim.name"] == "adamw"
    scheduled = settings(NEMO, "+model.optim.sched.max_steps=5000")
    assert scheduled["optim.schedule.max_steps"] == 5000 and scheduled["trainer.steps"] == 10000
    ratio = settings(changed(NEMO, model__optim__sched__warmup_steps=...), "+model.optim.sched.warmup_ratio=0.01")
    assert ratio["optim.warmup_steps"] == 100


def test_a_schedule_of_another_length_reaches_the_plan(tmp_path):
    config = experiment(tmp_path, converted(tmp_path, NEMO, "+model.optim.sched.max_steps=5000"))
    plan = resolve(config, 8, exists=lambda _: True)
    assert plan.config.optim.schedule["max_steps"] == 5000 and plan.config.optim.schedule["warmup_steps"] == 2000


def test_nothing_of_the_default_preset_is_left(tmp_path):
    """llama_2m has two kv heads and initial weights of 0.05; a file that is silent about them means something else."""
    silent = changed(NEMO, model__init_method_std=..., model__layernorm_epsilon=...)
    model = experiment(tmp_path, converted(tmp_path, silent)).model
    assert (model.num_key_value_heads, model.initializer_range, model.rms_norm_eps) == (None, 0.02, 1e-5)


def test_a_command_line_goes_over_the_file(tmp_path):
    config = experiment(tmp_path, converted(tmp_path, NEMO), "trainer.steps=3", "optim=linear", "data=mock")
    assert config.trainer.steps == 3 and config.optim.schedule["_target_"].endswith(".LinearDecay")
    assert config.data.mock and config.trainer.global_batch_size == 256


def test_their_overrides_come_first(tmp_path):
    overrides = ["model.num_layers=40", "+model.use_flash_attention=False", "model.data.data_prefix=[0.5,/a,0.5,/b]"]
    result = converted(tmp_path, NEMO, *overrides, "model.vocab_size=50000", "model.encoder_seq_length=2048")
    config = experiment(tmp_path, result)
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
    ],
)
def test_what_would_change_the_result_is_not_passed_over(tmp_path, key, value):
    content = changed(NEMO, **{key: value, "trainer__accelerator": "gpu"}, model__wrap_with_zero=...)
    result = converted(tmp_path, content)
    name = key.replace("__", ".")
    assert name in [one.key for one in result.unsupported]
    assert f"NOT SUPPORTED {name}=" in as_yaml(result, "theirs.yaml")
    assert experiment(tmp_path, result).model.hidden_size == 4096, "the rest is still written"


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
def test_precisions_of_nemo_and_neuron(tmp_path, changes, precision):
    result = converted(tmp_path, changed(NEMO, **changes))
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
def test_precisions_of_nxdt(tmp_path, changes, precision):
    content = changed(NXDT, **{f"precision__{key}": value for key, value in changes.items()})
    result = converted(tmp_path, content)
    assert result.settings["trainer.precision"] == precision and not result.unsupported
    lost = converted(tmp_path, changed(content, precision__type="mixed_precision", distributed_strategy__zero1=False))
    assert [one.key for one in lost.unsupported] == ["precision.type"] and lost.settings["trainer.zero"] == 0


def test_every_precision_that_is_written_exists():
    assert set(PRESETS) <= set(PRECISIONS)


def test_what_is_left_open_is_said(tmp_path):
    bare = changed(NEMO, model__optim__weight_decay=..., model__optim__betas=..., model__data__data_prefix="???")
    result = converted(tmp_path, bare)
    text = " ".join(result.assumed)
    for words in (
        "model.vocab_size=32000",
        "optim.weight_decay=0.01",
        "optim.betas=[0.9,0.999]",
        "no dataset is named",
    ):
        assert words in text
    assert "train_setup.sh" in text, "their files don't tell bf16SR from fp32"
    experiment(tmp_path, result)
    (problem,) = check(tmp_path / "ours.yaml", CONF, result.world_size)
    assert problem.field == "data.prefixes"
    assert check(tmp_path / "ours.yaml", CONF, 20) == [problem], "20 devices are no whole number of tp * pp"


def test_a_shape_in_hugging_faces_config(tmp_path):
    shape = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672}
    shape |= {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "rope_theta": 500000.0}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    content = changed(NXDT, model_source="hf", model__model_config=str(tmp_path / "config.json"), model__num_layers=16)
    for key in ("ffn_hidden_size", "num_attention_heads", "num_kv_heads"):
        del content["model"][key]
    model = experiment(tmp_path, converted(tmp_path, content)).model
    assert (model.vocab_size, model.intermediate_size, model.num_key_value_heads) == (128256, 28672, 8)
    assert (model.num_hidden_layers, model.rms_norm_eps) == (16, 1e-6), "their file over the json, the json's defaults"
    with pytest.raises(ConfigError, match="can't be read here") as error:
        converted(tmp_path, content, "model.model_config=/gone/config.json")
    assert len(error.value.problems) == 1


def test_sentencepieces_count_is_read_where_the_model_is_here(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"some words {number}" for number in range(200)))
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(tmp_path / "t"), vocab_size=30)
    result = converted(tmp_path, NEMO, f"model.tokenizer.model={tmp_path / 't.model'}")
    assert result.settings["model.vocab_size"] == 30 and not any("vocab" in text for text in result.assumed)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "can't be read as YAML"),
        ("- 1\n- 2\n", "no model section"),
        ("model: llama\n", "no model section"),
        ("a: 1\na: 2\n", "can't be read as YAML"),
    ],
)
def test_files_that_are_none(tmp_path, text, words):
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        convert(path, ["=3"])
    assert len(error.value.problems) == 2 and words in str(error.value), "and the override's mistake with it"


def test_everything_that_is_missing_is_said_at_once(tmp_path):
    bare = {"model": {"hidden_size": 64, "activations_checkpoint_granularity": "some"}}
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, bare)
    told = {problem.field for problem in error.value.problems}
    assert told == {
        "model.num_layers",
        "model.num_attention_heads",
        "model.micro_batch_size",
        "model.global_batch_size",
        "trainer.max_steps",
        "model.encoder_seq_length",
        "model.optim.lr",
        "model.activations_checkpoint_granularity",
    }


def test_an_experiment_in_conf_goes_by_its_name(tmp_path):
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    (conf / "experiment").mkdir(exist_ok=True)
    (conf / "experiment" / "seven.yaml").write_text(as_yaml(converted(tmp_path, NEMO), "theirs.yaml"))
    for written_so in ("experiment=seven", "+experiment=seven"):
        config = compose([written_so, "trainer.steps=5000"], conf)
        assert config.model.hidden_size == 4096 and config.trainer.steps == 5000
    assert config == experiment(tmp_path, converted(tmp_path, NEMO), "trainer.steps=5000")
    with pytest.raises(ConfigError, match="write experiment=seven"):
        compose(["experiment=sevn"], conf)


def test_a_mistake_in_an_experiment_is_told(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("trainer:\n  stepz: 3\n")
    with pytest.raises(ConfigError) as error:
        compose([f"experiment={path}"], CONF)
    assert "trainer.stepz" in str(error.value)
    with pytest.raises(ConfigError, match="path of a .yaml file"):
        compose([f"experiment={tmp_path / 'gone.yaml'}"], CONF)


def run(*arguments: str, where: Path) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "scripts" / "import_config.py")
    return subprocess.run([sys.executable, script, *arguments], cwd=where, capture_output=True, text=True, timeout=60)


def test_the_script(tmp_path):
    written(tmp_path, NEMO)
    done = run("theirs.yaml", "-o", "out/ours.yaml", "model.num_layers=16", where=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    for words in (
        "taken (",
        "renamed (",
        "without meaning here (",
        "experiment=out/ours.yaml",
        "model.num_hidden_layers=16",
    ):
        assert words in done.stdout
    again = run("theirs.yaml", "-o", "out/ours.yaml", "model.activation=gelu", where=tmp_path)
    assert again.returncode == 1 and "not supported: the training will differ (1)" in again.stdout
    dry = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--dry-run", "experiment=out/ours.yaml", "data=mock", "trainer.dp=4"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert dry.returncode == 0 and "pp 1 × dp 4 × tp 8 = 32" in dry.stdout, dry.stderr


def test_the_script_refuses(tmp_path):
    theirs = written(tmp_path, NEMO)
    before = theirs.read_text()
    over = run("theirs.yaml", "-o", "theirs.yaml", where=tmp_path)
    assert over.returncode == 2 and "not made by this script" in over.stderr and theirs.read_text() == before
    gone = run("gone.yaml", "-o", "x.yaml", where=tmp_path)
    assert gone.returncode == 2 and "No such file" in gone.stderr and "Traceback" not in gone.stderr
    assert not (tmp_path / "x.yaml").exists()
