"""Rules on combinations of settings. ``data.py`` also checks files."""

from __future__ import annotations

from megatron_llama.plan.rules import context, data, exact, finetune, float8, layout, optimizer, schedule
from megatron_llama.plan.rules.rule import Rule

RULES = tuple(
    value
    for module in (layout, context, schedule, data, finetune, float8, exact, optimizer)
    for value in vars(module).values()
    if isinstance(value, Rule)
)
"""All rules, in the order of their messages: by module, then in the order of definition."""
