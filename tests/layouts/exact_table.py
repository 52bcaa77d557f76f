"""The rows of the layout table that exact mode accepts."""

from __future__ import annotations

from tests.layouts.table import COMPILED, CP, CP4, LAYOUTS, ULYSSES

EXACT = "trainer.exact=true"
REJECTED = {
    COMPILED[0]: "compiled",
    "trainer.mlp_chunks": "MLP chunks",
    "trainer.grad_reduce": "rounded messages",
    "trainer.param_gather": "rounded messages",
    "trainer.float8": "float8",
    "optim.qk_clip": "logits by other matmuls",
    "optim.name=onebit_adam": "exchanged signs",
}
"""Overrides, or their beginnings, that exact mode rejects (plan/rules/exact.py)."""
# Context-parallel ranks have whole spans of sequences from 1,024 tokens on.
LONG = {"data.seq_length": "1024", "trainer.global_batch_size": "4", "model.max_position_embeddings": "256"}
"""Settings of rows with context parallelism; the last one, a quarter of the length, with dynamic RoPE only."""
QUICK = {
    "pp2·vpp2·dp2, zero 3",
    "tp2·pp2+sp, olmo2",
    "tp2·dp2+sp, muon, zero 3",
}


def rejection(layout: list[str], model: list[str]) -> str | None:
    """Return why exact mode rejects a row; None if it does not."""
    overrides = [*layout, *model]
    for override in overrides:
        for beginning, reason in REJECTED.items():
            if override.startswith(beginning):
                return reason
    divided = CP in layout or CP4 in layout
    if divided and any(override.startswith(("data.curriculum", "trainer.random_ltd")) for override in overrides):
        return "lengths vary"
    return None


def exact_rows() -> list[tuple[str, int, list[str], list[str]]]:
    """Return (name, ranks, overrides of the layout, overrides of the model) of the accepted rows.

    Rows with context parallelism have longer sequences and exchange heads.
    """
    accepted = []
    for name, ranks, layout, model in LAYOUTS:
        if rejection(layout, model) is not None:
            continue
        if CP in layout or CP4 in layout:
            names = [name for name in LONG if not name.startswith("model") or any(name in x for x in model)]
            layout, model = ([x for x in part if x.split("=")[0] not in LONG] for part in (layout, model))
            layout, model = [*layout, ULYSSES], [*model, *(f"{name}={LONG[name]}" for name in names)]
        accepted.append((name, ranks, layout, model))
    return accepted
