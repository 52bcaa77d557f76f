"""The TransformerConfig of megatron-core's layers and schedules, derived from the plan."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig

from megatron_llama.plan import Plan


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that config/precision.py means by a name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def mcore_config(plan: Plan) -> TransformerConfig:
    """The settings of megatron-core's layers and schedules.

    ``params_dtype`` is the dtype that the optimizer updates. Master weights are cast for the layers by
    ``fully_shard`` (parallel/data.py) or by the rank itself (parallel/working_copies.py).
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
        params_dtype=torch_dtype(plan.precision.param_dtype),
        pipeline_dtype=torch_dtype(plan.precision.compute_dtype),
        use_cpu_initialization=True,  # plain torch.empty, so that weights are made on the meta device
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        add_bias_linear=False,
        deterministic_mode=trainer.deterministic,
        # Else the schedules would divide the loss by local tokens and micro batches; parallel/pipeline.py has already
        # divided it by the tokens of the global batch.
        calculate_per_token_loss=True,
        # Batched transfers in the interleaved schedule swap activations and gradients over gloo (docs/parity.md).
        batch_p2p_comm=trainer.vpp == 1,
        overlap_p2p_comm=trainer.vpp > 1,
    )
