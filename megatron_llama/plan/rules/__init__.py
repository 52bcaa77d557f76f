"""Why a config is refused: rules on settings that must go together. ``paths.py`` has the checks of files instead."""

from __future__ import annotations

from megatron_llama.plan.rules import (
    curricula,
    datasets,
    finetune,
    layout,
    overlap,
    quantization,
    schedule,
    token_dropping,
)
from megatron_llama.plan.rules.rule import Rule

RULES = tuple(
    value
    for module in (layout, overlap, schedule, token_dropping, datasets, curricula, finetune, quantization)
    for value in vars(module).values()
    if isinstance(value, Rule)
)
"""Every rule, in the order of its messages: module by module, and inside one as defined."""
