"""Values outside a setting's own limits are rejected, and the nearest legal values are accepted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron_llama.config import Config
from megatron_llama.config.problems import format_problems
from megatron_llama.config.settings_table import check_limits, settings_by_name
from tests.config.helpers import as_typed, everything_exists, make, problems_of
from tests.golden import GoldenFiles

# Written by hand, not read from the settings, so that a limit that moves is noticed.
COUNTS = """
    model.max_position_embeddings model.rope_scaling.original_max_position_embeddings model.sliding_window
    model.sparse_attention.block model.sparse_attention.num_local_blocks
    model.sparse_attention.num_global_blocks data.seq_length trainer.tp trainer.cp trainer.pp trainer.vpp
    trainer.random_ltd.min_value trainer.random_ltd.max_value trainer.random_ltd.require_steps
    trainer.random_ltd.seq_per_step trainer.shard_group trainer.micro_batch_size trainer.global_batch_size
    trainer.epochs trainer.recompute_every trainer.mlp_chunks trainer.spike_rewinds trainer.val_steps
    optim.freeze_step finetune.lora_rank logging.every_steps logging.sample_tokens checkpoint.every_steps
    checkpoint.keep checkpoint.keep_every checkpoint.max_failed_saves
"""
COUNTS_FROM_0 = """
    trainer.steps trainer.skip_nonfinite_steps trainer.check_copies_every trainer.max_restarts
    trainer.val_every_steps optim.warmup_steps optim.constant_steps
"""
POSITIVE = """
    model.rms_norm_eps model.rope_theta model.initializer_range model.rope_scaling.low_freq_factor
    model.rope_scaling.high_freq_factor model.rope_scaling.attention_factor model.rope_scaling.beta_fast
    trainer.spike_factor trainer.hang_timeout_seconds optim.lr optim.eps
    optim.matrix_lr optim.qk_clip optim.clip finetune.lora_alpha finetune.beta device.peak_tflops device.memory_gib
