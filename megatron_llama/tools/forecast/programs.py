"""The training programs of a forecast: the variants of this one, and other programs' (``Program``)."""

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
    "megatron, overlapped": Program("the same, tensor parallelism overlapped", "tuned", "fused", overlaps_tp=True),
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
    "eager, flash 1": Program("the same, with the first FlashAttention", "flash 1", logit_bytes=14),
    "compiled": Program("PyTorch FSDP, compiled", kernels="compiled", keeps_gathered=True, sharded_logit_bytes=16),
    "compiled, overlapped": Program(
        "the same, asynchronous tensor parallelism",
        kernels="compiled",
        overlaps_tp=True,
        keeps_gathered=True,
        sharded_logit_bytes=16,
    ),
    "synapse": Program("compiled whole, by Gaudi's graph compiler, with its fused attention", kernels="compiled"),
    "xla": Program("compiled whole, by XLA", "scores", "compiled"),
}
"""The variants that the formulas know, by the name under which tables are read."""
