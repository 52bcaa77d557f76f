"""Rules on combinations of settings. ``data.py`` also checks files, ``memory.py`` whether a plan fits a machine."""

from __future__ import annotations

from megatron_llama.plan.rules import conflicts, data, finetune, layout, numerics, schedule
from megatron_llama.plan.rules.rule import Rule

MODULES = (layout, schedule, data, finetune, numerics)
RULES = (*conflicts.ROWS, *(value for module in MODULES for value in vars(module).values() if isinstance(value, Rule)))
"""All rules, in the order of their messages."""