"""
FACTORS = [[0.0], [1.0, -1.0], [float("inf")], [float("nan")], [1.0] * 8193]
Bounds = tuple[list[Any], list[Any]]
"""Values just outside of a limit, and values just inside."""

BOUNDS: dict[str, Bounds] = {
    **dict.fromkeys(COUNTS.split(), ([0, -1], [1, 2])),
    **dict.fromkeys(COUNTS_FROM_0.split(), ([-1], [0, 1])),
    **dict.fromkeys(POSITIVE.split(), ([0.0, -1e-9], [1e-9, 0.5])),
    "model.vocab_size": ([1, 0, 10**9 + 1], [2, 10**9]),
    "model.hidden_size": ([0, -1, 10**7 + 1], [1, 2, 10**7]),
    "model.intermediate_size": ([0, -1, 10**9 + 1], [1, 2, 10**9]),
    "model.num_hidden_layers": ([0, -1, 10_001], [1, 2, 10_000]),
    "model.num_attention_heads": ([0, -1, 10_001], [1, 2, 10_000]),
    "model.num_key_value_heads": ([0, -1, 10_001], [1, 2, 10_000]),
    "model.head_dim": ([0, -1, 10**6 + 1], [1, 2, 10**6]),
    "data.cache_gib": ([-1e-9], [0.0, 1.0]),
    "trainer.z_loss": ([-1e-9], [0.0, 1e-4]),
    "trainer.float8": (["fp8", ""], ["tensorwise", "rowwise"]),
    "model.rope_scaling.rope_type": (["proportional", "su"], ["llama3", "linear", "dynamic", "yarn", "longrope"]),
    "model.rope_scaling.factor": ([0.99, 0.0], [1.0, 1.01]),
    "model.rope_scaling.beta_slow": ([-1e-9], [0.0, 1.0]),
    "model.rope_scaling.mscale": ([-1e-9], [0.0, 0.707]),
    "model.rope_scaling.mscale_all_dim": ([-1e-9], [0.0, 1.0]),
    "model.rope_scaling.short_factor": (FACTORS, [[1.0], [1e-9, 2.0], [1.0] * 8192]),
    "model.rope_scaling.long_factor": (FACTORS, [[1.0], [1e-9, 2.0], [1.0] * 8192]),
    "model.model_type": (["qwen", "gpt2", ""], ["llama", "qwen2", "qwen3", "olmo2"]),
    "data.kind": (["chat"], ["pretrain", "sft"]),
    "data.prefixes": (
        [["0.5"], [0.5, "a", "b"], [0.5, "a", 0.5], ["a", 0.5], [0, "a"], [-1, "a", 2, "b"], [" "]],
        [[], ["a"], ["a", "b"], [0.5, "a", "0.5", "b"]],
    ),
    "data.schedule": (
        [
            [{"samples": 0, "prefixes": ["a"]}],
            [{"samples": 1.5, "prefixes": ["a"]}],
            [{"samples": 5, "prefixes": []}],
            [{"samples": 5, "prefixes": [0.5, "a", "b"]}],
            [{"samples": 5}],
            [{"samples": 5, "prefixes": ["a"], "weights": [1]}],
            [{"samples": 5, "prefixes": ["a"]}, {"samples": 5, "prefixes": ["b"]}],
            ["a"],
        ],
        [[], [{"samples": 5, "prefixes": ["a"]}, {"samples": 6, "prefixes": [0.5, "a", "0.5", "b"]}]],
    ),
    "data.validation_prefixes": (
        [[" "], [{"a/b": "x"}], [{"a": []}], [{"a": None}], [{"a": "x"}, "y"], [{"a": "x"}, {"A": "y"}]],
        [[], ["a", "b"], [{"a.b-c_1": "x"}, {"n" * 40: ["x", "y"]}]],
    ),
    "data.chat_template": (["llama", ""], ["own", "chatml", "prompter", "dialogue", "plain"]),
    "data.format": (["pairs"], ["auto", "text", "gsm8k"]),
    "data.response_marker": ([" "], ["a", None]),
    "data.template": (["mnli"], ["qnli", "sst2", None]),
    "data.split": (["969,30", "a,b,c", "0,1,1", "1,-1,1", ""], ["1,0,0", "0.9,0.05,0.05"]),
    "trainer.cp_comm": (["ring", ""], ["all_gather", "ulysses"]),
    "trainer.zero": ([-1, 4], [0, 1, 2, 3]),
    "trainer.dp": ([0, -1, 1_000_001], [1, 2, 1_000_000]),
    "trainer.grad_reduce": (["fp32", "int4"], ["bf16", "int8"]),
    "trainer.param_gather": (["bf16"], ["int8"]),
    "trainer.reduce_group": ([1, 0], [2, 4]),
    "trainer.secondary_group": ([1, 0], [2, 4]),
    "trainer.batch_schedule": (
        [[[0, 8]], [[8, 0]], [[8]], [8, 16], [[16, 8], [16, 4]], [[1.5, 8]], [["a", 8]], [[8, True]]],
        [[], [[1, 1]], [[8, 16], [9, 4]]],
    ),
    "trainer.seed": ([-1, 2**31], [0, 2**31 - 1]),
    "trainer.precision": (
        ["fp16", "", "BF16SR"],
        ["fp32", "bf16", "bf16_sr", "bf16_pure", "bf16SR", "fp32_OptStates", "fp32_ZeroOptMaster"]
        + ["fp32_ZeroOptMasterGradAcc", "megatron_amp_O2"],
    ),
    "trainer.recompute": (["some"], ["none", "elementwise", "selective", "full"]),
    "trainer.offload": ([["weights"], ["optimizer", "optimizer"]], [[], ["activations", "optimizer"]]),
    "trainer.spike_guard": (["clip", "on"], ["off", "skip", "rewind"]),
    "trainer.spike_window": ([0, 3], [4, 128]),
    "trainer.profile": ([[3], [0, 1], [3, 2], [1, 2, 3]], [None, [1, 1], [3, 5]]),
    "optim.name": (["adagrad"], ["adamw", "adam", "sgd", "onebit_adam", "muon"]),
    "optim.state_bits": ([4, 16, 32], [8, None]),
    "optim.min_lr": ([-1e-9], [0.0, 1e-9]),
    "optim.warmup_ratio": ([-0.1, 1.1], [0, 0.03, 1]),
    "optim.betas": ([[0.9], [0.9, 1.0], [-0.1, 0.9], [0.9, 0.9, 0.9]], [[0.0, 0.999]]),
    "optim.momentum": ([-0.1, 1.0], [0.0, 0.95]),
    "optim.adjust_lr": (["rms"], ["match_rms_adamw", "original"]),
    "optim.weight_decay": ([-1e-9], [0.0, 1e-9]),
    "finetune.method": (["qlora", "LoRA"], ["none", "full", "lora"]),
    "finetune.lora_dropout": ([-0.1, 1.0], [0.0, 0.99]),
    "finetune.lora_target_modules": (
        [[], ["c_attn"], ["q_proj", "c_attn"], ["q_proj", "q_proj"]],
        [["down_proj", "q_proj"], ["layers.0.mlp.up_proj"]],
    ),
    "finetune.exclude_modules": ([["c_attn"], ["q_proj", "q_proj"]], [[], ["layers.0.mlp.up_proj"]]),
    "finetune.layers_to_transform": ([[-1], [1, 1]], [[], [0, 2]]),
    "finetune.trainable_token_indices": ([[-1], [1, 1]], [[], [2, 0]]),
    "finetune.rank_pattern": ([{"q_proj": 0}, {"q_proj": 2.5}, {"(": 2}], [{}, {"layers.0.*": 2}]),
    "finetune.alpha_pattern": ([{"q_proj": 0}, {"(": 2}], [{}, {"layers.0.*": 2, "up_proj": 0.5}]),
    "finetune.bias": (["q_proj"], ["none", "all", "lora_only"]),
    "finetune.modules_to_save": ([["wte"], ["embed"], ["norm", "norm"]], [[], ["lm_head", "norm"]]),
    "finetune.objective": (["ppo"], ["sft", "dpo", "orpo", "kto"]),
    "finetune.loss_type": (["robust"], ["sigmoid", "hinge", "ipo"]),
    "finetune.label_smoothing": ([-0.1, 1.0], [0.0, 0.5]),
    "finetune.desirable_weight": ([0.0], [0.5, 2.0]),
    "finetune.undesirable_weight": ([-1.0], [0.5, 2.0]),
    "finetune.neftune_noise_alpha": ([0.0], [5.0, None]),
    "finetune.frozen_dtype": (["int4", "bfloat16", "fp4"], ["fp32", "bf16", "int8", "nf4", None]),
    "device.name": (["gpu"], ["auto", "cpu", "cuda", "neuron", "hpu"]),
    "logging.wandb": (["on", "disabled"], ["off", "offline", "online"]),
    "logging.wandb_project": (["", " "], ["megatron_llama", "a project"]),
    "hook.on_event": (["", " "], [None, "./notify.sh"]),
    "logging.prometheus": (["", " "], [None, "x.prom"]),
    "logging.trackio": (["", " "], [None, "a project"]),
    "logging.mlflow": (["", " "], [None, "an experiment"]),
    "checkpoint.save_timeout_seconds": ([-1], [0, 600]),
    "checkpoint.memory_every_steps": ([0], [None, 1]),
    "checkpoint.fallback_dir": (["", " "], [None, "other"]),
    "checkpoint.every_minutes": ([-1], [None, 0, 0.5, 15.0]),
    "checkpoint.allow": ([["lr"], ["data", "data"]], [[], ["data"], ["optim", "batch"]]),
    "checkpoint.dir": (["/tmp/run", "s3://user:secret@bucket/run"], ["s3://bucket/run", "gs://bucket/a/b"]),
    "checkpoint.resume": (["", " "], ["auto", "never", "runs/one/checkpoints/step_00000010"]),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds(name: str) -> None:
    wrong, right = BOUNDS[name]
    limit = settings_by_name()[name].limit
    assert limit is not None
    for value in wrong:
        problems = [one for one in problems_of(make(**{name: value}), exists=everything_exists) if one.field == name]
        assert [problem.rule for problem in problems] == [limit.rule], value
        advised, example = as_typed(problems[0].instead.removeprefix("write "))
        assert advised == name and limit.holds(example), problems[0].instead
    for value in right:
        assert check_limits(make(**{name: value})) == [], value


def test_texts_of_limits() -> None:
    names = [name for name in BOUNDS if BOUNDS[name][0] != BOUNDS["trainer.tp"][0]]
    page = []
    for name in names:
        for value in (each for each in BOUNDS[name][0] if len(str(each)) < 100):
            problems = [
                one for one in problems_of(make(**{name: value}), exists=everything_exists) if one.field == name
            ]
            page += format_problems(problems).splitlines()[2:]
    GoldenFiles.check("config/limits.txt", "\n".join(page))


def test_each_number_has_a_limit_that_its_examples_keep() -> None:
    settings = settings_by_name().values()
    assert all(setting.limit is not None for setting in settings if setting.kind in (int, float))
    assert BOUNDS.keys() == {setting.name for setting in settings if setting.limit is not None}
    assert check_limits(Config()) == []
    for setting in settings_by_name().values():
        if setting.limit is not None:
            assert setting.limit.holds(as_typed(f"{setting.name}={setting.limit.example}")[1]), setting.name
    settings = settings_by_name().items()
    # Some sections of the model are null here.
    numbers = {name for name, setting in settings if setting.kind in (int, float) and name.count(".") == 1}
    for value in (math.inf, -math.inf, math.nan):
        assert {problem.field for problem in check_limits(make(**dict.fromkeys(numbers, value)))} == numbers
