"""A case, and settings that several files share."""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    rule: str
    world: int
    bad: dict[str, Any]
    good: dict[str, Any]
    advice: str
    """Text that the message must suggest."""


LORA = {"finetune.method": "lora"}
FILES = {"data.mock": False, "data.prefixes": ["x"]}
RARITY = {"metric": "rarity", "min_difficulty": 1, "max_difficulty": 10, "total_curriculum_step": 5}
LENGTHS = {"metric": "seqlen_truncate", "schedule_type": "fixed_discrete", "difficulty": [64, 256], "max_step": [9]}
