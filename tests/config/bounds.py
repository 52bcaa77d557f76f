"""For each limited setting: values just outside of its limit, and values just inside. Written by hand, not read from
the settings, so that a bound that moves is noticed."""

from __future__ import annotations

from typing import Any

Bounds = tuple[list[Any], list[Any]]
COUNT: Bounds = ([0, -1], [1, 2])  # whole, at least 1
COUNT_FROM_0: Bounds = ([-1], [0, 1])  # whole, at least 0
POSITIVE: Bounds = ([0.0, -1e-9], [1e-9, 0.5])

BOUNDS: dict[str, Bounds] = {
    "model.vocab_size": ([1, 0], [2]),
    "model.hidden_size": COUNT,
    "model.intermediate_size": COUNT,
    "model.num_hidden_layers": COUNT,
    "model.num_attention_heads": COUNT,
    "model.num_key_value_heads": COUNT,
    "model.head_dim": COUNT,
    "model.max_position_embeddings": COUNT,
    "model.rms_norm_eps": POSITIVE,
    "model.rope_theta": POSITIVE,
    "model.initializer_range": POSITIVE,
    "model.rope_scaling.rope_type": (["yarn"], ["llama3"]),
    "model.rope_scaling.factor": ([0.99, 0.0], [1.0, 1.01]),
    "model.rope_scaling.low_freq_factor": POSITIVE,
    "model.rope_scaling.high_freq_factor": POSITIVE,
    "model.rope_scaling.original_max_position_embeddings": COUNT,
    "data.kind": (["chat"], ["pretrain", "sft"]),
    "data.prefixes": (
        [["0.5"], [0.5, "a", "b"], [0.5, "a", 0.5], ["a", 0.5], [0, "a"], [-1, "a", 2, "b"], [" "]],
        [[], ["a"], ["a", "b"], [0.5, "a", "0.5", "b"]],
    ),
    "data.chat_template": (["llama", ""], ["own", "chatml", "prompter", "dialogue", "plain"]),
    "data.template": (["mnli"], ["qnli", "sst2", None]),
    "data.split": (["969,30", "a,b,c", "0,1,1", "1,-1,1", ""], ["1,0,0", "0.9,0.05,0.05"]),
    "data.seq_length": COUNT,
    "trainer.tp": COUNT,
    "trainer.pp": COUNT,
    "trainer.vpp": COUNT,
    "trainer.zero": ([-1, 4], [0, 1, 2, 3]),
    "trainer.dp": COUNT,
    "trainer.shard_group": COUNT,
    "trainer.micro_batch_size": COUNT,
    "trainer.global_batch_size": COUNT,
    "trainer.steps": COUNT_FROM_0,
    "trainer.epochs": COUNT,
    "trainer.seed": ([-1, 2**31], [0, 2**31 - 1]),
    "trainer.precision": (
        ["fp16", "", "BF16SR"],
        ["fp32", "bf16", "bf16_sr", "bf16_pure", "bf16SR", "fp32_OptStates", "fp32_ZeroOptMaster"]
        + ["fp32_ZeroOptMasterGradAcc", "megatron_amp_O2"],
    ),
    "trainer.recompute": (["some"], ["none", "selective", "full"]),
    "trainer.skip_nonfinite_steps": COUNT_FROM_0,
    "trainer.hang_timeout_seconds": POSITIVE,
    "trainer.max_restarts": COUNT_FROM_0,
    "trainer.val_every_steps": COUNT,
    "trainer.val_steps": COUNT,
    "optim.name": (["adagrad"], ["adamw", "adam", "sgd"]),
    "optim.lr": POSITIVE,
    "optim.min_lr": ([-1e-9], [0.0, 1e-9]),
    "optim.warmup_steps": COUNT_FROM_0,
    "optim.warmup_ratio": ([-0.1, 1.1], [0, 0.03, 1]),
    "optim.constant_steps": COUNT_FROM_0,
    "optim.betas": ([[0.9], [0.9, 1.0], [-0.1, 0.9], [0.9, 0.9, 0.9]], [[0.0, 0.999]]),
    "optim.eps": POSITIVE,
    "optim.weight_decay": ([-1e-9], [0.0, 1e-9]),
    "optim.clip": POSITIVE,
    "finetune.method": (["qlora", "LoRA"], ["none", "full", "lora"]),
    "finetune.lora_rank": COUNT,
    "finetune.lora_alpha": POSITIVE,
    "finetune.lora_dropout": ([-0.1, 1.0], [0.0, 0.99]),
    "finetune.lora_target_modules": ([[], ["c_attn"], ["q_proj", "q_proj"]], [["down_proj", "q_proj"]]),
    "finetune.modules_to_save": ([["wte"], ["norm", "norm"]], [[], ["lm_head", "norm"]]),
    "finetune.frozen_dtype": (["int4", "bfloat16"], ["fp32", "bf16", "int8", "nf4", None]),
    "device.name": (["gpu"], ["auto", "cpu", "cuda", "neuron", "hpu"]),
    "device.peak_tflops": POSITIVE,
    "device.memory_gib": POSITIVE,
    "logging.every_steps": COUNT,
    "logging.sample_tokens": COUNT,
    "checkpoint.every_steps": COUNT,
    "checkpoint.keep": COUNT,
    "checkpoint.keep_every": COUNT,
    "checkpoint.resume": (["", " "], ["auto", "never", "runs/one/checkpoints/step_00000010"]),
}
