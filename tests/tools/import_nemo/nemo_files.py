"""Configs of NeMo, neuronx-nemo-megatron and NxDT, and helpers to convert them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron_llama.config import Config, load_config
from megatron_llama.tools.import_nemo.cli import as_yaml
from megatron_llama.tools.import_nemo.convert import convert
from megatron_llama.tools.import_nemo.read_yaml import ConvertedConfig
from tests.paths import CONF

# 7B config of NeMo and neuronx-nemo-megatron: data section inside the model section, some ${...}.
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
# 70B config of NxDT: separate sections for layout, data and precision.
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

# Eight billion as NeMo-Framework-Launcher writes them: what ${training...} and ${data_dir} name is in its own config.
LAUNCHER: dict[str, Any] = {
    "defaults": ["_self_", {"optional tp_overlap@model.ub_tp_comm_overlap_cfg": None}],
    "hydra": {"searchpath": ["file:///opt/conf"]},
    "run": {"name": "eight", "results_dir": "${base_results_dir}/${.name}", "time_limit": "0-01:30:00"},
    "trainer": {
        "devices": 8,
        "num_nodes": 1,
        "accelerator": "gpu",
        "precision": "bf16",
        "max_steps": 300000,
        "max_time": "05:23:30:00",
        "val_check_interval": 2000,
        "limit_val_batches": 32,
    },
    "exp_manager": {
        "explicit_log_dir": "${training.run.results_dir}/results",
        "checkpoint_callback_params": {"monitor": "val_loss", "save_top_k": 10, "mode": "min"},
    },
    "model": {
        "micro_batch_size": 1,
        "global_batch_size": 2048,
        "tensor_model_parallel_size": 2,
        "encoder_seq_length": 8192,
        "max_position_embeddings": "${.encoder_seq_length}",
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": "${multiply:4, ${.hidden_size}}",
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "megatron_amp_O2": True,
        "normalization": "rmsnorm",
        "activation": "fast-swiglu",
        "tokenizer": {"library": "huggingface", "type": "meta-llama/Meta-Llama-3-8B"},
        "fsdp_grad_reduce_dtype": 32,
        "gc_interval": 100,
        "data": {
            "data_prefix": [0.5, "${data_dir}/my-llama_00_text_document", 0.5, "${data_dir}/my-llama_01_text_document"],
            "splits_string": "990,8,2",
            "reset_position_ids": True,
            "reset_attention_mask": True,
            "eod_mask_loss": False,
        },
        "optim": {
            "name": "mcore_distributed_optim",
            "lr": 1.0e-4,
            "overlap_grad_sync": True,
            "bucket_cap_mb": 200,
            "sched": {"name": "CosineAnnealing", "warmup_steps": 500, "constant_steps": 0, "min_lr": 1.0e-5},
        },
    },
}


def write_source(where: Path, content: dict[str, Any]) -> Path:
    path = where / "theirs.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def with_changes(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a copy with changed keys; ``model__num_layers`` is model.num_layers, and ... deletes a key."""
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


def import_dict(where: Path, content: dict[str, Any], *overrides: str) -> ConvertedConfig:
    return convert(write_source(where, content), overrides)


def load_converted(where: Path, result: ConvertedConfig, *overrides: str) -> Config:
    """Load the written config as train.py does."""
    path = where / "ours.yaml"
    path.write_text(as_yaml(result, "theirs.yaml"))
    return load_config([f"experiment={path}", *overrides], CONF)


def kinds(result: ConvertedConfig) -> dict[str, str]:
    return {item.key: item.kind for item in result.conversions}
