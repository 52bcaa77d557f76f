"""Why a config is refused: rules on settings that must go together. ``data.py`` also has the checks of files."""

from __future__ import annotations

from megatron_llama.plan.rules import data, finetune, layout, schedule
from megatron_llama.plan.rules.rule import Rule

RULES = tuple(
    value for module in (layout, schedule, data, finetune) for value in vars(module).values() if isinstance(value, Rule)
)
"""Every rule, in the order of its messages: module by module, and inside one as defined."""
