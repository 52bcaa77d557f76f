"""Training programs of the forecasts: this project's variants, and other frameworks."""

from __future__ import annotations

from megatron_llama.plan.job import OUR_PROGRAMS, Program

PROGRAMS = {
    **OUR_PROGRAMS,
    "megatron 2021": Program(
        "Megatron-LM before FlashAttention",
        "scores",
        "fused",
        overlaps_dp=False,
        dropout=True,
        logit_bytes=0,
        loss_in_steps=True,
    ),
    "megatron": Program("Megatron-Core with Transformer Engine", "tuned", "fused"),
    "megatron, overlapped": Program("Megatron-Core, overlapped tensor parallelism", "tuned", "fused", overlaps_tp=True),
    "eager": Program(
        "PyTorch FSDP, eager, with FlashAttention", keeps_gathered=True, logit_bytes=14, sharded_logit_bytes=16
    ),
    "nanotron": Program(
        "nanotron",
        keeps_gathered=True,
        stages_by_cost=True,
        waits_for_messages=True,
        logit_bytes=10,
        loss_in_steps=True,
    ),
    "eager, flash 1": Program("PyTorch FSDP, eager, with FlashAttention 1", "flash 1", logit_bytes=14),
    "compiled": Program("PyTorch FSDP, compiled", kernels="compiled", keeps_gathered=True, sharded_logit_bytes=16),
    "compiled, overlapped": Program(
        "PyTorch FSDP, compiled, with asynchronous tensor parallelism",
        kernels="compiled",
        overlaps_tp=True,
        keeps_gathered=True,
        sharded_logit_bytes=16,
    ),
    "synapse": Program("Gaudi graph compiler with fused attention", kernels="compiled"),
    "xla": Program("XLA", "scores", "compiled"),
}
"""Programs by name; plan/published.py assigns one to each row of a table."""
