"""megatron-core's own config, derived from ours."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig

from megatron_llama.plan import Plan


def compute_dtype(plan: Plan) -> torch.dtype:
    """The dtype of activations and of the weights in matrix products."""
    return torch_dtype(plan.precision.compute_dtype)


def stored_dtype(plan: Plan) -> torch.dtype:
    """The dtype of the parameters that are sharded, updated and saved."""
    return torch_dtype(plan.precision.param_dtype)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that config/precision.py means by a name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def mcore_config(plan: Plan) -> TransformerConfig:
    """What megatron-core's layers and schedules read.

    Parameters are what the optimizer updates: ``fully_shard`` hands the layers bf16 copies of fp32 masters where the
    precision asks for it.
    """
    model, trainer = plan.model, plan.config.trainer
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        kv_channels=model.head_dim,
        tensor_model_parallel_size=trainer.tp,
        pipeline_model_parallel_size=trainer.pp,
        virtual_pipeline_model_parallel_size=trainer.vpp if trainer.vpp > 1 else None,
        sequence_parallel=plan.sp,
        params_dtype=stored_dtype(plan),
        pipeline_dtype=compute_dtype(plan),
        use_cpu_initialization=True,  # torch.empty on the current device, which is meta here
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        add_bias_linear=False,
        deterministic_mode=trainer.deterministic,
        calculate_per_token_loss=True,  # the loss comes already divided by the tokens of the global batch
        # Batched transfers of the interleaved schedule swap activations and gradients over gloo (docs/parity.md).
        batch_p2p_comm=trainer.vpp == 1,
        overlap_p2p_comm=trainer.vpp > 1,
    )
