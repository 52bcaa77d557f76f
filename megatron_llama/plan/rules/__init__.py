"""Rules on combinations of settings. ``data.py`` also checks files."""

from __future__ import annotations

from megatron_llama.plan.rules import data, finetune, layout, numerics, schedule
from megatron_llama.plan.rules.rule import Rule

RULES = tuple(
    value
    for module in (layout, schedule, data, finetune, numerics)
    for value in vars(module).values()
    if isinstance(value, Rule)
)
"""All rules, in the order of their messages: by module, then in the order of definition."""
